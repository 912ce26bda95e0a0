"""Laying out text for people: columns, folded lists, and numbers in words. Everything fits 80 columns where it can."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

import click

WIDTH = 80
_LABEL_WIDTH = 9
_INDENT = "  "
_LEAST_NAME = 12  # columns that a name keeps, whatever stands beside it


def plain(text: str) -> str:
    """Return a name or a path for one line of text; what does not print, and could steer a terminal, is escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def plain_lines(text: str) -> str:
    """Return a message of one or more lines, as `plain` line by line.

    A line break between backticks is part of a name, and escaped.
    """
    lines: list[str] = []
    for line in text.expandtabs(4).split("\n"):
        if lines and lines[-1].count("`") % 2 and not lines[-1].startswith(" "):
            lines[-1] += f"\\n{line}"
        else:
            lines.append(line)
    return "\n".join(map(plain, lines))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def width(text: str) -> int:
    """Return how many terminal columns a styled text takes."""
    bare = click.unstyle(text)
    return len(bare) + sum(unicodedata.east_asian_width(c) in "WF" for c in bare if not c.isascii())


def pad(text: str, columns: int) -> str:
    """Return the text with blanks up to a width."""
    return text + " " * (columns - width(text))


def rows(table: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return aligned lines of a table, two blanks between its columns; the last one is not padded."""
    widths = [max(map(width, column)) for column in itertools.zip_longest(*table, fillvalue="")]
    return [
        indent + "  ".join([*(pad(cell, size) for cell, size in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in table
    ]


def fact(label: str, parts: Iterable[str], *, indent: str = _INDENT) -> list[str]:
    """Return ``label  part, part, ...`` in lines that break between the parts only."""
    first = f"{indent}{label:<{_LABEL_WIDTH}} "
    lines = [first]
    for number, part in enumerate(parts):
        if number == 0:
            lines[-1] += part
        elif width(lines[-1]) + width(part) + 2 < WIDTH:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(" " * len(first) + part)
    return lines


def figures(
    label: str, columns: Sequence[str], table: Sequence[Sequence[str]], *, indent: str = _INDENT
) -> list[str]:
    """Return a table of figures under its label: names on the left, figures to the right under their headings.

    Names that are too long for the line lose their middle; figures never break.

    Parameters
    ----------
    columns
        The headings of the figures.
    table
        Rows: a name, then its figures.
    """
    sizes = [max(map(width, column)) for column in zip(columns, *(row[1:] for row in table), strict=True)]
    inner = indent + _INDENT
    room = WIDTH - width(inner) - sum(size + 2 for size in sizes)
    names = [shortened(row[0], max(_LEAST_NAME, room)) for row in table]
    first = max([width(label) - width(_INDENT), *map(width, names)])
    lines = [indent + pad(label, first + width(_INDENT)) + _right(columns, sizes)]
    lines += [inner + pad(name, first) + _right(row[1:], sizes) for name, row in zip(names, table, strict=True)]
    return lines


def _right(cells: Iterable[str], sizes: Iterable[int]) -> str:
    return "".join("  " + " " * (size - width(cell)) + cell for cell, size in zip(cells, sizes, strict=True))


def shortened(text: str, columns: int) -> str:
    """Return a plain text that takes at most so many columns: a longer one loses its middle."""
    if width(text) <= columns:
        return text
    left, right = text[: (columns - 1) // 2], text[len(text) - columns // 2 :]
    while width(left) + width(right) + 1 > columns:  # wide characters
        left, right = (left[:-1], right) if width(left) > width(right) else (left, right[1:])
    return f"{left}…{right}"


def duration(seconds: float) -> str:
    """Return ``2.41 s``, ``24.1 s``, ``3 min 05 s`` or ``2 h 03 min``."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def share(part: int, whole: int) -> str:
    """Return what percentage ``part`` is of ``whole``."""
    return f"{part / whole:.1%}" if whole else "0.0%"
