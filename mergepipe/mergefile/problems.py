"""Collects what is wrong with a Mergefile, so that everything is reported in one go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergepipe.errors import MergefileError, raise_collected
from mergepipe.mergefile.locate import KeyPath, LineMap
from mergepipe.mergefile.suggest import quoted

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST_VALUE = 60
_ABSENT = object()


def key_path(path: KeyPath) -> str:
    """Return a key path for people: ``outputs.assistant.experts[1].weight``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else quoted(part))
    return text


def describe(value: Any) -> str:
    """Return a TOML value for a message, shortened where it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + "...")
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_VALUE:
        return "an integer of more than 60 digits"  # and Python refuses to print those of some thousands
    return str(value) if isinstance(value, int | float) else "a date or time"


class Problems:
    """The problems of one Mergefile.

    Parameters
    ----------
    file
        How messages call the file.
    location
        The whole path, for the machine-readable facts.
    lines
        Where its keys stand.
    """

    def __init__(self, file: str, location: str, lines: LineMap) -> None:
        self._file = file
        self._location = location
        self._lines = lines
        self._found: list[tuple[int, MergefileError]] = []

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the nearest table around it."""
        return self._lines.line(path)

    def add(
        self,
        path: KeyPath,
        what: str,
        *,
        expected: str | None = None,
        got: Any = _ABSENT,
        hint: str | None = None,
        **facts: Any,
    ) -> None:
        """Record a problem of the key at ``path``.

        ``what`` is a sentence without a full stop; ``expected`` is in words; ``got`` is the TOML value.
        """
        line, where = self._lines.line(path), key_path(path)
        message = f"{self._file}:{line}: {where + ': ' if where else ''}{what}"
        comparison = [] if expected is None else [f"expected {expected}"]
        comparison += [] if got is _ABSENT else [f"got {describe(got)}"]
        if comparison:
            message += "\n  " + ", ".join(comparison)
        error = MergefileError(message, hint=hint, file=self._location, line=line, key_path=where, **facts)
        self._found.append((line, error))

    def raise_if_any(self) -> None:
        """Raise everything recorded, in the order of the file.

        Raises
        ------
        MergefileError
            If there is one problem.
        CollectedErrors
            If there are more.
        """
        raise_collected(error for _, error in sorted(self._found, key=lambda pair: pair[0]))
