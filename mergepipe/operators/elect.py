"""Sign election (TIES, Yadav et al. 2023, section 4): a sign for each element, and the sum of what agrees with it.

The elected sign is that of the sum of the weighted deltas, + where that is 0. A weighted delta agrees where it has this
sign; one that is 0 has none. All sums run in expert order, in the work dtype.

Signs are compared as bits. Where - is elected, the signs of all terms are turned around and that of their sum turned
back, which changes no rounding: what agrees is then what is not negative. The bits of a float are a negative integer
where its sign is -, so the larger one of that and 0 is the term where it agrees, and +0 elsewhere. That takes half the
passes over memory that masks of bools take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs
from mergepipe.operators.numerics import CANCELLATION
from mergepipe.operators.sparsify import SPARE, keep

# Scratch arrays: 0 is free once elements are dropped, 1 to 3 are used here, and those after them hold the terms.
_SIGN, _SUM, _OTHER = 1, 2, 3
FIRST_TERM = 4


class Election:
    """One tile's election; terms are added one by one, in expert order.

    Parameters
    ----------
    inputs
        The tile.
    """

    def __init__(self, inputs: BlockInputs) -> None:
        self._inputs = inputs
        self._terms: list[Array] = []
        self._weights: list[float] = []

    @property
    def scratch(self) -> int:
        """The number of the scratch array for the next term."""
        return FIRST_TERM + len(self._terms)

    def add(self, term: Array, weight: float) -> None:
        """Add a weighted delta, in an array that is overwritten, and its weight, rounded to the work dtype."""
        self._terms.append(term)
        self._weights.append(weight)
        if len(self._terms) == 2:
            np.add(self._terms[0], term, out=self._inputs.scratch(_SIGN))
        elif len(self._terms) > 2:
            self._inputs.scratch(_SIGN).__iadd__(term)

    def result(self, *, normalize: bool) -> Array | None:
        """Return the sum of the agreeing terms, divided by the sum of their weights where `normalize` says so.

        The divisor is 1 where nothing agrees, or where weights of both signs (nearly) cancel. None without terms.
        """
        terms, weights = self._terms, self._weights
        if len(terms) <= 1:  # a single one agrees with itself, and where it is 0 so is the result
            if terms and normalize:
                terms[0] /= weights[0]
            return terms[0] if terms else None
        divisor = _divisor(self._inputs, weights) if normalize else None
        total = (self._sum_any if self._inputs.non_finite else self._sum_finite)(divisor)
        if divisor is not None:
            total /= divisor.value()
        return total

    def _sum_finite(self, divisor: _Divisor | _EqualDivisor | None) -> Array:
        """Return the sum of the agreeing terms, +0 where there is none; the divisor counts those that are not 0."""
        sign = self._inputs.scratch(_SIGN)
        sign += 0  # a sum of -0 counts as +
        signs, nothing = _signed(sign), _signed(self._inputs.scratch(SPARE))
        signs &= np.iinfo(signs.dtype).min
        nothing.fill(0)  # numpy is quicker with an array than with one number
        total = self._terms[0]
        for term, weight in zip(self._terms, self._weights, strict=True):
            bits = _signed(term)
            bits ^= signs
            np.maximum(bits, nothing, out=bits)
            if divisor is not None:
                divisor.add(term != 0, weight)
            if term is not total:
                total += term
        _signed(total).__ixor__(signs)
        return total

    def _sum_any(self, divisor: _Divisor | _EqualDivisor | None) -> Array:
        """As `_sum_finite`, where terms may be infinite or NaN: NaN stays in the result."""
        positive = self._inputs.scratch(_SIGN) >= 0
        total = self._terms[0]
        for term, weight in zip(self._terms, self._weights, strict=True):
            agrees = (term > 0) == positive
            agrees &= term != 0
            keep(term, agrees)
            if divisor is not None:
                divisor.add(term != 0, weight)
            if term is not total:
                total += term
        return total


def _signed(values: Array) -> Array:
    return values.view(f"i{values.itemsize}")


def _divisor(inputs: BlockInputs, weights: Sequence[float]) -> _Divisor | _EqualDivisor:
    """Return what adds up the weights that agree."""
    work: Any = np.dtype(inputs.dtype).type
    sums = [work(0)]
    for weight in weights:
        sums.append(sums[-1] + work(weight))
    if min(weights) == max(weights) > 0 and all(total == count * work(weights[0]) for count, total in enumerate(sums)):
        return _EqualDivisor(inputs, weights[0])
    return _Divisor(inputs, weights)


class _EqualDivisor:
    """The number of those that agree times their weight, where that is what adding the weight so often comes to."""

    def __init__(self, inputs: BlockInputs, weight: float) -> None:
        self._sum, self._weight = inputs.scratch(_SUM), weight
        self._count = np.zeros(inputs.shape, np.uint8)  # of `sparse.MOST_ELECTING` at most

    def add(self, agrees: Array, weight: float) -> None:
        """Count a term where it agrees."""
        del weight
        self._count += agrees.view(np.uint8)

    def value(self) -> Array:
        """Return what to divide by; nothing but 0 is divided where none agrees."""
        self._count += self._count == 0
        np.copyto(self._sum, self._count)
        if self._weight != 1:
            self._sum *= self._weight
        return self._sum


class _Divisor:
    """Sums of the weights that agree, by element."""

    def __init__(self, inputs: BlockInputs, weights: Sequence[float]) -> None:
        self._sum, self._term = inputs.scratch(_SUM), inputs.scratch(_OTHER)
        self._size = np.zeros_like(self._sum) if min(weights) < 0 < max(weights) else None
        self._sum.fill(0)

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
