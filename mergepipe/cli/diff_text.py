"""A difference as text for a terminal: causes first, then what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from mergepipe.cli import diff_words as words
from mergepipe.cli.tables import WIDTH, plain, rows, width
from mergepipe.units import format_count

if TYPE_CHECKING:
    from mergepipe.lockfile.diff_values import EntryChange, LockDiff, OutputChange, Places, TensorGroup
    from mergepipe.project.diff import DiffReport
    from mergepipe.project.diff_weights import TensorNumbers

_COLOURS = {"added": "green", "removed": "red", "changed": "yellow"}
_GROUPS = 6  # values of one parameter, without --verbose
_FORMS = 5  # tensors of another dtype or shape, without --verbose
_NUMBERS = 20  # tensors with numbers, without --verbose


def diff_lines(report: DiffReport, *, verbose: bool) -> Iterator[str]:
    """Yield what differs; a line that says so if nothing does."""
    diff = report.diff
    old, new = (words.side_words(side, _name) for side in (diff.old, diff.new))
    if diff.is_empty:
        yield f"no differences between {old} and {new}"
        return
    yield f"{old} {words.ARROW} {new}"
    if diff.geometry is not None:
        yield ""
        yield f"geometry: {words.short(diff.geometry.old)} {words.ARROW} {words.short(diff.geometry.new)}"
    for source in diff.sources:
        yield ""
        yield from _source(source)
    for output in diff.outputs:
        yield ""
        yield from _output(output, report.numbers, verbose=verbose)
    yield from _unchanged(diff)


def _name(text: str) -> str:
    return click.style(plain(text), bold=True)


def _change(change: str, text: str | None = None) -> str:
    return click.style(text or change, fg=_COLOURS[change])


def _unchanged(diff: LockDiff) -> Iterator[str]:
    if diff.unchanged:
        yield ""
        yield from _wrapped("unchanged outputs: ", [plain(name) for name in diff.unchanged])


def _source(source: EntryChange) -> Iterator[str]:
    same = ", the same content" if words.is_same_content(source) else ""
    yield f"source {_name(source.name)}: {_change(source.change)}{same}"
    facts = [(fact.key or "digest", fact.old, fact.new, fact.reason) for fact in source.facts]
    yield from rows([_arrow(*fact) for fact in facts], indent="  ")


def _arrow(key: str, old: str | None, new: str | None, reason: str | None = None) -> tuple[str, str]:
    change = f"{plain(words.short(old))} {words.ARROW} {plain(words.short(new))}"
    return plain(key), change + (f" ({reason})" if reason and key == "files" else "")


def _output(output: OutputChange, numbers: dict[str, TensorNumbers] | None, *, verbose: bool) -> Iterator[str]:
    entry = output.new or output.old
    operator = f" ({plain(entry.operator)})" if entry else ""
    yield f"output {_name(output.name)}{operator}: {_change(output.change, words.heading_words(output))}"
    entry_facts = [(key, plain(text)) for key, text in words.entry_facts(output)]
    yield from rows(entry_facts, indent="  ") if entry_facts else ()
    yield from _because(output)
    facts = list(output.declared if verbose else words.shown_facts(output))
    table = [_arrow(fact.key, *words.fact_words(fact, output)) for fact in facts]
    yield from rows(table, indent="  ") if table else ()
    yield from _parameters(output, verbose=verbose)
    consequences = [
        ("expert reads", words.reads_words(output)),
        ("expert blocks", words.blocks_words(output)),
        ("levels", words.levels_words(output)),
        ("moved", words.moves_words(output)),
        ("bound", words.bound_words(output)),
        ("written", words.written_words(output)),
        ("side files", words.listed(map(plain, words.side_files(output)), 5) or None),
    ]
    found = [(label, text) for label, text in consequences if text is not None]
    yield from rows(found, indent="  ") if found else ()
    yield from _tensors(output)
    forms = words.forms(output)
    for name, change in forms if verbose else forms[:_FORMS]:
        yield f"  {plain(name)}: {change}"
    if len(forms) > _FORMS and not verbose:
        yield f"  and {format_count(len(forms) - _FORMS, 'more tensor')} of another dtype or shape"
    if numbers is not None and output.name in numbers:
        yield from _numbers(numbers[output.name], verbose=verbose)


def _because(output: OutputChange) -> Iterator[str]:
    if not output.causes:
        return
    yield "  because of"
    table = [
        (words.cause_text(cause, _name, within=output.name), format_count(count, "tensor"))
        for cause, count in output.causes
    ]
    yield from rows(table, indent="    ")


def _parameters(output: OutputChange, *, verbose: bool) -> Iterator[str]:
    if words.same_values(output):
        yield "  parameters are written differently; every tensor gets the same values"
    for change in output.parameters or ():
        shown = change.groups if verbose else change.groups[:_GROUPS]
        for group in shown:
            values = plain(words.group_words(group))
            yield f"  {plain(change.name)}  {values} in {format_count(group.tensors, 'tensor')}"
            yield from _where(group.places, "    ", short=True)
        if len(shown) < len(change.groups):
            rest = sum(group.tensors for group in change.groups[len(shown) :])
            more = format_count(len(change.groups) - len(shown), "more pair")
            yield f"  {plain(change.name)}  {more} of values, in {format_count(rest, 'tensor')}"


def _where(found: Iterable[Places], indent: str, *, short: bool = False) -> Iterator[str]:
    for places in found:
        where, modules = words.places_words(places, plain, short=short)
        yield from _wrapped(f"{indent}{where}: ", modules)


def _tensors(output: OutputChange) -> Iterator[str]:
    if output.groups:
        yield "  tensors"
    for group in output.groups:
        yield from _group(group, output)


def _group(group: TensorGroup, output: OutputChange) -> Iterator[str]:
    indent = "    "
    if len(output.groups) > 1:
        causes = [words.cause_text(output.causes[i][0], plain, within=output.name) for i in group.causes]
        yield f"    {_change(group.change)} because of {'; '.join(causes)}"
        indent = "      "
    yield from _where(group.places, indent)


def _wrapped(start: str, parts: Iterable[str]) -> Iterator[str]:
    """Yield parts with commas, in lines that break between them only."""
    line, indent, empty = start, " " * (len(start) - len(start.lstrip()) + 2), True
    for part in parts:
        if empty:
            line += part
        elif width(line) + width(part) + 3 <= WIDTH:
            line += f", {part}"
        else:
            yield f"{line},"
            line = indent + part
        empty = False
    yield line


def _numbers(numbers: TensorNumbers, *, verbose: bool) -> Iterator[str]:
    for side in ("old", "new"):
        if side in numbers.missing:
            yield f"  the {side} weights are not available: {plain(numbers.missing[side])}"
    if not numbers.tensors:
        return
    found = words.by_distance(numbers.tensors)
    shown = found if verbose else found[:_NUMBERS]
    if shown:
        yield "  distances, the largest first"
        head = ("tensor", "relative L2", "max abs", "cosine")
        yield from rows([head, *((plain(name), *words.distance_words(d)) for name, d in shown)], indent="    ")
    if len(shown) < len(found):
        yield f"    and {format_count(len(found) - len(shown), 'more tensor')}; `--verbose` lists all"
    for tensor in numbers.tensors:
        if tensor.problem is not None:
            yield f"  {plain(tensor.name)}: {plain(tensor.problem)}"
