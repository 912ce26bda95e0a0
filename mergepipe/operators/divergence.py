"""How far the softmax of an expert's rows is from that of the base's, and arcee_fusion's importance of an element.

The divergence of a row is ``sum p log(p / q)`` with ``p = softmax(expert) + 1e-8`` and ``q = softmax(base) + 1e-8``,
in float64, rounded once to the work dtype. Both ``p`` and ``q`` sum to the same number, so that ``q - p`` may be added
to each term: then all terms are positive and of the size of the result, which no rounding drowns.

numpy's own ``exp`` and ``log`` give other last bits with other vector units, and what is computed here decides which
elements are taken. So both are series of additions, products and divisions, which IEEE 754 defines to the bit: the
same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs, Statistic
from mergepipe.operators.magnitudes import Magnitudes
from mergepipe.values import dataclass

EPSILON = 1e-8
"""Added to each probability."""

# Rows are taken together up to so many elements: what the arithmetic needs of them stays in the cache of a core.
_TOGETHER = 1 << 13
# exp of less would need subnormal numbers; beside `EPSILON` it is nothing.
_LOWEST = -700.0
# Adding it rounds to an integer, which then stands in the low bits.
_ROUNDER = 1.5 * 2.0**52
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# log(2) in two parts: products of the first with an exponent are exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_EXP_SERIES = tuple(1 / math.factorial(power) for power in range(13))
_LOG_SERIES = tuple(2 / (2 * place + 1) for place in range(10))
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
# Where p and q differ by a factor of sqrt(2) at most: the series that needs no logarithm has converged.
_NEAR_SQUARE = 0.0294


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergences(Statistic):
    """The divergence of each row of a block: an array of the work dtype, as bytes."""

    name: ClassVar[str] = "arcee.divergences"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: they depend on the inputs alone."""
        return ()

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the divergences; see `Statistic.measure`."""
        return b"".join(divergences(inputs, self.slots[-1] - 1).tobytes() for inputs in tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Importances(Magnitudes):
    """The table of the importances of a block's elements: the delta's magnitude times the divergence of its row.

    Attributes
    ----------
    known
        The divergences of all rows of the tensor, where they are known already. They are not part of the key: a
        block's rows follow from its content.
    """

    name: ClassVar[str] = "arcee.importances"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    widens: ClassVar[bool] = False
    known: Array | None = field(default=None, compare=False, repr=False)

    def magnitudes(self, inputs: BlockInputs) -> Array | None:
        """Return the importances of a tile; see `Magnitudes.magnitudes`."""
        index = self.slots[-1] - 1
        return importance(inputs, index, self.known) if inputs.has(index) else None


def joined(blocks: Iterable[bytes], work: str) -> Array:
    """Return the divergences of all rows of a tensor from those of its blocks."""
    return np.concatenate([np.frombuffer(block, work) for block in blocks])


def importance(inputs: BlockInputs, index: int, known: Array | None) -> Array:
    """Return the importance of each element of a tile of whole rows, in scratch array 0 (work dtype, ``(n,)``)."""
    row = inputs.row_elements
    if known is None:
        factors = divergences(inputs, index)
    else:
        first = inputs.start // row
        factors = known[first : first + inputs.shape[0] // row]
    size: Array = inputs.delta(index, 0)
    np.abs(size, out=size)
    table = size.reshape(-1, row)
    table *= factors[:, np.newaxis]
    return size


def divergences(inputs: BlockInputs, index: int) -> Array:
    """Return the divergence of each row of a tile of whole rows: work dtype, ``(rows,)``, not negative."""
    row = inputs.row_elements
    rows = inputs.shape[0] // row
    found = np.zeros(rows, np.dtype(inputs.dtype))
    if not inputs.has(index):
        return found
    expert, base = (np.asarray(a).reshape(rows, row) for a in (inputs.value(index, 1), inputs.base))
    step = max(1, _TOGETHER // row)
    space = np.empty((6, step * row))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        arrays = [array[: (last - first) * row].reshape(-1, row) for array in space]
        _divergence(expert[first:last], base[first:last], arrays, found[first:last])
    return found


def _divergence(expert: Array, base: Array, arrays: list[Array], out: Array) -> None:
    """Write the divergence of each row; the terms are ``p log(p / q) - (p - q)``, and p, q sum to the same.

    With ``z = (p - q) / (p + q)`` a term is ``z (p - q + p (2/3 z^2 + 2/5 z^4 + ...))``, in which nothing cancels.
    """
    p, q, apart, quotient, square, series = arrays
    _probabilities(expert, p, arrays[2:])
    _probabilities(base, q, arrays[2:])
    np.subtract(p, q, out=apart)
    np.add(p, q, out=quotient)
    np.divide(apart, quotient, out=quotient)
    np.multiply(quotient, quotient, out=square)
    _series(_LOG_SERIES[1:], square, series)
    series *= square
    series *= p
    series += apart
    series *= quotient
    if not np.maximum.reduce(square, axis=None) <= _NEAR_SQUARE:
        far = np.nonzero(~(square <= _NEAR_SQUARE))
        series[far] = p[far] * _log(p[far] / q[far]) - apart[far]
    out[...] = np.add.reduce(series, axis=1)


def _probabilities(values: Array, out: Array, spare: list[Array]) -> None:
    """Write ``softmax(values) + 1e-8`` of each row."""
    power, *more = spare
    np.copyto(power, values)
    power -= np.maximum.reduce(power, axis=1, keepdims=True)
    _exp(power, out, more)
    out /= np.add.reduce(out, axis=1, keepdims=True)
    out += EPSILON


def _exp(power: Array, out: Array, spare: list[Array]) -> None:
    """Write ``exp(power)`` of powers that are not positive; `power` is used up. Relative error below 1e-15."""
    shifted, scale = spare[0], spare[1].view(np.int64)
    np.maximum(power, _LOWEST, out=power)
    np.multiply(power, _LOG2_E, out=shifted)
    shifted += _ROUNDER
    np.add(shifted.view(np.int64), 1023, out=scale)
    scale <<= 52  # the bits of 2 to the integer
    shifted -= _ROUNDER
    np.multiply(shifted, _LN2_HIGH, out=out)
    power -= out
    shifted *= _LN2_LOW
    power -= shifted
    _series(_EXP_SERIES, power, out)
    out *= scale.view(np.float64)


def _log(value: Array) -> Array:
    """Return ``log(value)`` of positive numbers (1-D). Relative error below 1e-15 but next to 1."""
    bits = value.view(np.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)  # between sqrt(1/2) and sqrt(2)
    quotient = (mantissa - 1) / (mantissa + 1)
    out = np.empty_like(value)
    _series(_LOG_SERIES, quotient * quotient, out)  # log(v) = 2 artanh((v - 1) / (v + 1))
    out *= quotient
    out += exponent * _LN2_LOW
    out += exponent * _LN2_HIGH
    return out


def _series(coefficients: tuple[float, ...], x: Array, out: Array) -> None:
    """Write the polynomial with these coefficients, by Horner's rule."""
    np.multiply(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        out += coefficient
        out *= x
    out += coefficients[0]
