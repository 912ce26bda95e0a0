"""Named crash points: where the tests kill the process to prove that every prefix of the writes is recoverable.

Set ``MERGEPIPE_CRASH_POINT=name`` (or ``name:3`` for the third time that it is passed) and the process kills itself
there with SIGKILL, as a power cut would. Without the variable a point costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

CRASH_POINTS = (
    "engine.first-block",
    "engine.tensor-recorded",
    "engine.shard-complete",
    "packs.fsynced",
    "packs.renamed",
    "packs.recorded",
    "publish.assembling",
    "publish.assembled",
    "publish.recorded",
    "publish.swap-begun",
    "publish.swapped",
    "publish.cleaned",
    "lock.written",
    "lock.renamed",
)

_seen: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kill the process here if the environment asks for it."""
    wanted = os.environ.get("MERGEPIPE_CRASH_POINT")
    if wanted is None:
        return
    if name not in CRASH_POINTS:
        raise AssertionError(f"crash point `{name}` is not in CRASH_POINTS")
    point, _, count = wanted.partition(":")
    if point == name:
        _seen[name] += 1
        if _seen[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
