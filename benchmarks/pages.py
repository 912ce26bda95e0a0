"""What the pages of all benchmarks have in common: text between markers, tables in markdown, the style of pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_INK = "#1f2328"
STYLE: Any = {
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "mergepipe",  # the same figures make the same file
    "text.color": _INK,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
}


def put(page: str, name: str, text: str) -> str:
    """Return a page with another text between the markers of a name.

    Raises
    ------
    ValueError
        If the page has no such markers, or has them twice.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page has no place for `{name}`")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
