"""Medians of runs, and ratios between them: what tables, bars and the comparison of two benchmarks are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.speed import rows
from benchmarks.speed.results import Json
from benchmarks.speed.rows import ROWS, Row

# What is compared with what, by kind of row: (who takes longer or is the floor, who is divided by).
PAIRS = {
    "full": (
        (rows.BEST, rows.OURS),
        (rows.DEFAULT, rows.OURS),
        (rows.BEST, rows.L1),
        (rows.BEST, rows.BUDGET),
        (rows.OURS, rows.BUDGET),
        (rows.OURS, rows.FLOOR),
    ),
    "second": ((rows.TWO, rows.ONE),),
    "changes": ((rows.FULL, rows.TENSOR), (rows.TENSOR, rows.TENSOR_FLOOR), (rows.FULL, rows.NOTHING)),
    "parameter": ((rows.BEFORE, "t changed"), (rows.BEFORE, "lambda changed"), (rows.BEFORE, "density changed")),
    "memory": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The wall time of one participant by that of another, in one row and mode.

    Attributes
    ----------
    value
        The ratio of the medians.
    low, high
        The smallest and largest ratio within a round.
    rounds
        In how many rounds the two were measured.
    """

    row: str
    mode: str
    of: str
    by: str
    value: float
    low: float
    high: float
    rounds: tuple[int, int]


def runs_of(found: Json, row: str, mode: str, who: str) -> list[Json]:
    """Return the runs of a participant, by rounds; none where it was not measured."""
    runs = found.get("rows", {}).get(row, {}).get("runs", [])
    return sorted((run for run in runs if (run["mode"], run["who"]) == (mode, who)), key=lambda run: run["round"])


def median(runs: Sequence[Json], name: str) -> float:
    """Return the median of one figure."""
    return float(statistics.median(run[name] for run in runs))


def ratio(found: Json, row: str, mode: str, of: str, by: str) -> Ratio | None:
    """Return a ratio of wall times; None where one of the two was not measured."""
    above, below = (runs_of(found, row, mode, who) for who in (of, by))
    if not above or not below:
        return None
    walls = {run["round"]: run["wall"] for run in below}
    paired = [run["wall"] / walls[run["round"]] for run in above if run["round"] in walls]
    value = median(above, "wall") / median(below, "wall")
    return Ratio(
        row=row,
        mode=mode,
        of=of,
        by=by,
        value=value,
        low=min(paired, default=value),
        high=max(paired, default=value),
        rounds=(len(above), len(below)),
    )


def ratios(found: Json) -> Iterator[Ratio]:
    """Yield all ratios of all rows that were measured."""
    for row in measured_rows(found):
        for mode in row.modes:
            for of, by in PAIRS[row.kind]:
                one = ratio(found, row.name, mode, of, by)
                if one is not None:
                    yield one


def measured_rows(found: Json) -> list[Row]:
    """Return the rows that were measured, in their order."""
    return [row for name, row in ROWS.items() if found.get("rows", {}).get(name, {}).get("runs")]
