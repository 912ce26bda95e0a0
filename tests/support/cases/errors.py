"""How a case fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Prose for people: allowed in every mapping of a case, never executed.
PROSE = frozenset({"notes", "comment"})


class CheckError(AssertionError):
    """The tool did not do what the case says."""


class CaseError(Exception):
    """The case asks for something that the harness does not know, or that makes no sense."""


def require(problems: Iterable[str], label: str = "") -> None:
    """Raise a `CheckError` that lists the problems, if there are any."""
    found = list(problems)
    if found:
        raise CheckError("\n".join((f"{label}:" if label else "the case failed:", *(f"- {p}" for p in found))))


def known_keys(mapping: Any, known: Iterable[str], where: str, required: Iterable[str] = ()) -> None:
    """Check that ``mapping`` is one, has no key but the known ones, and has the required ones.

    Raises
    ------
    CaseError
        If not; the message names the keys.
    """
    if not isinstance(mapping, Mapping):
        raise CaseError(f"{where}: expected a mapping, got {mapping!r}")
    unknown = sorted(set(mapping) - set(known) - PROSE)
    missing = sorted(set(required) - set(mapping))
    if unknown:
        raise CaseError(f"{where}: the harness does not know {', '.join(map(repr, unknown))}")
    if missing:
        raise CaseError(f"{where}: {', '.join(map(repr, missing))} is missing")
