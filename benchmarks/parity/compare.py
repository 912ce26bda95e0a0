"""How far apart two results are: in units in the last place of the output, and in those of what was merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.parity.values import Exact

_BITS = {2: np.int16, 4: np.int32}
ROUNDING = 4.0  # units in the last place of the largest input: what a few float32 operations may be off

_COUNTS = ("elements", "equal", "one", "undecided", "deliberate", "rounding", "nearer", "unexplained", "reproduced",
           "emulated", "ours_elsewhere", "theirs_elsewhere", "counts", "other_counts")  # fmt: skip


def ulps(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return how many values of their dtype lie between two arrays, element by element; zeros of any sign are equal."""

    def ordered(array: np.ndarray) -> np.ndarray:
        bits = array.view(_BITS[array.dtype.itemsize]).astype(np.int64)
        smallest = -(1 << (8 * array.dtype.itemsize - 1))
        return np.where(bits < 0, smallest - bits, bits)

    return np.abs(ordered(one) - ordered(two))


def _output_spacing(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the unit in the last place of the output's dtype at these magnitudes."""
    if dtype == np.float16:
        return np.spacing(np.abs(values).astype(np.float16)).astype(np.float64)
    return spacing(values) * (2.0**16 if dtype.itemsize == 2 else 1.0)


def spacing(values: np.ndarray) -> np.ndarray:
    """Return the unit in the last place of float32 at these magnitudes, in float64."""
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


@dataclass(slots=True)
class Comparison:
    """Counts of elements over some tensors.

    Attributes
    ----------
    histogram
        Elements by ulp distance in the output dtype: 0, 1, 2, 4, ... (the lower end of a power of two).
    undecided
        Elements that differ where equal magnitudes are torn apart by a threshold, or where rounding decides.
    deliberate
        Elements of tensors for which our definition is another one, on purpose, see `exact.by_design`.
    rounding
        Elements that differ by more than 1 ulp, but both are, or are from one another, no more than `ROUNDING` units of
        the largest number that is added up (and what a cosine off by 2^-22 makes) away from the exact value.
    nearer
        Elements that differ by more, where ours is the nearer to the exact value: within twice that bound, or at most
        half as far off as mergekit's.
    unexplained
        All others.
    ours_elsewhere, theirs_elsewhere
        Undecided elements off the exact value by more than `ROUNDING` units: chosen otherwise than float64 does.
    counts, other_counts
        Tensors for which it was counted how many elements were kept, and those with another count than mergekit's.
    emulated, reproduced
        Elements that differ, outside ties, and for which mergekit's order of operations was followed; and those of
        them that came out with mergekit's bits.
    """

    elements: int = 0
    equal: int = 0
    one: int = 0
    undecided: int = 0
    deliberate: int = 0
    rounding: int = 0
    nearer: int = 0
    unexplained: int = 0
    ours_elsewhere: int = 0
    theirs_elsewhere: int = 0
    counts: int = 0
    other_counts: int = 0
    reproduced: int = 0
    emulated: int = 0
    largest: int = 0
    scaled: float = 0.0
    ours_off: float = 0.0
    theirs_off: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter)
    worst: list[str] = field(default_factory=list)

    def add(self, other: Comparison) -> None:
        """Add the counts of another comparison."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("largest", "scaled", "ours_off", "theirs_off"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.histogram.update(other.histogram)
        self.worst += other.worst


def compare(
    label: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    inputs: Sequence[np.ndarray],
    evaluated: Exact,
    *,
    deliberate: bool = False,
    emulated: np.ndarray | None = None,
) -> Comparison:
    """Compare one tensor, given what went in and the exact values."""
    exact, undecided = evaluated.value, evaluated.undecided
    found = Comparison(elements=ours.size)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        raise SystemExit(f"{label}: {ours.dtype}{ours.shape} against {theirs.dtype}{theirs.shape}")
    distance = ulps(ours, theirs)
    if deliberate:
        found.equal = int((distance == 0).sum())
        found.deliberate = found.elements - found.equal
        return found
    buckets = np.where(distance, _floor_power(distance), 0)
    for bucket, count in zip(*np.unique(buckets, return_counts=True), strict=True):
        found.histogram[int(bucket)] += int(count)
    sizes = [np.abs(array.astype(np.float64)) for array in inputs] + [np.abs(exact)]
    scale = spacing(np.max(sizes if evaluated.size is None else [*sizes, evaluated.size], axis=0))
    wide, other = ours.astype(np.float64), theirs.astype(np.float64)
    scale = np.maximum(scale, _output_spacing(exact, ours.dtype))
    apart, off, their_off = np.abs(wide - other) / scale, np.abs(wide - exact) / scale, np.abs(other - exact) / scale
    rest = ~((distance <= 1) | undecided)
    blur = 0.0 if evaluated.blur is None else evaluated.blur / scale
    near = rest & ((apart <= ROUNDING + blur) | (np.maximum(off, their_off) <= ROUNDING + blur))
    nearer = rest & ~near & (off < their_off) & ((off <= 2 * ROUNDING) | (off <= their_off / 2))
    bad = rest & ~near & ~nearer
    found.equal, found.one = int((distance == 0).sum()), int((distance == 1).sum())
    elsewhere = [int((undecided & (distances > ROUNDING)).sum()) for distances in (off, their_off)]
    found.ours_elsewhere, found.theirs_elsewhere = elsewhere
    found.undecided = int((undecided & (distance > 1)).sum())
    found.rounding, found.nearer, found.unexplained = int(near.sum()), int(nearer.sum()), int(bad.sum())
    if (~undecided).any():
        found.largest = int(distance[~undecided].max())
        found.scaled, found.ours_off, found.theirs_off = (float(x[~undecided].max()) for x in (apart, off, their_off))
    if emulated is not None:
        differ = (distance > 0) & ~undecided
        found.emulated = int(differ.sum())
        found.reproduced = int((differ & (ulps(emulated.astype(ours.dtype), theirs) == 0)).sum())
    if bad.any():
        at = int(np.argmax(np.where(bad, apart, 0)))
        found.worst.append(
            f"{label}[{at}] of {ours.shape}: {bad.sum()} elements, worst {apart.flat[at]:.3g} units apart; "
            f"ours {wide.flat[at]!r}, mergekit {other.flat[at]!r}, exact {exact.flat[at]!r}"
        )
    return found


def _floor_power(distance: np.ndarray) -> np.ndarray:
    return 2 ** np.floor(np.log2(np.maximum(distance, 1))).astype(np.int64)


def summary(found: Comparison) -> str:
    """Return the counts in a line."""
    return (
        f"{found.elements} elements, {found.equal / max(found.elements, 1):.4%} equal, {found.one} by 1 ulp,"
        f" {found.undecided} by choice, {found.deliberate} by design, {found.rounding} rounding, {found.nearer} nearer,"
        f" {found.unexplained} unexplained, {found.reproduced} of {found.emulated} reproduced,"
        f" {found.other_counts} of {found.counts} counts differ; largest {found.largest} ulp, {found.scaled:.3g} units;"
        f" off {found.ours_off:.3g} (ours), {found.theirs_off:.3g}"
    )
