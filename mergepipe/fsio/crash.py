"""Named crash points: where the tests kill the process to prove that every prefix of the writes is recoverable.

Set ``MERGEPIPE_CRASH_POINT=name`` (or ``name:3`` for the third time that it is passed) and the process kills itself
there with SIGKILL, as a power cut would. Without the variable a point costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

# What every build of new outputs passes, in this order.
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
# What builds pass in special situations, and other commands.
RARE_CRASH_POINTS = (
    "cache.created",
    "catalog.created",
    "catalog.set-aside",
    "packs.forgotten",
    "packs.quarantined",
    "prune.forgotten",
    "prune.removed",
    "engine.abandoned",
    "publish.claimed",
    "publish.kept",
    "publish.rescued",
    "publish.recovered",
    "swap.journalled",
    "swap.retired",
    "swap.replaced",
    "swap.completed",
    "signature.written",
    "signature.renamed",
    "scratch.made",
    "replay.swapped",
    "sweep.scratch",
    "git.configured",
    "git.removed",
    "git.unlinked",
    "file.written",
    "file.renamed",
    "planes.written",
    "planes.renamed",
    "pack.begun",
    "pack.exact",
    "pack.assembled",
    "pack.cleaned",
    "pack.recovered",
    "codes.quarantined",
)

_seen: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kill the process here if the environment asks for it."""
    wanted = os.environ.get("MERGEPIPE_CRASH_POINT")
    if wanted is None:
        return
    if name not in CRASH_POINTS and name not in RARE_CRASH_POINTS:
        raise AssertionError(f"crash point `{name}` is not listed")
    point, _, count = wanted.partition(":")
    if point == name:
        _seen[name] += 1
        if _seen[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
