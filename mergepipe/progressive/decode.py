"""Decoding a block's delta from the chunks of its first stages.

Elements are looked up several at a time: 8 by a byte of the first plane, 4 by half bytes of two or three planes, 2 by
pairs of bits of up to six (`spread`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.errors import PackError
from mergepipe.progressive.levels import LEVEL_BITS, LEVELS, STAGE_BITS
from mergepipe.progressive.spread import TILE, Spread
from mergepipe.progressive.units import (
    HIGHEST_CODE,
    HIGHEST_SCALE,
    LOWEST_SCALE,
    POINT_BYTES,
    Units,
    decoded_points,
    scales_of,
)

Array = npt.NDArray[Any]

_BASE = struct.Struct("<h")
_TABLE_BYTES = tuple(POINT_BYTES << bits for bits in LEVEL_BITS)

_TOO_LARGE = 2.0**128  # of float32


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.decoded = np.empty(TILE, np.float32)


_workspace = _Workspace()


class BlockDecoder:
    """The delta of one block at the level of the chunks that are given.

    Parameters
    ----------
    chunks
        Of stages 1, 2, ... of the block; as many as the level. They are looked at until the decoder is no longer used.
    elements
        Of the block.
    row_elements
        Of the tensor.

    Attributes
    ----------
    level
        How many chunks there are.
    units
        Of the block.
    unit_elements
        `fill` is fastest where it starts and stops at multiples of it, or at the block's end.

    Raises
    ------
    PackError
        If the chunks are not what a block of this size has.
    """

    __slots__ = ("_classes", "_planes", "_points", "_ranks", "_scales", "_spread", "level", "unit_elements", "units")

    def __init__(self, chunks: Sequence[memoryview | bytes], elements: int, row_elements: int) -> None:
        self.level = len(chunks)
        if not 1 <= self.level <= LEVELS:
            raise PackError(f"{self.level} chunks are given, expected 1 to {LEVELS}")
        self.units = Units.of(elements, row_elements)
        self.unit_elements = self.units.size
        self._spread: Spread | None = None
        self._planes: list[Array] = []
        if any(map(len, chunks)):
            self._parse(chunks)

    @property
    def is_zero(self) -> bool:
        """Whether no element differs from zero: the code of such a block is empty."""
        return not self._planes

    def _parse(self, chunks: Sequence[memoryview | bytes]) -> None:
        units = self.units
        start = _BASE.size + units.count
        if len(chunks[0]) < start:
            raise _wrong_size(0, chunks[0], start)
        (base,) = _BASE.unpack_from(chunks[0])
        codes = np.frombuffer(chunks[0], np.uint8, units.count, _BASE.size)
        if not LOWEST_SCALE < base + HIGHEST_CODE < HIGHEST_SCALE:
            raise PackError(f"the scales begin at {base} quarters of an octave, which no code has")
        low, high = int(np.minimum.reduce(codes)), int(np.maximum.reduce(codes))
        number = units.count if low else int(np.count_nonzero(codes))
        width = number * units.plane_bytes - units.cut(bool(codes[-1]))
        for stage, (chunk, table, bits) in enumerate(zip(chunks, _TABLE_BYTES, STAGE_BITS, strict=False)):
            begin = start + table
            if len(chunk) != begin + bits * width:
                raise _wrong_size(stage, chunk, begin + bits * width)
            for _ in range(bits):
                self._planes.append(np.frombuffer(chunk, np.uint8, width, begin))
                begin += width
            points_start, start = start, 0
        if number == 0:
            raise PackError("the chunks have no units, and no code is like that")
        self._ranks = None
        if number < units.count:
            self._ranks = np.concatenate(([0], np.cumsum(codes != 0)))
            codes = codes[codes != 0]
            low = int(codes.min())
        if base + low < LOWEST_SCALE:
            raise PackError(f"the scales begin at {base + low} quarters of an octave, which no code has")
        self._classes = np.subtract(codes, low, dtype=np.uint16)
        self._scales = scales_of(base + low, base + high)
        points = np.frombuffer(chunks[-1], "<f2", 1 << LEVEL_BITS[self.level - 1], points_start)
        self._points = points.astype(np.float32)
        largest = float(np.maximum.reduce(np.abs(self._points))) * float(self._scales[-1])
        if not largest < _TOO_LARGE:  # neither are infinities and NaN
            raise PackError("the chunks have points that are no finite numbers, and no code is like that")

    def unit_points(self, weight: float, dtype: np.dtype[Any]) -> Array:
        """Return (2**bits, units): what every code of an element stands for in each unit, times a weight.

        Parameters
        ----------
        weight
            Rounded to ``dtype``, in which the products are taken.
        """
        values = decoded_points(self._scales, self._points).astype(dtype, copy=False)
        if weight != 1:
            values = values * dtype.type(weight)
        if self._ranks is None:
            return values.T.take(self._classes.astype(np.intp), axis=1, mode="wrap")
        whole = np.zeros((values.shape[1], self.units.count), dtype)
        whole[:, np.diff(self._ranks) > 0] = values.T[:, self._classes]
        return whole

    def unit_planes(self) -> list[Array]:
        """Return the planes of all units from the sign down, (units * bytes,) uint8 each, at most the last unit short.

        What zero units have there means nothing.
        """
        if self._ranks is None:
            return self._planes
        width, there = self.units.plane_bytes, np.diff(self._ranks) > 0
        planes = []
        for plane in self._cut(0, int(self._ranks[-1])):
            whole = np.zeros((self.units.count, width), np.uint8)
            whole[there] = plane.reshape(-1, width)
            planes.append(whole.reshape(-1))
        return planes

    def _cut(self, first: int, last: int) -> list[Array]:
        """Return the planes of coded units [first, last), counted without the others."""
        begin, end = first * self.units.plane_bytes, last * self.units.plane_bytes
        planes = [plane[begin:end] for plane in self._planes]
        if len(planes[0]) < end - begin:  # the last unit of a block may be short
            planes = [np.concatenate((plane, np.zeros(end - begin - len(plane), np.uint8))) for plane in planes]
        return planes

    def fill(self, start: int, out: Array) -> None:
        """Write the decoded delta of elements [start, start + len(out)) of the block into ``out``.

        Parameters
        ----------
        out
            1-D, contiguous, float32 or float64.
        """
        if self.is_zero:
            out[...] = 0
            return
        if self._spread is None:
            self._spread = Spread(self._points, self._scales)
        for first, last, low, high in self.units.tiles(start, start + len(out), TILE // self.units.padded):
            self._fill_units(first, last, low - first * self.units.size, out[low - start : high - start])

    def _fill_units(self, first: int, last: int, skip: int, out: Array) -> None:
        """Decode units [first, last), and write what follows the first ``skip`` elements."""
        units, shape = self.units, (last - first, self.units.padded)
        is_direct = out.size == (last - first) * units.padded and out.dtype == np.float32 and out.flags.c_contiguous
        decoded = (out if is_direct else _workspace.decoded[: shape[0] * shape[1]]).reshape(shape)
        if self._ranks is None:
            self._decode(first, last, decoded)
        else:
            ranks = self._ranks[first : last + 1]
            self._decode_some(ranks, decoded)
        if not is_direct:
            whole = decoded if units.padded == units.size else np.ascontiguousarray(decoded[:, : units.size])
            out[...] = whole.reshape(-1)[skip : skip + len(out)]

    def _decode_some(self, ranks: Array, out: Array) -> None:
        """Decode units of which some may be zero; ``ranks`` counts the coded ones before each, and before the next."""
        low, high = int(ranks[0]), int(ranks[-1])
        if high - low == len(out):
            self._decode(low, high, out)
            return
        out[...] = 0
        if high > low:
            compact = np.empty((high - low, out.shape[1]), np.float32)
            self._decode(low, high, compact)
            out[ranks[1:] > ranks[:-1]] = compact

    def _decode(self, first: int, last: int, out: Array) -> None:
        """Decode coded units [first, last), counted without the others, into ``out`` (units, padded) float32."""
        planes = [plane.reshape(-1, self.units.plane_bytes) for plane in self._cut(first, last)]
        assert self._spread is not None
        self._spread.look_up(planes, self._classes[first:last], out)


def _wrong_size(stage: int, chunk: memoryview | bytes, expected: int) -> PackError:
    return PackError(f"the chunk of stage {stage + 1} has {len(chunk):,} bytes, expected {expected:,}")
