"""What people read of a report: lines of text, styled; the console takes the styles out where they are not wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import click

from mergepipe.cli.tables import duration, fact, plain, rows
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.reports import (
        Bound,
        BuildReport,
        CacheInfo,
        OutputReport,
        StatusReport,
    )

Show = Callable[[str], str]
"""Shows a path of the Mergefile to somebody in the current directory."""

_STATES = {"built": "green", "up-to-date": "green", "stale": "yellow", "unbuilt": "yellow"}
_SKIPPED = (
    ("zero", "equal to the base"),
    ("shared", "read already, for another expert or output"),
    ("omitted", "outside the budget"),
)


def build_lines(report: BuildReport, show: Show, *, verbose: bool) -> Iterator[str]:
    """Yield what a build did: a block for each output, then the lock."""
    for output in report.outputs.values():
        yield from _built(output, show, verbose=verbose)
    for name, is_new in (report.signed or {}).items():
        yield f"{click.style(plain(name), bold=True)}: {'signed' if is_new else 'signed already'}"
    yield f"{plain(show(report.lock_path))} {'updated' if report.lock_changed else 'unchanged'}"


def _built(output: OutputReport, show: Show, *, verbose: bool) -> Iterator[str]:
    reads = (output.expert_bytes["read"], output.base_bytes_read, output.index_bytes_read)
    counts = output.blocks
    idle = output.state == "unchanged" and not any((*reads, output.bytes_written, counts["computed"]))
    first = f"{heading(output.name, output.operator)}: {_state(output.state)}"
    if idle and not verbose:
        yield f"{first}, {path_in_words(output.path, show)}"
        return
    yield first + (f" in {duration(output.seconds)}" if output.state != "unchanged" else "")
    yield from fact("path", [path_in_words(output.path, show)])
    if idle:
        yield from fact("reused", [f"{_all_blocks(counts['total'])}; nothing read, nothing written"])
    else:
        yield from fact("read", _reads(output) if any(reads) else ["nothing"])
        yield from _skipped(output.expert_blocks)
        yield from _levels(output.levels)
        work = [f"{counts['computed']:,} computed", f"{counts['cached']:,} reused", f"{counts['copied']:,} copied"]
        yield from fact("blocks", [f"{counts['total']:,}: {work[0]}", *work[1:]])
        yield from fact("written", [format_bytes(output.bytes_written) if output.bytes_written else "nothing"])
    yield from bound_line(output.bound, verbose=verbose)
    yield from (f"  note: {plain(note)}" for note in output.notes)
    if verbose:
        planned, full = output.expert_bytes["planned"], output.expert_bytes["full"]
        yield from fact("planned", [f"{format_bytes(planned)} of the experts' {format_bytes(full)}"])
        yield from fact("digest", [plain(output.digest)])


def heading(name: str, operator: str) -> str:
    """Return the line that the facts of an output stand below."""
    return f"{click.style(plain(name), bold=True)} ({plain(operator)})"


def _state(state: str) -> str:
    return click.style(plain(state), fg=_STATES[state]) if state in _STATES else plain(state)


def path_in_words(path: str | None, show: Show) -> str:
    """Return the directory of an output in words."""
    return "not published" if path is None else plain(show(path))


def _all_blocks(count: int) -> str:
    return f"all {format_count(count, 'block')}" if count != 1 else "the only block"


def _reads(output: OutputReport) -> list[str]:
    read, full = output.expert_bytes["read"], output.expert_bytes["full"]
    experts = format_bytes(read) if read == full else f"{format_bytes(read)} of {format_bytes(full)}"
    base, index = format_bytes(output.base_bytes_read), format_bytes(output.index_bytes_read)
    return [f"experts {experts}", f"base {base}", f"index {index}"]


def _skipped(expert_blocks: Mapping[str, int]) -> Iterator[str]:
    """Yield why not every block of the experts was read."""
    reasons = [(expert_blocks[key], why) for key, why in _SKIPPED if expert_blocks[key]]
    if reasons:
        count = f"{sum(number for number, _ in reasons):,} of {format_count(expert_blocks['total'], 'expert block')}"
        parts = [f"{number:,} {why}" for number, why in reasons] if len(reasons) > 1 else [reasons[0][1]]
        yield from fact("skipped", [f"{count}: {parts[0]}", *parts[1:]])


def _levels(levels: Mapping[str, int] | None) -> Iterator[str]:
    """Yield how precisely the expert blocks are read, where any is approximate."""
    words = {"omitted": "left out", "exact": "exact"}
    counts = [f"{count:,} {words.get(name, f'at level {name}')}" for name, count in (levels or {}).items()]
    if levels is not None and levels.keys() - words.keys():
        yield from fact("levels", counts)


def bound_line(bound: Bound, *, verbose: bool) -> Iterator[str]:
    """Yield how far an output can be from its full read, where that is not nothing."""
    if bound.kind == "exact":
        if verbose:
            yield from fact("bound", ["exact: the full-read merge"])
        return
    known = []
    if bound.relative_to_update is not None:
        known.append(f"{bound.relative_to_update * 100:.3g}% of the update")
    if bound.absolute is not None:
        known.append(f"absolute {bound.absolute:.3g}")
    how = {"certified": "at most ", "estimated": "about "}.get(bound.kind, "")
    text = f"{plain(bound.kind)}: {how}{known[0]}" if known else "not known for this operator"
    yield from fact("bound", [text, *known[1:]])


_LOCK_WORDS = {
    "current": "is current",
    "outdated": "is outdated",
    "missing": "is missing",
}
_NAMED = 3  # outputs in the line of the lock


def status_lines(report: StatusReport, show: Show) -> Iterator[str]:
    """Yield the state of each output with the reasons, then that of the lock."""
    outputs = report.outputs.values()
    table = [(click.style(plain(o.name), bold=True), _state(o.state), path_in_words(o.path, show)) for o in outputs]
    for line, output in zip(rows(table), outputs, strict=True):
        yield line
        yield from (f"  - {plain(reason)}" for reason in output.reasons)
    yield f"{plain(show(report.lock_path))} {_LOCK_WORDS.get(report.lock_state) or _unverified(report)}"


def _unverified(report: StatusReport) -> str:
    """Return why only a build can tell whether the lock is what it should be: what there is of each output."""
    states = [f"`{plain(o.name)}` is {o.state}" for o in report.outputs.values() if o.state != "up-to-date"]
    more = [f"{format_count(len(states) - _NAMED, 'more output')}"] if len(states) > _NAMED else []
    return f"is not verified: {', '.join([*states[:_NAMED], *more])}; a build tells"


def cache_info_lines(info: CacheInfo) -> Iterator[str]:
    """Yield what the cache holds."""
    yield f"cache {plain(info.path)}"
    yield from fact("packs", [format_count(info.packs, "shard"), format_bytes(info.pack_bytes)])
    yield from fact("codes", [format_count(info.codes, "delta"), format_bytes(info.code_bytes)])
    yield from fact("staged", [format_bytes(info.staged_bytes)])
    yield from fact("damaged", [format_bytes(info.quarantined_bytes)])
    files, results = format_count(info.files, "source file"), format_count(info.results, "result")
    statistics = f"{format_bytes(info.statistic_bytes)} of statistics"
    yield from fact("catalog", [files, results, statistics, format_bytes(info.catalog_bytes)])
