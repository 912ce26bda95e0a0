"""Random masks: how often mergepipe keeps an element, against the probability that mergekit would keep it with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.parity.cases import Case
from benchmarks.parity.checkpoints import Arrays

GROUPS = 5


@dataclass(slots=True)
class Group:
    """Elements of a like probability: how many, how many were kept, and the mean and variance that were expected."""

    elements: int = 0
    kept: int = 0
    expected: float = 0.0
    variance: float = 0.0
    moment: float = 0.0
    moment_variance: float = 0.0

    @property
    def deviation(self) -> float:
        """Return how many standard deviations the kept count is from its mean."""
        return (self.kept - self.expected) / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def mean_deviation(self) -> float:
        """Return how many standard deviations the sum of kept deltas is from its mean."""
        return self.moment / math.sqrt(self.moment_variance) if self.moment_variance else 0.0


@dataclass(slots=True)
class MaskCount:
    """Kept elements by the fifth of the ranks in their row that their magnitude falls in (dare: one group)."""

    groups: dict[int, Group] = field(default_factory=dict)

    def add(self, other: MaskCount) -> None:
        """Add other counts."""
        for number, group in other.groups.items():
            mine = self.groups.setdefault(number, Group())
            mine.elements += group.elements
            mine.kept += group.kept
            mine.expected += group.expected
            mine.variance += group.variance
            mine.moment += group.moment
            mine.moment_variance += group.moment_variance


def _alone(magnitudes: np.ndarray) -> np.ndarray:
    """Return which elements share their magnitude with no other of their row: the ranks of others are arbitrary."""
    rows = magnitudes.reshape(-1, magnitudes.shape[-1])
    ranked = np.sort(rows, axis=1)
    again = ranked[:, 1:] == ranked[:, :-1]
    found = np.ones(rows.shape, bool)
    for row in np.flatnonzero(again.any(axis=1)):
        found[row] = ~np.isin(rows[row], ranked[row, 1:][again[row]])
    return found.reshape(magnitudes.shape)


def count_masks(masks: Arrays, probabilities: Arrays, case: Case, sources: Mapping[str, Arrays]) -> MaskCount:
    """Count where mergekit drew (its probabilities were recorded), the delta is not zero and its rank is certain."""
    found = MaskCount()
    experts = [source for source, _ in case.experts if source != "base"]
    ranked = case.method.startswith("della")
    for key, chances in probabilities.items():
        name, _, number = key.partition("|")
        base, expert = (sources[source][name].astype(np.float32) for source in ("base", experts[int(number)]))
        delta = (expert - base).astype(np.float64)
        there = (delta != 0) & _alone(np.abs(delta)) if ranked else delta != 0
        chance, kept = chances.reshape(delta.shape)[there].astype(np.float64), masks[key][there] != 0
        low, high = float(chances.min()), float(chances.max())
        place = np.zeros(chance.shape, np.int64)
        if ranked and high > low:
            place = np.minimum((GROUPS * (chance - low) / (high - low)).astype(np.int64), GROUPS - 1)
        for group in range(GROUPS):
            inside = place == group
            found.add(MaskCount({group: _group(chance[inside], kept[inside], delta[there][inside])}))
    return found


def _group(chance: np.ndarray, kept: np.ndarray, delta: np.ndarray) -> Group:
    variance = chance * (1 - chance)
    return Group(
        elements=len(chance),
        kept=int(kept.sum()),
        expected=float(chance.sum()),
        variance=float(variance.sum()),
        moment=float((delta * (kept - chance)).sum()),
        moment_variance=float((delta**2 * variance).sum()),
    )
