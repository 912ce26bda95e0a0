"""What the operators that pick or swap elements should give: whole arrays, one formula a line, no code of mergepipe.

Each takes the base and the experts (arrays of one float dtype, the work dtype, in which every step is rounded) and
returns an array of that dtype. An expert may be None where its delta is zero. Pass float64 copies for a reference to
compare within rounding.
"""

from __future__ import annotations

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
