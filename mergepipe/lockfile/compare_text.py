"""The differences of two locks as text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from mergepipe.lockfile.compare import Difference
from mergepipe.lockfile.writer import key_text
from mergepipe.units import format_count

_LONG_DIGEST = re.compile(r"(b3:[0-9a-f]{12})[0-9a-f]{52}")
_SHOWN_TENSORS = 3


def render_differences(differences: Sequence[Difference], path: Path, limit: int = 20) -> str:
    """Return the differences as text: a line that names the lock, then at most ``limit`` lines.

    Neighbouring tensors of one output share a line with their count and first names.
    """
    if not differences:
        return f"`{path}` is up to date"
    lines: list[str] = []
    shown = 0
    for _, run in itertools.groupby(differences, key=_run_key):
        members = tuple(run)
        if len(lines) == limit:
            lines.append(f"  and {format_count(len(differences) - shown, 'more difference')}")
            break
        lines.append("  " + (_tensors_line(members) if len(members) > 1 else _line(members[0])))
        shown += len(members)
    return "\n".join((f"`{path}` would change in {format_count(len(differences), 'entry', 'entries')}", *lines))


def _run_key(difference: Difference) -> str:
    """Return what neighbours that share a line have in common: the tensor table; other entries stand alone."""
    entry, tensor = difference.entry, difference.tensor
    return entry if tensor is None else entry.removesuffix(key_text(tensor))


def _line(difference: Difference) -> str:
    old, new = ("none" if text is None else _LONG_DIGEST.sub(r"\1", text) for text in (difference.old, difference.new))
    return f"{difference.entry}: {old} -> {new} ({difference.reason})"


def _tensors_line(run: Sequence[Difference]) -> str:
    names = ", ".join(f"`{difference.tensor}`" for difference in run[:_SHOWN_TENSORS])
    more = f" and {len(run) - _SHOWN_TENSORS:,} more" if len(run) > _SHOWN_TENSORS else ""
    table = _run_key(run[0]).removesuffix(".")
    return f"{table}: {format_count(len(run), 'tensor')}: {names}{more} ({run[0].reason})"
