"""The few pieces of arithmetic that operators share: rounding of coefficients, ordered sums, safe divisors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import Array, BlockInputs

# Weights cancel if their sum is below this share of the sum of their magnitudes: what is left of it is rounding, and
# dividing by it would blow the result up by more than a million.
CANCELLATION = 1e-6


def rounded(values: Iterable[float], work: str) -> tuple[float, ...]:
    """Return the values rounded to the work dtype (``float32`` or ``float64``), as Python floats."""
    kind = np.float64 if work == "float64" else np.float32
    return tuple(float(kind(value)) for value in values)


def ordered_sum(values: Sequence[float], work: str) -> float:
    """Return the sum from left to right, rounded to the work dtype after every addition."""
    kind = np.float64 if work == "float64" else np.float32
    total = kind(0)
    for value in values:
        total = kind(total + kind(value))
    return float(total)


def normaliser(weights: Sequence[float], work: str) -> float:
    """Return the sum of the weights, to divide by.

    Raises
    ------
    OperatorError
        If the weights cancel (sum within `CANCELLATION` of zero, relative to their magnitudes) or are all zero.
    """
    total = ordered_sum(weights, work)
    if abs(total) <= CANCELLATION * sum(abs(weight) for weight in weights):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise OperatorError(
            f"the weights ({shown}) sum to {total:g}, nearly zero, so the merge cannot be normalised by their sum",
            hint="set `normalize = false` in the output's params, or choose weights whose sum is not zero",
            weights=list(weights),
            weight_sum=total,
        )
    return total


def weighted_sum(inputs: BlockInputs, coefficients: Sequence[float], *, deltas: bool) -> Array | None:
    """Return ``sum of c_i x_i`` (or ``c_i (x_i - base)``) from left to right, or None if no expert is present.

    Every product and every addition is rounded on its own (no fused multiply-add), whatever the device.
    """
    total: Array | None = None
    for array, coefficient in zip(inputs.experts, coefficients, strict=True):
        if array is None:
            continue
        if deltas:
            term = array - inputs.base
            term *= coefficient
        else:
            term = array * coefficient
        if total is None:
            total = term
        else:
            total += term
    return total
