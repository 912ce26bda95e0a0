"""How much the experts' deltas move a merge: what operators say of themselves, and budgets go by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from mergepipe.values import dataclass

ROOT_OF_2 = math.nextafter(math.sqrt(2.0), 2.0)
"""Not below the square root of 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """How much a delta moves the result: what a budget weighs deltas by, and what bounds the error of leaving some out.

    Leaving a delta out takes it as zero; the reduction stays that of the full read. In what follows ``n_i`` is the
    Frobenius norm of expert i's delta in a block, and "moves" is the Frobenius norm of the difference that it makes to
    the merged block, in exact arithmetic.

    Attributes
    ----------
    factors
        Per expert how much longer the result's change can be than the delta's, |c| for a coefficient c; 0 for one that
        is no input. Where nothing is known, a measure of its weight all the same: it decides what is read first.
    kind
        ``additive``: leaving out deltas moves a block by at most the sum of ``factors[i] n_i`` over them.
        ``mean``: a block of which anything is left out moves by at most ``sqrt(sum((spread[i] n_i)^2))`` over *all*
        experts, and ``sum``: by at most ``sum(spread[i] n_i)`` over all; where a sign is elected or a number of changes
        counted, the smallest delta may decide about the others. ``none``: no bound is known.
    spread
        Per expert, for ``mean`` and ``sum``.
    combination
        Where the full read's result less the base is a sum of the base and the deltas with these coefficients: that of
        the base, then that of each expert. None where it is not.
    linear
        Whether each delta enters by a linear map that does not depend on the deltas themselves (coefficients, masks by
        place): then what a delta is off by moves the result by at most its factor times that. Where it does not hold, a
        delta that is only approximately known may have other elements dropped, or another sign elected.
    """

    factors: tuple[float, ...]
    kind: Literal["additive", "mean", "sum", "none"]
    spread: tuple[float, ...] = ()
    combination: tuple[float, ...] | None = None
    linear: bool = False


def additive(coefficients: Iterable[float], *, base: float | None = 0.0, linear: bool = False) -> Influence:
    """Return the influence of deltas that enter the result with these coefficients, each on its own.

    Parameters
    ----------
    base
        What the base enters with beyond once, where the result is that of coefficients times whole deltas; None where
        it is not: where elements of the deltas are dropped, or the coefficients differ within a tensor.
    linear
        As in `Influence`: only whoever has looked at it may say so.
    """
    values = tuple(coefficients)
    combination = None if base is None else (base, *values)
    return Influence(factors=tuple(map(abs, values)), kind="additive", combination=combination, linear=linear)


def excess(coefficients: Sequence[float]) -> float:
    """Return how much more of the base than once there is where values enter with these coefficients.

    ``sum(c_i x_i) - base`` is ``(sum(c_i) - 1) base + sum(c_i (x_i - base))``. Coefficients that sum to 1 but for their
    own rounding to float32 leave none.
    """
    more = math.fsum(coefficients) - 1
    return 0.0 if abs(more) <= len(coefficients) * 2.0**-23 else more
