"""Tables that decode several elements at once, and the indices into them.

What a byte, or a few bits, of each plane stand for is looked up whole: numpy copies an entry of 8, 16 or 32 bytes as
fast as one of 4. Where it pays, a table holds the entries of every scale of the block; elsewhere what was looked up is
multiplied by its scale, which gives the same float32 numbers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.progressive.units import SMALLEST, decoded_points

Array = npt.NDArray[Any]

TILE = 1 << 16
"""Elements that are decoded at a time, at most."""
_TABLE_BYTES = 1 << 18
"""Tables beyond this fall out of the processor's second cache."""
_PER_ENTRY = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 8: 1}
"""How many elements an entry holds, by the bits of one."""
_BYTE_BITS = 8
_FLOAT_BYTES = 4
_HALF_BYTES = np.arange(16)[:, None] >> np.arange(3, -1, -1) & 1


class _Workspace(threading.local):
    """Buffers for one tile of each thread: fresh memory costs more than the work that is done in it."""

    def __init__(self) -> None:
        self.byte = np.empty(TILE // 8, np.intp)
        self.scaled = np.empty(TILE // 8, np.uint16)
        self.words = np.empty(TILE // 8 * 2, np.uint64)
        self.more = np.empty(TILE // 8 * 2, np.uint64)
        self.index = np.empty(TILE, np.intp)


_workspace = _Workspace()


class Spread:
    """The table of one block's points.

    Parameters
    ----------
    points
        (2**bits,) float32, in units of a scale.
    scales
        (scales,) float32: of the block's units, each once.
    """

    __slots__ = ("_count", "_factors", "_flushes", "_lanes", "_planes", "_table")

    def __init__(self, points: Array, scales: Array) -> None:
        bits = self._planes = len(points).bit_length() - 1
        count = self._count = _PER_ENTRY[bits]
        entries = 1 << (bits * count)
        self._factors: Array | None = None
        self._flushes = False
        values = decoded_points(scales, points)
        if count == 1 or (len(scales) > 1 and len(scales) * entries * count * _FLOAT_BYTES > _TABLE_BYTES):
            self._factors = scales
            self._flushes = bool(((values == 0) & (points != 0)).any())
            values = points[None, :]
        table = _signs(values) if bits == 1 else np.take(values, _cells_of_entries(bits), axis=1)
        self._table = table.reshape(-1, count)
        self._lanes = _lanes(bits, count) if count < _BYTE_BITS else ()
        if self._lanes and len(self._table) > entries:
            offsets = np.arange(len(values), dtype=np.uint64) * np.uint64(entries)
            first = self._lanes[0] + (offsets * _ONES[count])[:, None, None]
            self._lanes = (first.reshape(-1, first.shape[-1]), *self._lanes[1:])

    def look_up(self, planes: Sequence[Array], classes: Array, out: Array) -> None:
        """Decode at most `TILE` elements, padding included.

        Parameters
        ----------
        planes
            (units, bytes) uint8 for each bit, from the sign down.
        classes
            (units,) uint16: which of the scales each has.
        out
            (units, 8 * bytes) float32, contiguous.
        """
        first = self._first_index(planes[0], classes)
        index = self._entries(first, planes) if self._lanes else first
        np.take(self._table, index, axis=0, out=out.reshape(-1, self._count), mode="clip")
        if self._factors is not None:
            np.multiply(out, self._factors[classes][:, None], out=out)
            if self._flushes:
                out[np.abs(out) < SMALLEST] = 0

    def _first_index(self, plane: Array, classes: Array) -> Array:
        """Return each byte of the first plane, with the scale of its unit above it where the table has several."""
        byte = _workspace.byte[: plane.size]
        if self._factors is not None:
            np.copyto(byte.reshape(plane.shape), plane)
        else:
            scaled = _workspace.scaled[: plane.size]
            np.add(plane, (classes << _BYTE_BITS)[:, None], out=scaled.reshape(plane.shape))
            np.copyto(byte, scaled)
        return byte

    def _entries(self, first: Array, planes: Sequence[Array]) -> Array:
        """Return the entries that bytes of all planes make together, in order."""
        space, per_byte = _workspace, self._lanes[0].shape[1]
        words = space.words[: first.size * per_byte].reshape(-1, per_byte)
        more = space.more[: words.size].reshape(words.shape)
        np.take(self._lanes[0], first, axis=0, out=words, mode="clip")
        for plane, lanes in zip(planes[1:], self._lanes[1:], strict=True):
            np.copyto(space.byte[: first.size].reshape(plane.shape), plane)
            np.take(lanes, first, axis=0, out=more, mode="clip")  # `first` is the same memory
            np.bitwise_or(words, more, out=words)
        if per_byte > 1:
            return words.reshape(-1).view(np.intp)
        narrow = words.reshape(-1).view(_LANE_TYPES[self._count])
        index = space.index[: len(narrow)]
        np.copyto(index, narrow)
        return index


_LANE_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}
_ONES = {1: np.uint64(0x0101010101010101), 2: np.uint64(0x0001000100010001), 4: np.uint64(1)}


def _signs(values: Array) -> Array:
    """Return what bytes of the first plane stand for, (scales * 256, 8), put together from halves of them."""
    halves = np.take(values, _HALF_BYTES, axis=1).view(np.complex128)  # four floats, copied as one number
    table = np.empty((len(values), 16, 16, 2), np.complex128)
    table[:, :, :, 0] = halves
    table[:, :, :, 1] = halves[:, None, :, 0]
    return table.view(np.float32).reshape(-1, _BYTE_BITS)


@functools.cache
def _cells_of_entries(bits: int) -> Array:
    """Return (entries, elements) which cell each element of an entry is in.

    The bits of an entry are those of its elements in the first plane, then in the second, and so on.
    """
    count = _PER_ENTRY[bits]
    entry = np.arange(1 << (bits * count))[:, None]
    cells = np.zeros((len(entry), count), np.intp)
    for plane in range(bits):
        group = entry >> (count * (bits - 1 - plane))
        cells = cells * 2 + ((group >> (count - 1 - np.arange(count))) & 1)
    return cells


@functools.cache
def _lanes(planes: int, count: int) -> tuple[Array, ...]:
    """Return for each plane what its bytes add to the entries of their elements: (256, words) uint64.

    The entries of one byte lie side by side in memory: in two words where there are two, else in parts of one word.
    """
    per_byte = _BYTE_BITS // count
    words = 2 if count == 4 else 1
    width = 64 * words // per_byte
    byte = np.arange(256, dtype=np.uint64)
    tables = []
    for plane in range(planes):
        table = np.zeros((256, words), np.uint64)
        for lane in range(per_byte):
            bits = (byte >> np.uint64(_BYTE_BITS - count * (lane + 1))) & np.uint64((1 << count) - 1)
            position = lane * width
            table[:, position // 64] |= bits << np.uint64(count * (planes - 1 - plane) + position % 64)
        tables.append(table)
    return tuple(tables)
