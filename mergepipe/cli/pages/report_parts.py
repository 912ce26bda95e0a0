"""What the page of a report is put together from: figures, tables, and numbers in words. All text is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mergepipe.cli.pages.filling import text
from mergepipe.cli.pages.maps import percent
from mergepipe.values import dataclass

_BREAKS = re.compile(r"[._](?=.)")
_SAMPLED = "sample:"  # of a source that is known by samples
_DIGITS = len("b3:") + 12


@dataclass(frozen=True, slots=True, kw_only=False)
class Column:
    """A column of a table: its title, and how its cells are set."""

    title: str
    is_number: bool = False
    is_name: bool = False
    is_why: bool = False
    is_narrow: bool = False

    @property
    def kind(self) -> str:
        """The class of its cells as an attribute, with a blank before it; nothing for plain text."""
        kinds = {"number": self.is_number, "name": self.is_name, "why": self.is_why, "narrow": self.is_narrow}
        return "".join(f' class="{name}"' for name, holds in kinds.items() if holds)


def name_text(name: str) -> str:
    """Return a name of a tensor or a module, which may break behind its dots and underscores."""
    return _BREAKS.sub(r"\g<0><wbr>", text(name))


def short(value: float | None) -> str:
    """Return a number with three digits; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return text(percent(value))


def number(value: int) -> str:
    """Return a count."""
    return text(f"{value:,}")


def digest(value: str) -> str:
    """Return a digest: its first digits, the whole of it for those who point at it or copy it."""
    shown = value[: len(value) - len(value.removeprefix(_SAMPLED)) + _DIGITS]
    return f'<span class="digest" title="{text(value)}" data-digest="{text(value)}">{text(shown)}…</span>'


def figures(entries: Sequence[Sequence[Any]]) -> str:
    """Return a list of figures.

    Parameters
    ----------
    entries
        Of each its name, title, value as data, and content, which is escaped already; perhaps a note.
    """
    return f'<dl class="figures">{"".join(_figure(*entry) for entry in entries)}</dl>'


def _figure(name: str, title: str, value: object, content: str, note: str = "") -> str:
    data = "" if value is None else text(str(value))
    small = f"<small>{text(note)}</small>" if note else ""
    shown = f'<dd data-figure="{text(name)}" data-value="{data}">{content}{small}</dd>'
    return f"<div><dt>{text(title)}</dt>{shown}</div>"


def table(
    name: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    label: str | None = None,
    values: Sequence[Sequence[float | None]] | None = None,
    sortable: bool = False,
    heading: bool = True,
) -> str:
    """Return a table that scrolls by itself where it is wider than the page.

    Parameters
    ----------
    rows
        Cells, which are escaped already.
    label
        What it shows, for those who cannot see what stands above it; the title of its section by default.
    values
        By row what the columns of numbers are sorted by, in their order; None for what is not known.
    sortable
        Whether the titles are buttons.
    heading
        Whether the first cell of a row names it.
    """
    titles = "".join(_title(column, sortable=sortable) for column in columns)
    body = "".join(
        f"<tr>{''.join(_cells(columns, row, values[at] if values is not None else None, heading=heading))}</tr>\n"
        for at, row in enumerate(rows)
    )
    kind = "wide tall" if sortable else "wide"
    region = f'role="region" aria-label="{text(label or columns[0].title + "s")}" tabindex="0"'
    inner = f'<table id="{name}"><thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="{kind}" {region}>{inner}</div>'


def _title(column: Column, *, sortable: bool) -> str:
    title = name_text(column.title)
    shown = f'<button type="button">{title}</button>' if sortable else title
    return f'<th scope="col"{column.kind}>{shown}</th>' if title else f"<td{column.kind}></td>"


def _cells(
    columns: Sequence[Column], row: Sequence[str], values: Sequence[float | None] | None, *, heading: bool
) -> Iterator[str]:
    left = iter(values or ())
    for at, (column, cell) in enumerate(zip(columns, row, strict=True)):
        data = ""
        if values is not None and column.is_number:
            value = next(left)
            data = f' data-value="{"" if value is None else repr(value)}"'
        if at == 0 and heading:
            yield f'<th scope="row"{column.kind}>{cell}</th>'
        else:
            yield f"<td{column.kind}{data}>{cell}</td>"
