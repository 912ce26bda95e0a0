"""What people read of a plan: what is read of each expert, what is lost, what it takes; then the whole build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from mergepipe.cli.render import Show, bound_line, heading, path_in_words
from mergepipe.cli.tables import duration, fact, figures, plain, share, shortened
from mergepipe.plan.access import is_approximate, level_words
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.plan_report import DiskReport, PlannedExpert, PlannedOutput, PlanReport

_WORST = 3  # tensors named where not all are asked for
_LABELS = 3  # names in a row of text
_NAME = 40  # columns of such a name


def plan_lines(report: PlanReport, show: Show, *, verbose: bool) -> Iterator[str]:
    """Yield what builds would read and make, output by output, and what one build of all of them takes."""
    for output in report.outputs.values():
        yield heading(output.name, output.operator)
        yield from _planned(output, show, verbose=verbose)
    yield from _all(report, show)


def _planned(output: PlannedOutput, show: Show, *, verbose: bool) -> Iterator[str]:
    yield from fact("path", [path_in_words(output.path, show)])
    if verbose:
        yield from fact("plan", [plain(output.digest)])
    yield from fact("tensors", [f"{output.tensors:,} in {format_count(output.blocks['total'], 'block')}"])
    yield from _experts(output, verbose=verbose)
    yield from fact("base", [format_bytes(output.base_bytes)])
    yield from fact("output", [f"{format_bytes(output.output_bytes)} in {format_count(output.shards, 'shard')}"])
    yield from bound_line(output.bound, verbose=verbose)
    yield from _losses(output, verbose=verbose)
    if output.index_bytes_read:
        yield from fact("measured", [f"{format_bytes(output.index_bytes_read)} read to plan the budget, once"])
    yield from _next_build(output)
    for message in (*output.notes, *output.decisions):
        yield f"  note: {plain(message)}"


# --- experts ------------------------------------------------------------------------------------------------------


def _experts(output: PlannedOutput, *, verbose: bool) -> Iterator[str]:
    """Yield a row for each expert, and one for all of them."""
    if not output.experts:
        yield from fact("experts", ["none"])
        return
    columns = ["full", "planned", "cached", "to read"]
    table = [_expert_row(plain(name), expert, verbose=verbose) for name, expert in output.experts.items()]
    if len(table) > 1:
        total = output.expert_bytes
        row = ["in all", *(format_bytes(total[key]) for key in ("full", "planned", "cached", "to_read"))]
        if verbose:
            blocks = output.expert_blocks
            row.append(_blocks(blocks["total"] - blocks["omitted"], blocks["total"]))
        table.append(row)
    yield from figures("experts", [*columns, *(["blocks"] if verbose else [])], table)
    planned, full = output.expert_bytes["planned"], output.expert_bytes["full"]
    spared = planned - output.expert_bytes["cached"] - output.expert_bytes["to_read"]
    if spared:
        yield from fact("spared", [f"{format_bytes(spared)} equal the base, or are read for another expert or output"])
    if planned != full:
        blocks = output.expert_blocks
        total_blocks = format_count(blocks["total"], "expert block")
        parts = [f"{share(planned, full)} of the experts' bytes"]
        if blocks["omitted"]:
            parts.append(f"{blocks['omitted']:,} of {total_blocks} left out")
        yield from fact("budget", parts)
    yield from _levels(output, verbose=verbose)


def _levels(output: PlannedOutput, *, verbose: bool) -> Iterator[str]:
    """Yield how precisely the blocks of the experts are read, and what the codes take that this is read from."""
    if not output.levels:
        return
    table = [
        [level_words(level), f"{count.blocks:,}", format_bytes(count.bytes)] for level, count in output.levels.items()
    ]
    yield from figures("levels", ["blocks", "bytes"], table)
    for name, expert in output.experts.items() if verbose else ():
        counts = [f"{count.blocks:,} {level_words(level)}" for level, count in (expert.levels or {}).items()]
        yield from fact(shortened(plain(name), _NAME), counts, indent="    ")
    if output.codes is not None and output.codes["bytes"]:
        missing = output.codes["missing"]
        gone = [f"{format_bytes(missing)} gone: made again where they are read"] if missing else []
        yield from fact("codes", [f"{format_bytes(output.codes['bytes'] - missing)} in the cache", *gone])


def _expert_row(name: str, expert: PlannedExpert, *, verbose: bool) -> list[str]:
    sizes = (expert.full, expert.planned, expert.cached, expert.to_read)
    blocks = [_blocks(expert.blocks - expert.omitted, expert.blocks)] if verbose else []
    return [name, *map(format_bytes, sizes), *blocks]


def _blocks(count: int, whole: int) -> str:
    return f"{count:,}" if count == whole else f"{count:,} of {whole:,}"


# --- losses -------------------------------------------------------------------------------------------------------


def _expected(output: PlannedOutput) -> Iterator[str]:
    """Yield the expected error, with its standard error where norms were sampled, in the unit of the bound."""
    if output.expected_error is None:
        return
    bound, whole, unit = output.bound, 1.0, ""
    if bound.absolute and bound.relative_to_update:
        whole, unit = bound.absolute / bound.relative_to_update / 100, "% of the update"
    doubt = f" ± {output.expected_error_uncertainty / whole:.2g}" if output.expected_error_uncertainty else ""
    yield f"error about {output.expected_error / whole:.3g}{doubt}{unit} (an estimate)"


def _losses(output: PlannedOutput, *, verbose: bool) -> Iterator[str]:
    """Yield how much of the deltas is left out, and the tensors that lose most."""
    approximate = output.levels is not None and any(is_approximate(level) for level in output.levels)
    if not output.expert_blocks["omitted"] and not approximate:
        return
    label = "missing" if approximate else "left out"
    yield from fact(label, [f"{output.omitted_mass:.1%} of the deltas' length", *_expected(output)])
    losses = [loss for loss in output.losses if loss.omitted_bytes]
    table = [
        [
            plain(loss.tensor),
            format_bytes(loss.omitted_bytes),
            f"{loss.omitted_mass:.0%}",
            "-" if loss.error_share is None else f"{loss.error_share:.1%}",
        ]
        for loss in (losses if verbose else losses[:_WORST])
    ]
    if table:
        yield from figures("loses most", ["left out", "of deltas", "of error"], table)


# --- the next build -----------------------------------------------------------------------------------------------


def _next_build(output: PlannedOutput) -> Iterator[str]:
    build = output.next_build
    if build.unchanged:
        yield from fact("build", ["nothing to do: it is up to date"])
        return
    upto = "" if build.exact else "at most "
    reads = (build.expert_bytes, build.base_bytes, build.index_bytes)
    first, *others = _reads(reads, exact=build.exact, bounded=build.bounded)
    yield from fact("build", [f"reads {first}", *others])
    if build.unindexed:
        names = [shortened(plain(name), _NAME) for name in build.unindexed]
        more = [f"and {len(names) - _LABELS} more"] if len(names) > _LABELS else []
        whole = f"not indexed yet: {format_bytes(sum(build.unindexed.values()))} read once, whole"
        yield from fact("new", [*names[:_LABELS], *more, whole])
    counts = output.blocks
    work = [f"{counts['computed']:,} computed", f"{counts['cached']:,} reused", f"{counts['copied']:,} copied"]
    yield from fact("blocks", [f"{counts['total']:,}: {upto}{work[0]}", *work[1:]])
    yield from fact("writes", [upto + format_bytes(build.written)])
    yield from fact("estimate", [_time(output), f"at most {format_bytes(output.peak_memory_bytes)} of memory"])


def _reads(reads: Sequence[int], *, exact: bool, bounded: bool) -> list[str]:
    """Return what is read of experts and base, and to index: as it will be, or the limit of all of it first."""
    experts, base, index = map(format_bytes, reads)
    limit = "" if exact else f"{'at most' if bounded else 'about'} {format_bytes(sum(reads))}: "
    return [f"{limit}experts {experts}", f"base {base}", f"index {index}"]


def _time(output: PlannedOutput) -> str:
    if output.seconds is not None:
        return f"about {duration(output.seconds)}"
    if output.not_timed:
        return f"no time known: {' and '.join(map(plain, output.not_timed))} not timed yet"
    return "no time known before the first build"


def _all(report: PlanReport, show: Show) -> Iterator[str]:
    """Yield what one build of all outputs takes, and whether there is room for it."""
    made = [output for output in report.outputs.values() if not output.next_build.unchanged]
    if not made:
        return
    if len(made) > 1:
        yield click.style("one build of all", bold=True)
        reads = tuple(report.reads[key] for key in ("expert_bytes", "base_bytes", "index_bytes"))
        yield from fact("reads", _reads(reads, exact=report.exact, bounded=report.bounded))
        time = "no time known" if report.seconds is None else f"about {duration(report.seconds)}"
        yield from fact("estimate", [time, f"at most {format_bytes(report.peak_memory_bytes)} of memory"])
    else:
        yield click.style("disk", bold=True)
    for disk in report.disks:
        yield from _disk(disk, show)


def _disk(disk: DiskReport, show: Show) -> Iterator[str]:
    free = "free space not known" if disk.free is None else f"{format_bytes(disk.free)} free"
    where = plain(show(disk.path))
    yield from fact("cache" if disk.cache else "outputs", [where, f"{format_bytes(disk.needed)} to write", free])
    if not disk.fits and disk.free is not None:
        short = format_bytes(disk.needed - disk.free)
        warning = click.style("warning:", fg="yellow", bold=True)
        yield f"  {warning} {short} are missing for this build at {where}"
