"""Comparing two runs of the benchmark: the ratios are to be the same on another day, whatever the times are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.speed.ratios import measured_rows, ratios
from benchmarks.speed.results import Json

WITHIN = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A ratio in both runs, and how far they are apart: 0.25 if one is a quarter more than the other."""

    label: str
    before: float
    after: float

    @property
    def apart(self) -> float:
        """Return how much larger the larger one is, as a share of the smaller one."""
        return max(self.before, self.after) / min(self.before, self.after) - 1.0


def pairs(before: Json, after: Json) -> list[Pair]:
    """Return the ratios that both runs have, those that are furthest apart first."""
    one, other = ({(r.row, r.mode, r.of, r.by): r.value for r in ratios(found)} for found in (before, after))
    found = [
        Pair(label=f"{row}, {mode}: {of} / {by}", before=one[row, mode, of, by], after=other[row, mode, of, by])
        for row, mode, of, by in one
        if (row, mode, of, by) in other
    ]
    return sorted(found, key=lambda pair: (-pair.apart, pair.label))


def missing(before: Json, after: Json) -> list[str]:
    """Return the ratios that only one of the runs has, in words."""
    one, other = ({f"{r.row}, {r.mode}: {r.of} / {r.by}" for r in ratios(found)} for found in (before, after))
    return sorted(one ^ other)


def summary(before: Json, after: Json) -> Json:
    """Return what a page says of two runs: when they were, how many ratios there are, and which are apart."""
    found = pairs(before, after)
    return {
        "before": dates(before),
        "after": dates(after),
        "ratios": len(found),
        "worst": found[0].apart if found else None,
        "apart": [[pair.label, pair.before, pair.after] for pair in found if pair.apart > WITHIN],
    }


def report(before: Json, after: Json) -> list[str]:
    """Return lines to read: every ratio of both runs, and what is to be said of it."""
    lines = [
        f"{pair.label}: {pair.before:.2f}, {pair.after:.2f} ({pair.apart:.0%} apart)"
        + (f" MORE THAN {WITHIN:.0%}" if pair.apart > WITHIN else "")
        for pair in pairs(before, after)
    ]
    return [*lines, *(f"{label}: in one of them only" for label in missing(before, after))]


def dates(found: Json) -> str:
    """Return the days of a run in words."""
    days: Sequence[str] = sorted({found["rows"][row.name]["date"] for row in measured_rows(found)})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"
