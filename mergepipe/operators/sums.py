"""Exact sums of magnitudes: integers, so that neither order nor cutting nor vector width can change a bit.

A float is an integer times a power of two. Values are split at a grid that is coarse enough for float64 to add all of
them exactly, whatever the order, and what is left below the grid is split again; float32 data take one or two rounds.
(Rump, Ogita and Oishi 2008, accurate floating-point summation, use the same splitting.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs, Statistic
from mergepipe.operators.magnitudes import patterns
from mergepipe.values import dataclass

# Sums are held as integers in units of the smallest float64, 2^-1074.
UNIT = 1074
_LARGE = 900
_SCALED = 200
# Numbers that are widened to float64 together: two arrays of them fit the second cache.
_TOGETHER = 1 << 16


def exact_sum(values: Array) -> int:
    """Return the exact sum of finite floats (any sign), in units of 2^-1074."""
    total = 0
    for piece, wide, spare in _pieces(values):
        np.copyto(wide, piece)
        total += _piece_sum(wide, spare, _highest(wide))
    return total


def _pieces(values: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield pieces with two float64 arrays of their size each: always the same two, which stay in the cache."""
    wide, spare = np.empty((2, min(_TOGETHER, values.size)))
    for start in range(0, values.size, _TOGETHER):
        piece = values[start : start + _TOGETHER]
        yield piece, wide[: piece.size], spare[: piece.size]


def _highest(values: Array) -> float:
    return max(float(values.max()), -float(values.min()))


def _piece_sum(rest: Array, spare: Array, highest: float) -> int:
    """Return the exact sum of finite float64 numbers, of magnitudes up to `highest`; both arrays are overwritten."""
    total = 0
    while highest:
        exponent = math.frexp(highest)[1]
        if exponent > _LARGE:  # the grid itself would overflow
            large = np.abs(rest) >= 2.0 ** (_LARGE - _SCALED)
            scaled = rest[large] * 2.0**-_SCALED
            total += _piece_sum(scaled, np.empty_like(scaled), _highest(scaled)) << _SCALED
            rest[large] = 0
        else:
            # As many multiples of the grid as `rest.size` such values hold are exact in float64.
            grid = max(exponent + rest.size.bit_length() - 51, -UNIT)
            shift = math.ldexp(1.5, 52 + grid)
            np.add(rest, shift, out=spare)
            spare -= shift
            total += units(float(spare.sum()))
            rest -= spare
        highest = _highest(rest) if rest.any() else 0.0
    return total


def units(value: float) -> int:
    """Return a finite float in units of 2^-1074; exact."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << UNIT) // denominator)


def encode_sum(total: int) -> bytes:
    """Return a sum that is not negative as bytes."""
    spare = (total & -total).bit_length() - 1 if total else 0
    digits = total >> spare
    return spare.to_bytes(2, "little") + digits.to_bytes((digits.bit_length() + 7) // 8, "little")


def total_of(values: Iterable[bytes]) -> int:
    """Return the sum of the numbers that `encode_sum` made into these bytes."""
    return sum(int.from_bytes(data[2:], "little") << int.from_bytes(data[:2], "little") for data in values)


def finite_sum(values: Array) -> int:
    """Return the exact sum of the magnitudes of the finite ones among these floats, in units of 2^-1074."""
    total = 0
    for piece, wide, spare in _pieces(values):
        np.abs(piece, out=wide)
        highest = float(wide.max())
        if not math.isfinite(highest):
            wide[~np.isfinite(wide)] = 0
            highest = float(wide.max())
        total += _piece_sum(wide, spare, highest)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MagnitudeSum(Statistic):
    """The exact sum of the magnitudes of an expert's delta in a block; those that are not finite do not count.

    Attributes
    ----------
    above, below
        Only magnitudes whose bit patterns lie strictly between these (`magnitudes.patterns`); -1 and None for all.
    """

    name: ClassVar[str] = "magnitude_sum"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    widens: ClassVar[bool] = True
    slots: tuple[int, ...]
    above: int = -1
    below: int | None = None

    def settings(self) -> tuple[Any, ...]:
        """Return the bounds; see `Statistic.settings`."""
        return (self.above, self.below)

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the sum as bytes (`total_of`); see `Statistic.measure`."""
        index = self.slots[-1] - 1
        total = 0
        for inputs in tiles:
            if inputs.has(index):
                delta = inputs.delta(index, 0)
                total += finite_sum(delta if self._everything() else delta[self._within(patterns(delta))])
        return encode_sum(total)

    def _everything(self) -> bool:
        return self.above < 0 and self.below is None

    def _within(self, bits: Array) -> Array:
        mask = np.ones(bits.shape, np.bool_) if self.above < 0 else bits > bits.dtype.type(self.above)
        if self.below is not None:
            mask &= bits < bits.dtype.type(self.below)
        return mask
