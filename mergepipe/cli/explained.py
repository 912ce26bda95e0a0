"""What `explain` prints beside parameters: reads, errors, builds and contributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from mergepipe.cli.tables import fact, pad, plain, share, width
from mergepipe.units import budget_words, format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.contributions import Contribution, ExpertShare
    from mergepipe.project.explain import ExplainedInput, OutputExplanation, TensorExplanation
    from mergepipe.project.explain_values import InputReads, OutputSummary

_SAMPLED = "sample:"  # of a source that is known by samples
_DIGEST_SHOWN = len("b3:") + 12
_MODULES = 8
_NEVER = "-"


def shown_digest(digest: str, *, verbose: bool) -> str:
    """Return a digest, shortened unless ``verbose``."""
    head = len(digest) - len(digest.removeprefix(_SAMPLED))
    return digest if verbose else digest[: head + _DIGEST_SHOWN]


def percent(part: float | None) -> str:
    """Return a share in percent, with three digits."""
    return _NEVER if part is None else f"{part * 100:.3g}%"


# --- one tensor -------------------------------------------------------------------------------------------------------


def input_lines(found: ExplainedInput, *, indent: str) -> Iterator[str]:
    """Yield what is read of an input, and what it contributed."""
    if found.reads is not None:
        yield indent + _reads(found.reads)
    if found.contribution is not None:
        yield indent + _contribution(found.contribution)


def _reads(reads: InputReads) -> str:
    if not reads.blocks:
        return "no block is read"
    parts = [f"read {reads.read:,} of {format_count(reads.blocks, 'block')} ({format_bytes(reads.bytes_read)})"]
    if reads.omitted:
        parts.append(f"{reads.omitted:,} left out ({format_bytes(reads.bytes_omitted)})")
    if reads.residual is not None and reads.levels is not None:
        counts = [f"{count['blocks']:,} {_level(name)}" for name, count in reads.levels.items() if name != "omitted"]
        parts += [f"approximate: {', '.join(counts)}", f"at most {reads.residual:.3g} missing of its deltas' norm"]
    parts += [f"{reads.zero:,} equal to the base"] if reads.zero else []
    parts += [f"{reads.shared:,} equal to another input"] if reads.shared else []
    return ", ".join(parts)


def _level(name: str) -> str:
    return {"exact": "exact", "omitted": "left out"}.get(name, f"at level {name}")


def _contribution(found: ExpertShare) -> str:
    parts = [f"gave {percent(found.norm_share)} by norm"] if found.norm_share is not None else []
    parts += [f"cosine {found.cosine:.3f} with the update"] if found.cosine is not None else []
    parts += [f"signs agree in {percent(found.sign_agreement)}"] if found.sign_agreement is not None else []
    return ", ".join(parts) or "gave nothing"


def tensor_lines(found: TensorExplanation) -> Iterator[str]:
    """Yield a tensor's error, update and build."""
    if found.error is not None:
        yield from fact("error", _error(found))
    if found.contribution is not None:
        yield from fact("update", _update(found.contribution))
    elif found.not_measured is not None:
        yield from fact("update", [f"not known: {plain(found.not_measured)}"])
    if found.build is not None:
        yield from fact("build", [_build(found)])


def _error(found: TensorExplanation) -> list[str]:
    error = found.error
    assert error is not None, "it is shown where there is one"
    if not error.omitted_bytes and error.kind == "exact":
        return ["none: nothing of it is left out"]
    if error.bound is None:
        parts = ["no bound is known"]
    else:
        whose = f" ({percent(error.bound_share)} of the output's, in squares)" if error.bound_share is not None else ""
        parts = [f"{_at_most(error.kind)} {error.bound:.3g}{whose}"]
    if error.expected is not None:
        whose = f" ({percent(error.expected_share)})" if error.expected_share is not None else ""
        parts.append(f"expected {error.expected:.3g}{whose}")
    approximate = any(one.reads is not None and one.reads.residual is not None for one in found.experts)
    missing = "missing: some are approximate" if approximate else "left out"
    return [*parts, f"{percent(error.omitted_mass)} of its deltas {missing}"]


def _update(found: Contribution) -> list[str]:
    parts = [f"norm {found.update_norm:.3g}"] if found.update_norm is not None else ["its norm is not finite"]
    if found.update_relative is not None:
        parts.append(f"{percent(found.update_relative)} of the base's")
    elif found.base_norm is None:
        parts.append("the output itself: there is no base")
    if found.sign_agreement is not None:
        parts.append(f"signs of two experts agree in {percent(found.sign_agreement)}")
    return parts


_STATES = {
    "rebuilt": "rebuilt by the last build that changed the output: ",
    "reused": "reused by the last build that changed the output: ",
    "cached": "taken from the cache by the last build that changed the output: ",
    "stale": "a build would make it again: ",
    "unchanged": "a build would reuse it: ",
}


def _build(found: TensorExplanation) -> str:
    build = found.build
    assert build is not None, "it is shown where there is one"
    if build.state == "unbuilt":
        return "not built here before"
    if build.change.part == "first":
        return "made by the first build" + (", from the cache" if build.state == "reused" else "")
    if build.change.part == "recipe" and build.change.before is None:
        return "which part of its key changed was not recorded"
    state = "cached" if build.state == "reused" and build.change.part != "none" else build.state
    return _STATES[state] + plain(build.change.text())


# --- an output --------------------------------------------------------------------------------------------------------


def summary_lines(found: OutputSummary, show: Callable[[str], str], *, verbose: bool) -> Iterator[str]:
    """Yield how an output stands; ``show`` shows a path of the Mergefile to somebody in the current directory."""
    built = [shown_digest(found.digest, verbose=verbose)] if found.digest is not None else []
    yield from fact("state", [found.state, *built, *([plain(show(found.path))] if found.path is not None else [])])
    for reason in found.reasons if found.state == "stale" else ():
        yield f"            {plain(reason)}"
    for source in found.sources:
        digest = "content not known yet" if source.digest is None else shown_digest(source.digest, verbose=verbose)
        yield from fact("source", [f"{plain(source.source)} ({' and '.join(source.roles)})", digest])
    full, planned = found.expert_bytes["full"], found.expert_bytes["planned"]
    reads = f"{format_bytes(planned)} of {format_bytes(full)} of the experts ({share(planned, full)})"
    if found.is_resolved:
        yield from fact("budget", [budget_words(found.budget), reads, *_bound(found)])
        if found.levels is not None and found.levels.keys() - {"omitted", "exact"}:
            yield from fact("levels", [f"{count['blocks']:,} {_level(name)}" for name, count in found.levels.items()])
    else:
        what = "what it reads is not known before deltas are measured (`plan`)"
        yield from fact("budget", [budget_words(found.budget), what])
    yield from _last(found)


def _at_most(kind: str) -> str:
    return "about" if kind == "estimated" else "at most"


def _bound(found: OutputSummary) -> Iterator[str]:
    bound = found.bound
    if bound.kind == "exact":
        yield "nothing is left out"
    elif bound.relative_to_update is not None:
        yield f"error {_at_most(bound.kind)} {percent(bound.relative_to_update)} of the update ({bound.kind})"
    elif bound.absolute is not None:
        yield f"error {_at_most(bound.kind)} {bound.absolute:.3g} ({bound.kind})"
    else:
        yield "no bound is known"


def _last(found: OutputSummary) -> Iterator[str]:
    last = found.last
    if last is None:
        return
    run, blocks, tensors = last.run, last.blocks, last.tensors
    read = run["expert_bytes_read"] + run["base_bytes_read"] + run["index_bytes_read"]
    yield from fact(
        "built",
        [
            f"{format_count(tensors['rebuilt'], 'tensor')} rebuilt",
            f"{tensors['reused']:,} reused",
            f"{blocks['computed']:,} of {format_count(blocks['total'], 'block')} computed",
            f"{format_bytes(read)} read",
        ],
    )
    for reason in last.reasons:
        yield f"            because {plain(reason)}"


def module_lines(found: OutputExplanation, *, verbose: bool) -> Iterator[str]:
    """Yield what the experts contributed: to all of the output, then by module, larger updates first."""
    if found.contribution is None:
        if found.not_measured is not None:
            yield f"contributions are not known: {plain(found.not_measured)}"
        return
    yield click.style("contributions", bold=True) + ": the share by norm of each expert / its cosine with the update"
    experts = [expert.source for expert in found.contribution.experts]
    shown = found.modules if verbose else found.modules[:_MODULES]
    head = ["", "of update", "of base", *map(plain, experts)]
    whole = _NEVER if found.contribution.update_norm is None else "100%"
    table = [head, ["all", whole, *_cells(found.contribution, experts)]]
    table += [[plain(m.module), percent(m.update_share), *_cells(m.contribution, experts)] for m in shown]
    widths = [max(map(width, column)) for column in zip(*table, strict=True)]
    for line in table:
        rest = [" " * (size - width(cell)) + cell for cell, size in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join([f"  {pad(line[0], widths[0])}", *rest]).rstrip()
    left = len(found.modules) - len(shown)
    if left:
        yield f"  and {format_count(left, 'more module')} (-v shows all)"


def _cells(found: Contribution, experts: list[str]) -> Iterator[str]:
    yield percent(found.update_relative)
    by_source = {expert.source: expert for expert in found.experts}
    for source in experts:
        expert = by_source.get(source)
        if expert is None:
            yield _NEVER
        else:
            cosine = _NEVER if expert.cosine is None else f"{expert.cosine:.2f}"
            yield f"{percent(expert.norm_share)} / {cosine}"
