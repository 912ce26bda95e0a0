"""How fast this machine was in earlier builds: one number per kind of work, for the estimates of `plan`.

A number says what a byte of that kind of work takes, in seconds, or what a run takes whatever it moves. They are no
part of any result, and losing them costs an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mergepipe.cache.catalog import Catalog

_PREFIX = "seconds:"


def record_seconds(catalog: Catalog, measured: Mapping[str, float]) -> None:
    """Remember what each kind of work took.

    A new measurement moves what was known half of the way (in factors, not in differences): one build on a cold or busy
    disk does not spoil the next estimate, and after a few builds the number is that of the machine as it is now.
    Values that are not positive and finite are left out.
    """
    known = recorded_seconds(catalog)
    rows = []
    for kind, value in measured.items():
        if 0 < value < math.inf:
            before = known.get(kind)
            rows.append((_PREFIX + kind, value if before is None else math.sqrt(value * before)))
    if rows:
        with catalog.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO measured VALUES (?, ?)", rows)


def recorded_seconds(catalog: Catalog) -> dict[str, float]:
    """Return what each kind of work took, in the order of their names; what is not a usable number is left out."""
    rows = catalog.rows("SELECT name, value FROM measured WHERE name LIKE ? ORDER BY name", (_PREFIX + "%",))
    found = {}
    for name, value in rows:
        if isinstance(value, int | float) and 0 < value < math.inf:
            found[str(name).removeprefix(_PREFIX)] = float(value)
    return found
