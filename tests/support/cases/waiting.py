"""Cases that are not expected to pass yet, each with the feature that it waits for.

The list is strict: a case that is listed and passes fails the suite, so that it is taken off the list.
"""

from __future__ import annotations

from collections.abc import Mapping

# Start of the case's id -> what it waits for.
WAITING: Mapping[str, str] = {
}

# Single runs of cases that must pass otherwise: (start of the id, number of the run) -> what it waits for.
WAITING_RUNS: Mapping[tuple[str, int], str] = {
}


def waits_for(name: str) -> str | None:
    """Return what a whole case waits for, None if it must pass."""
    return next((feature for start, feature in WAITING.items() if name.startswith(start)), None)


def run_waits_for(name: str, number: int) -> str | None:
    """Return what one run of a case waits for, None if it must pass."""
    found = (f for (start, n), f in WAITING_RUNS.items() if name.startswith(start) and n == number)
    return next(found, None)
