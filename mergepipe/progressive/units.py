"""Units: what of a block has one scale, and how the pieces of a chunk follow from that."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.progressive.levels import LEVEL_BITS, STAGE_BITS
from mergepipe.values import dataclass

Array = npt.NDArray[Any]

BASE_BYTES = 2
POINT_BYTES = 2
SHORT_ROW = 256
"""Rows that are shorter share a scale, so that scales stay cheap."""
LONG_ROW = 8192
LONG_UNIT = 4096
"""Blocks of longer rows are cut without regard to rows, so that a tile of work always holds whole units."""
SCALES_PER_OCTAVE = 4
LOWEST_SCALE = -120 * SCALES_PER_OCTAVE
"""Units of a smaller scale count as zero: so no step leaves the range of normal float32 numbers."""
# 2**(i/4), rounded to float32.
_ROOTS = np.array([float.fromhex(x) for x in ("0x1p0", "0x1.306fep0", "0x1.6a09e6p0", "0x1.ae89fap0")], np.float32)
HIGHEST_CODE = 255
HIGHEST_SCALE = 120 * SCALES_PER_OCTAVE
"""A block with a unit of this scale or a larger one has no code: a point of others might not be finite in it."""
SMALLEST = np.float32(2.0**-126)
"""The smallest normal float32 number."""
_TINY = np.float32(2.0**-100)
"""With a scale of at least this even the smallest float16 number makes a normal one."""
_BYTE_BITS = 8


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one block.

    Attributes
    ----------
    elements
        Of the block.
    size
        Elements of a unit; the last one may have fewer.
    count
        Number of units.
    plane_bytes
        Bytes that a bit of each element of a unit takes; the next unit begins with a new byte.
    padded
        Elements of a unit and the padding of its last byte.
    last
        Elements of the last unit.
    """

    elements: int
    size: int
    count: int = field(init=False)
    plane_bytes: int = field(init=False)
    padded: int = field(init=False)
    last: int = field(init=False)

    def __post_init__(self) -> None:
        count, plane_bytes = -(-self.elements // self.size), -(-self.size // _BYTE_BITS)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "plane_bytes", plane_bytes)
        object.__setattr__(self, "padded", plane_bytes * _BYTE_BITS)
        object.__setattr__(self, "last", self.elements - (count - 1) * self.size)

    @classmethod
    @functools.lru_cache(maxsize=64)  # most blocks of a model have one of a few shapes
    def of(cls, elements: int, row_elements: int) -> Units:
        """Return the units of a block of whole rows."""
        if row_elements < SHORT_ROW:
            return cls(elements, -(-SHORT_ROW // row_elements) * row_elements)
        return cls(elements, row_elements if row_elements <= LONG_ROW else LONG_UNIT)

    def tiles(self, start: int, stop: int, per_tile: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut elements [start, stop) into tiles of at most so many units.

        Yields
        ------
        tuple
            The first unit, the one behind the last, and the tile's first element and the one behind its last.
        """
        end = -(-stop // self.size)
        for first in range(start // self.size, end, per_tile):
            last = min(first + per_tile, end)
            yield first, last, max(start, first * self.size), min(stop, last * self.size)

    def chunk_bytes(self, stage: int) -> int:
        """Return how large the chunk of a stage is where no unit is zero; ``stage`` counts from 0."""
        plane = (self.count - 1) * self.plane_bytes + -(-self.last // _BYTE_BITS)
        head = BASE_BYTES + self.count if stage == 0 else 0
        return head + POINT_BYTES * (1 << LEVEL_BITS[stage]) + STAGE_BITS[stage] * plane

    def cut(self, last_is_coded: bool) -> int:
        """Return how many bytes a plane is short of one with a whole last unit."""
        return self.plane_bytes - -(-self.last // _BYTE_BITS) if last_is_coded else 0


def scale_of(steps: Array) -> Array:
    """Return 2**(steps/4) in float32, the same on every machine, for integer steps."""
    roots = _ROOTS[steps % SCALES_PER_OCTAVE]
    scales: Array = np.ldexp(roots, steps // SCALES_PER_OCTAVE)  # exact: only the exponent changes
    return scales


_SCALES = scale_of(np.arange(LOWEST_SCALE, HIGHEST_SCALE + 1))


def scales_of(low: int, high: int) -> Array:
    """Return `scale_of` the steps from ``low`` to ``high``, both among those that codes have."""
    return _SCALES[low - LOWEST_SCALE : high - LOWEST_SCALE + 1]


def decoded_points(scales: Array, points: Array) -> Array:
    """Return (scales, points) float32: what every point (float16, or widened) stands for in units of every scale.

    Numbers below the normal range are zero, whether or not the machine would keep them. Scales are ascending.
    """
    values = scales[:, None] * points.astype(np.float32, copy=False)
    if scales[0] < _TINY:
        values[np.abs(values) < SMALLEST] = 0
    return values
