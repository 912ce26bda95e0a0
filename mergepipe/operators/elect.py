"""Sign election (TIES, Yadav et al. 2023, section 4): a sign for each element, and the sum of what agrees with it.

The elected sign is that of the sum of the weighted deltas, + where that is 0. A weighted delta agrees where it has this
sign; one that is 0 has none. All sums run in expert order, in the work dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs
from mergepipe.operators.numerics import CANCELLATION
from mergepipe.operators.sparsify import SPARE, keep

# Scratch arrays: 0 to 3 are used here, and those after them hold the terms.
FIRST_TERM = 4


def elect(inputs: BlockInputs, terms: Sequence[Array], weights: Sequence[float], *, normalize: bool) -> Array:
    """Return the sum of the agreeing terms, divided by the sum of their weights where `normalize` says so.

    The divisor is 1 where nothing agrees, or where weights of both signs (nearly) cancel.

    Parameters
    ----------
    terms
        Weighted deltas, at least one, in arrays that are overwritten; the first holds the result.
    weights
        Their weights, rounded to the work dtype.
    """
    total = terms[0]
    if len(terms) == 1:  # it agrees with itself, and where it is 0 so is the result
        if normalize:
            total /= weights[0]
        return total
    sign = inputs.scratch(SPARE)
    _add_up(terms, sign)
    positive = sign >= 0
    divisor = _Divisor(inputs, weights) if normalize else None
    for term, weight in zip(terms, weights, strict=True):
        agrees = (term > 0) == positive
        agrees &= term != 0
        if divisor is not None:
            divisor.add(agrees, weight)
        keep(term, agrees)
        if term is not total:
            total += term
    if divisor is not None:
        total /= divisor.value()
    return total


def _add_up(terms: Sequence[Array], out: Array) -> None:
    np.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
        out += term


class _Divisor:
    """Sums of the weights that agree, by element."""

    def __init__(self, inputs: BlockInputs, weights: Sequence[float]) -> None:
        self._sum, self._term = inputs.scratch(1), inputs.scratch(2)
        self._size = inputs.scratch(3) if min(weights) < 0 < max(weights) else None
        for array in (self._sum, self._size):
            if array is not None:
                array.fill(0)

    def add(self, agrees: Array, weight: float) -> None:
        """Count a weight where its term agrees."""
        self._sum += np.multiply(agrees, self._sum.dtype.type(weight), out=self._term)
        if self._size is not None:
            self._size += np.abs(self._term, out=self._term)

    def value(self) -> Array:
        """Return what to divide by."""
        if self._size is None:
            nothing = self._sum == 0
        else:
            self._size *= self._sum.dtype.type(CANCELLATION)
            nothing = np.abs(self._sum, out=self._term) <= self._size
            keep(self._sum, ~nothing)
        self._sum += nothing
        return self._sum
