"""The model card: ``README.md`` of an output, the same bytes on every machine.

It is made from the plan, the Mergefile's entry, the digests and what the sources' cards agree on. Its last line holds
the digest of what stands above, so that a card that somebody changed is known for theirs, wherever the directory went.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mergepipe.digest import SAMPLED_PREFIX, content_digest, format_digest
from mergepipe.errors import fail_storage
from mergepipe.mergefile.excerpt import shown_location
from mergepipe.plan.access import is_approximate
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVEL_BITS
from mergepipe.publish.carried import Carried
from mergepipe.publish.escaping import code_span, fenced, visible, yaml_scalar
from mergepipe.publish.sidefiles import stored_dtype
from mergepipe.signatures import COMMON_PARAMS
from mergepipe.units import format_bytes, format_count

CARD = "README.md"
_MARK = "<!-- mergepipe {digest}: of all lines above. Builds leave a card alone that was changed. -->\n"
_GROUPS = 40
_LARGEST = 1 << 26  # bytes; no card of ours comes near it
_SIMPLE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")
_CHECK = """\
mergepipe verify DIRECTORY                  # hash every file, tensor and block of the output again
mergepipe replay DIRECTORY/mergepipe.json   # merge the sources again, and compare every digest"""
_CHECKED = (
    "`verify` needs nothing but this directory. `replay` needs the sources: it refuses one whose content is not what",
    "the table above says, and an output that does not come out bit for bit. `mergepipe.json` holds what both go by:",
    "a digest for each block of each input and output, and the parameters of each tensor.",
)


def model_card(
    plan: OutputPlan,
    locations: Mapping[str, str | None],
    digests: Mapping[str, str],
    *,
    excerpt: str = "",
    carried: Carried | None = None,
    digest: str = "",
    has_config: bool = True,
) -> bytes:
    """Return the card.

    Parameters
    ----------
    locations
        Per source where it is, as the Mergefile says; absolute paths are reduced to their last part. None for another
        output of the same Mergefile.
    digests
        Per source its content digest (``b3:...``), or ``sample:`` and its fingerprint.
    excerpt
        The part of the Mergefile that declares the output (`mergepipe.mergefile.excerpt`).
    carried
        What is taken over from the sources and their cards.
    digest
        The output's own digest.
    has_config
        Whether there is a ``config.json`` beside the weights, which transformers loads by.
    """
    carried = carried or Carried()
    lines = [
        *_front_matter(plan, carried, has_config=has_config),
        "",
        f"# {_title(plan.output.name)}",
        "",
        *_summary(plan, digest),
        "",
        *_sources(plan, locations, digests, carried),
        "",
        *_sampled_note(digests),
        *_license_note(carried),
        *_made(plan),
        *_recipe(plan, excerpt),
        "## Parameters",
        "",
        *_parameters(plan),
        "",
        "## Check it, make it again",
        "",
        *fenced(_CHECK, "bash"),
        "",
        *_CHECKED,
        "",
        "",
    ]
    text = "\n".join(lines).encode()
    return text + _mark(text)


def is_own_card(data: bytes) -> bool:
    """Return whether a card is one that mergepipe wrote, as it wrote it."""
    start = data.rfind(b"\n", 0, -1) + 1
    return data[start:] == _mark(data[:start])


def _mark(text: bytes) -> bytes:
    return _MARK.format(digest=format_digest(content_digest(text))).encode()


def has_foreign_card(directory: Path) -> bool:
    """Return whether a directory has a card that mergepipe did not write, or that was changed since: a user's.

    Raises
    ------
    StorageError
        If it is there and cannot be read.
    """
    path = directory / CARD
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return True
        return not is_own_card(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        fail_storage(error, path, "read")


def own_files(directory: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that a directory's record claims, without a card that is a user's by now."""
    return tuple(name for name in names if name != CARD or not has_foreign_card(directory))


def _front_matter(plan: OutputPlan, carried: Carried, *, has_config: bool) -> Iterator[str]:
    operators = dict.fromkeys(part.operator.signature.name for part in plan.parts)
    tags = dict.fromkeys(("merge", "mergepipe", *operators))
    entries: list[tuple[str, str | Sequence[str]]] = [
        ("base_model", carried.base_models),
        ("base_model_relation", "merge" if carried.base_models else ""),
        ("library_name", "transformers" if has_config else ""),
        ("license", carried.license),
        ("license_name", carried.license_name),
        ("license_link", carried.license_link),
        ("language", carried.languages),
        ("pipeline_tag", carried.pipeline_tag),
        ("tags", tuple(tags)),
    ]
    yield "---"
    for key, value in entries:
        if isinstance(value, str):
            yield from [f"{key}: {yaml_scalar(value)}"] if value else []
        elif value:
            yield f"{key}:"
            yield from (f"- {yaml_scalar(item)}" for item in value)
    yield "---"


def _title(name: str) -> str:
    return name if _SIMPLE_NAME.fullmatch(name) else code_span(name)


def _summary(plan: OutputPlan, digest: str) -> Iterator[str]:
    output, dtype = plan.output, stored_dtype(plan)
    made = "slices" if output.slices is not None else code_span(output.operator)
    count = format_count(len(output.expert_sources), "checkpoint")
    size = f"{len(plan.tensors):,} tensors, {format_bytes(plan.layout.total_size)}"
    yield f"A merge of {count} by {made}, made with mergepipe."
    yield f"{size}{f', mostly {dtype}' if dtype else ''}."
    if digest:
        yield f"Digest of the tensors: `{digest}`."


def _sources(
    plan: OutputPlan, locations: Mapping[str, str | None], digests: Mapping[str, str], carried: Carried
) -> Iterator[str]:
    licensed = bool(carried.licenses)
    yield f"| role | source | location | {'license | ' if licensed else ''}content |"
    yield f"| --- | --- | --- | {'--- | ' if licensed else ''}--- |"
    for source in plan.sources:
        stated, location = carried.licenses.get(source), locations[source]
        cells = [_role(plan, source), code_span(source), _location(source, location)]
        unknown = "not stated" if location is not None else "see its own card"
        cells += [code_span(stated) if stated else unknown] if licensed else []
        yield f"| {' | '.join(cells)} | {code_span(digests[source])} |"


def _role(plan: OutputPlan, source: str) -> str:
    bases = {part.base.source for part in plan.parts if part.base is not None}
    return "base" if source in bases else "expert"


def _location(source: str, location: str | None) -> str:
    if location is None:
        return f"output {code_span(source)} of the same Mergefile"
    return code_span(shown_location(location))


def _sampled_note(digests: Mapping[str, str]) -> list[str]:
    if not any(digest.startswith(SAMPLED_PREFIX) for digest in digests.values()):
        return []
    return ["What is marked `sample:` was not read whole: it is known by its header and by samples of its blocks.", ""]


def _license_note(carried: Carried) -> list[str]:
    if not carried.licenses or carried.license:
        return []
    return ["The sources do not all state the same license, so none is stated for this merge: see theirs.", ""]


def _made(plan: OutputPlan) -> list[str]:
    """Return what was read under a budget, and how far that can be from the full read."""
    outcome, budget = plan.outcome, plan.output.budget
    if outcome is None or budget is None:
        return ["No budget: this is the full-read merge, nothing of the experts is left out.", ""]
    read = f"{format_bytes(plan.planned_bytes)} of the experts' {format_bytes(plan.expert_bytes)} were read"
    bound = outcome.bound
    if bound.kind == "exact":
        far = "nothing is missing: it is the full-read merge"
    elif bound.absolute is None:
        far = "how far that is from the full-read merge is not known"
    else:
        relative = bound.relative_to_update
        share = "" if relative is None else f", which is {100 * relative:.3g}% of what that changes of the base"
        sure = "are at most" if bound.kind == "certified" else "are by estimate at most"
        far = f"the weights {sure} {bound.absolute:.3g} (Frobenius norm) from the full-read merge{share}"
    return [f"Made under a budget ({code_span(budget.text())}): {read}{_first_bits(plan)}; {far}.", ""]


def _first_bits(plan: OutputPlan) -> str:
    """Return of which bits of the experts' deltas that is, where a budget bought levels."""
    levels = {level for tensor in plan.tensors if tensor.access is not None for level in tensor.access.found()}
    bits = [LEVEL_BITS[level - 1] for level in levels if is_approximate(level)]
    if not bits:
        return ""
    least, most = min(bits), max(bits)
    span = format_count(most, "bit") if least == most else f"{least} to {most} bits"
    return f", of most deltas the first {span} of each element"


def _recipe(plan: OutputPlan, excerpt: str) -> Iterator[str]:
    if not excerpt:
        return
    yield from ("## Recipe", "", "This output and its sources, as the Mergefile declares them:", "")
    yield from fenced(excerpt, "toml")
    yield ""


# --- resolved parameters ------------------------------------------------------------------------------------------


def _parameters(plan: OutputPlan) -> Iterator[str]:
    """Yield the distinct sets of resolved parameters, with the tensors that each is for."""
    groups: dict[tuple[object, ...], list[TensorPlan]] = {}
    for tensor in plan.tensors:
        groups.setdefault(_group(tensor), []).append(tensor)
    yield "| tensors | operator | parameters | of the experts |"
    yield "| --- | --- | --- | --- |"
    for members in list(groups.values())[:_GROUPS]:
        first = members[0]
        where = f"{_where(members)}: {len(members):,}" if len(groups) > 1 else f"all {len(members):,}"
        if first.decision is not Decision.MERGE:
            yield f"| {where} | copied | | |"
            continue
        experts = plan.parts[first.part].experts
        own = [
            f"{code_span(member.source)}: {_params(values)}"
            for member, values in zip(experts, first.params.experts, strict=True)
            if values
        ]
        name = code_span(first.operator.signature.name)
        yield f"| {where} | {name} | {_params(_noted(first.params.values))} | {'; '.join(own)} |"
    if len(groups) > _GROUPS:
        yield ""
        yield f"And {format_count(len(groups) - _GROUPS, 'more set')} of parameters, in `mergepipe.json`."


def _group(tensor: TensorPlan) -> tuple[object, ...]:
    if tensor.decision is not Decision.MERGE:
        return ("copied",)
    experts = tuple(tuple(values.items()) for values in tensor.params.experts)
    return (tensor.part, id(tensor.operator), tuple(tensor.params.values.items()), experts)


def _where(members: Sequence[TensorPlan]) -> str:
    """Return the layers of some tensors in words: ``layers 0 to 3, outside the layers``."""
    layers = sorted({tensor.layer for tensor in members if tensor.layer is not None})
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    words = [f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(texts)}"] if texts else []
    outside = any(tensor.layer is None for tensor in members)
    return ", ".join([*words, *(["outside the layers"] if outside else [])])


def _noted(values: Mapping[str, object]) -> dict[str, object]:
    """Return an output's parameters without the common ones that have their defaults."""
    defaults = {spec.name: spec.default for spec in COMMON_PARAMS}
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


def _params(params: Mapping[str, object]) -> str:
    return ", ".join(code_span(f"{name} = {_value(value)}") for name, value in params.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else visible(str(value))
