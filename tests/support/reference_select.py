"""What the operators that pick or swap elements should give: whole arrays, one formula a line, no code of mergepipe.

Each takes the base and the experts (arrays of one float dtype, the work dtype, in which every step is rounded) and
returns an array of that dtype. An expert may be None where its delta is zero. Pass float64 copies for a reference to
compare within rounding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = NDArray[Any]


def deltas(base: Array, experts: Sequence[Array | None]) -> list[Array]:
    """Return the experts minus the base; equal infinities have a difference of zero."""
    with np.errstate(all="ignore"):
        return [np.where(x == base, 0, x - base).astype(base.dtype) if x is not None else base * 0 for x in experts]


def nearswap(base: Array, expert: Array, t: float) -> Array:
    """Return ``w x + (1 - w) base`` with ``w = min(t / max(|x - base|, 1e-6), 1)``."""
    real = base.dtype.type
    if real(t) == 0:
        return base
    with np.errstate(all="ignore"):
        (delta,) = deltas(base, [expert])
        share = np.minimum(real(t) / np.maximum(np.abs(delta), real(1e-6)), real(1))
        return np.where(delta == 0, base, share * expert + (real(1) - share) * base)


def change_counts(base: Array, experts: Sequence[Array | None], epsilon: float) -> list[tuple[int, int]]:
    """Return per expert how many elements it changed alone, and how many together with others."""
    sizes = [np.abs(delta).reshape(-1) for delta in deltas(base, experts)]
    found = [[0, 0] for _ in sizes]
    for element in range(base.size):
        who = [i for i, size in enumerate(sizes) if size[element] > base.dtype.type(epsilon)]
        for i in who:
            found[i][len(who) > 1] += 1
    return [(alone, shared) for alone, shared in found]


def ram(base: Array, experts: Sequence[Array | None], epsilon: float, factors: Sequence[float] | None = None) -> Array:
    """Return the base plus what one expert changed (times its factor), plus the average of what several changed."""
    real = base.dtype.type
    changes = [delta.reshape(-1) for delta in deltas(base, experts)]
    out = base.reshape(-1).copy()
    for element in range(base.size):
        who = [i for i, change in enumerate(changes) if abs(change[element]) > real(epsilon)]
        total = real(0)
        for i in who:
            factor = real(factors[i]) if factors and len(who) == 1 else real(1)
            total += changes[i][element] / real(len(who)) * factor
        out[element] += total
    return out.reshape(base.shape)


def ramplus(
    base: Array, experts: Sequence[Array | None], r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5
) -> Array:
    """Return `ram` with the factor ``1 + r min(shared / max(alone, epsilon), alpha)`` for what one expert changed."""
    real = base.dtype.type
    factors = [
        real(1) + real(r) * min(real(shared) / max(real(alone), real(epsilon)), real(alpha))
        for alone, shared in change_counts(base, experts, epsilon)
    ]
    return ram(base, experts, epsilon, factors)


def sce(base: Array, experts: Sequence[Array | None], select_topk: float = 1.0) -> Array:
    """Return the base plus the weighted average of the selected deltas that agree in sign with their sum."""
    real = base.dtype.type
    changes = np.stack(deltas(base, experts))
    if select_topk < 1:
        selected = most_varying(changes, select_topk)
        changes = np.where(selected, changes, real(0))
    means = [real(math.fsum((change.astype(np.float64) ** 2).reshape(-1)) / max(1, base.size)) for change in changes]
    total = real(0)
    for mean in means:
        total += mean
    weights = [real(1 / len(experts)) if total < 1e-6 else mean / total for mean in means]
    balance = np.zeros_like(base)
    for change in changes:
        balance = balance + change
    sums, divisor = np.zeros_like(base), np.zeros_like(base)
    for change, weight in zip(changes, weights, strict=True):
        agrees = np.sign(change) == np.where(balance >= 0, 1, -1)
        sums = sums + np.where(agrees, change * weight, real(0))
        divisor = divisor + np.where(agrees, weight, real(0))
    return base + sums / np.maximum(divisor, real(1e-6))


def most_varying(changes: Array, share: float) -> Array:
    """Return where the first axis' variance is among the largest, as many as the share of those that are not 0."""
    spread = variances(changes).reshape(-1)
    count = int(np.count_nonzero(spread) * share)
    order = sorted(range(spread.size), key=lambda element: (-spread[element], element))
    selected = np.zeros(spread.size, bool)
    selected[order[:count]] = True
    return selected.reshape(changes.shape[1:])


def variances(changes: Array) -> Array:
    """Return the biased variance along the first axis, in float64 from left to right, rounded to the input's dtype."""
    found = np.empty(changes.shape[1:], changes.dtype)
    for element in np.ndindex(found.shape):
        values = [float(change[element]) for change in changes]
        mean = square = 0.0
        for value in values:
            mean += value
        mean /= len(values)
        for value in values:
            square += (value - mean) * (value - mean)
        found[element] = square / len(values)
    return found


def row_divergences(base: Array, expert: Array) -> Array:
    """Return ``sum p log(p / q)`` of every row, with ``p``, ``q`` the softmax of expert and base plus 1e-8; float64."""
    found = []
    for x, b in zip(*(array.astype(np.float64).reshape(-1, base.shape[-1]) for array in (expert, base)), strict=True):
        p, q = ([math.exp(v - max(row)) for v in row] for row in (x, b))
        p, q = ([v / math.fsum(row) + 1e-8 for v in row] for row in (p, q))
        terms = [v * math.log(v / w) for v, w in zip(p, q, strict=True)]
        found.append(max(0.0, math.fsum((*terms, *q, *(-v for v in p)))))  # p and q should sum to the same
    return np.array(found)


def arcee_threshold(importance: Array) -> Any:
    """Return ``median + 1.5 (q3 - q1)``, quantiles being elements of the ascending order, rounded down in place."""
    real = importance.dtype.type
    ordered = sorted(importance.reshape(-1).tolist())
    first, median, third = (real(ordered[int(q * (len(ordered) - 1))]) for q in (0.25, 0.5, 0.75))
    return median + real(1.5) * (third - first)


def arcee_fusion(base: Array, expert: Array, factors: Array | None = None) -> Array:
    """Return the base with the expert's elements whose importance (times their row's factor) is at the threshold."""
    (delta,) = deltas(base, [expert])
    importance = np.abs(delta)
    if factors is not None:
        importance = importance.reshape(-1, base.shape[-1]) * factors[:, np.newaxis]
        importance = importance.reshape(base.shape)
    return base + np.where(importance >= arcee_threshold(importance), delta, base.dtype.type(0))
