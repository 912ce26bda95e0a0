"""A difference as a comment for a pull request: GitHub's markdown, a summary and folded details, of a limited size.

Names come from checkpoints and Mergefiles. They stand in code spans, in which markdown has no meaning, nobody is
mentioned and no address becomes a link; what could end a code span or a table's cell is written as HTML entities.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mergepipe.cli import diff_words as words
from mergepipe.cli.tables import plain
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.lockfile.compare import Difference
    from mergepipe.lockfile.diff_values import EntryChange, OutputChange, Places
    from mergepipe.project.diff import DiffReport
    from mergepipe.project.diff_weights import TensorNumbers

LIMIT = 60_000
"""Bytes of a comment at most: GitHub takes 65,536 characters."""
_RESERVE = 400  # for the lines that say how much more there is, and closing tags
_NAME_LENGTH = 120
_ROWS = 40  # of a summary table
_ITEMS = 200  # of a list in the details
_CAUSES = 4
_UNSAFE = re.compile(r"[^A-Za-z0-9 .,_/()-]")
_ARROW = "→"


def diff_markdown(report: DiffReport) -> str:
    """Return the comment; it says so if nothing differs."""
    diff = report.diff
    old, new = (words.side_words(side, code) for side in (diff.old, diff.new))
    page = _Page(LIMIT)
    if diff.is_empty:
        page.add([f"### mergepipe: no differences between {old} and {new}"])
        return page.text()
    page.add([f"### mergepipe: {old} {_ARROW} {new}", ""])
    if diff.geometry is not None:
        page.add(["The two cut tensors into blocks in different ways, so that all digests differ.", ""])
    if diff.outputs:
        page.add(["| output | operator | tensors | expert reads | bound | because of |", "|---|---|---|---|---|---|"])
        page.items([_summary_row(output) for output in diff.outputs], _ROWS, "| … and {} more | | | | | |")
        page.add([""])
    if diff.unchanged:
        page.add([f"Unchanged: {words.listed(map(code, diff.unchanged), _ROWS)}", ""])
    if diff.sources:
        page.add(["| source | change | old | new |", "|---|---|---|---|"])
        page.items([_source_row(source) for source in diff.sources], _ROWS, "| … and {} more | | | |")
        page.add([""])
    for number, output in enumerate(diff.outputs):
        numbers = (report.numbers or {}).get(output.name)
        if not page.has_room(2 * _RESERVE):
            page.add([f"… and details of {format_count(len(diff.outputs) - number, 'more output')}"])
            break
        _details(page, output, numbers)
    return page.text()


# --- escaping ----------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Return a name or value that means nothing to markdown, on one line, cut to a sane length."""
    shown = _cut(text)
    if shown and shown == shown.strip() and not re.search(r"[`|<>&\\]", shown):
        return f"`{shown}`"
    return f"<code>{_entities(shown)}</code>"


def _cut(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= _NAME_LENGTH else f"{shown[: _NAME_LENGTH - 1]}…"


def _entities(text: str) -> str:
    """Return text for HTML; what markdown could take for its own is written as an entity."""
    return _UNSAFE.sub(lambda match: f"&#{ord(match[0])};", text).replace("_", "&#95;").replace("www.", "www&#46;")


def _html_code(text: str) -> str:
    """Return a name inside HTML, where code spans are not seen."""
    return f"<code>{_entities(_cut(text))}</code>"


# --- size --------------------------------------------------------------------------------------------------------


class _Page:
    """Lines up to a size in bytes; what does not fit is counted."""

    def __init__(self, limit: int) -> None:
        self._lines: list[str] = []
        self._left = limit

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes more would fit."""
        return self._left >= size

    def add(self, lines: Iterable[str]) -> None:
        """Add lines, whatever room there is: for the few of a fixed size."""
        for line in lines:
            self._lines.append(line)
            self._left -= _size(line)

    def items(self, lines: Sequence[str], limit: int, more: str) -> None:
        """Add as many lines as fit, and at most ``limit``; then ``more`` with the number of those that do not."""
        count = 0
        while count < min(limit, len(lines)) and self.has_room(_size(lines[count]) + _RESERVE):
            self.add([lines[count]])
            count += 1
        if count < len(lines):
            self.add([more.format(f"{len(lines) - count:,}")])

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(self._lines).rstrip("\n")


def _size(line: str) -> int:
    return len(line.encode("utf-8", "surrogateescape")) + 1


# --- the summary -------------------------------------------------------------------------------------------------


def _summary_row(output: OutputChange) -> str:
    entry = output.new or output.old
    operators = [side.operator for side in (output.old, output.new) if side is not None]
    operator = f" {_ARROW} ".join(map(code, dict.fromkeys(operators)))
    causes = [words.cause_text(cause, code, within=output.name) for cause, _ in output.causes]
    cells = (
        code(output.name),
        operator,
        words.heading_words(output),
        _arrows(words.reads_words(output)) or (format_bytes(entry.expert_bytes_planned) if entry else ""),
        _arrows(words.bound_words(output)) or (words.bound_text(entry.bound) if entry else ""),
        words.listed(causes, _CAUSES, "; ") or "—",
    )
    return "| " + " | ".join(cells) + " |"


def _arrows(text: str | None) -> str:
    return "" if text is None else text.replace(words.ARROW, _ARROW)


def _source_row(source: EntryChange) -> str:
    facts = {fact.key or "digest": fact for fact in source.facts}
    fact = facts.get("digest") or source.facts[0]
    old, new = ("—" if value is None else code(words.short(value)) for value in (fact.old, fact.new))
    what = [key for key in facts if key != "digest" and not key.startswith("files")]
    what += ["files"] if any(key.startswith("files") for key in facts) else []
    words_of = source.change + (f" ({', '.join(what)})" if source.change == "changed" and what else "")
    words_of += ", the same content" if words.is_same_content(source) else ""
    return f"| {code(source.name)} | {words_of} | {old} | {new} |"


# --- details -----------------------------------------------------------------------------------------------------


def _details(page: _Page, output: OutputChange, numbers: TensorNumbers | None) -> None:
    summary = f"{_html_code(output.name)}: {html.escape(words.heading_words(output))}"
    page.add([f"<details><summary>{summary}</summary>", ""])
    sections = (
        ("Because of", list(_causes(output))),
        ("Declared", [f"- {key}: {code(text)}" for key, text in words.entry_facts(output)]),
        ("Declared", [_fact(fact, output) for fact in words.shown_facts(output)]),
        ("Parameters", list(_parameters(output))),
        ("What follows", list(_consequences(output))),
        ("Tensors", list(_tensors(output))),
        ("Dtypes and shapes", [f"- {code(name)}: {_arrows(change)}" for name, change in words.forms(output)]),
        ("Weights", list(_missing(numbers))),
    )
    for title, lines in sections:
        if lines and page.has_room(2 * _RESERVE):
            page.add([f"**{title}**", ""])
            page.items(lines, _ITEMS, "- … and {} more")
            page.add([""])
    if numbers is not None and numbers.tensors and page.has_room(3 * _RESERVE):
        _distances(page, numbers)
    page.add(["</details>", ""])


def _causes(output: OutputChange) -> Iterator[str]:
    for cause, count in output.causes:
        yield f"- {words.cause_text(cause, code, within=output.name)}: {format_count(count, 'tensor')}"


def _fact(fact: Difference, output: OutputChange) -> str:
    old, new = words.fact_words(fact, output)
    return f"- {code(fact.key)}: {code(old)} {_ARROW} {code(new)}"


def _parameters(output: OutputChange) -> Iterator[str]:
    if words.same_values(output):
        yield "- parameters are written differently; every tensor gets the same values"
    for change in output.parameters or ():
        for group in change.groups:
            values = f"{code(words.value_words(group.old))} {_ARROW} {code(words.value_words(group.new))}"
            where = words.listed(map(_places, group.places), 8, "; ")
            yield f"- {code(change.name)}: {values} in {format_count(group.tensors, 'tensor')}: {where}"


def _places(places: Places) -> str:
    where, modules = words.places_words(places, code, short=True)
    return f"{where}: {words.listed(modules, 20)}"


def _consequences(output: OutputChange) -> Iterator[str]:
    found = (
        ("expert reads", words.reads_words(output)),
        ("expert blocks read", words.blocks_words(output)),
        ("levels", words.levels_words(output)),
        ("moved", words.moves_words(output)),
        ("bound", words.bound_words(output)),
        ("written", words.written_words(output)),
        ("side files", words.listed(map(code, words.side_files(output)), 20) or None),
    )
    for label, text in found:
        if text is not None:
            yield f"- {label}: {_arrows(text) if label != 'side files' else text}"


def _tensors(output: OutputChange) -> Iterator[str]:
    for group in output.groups:
        causes = [words.cause_text(output.causes[i][0], code, within=output.name) for i in group.causes]
        why = f" ({group.change} because of {words.listed(causes, _CAUSES, '; ')})" if len(output.groups) > 1 else ""
        for places in group.places:
            where, modules = words.places_words(places, code)
            yield f"- {where}: {words.listed(modules, 50)}{why}"


def _missing(numbers: TensorNumbers | None) -> Iterator[str]:
    if numbers is None:
        return
    for side, reason in numbers.missing.items():
        yield f"- the {side} weights are not available: {code(reason)}"
    for tensor in numbers.tensors:
        if tensor.problem is not None:
            yield f"- {code(tensor.name)}: {code(tensor.problem)}"


def _distances(page: _Page, numbers: TensorNumbers) -> None:
    page.add(["| tensor | relative L2 | max abs | cosine |", "|---|---|---|---|"])
    lines = [
        f"| {code(name)} | {' | '.join(words.distance_words(distance))} |"
        for name, distance in words.by_distance(numbers.tensors)
    ]
    page.items(lines, len(lines), "| … and {} more | | | |")
    page.add([""])
