"""The few pieces of arithmetic that operators share: rounding of coefficients, ordered sums, safe divisors.

Coefficients are handled without numpy, so that planning does not need it. A float32 sum of two float32 values is the
float64 sum rounded once more: float64 has more than twice the digits plus two, so the second rounding changes nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import Array, BlockInputs

# Weights cancel if their sum is below this share of the sum of their magnitudes: what is left of it is rounding, and
# dividing by it would blow the result up by more than a million.
CANCELLATION = 1e-6


def _round(value: float, work: str) -> float:
    """Return a value rounded to nearest even in the work dtype."""
    if work == "float64":
        return value
    try:
        (result,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(result)


def rounded(values: Iterable[float], work: str) -> tuple[float, ...]:
    """Return the values rounded to the work dtype (``float32`` or ``float64``), as Python floats."""
    return tuple(_round(value, work) for value in values)


def ordered_sum(values: Sequence[float], work: str) -> float:
    """Return the sum from left to right, rounded to the work dtype after every addition."""
    total = 0.0
    for value in values:
        total = _round(total + _round(value, work), work)
    return total


def normaliser(weights: Sequence[float], work: str) -> float:
    """Return the sum of the weights, to divide by.

    Raises
    ------
    OperatorError
        If their sum overflows, if they cancel (sum within `CANCELLATION` of zero, relative to their magnitudes), or
        if all are zero.
    """
    total = ordered_sum(weights, work)
    if not math.isfinite(total):
        raise OperatorError(
            f"the weights sum to more than {work} can hold, so the merge cannot be normalised by their sum",
            hint="scale the weights down: only their ratios matter when they are normalised",
            weights=list(weights),
        )
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

    Sums that were taken already, of deltas alone, come behind the experts. Every product and every addition is rounded
    on its own (no fused multiply-add), whatever the device.
    """
    total = None
    for index, coefficient in enumerate(coefficients):
        if not inputs.has(index):
            continue
        number = 0 if total is None else 1
        if deltas:
            term = inputs.delta(index, number)
            if coefficient != 1 or inputs.base is None:  # a difference times 1 is itself, whatever it is
                term *= coefficient
        else:
            room, value = inputs.scratch(number), inputs.value(index, number)
            if coefficient == 1 and not inputs.non_finite and (total is not None or value is room):
                term = value  # what is added is only read; a NaN times 1 may be another one
            else:
                term = inputs.xp.multiply(value, coefficient, out=room)
        if total is None:
            total = term
        else:
            total += term
    for taken in inputs.sums:
        if total is None:
            total = taken
        else:
            total += taken
    return total
