"""How the messages about checkpoints quote names and list them."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_NAME = 1000


def quote(name: str) -> str:
    """Return a name in backticks, control characters escaped and absurd lengths cut, for one line of a message."""
    if len(name) > _LONGEST_NAME:
        name = name[:_LONGEST_NAME] + "..."
    if not name.isprintable():
        name = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
    return f"`{name}`"


def enumerate_names(names: Sequence[str], *, limit: int = 6) -> str:
    """Return ``a``, ``b`` and how many more there are beyond ``limit``."""
    listed = ", ".join(quote(name) for name in names[:limit])
    rest = len(names) - limit
    return f"{listed} and {rest:,} more" if rest > 0 else listed
