"""Decoding several deltas of a block at once, where nothing but their weighted sum is wanted.

The bits of several experts at one position make one number, and a table of each unit says what sum of weighted points
that stands for: one lookup for all of them, where each by itself would take a lookup, a product and an addition.
Experts whose bits are more than a number of one byte holds go into further tables, and the sums are added.

All tables are worked on at once: what costs is the number of calls as much as the number of bytes, since threads that
work side by side wait for one another between any two calls.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.levels import LEVEL_BITS

Array = npt.NDArray[Any]

TILE = 1 << 17
"""Elements that are decoded at a time, at most."""
_INDEX_BITS = 8
_INDICES = 1 << 16
"""So many entries of tables can be counted in two bytes."""
_WEIGHTS = (1 << np.arange(_INDEX_BITS - 1, -1, -1)).astype(np.uint8)[:, None, None]


class _Workspace(threading.local):
    """Buffers for one tile of each thread: fresh memory costs more than the work that is done in it."""

    def __init__(self) -> None:
        self._buffers: dict[object, Array] = {}

    def array(self, name: object, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a buffer of this name; what was there before is lost."""
        size = math.prod(shape)
        have = self._buffers.get(name)
        if have is None or have.size < size or have.dtype != dtype:
            have = self._buffers[name] = np.empty(size, dtype)
        return have[:size].reshape(shape)


_workspace = _Workspace()


class JointDecoder:
    """The weighted sum of several deltas of one block, each at a level of its own.

    Parameters
    ----------
    decoders
        Of deltas of one block, hence with the same units.
    weights
        Of each, rounded to the work dtype.
    dtype
        The work dtype: a weighted point is rounded to it once, and so is every addition. Additions go from left to
        right within a table, and the tables' sums are added from left to right.

    Attributes
    ----------
    unit_elements
        As of `BlockDecoder`.
    """

    __slots__ = ("_per_tile", "_planes", "_units", "_values", "unit_elements")

    def __init__(self, decoders: Sequence[BlockDecoder], weights: Sequence[float], dtype: np.dtype[Any]) -> None:
        units = self._units = decoders[0].units
        self.unit_elements = decoders[0].unit_elements
        tables = _tables(decoders)
        self._planes = [[plane for one in reversed(table) for plane in decoders[one].unit_planes()] for table in tables]
        width = 1 << max(map(len, self._planes), default=0)
        # A table for each unit, and each of them for all tables: (units, tables, numbers).
        self._values = np.empty((units.count, len(tables), width), dtype)
        for number, table in enumerate(tables):
            _sum_up([(decoders[one], weights[one]) for one in table], self._values[:, number])
        entries = max(1, len(tables) * width)
        self._per_tile = max(1, min(TILE // units.padded, _INDICES // entries))

    def fill(self, start: int, out: Array) -> None:
        """Write the sum at elements [start, start + len(out)) of the block into ``out``, 1-D of the work dtype."""
        if not self._planes:
            out[...] = 0
            return
        for first, last, low, high in self._units.tiles(start, start + len(out), self._per_tile):
            self._fill_units(first, last, low - first * self._units.size, out[low - start : high - start])

    def _fill_units(self, first: int, last: int, skip: int, out: Array) -> None:
        """Sum up units [first, last), and write what follows the first ``skip`` elements."""
        units, values = self._units, self._values[first:last]
        shape = (last - first, units.padded)
        index = self._indices(first, last)
        is_direct = out.size == shape[0] * shape[1] and out.flags.c_contiguous
        if is_direct and len(index) == 1:
            _look_up(values, index[0], out)
            return
        found = _workspace.array("sums", index.shape, out.dtype)
        _look_up(values, index, found)
        into = out if is_direct else found[0]
        if len(found) > 1:
            np.add(found[0], found[1], out=into)
        for more in found[2:]:
            np.add(into, more, out=into)
        if not is_direct:
            out[...] = into.reshape(shape)[:, : units.size].reshape(-1)[skip : skip + len(out)]

    def _indices(self, first: int, last: int) -> Array:
        """Return (tables, elements): where in the tables of units [first, last) the sum of each element stands."""
        tables, count = len(self._planes), last - first
        numbers = self._numbers(first, last)
        narrow = _workspace.array("narrow", (tables, count, self._units.padded), np.uint16)
        np.copyto(narrow.reshape(numbers.shape), numbers)
        width = self._values.shape[2]
        begins = np.arange(0, count * tables * width, width, dtype=np.uint16)
        np.add(narrow, begins.reshape(count, tables).T[:, :, None], out=narrow)
        index = _workspace.array("index", numbers.shape, np.intp)
        np.copyto(index, narrow.reshape(numbers.shape))
        return index

    def _numbers(self, first: int, last: int) -> Array:
        """Return (tables, elements) uint8: the bits of all members of a table at each element."""
        depth, tables = max(map(len, self._planes)), len(self._planes)
        width = self._units.plane_bytes
        packed = _workspace.array("packed", (depth, tables, (last - first) * width), np.uint8)
        for table, planes in enumerate(self._planes):
            unused = depth - len(planes)
            packed[:unused, table] = 0
            for at, plane in enumerate(planes, unused):
                part = plane[first * width : last * width]
                packed[at, table, : len(part)] = part  # the last unit of a block may be short
        bits = np.unpackbits(packed.reshape(-1)).reshape(depth, tables, -1)
        np.multiply(bits, _WEIGHTS[-depth:], out=bits)
        numbers = _workspace.array("numbers", bits.shape[1:], np.uint8)
        np.bitwise_or.reduce(bits, axis=0, out=numbers)
        return numbers


def _look_up(values: Array, index: Array, out: Array) -> None:
    np.take(values, index, out=out, mode="wrap")  # every index is in range, and this way of making sure is the quickest


def _tables(decoders: Sequence[BlockDecoder]) -> list[list[int]]:
    """Return which decoders share a table: as few tables as may be, and of about equal size."""
    bits = {number: LEVEL_BITS[one.level - 1] for number, one in enumerate(decoders) if not one.is_zero}
    if not bits:
        return []
    number = -(-sum(bits.values()) // _INDEX_BITS)
    for room in range(max(*bits.values(), -(-sum(bits.values()) // number)), _INDEX_BITS + 1):
        found = _filled(bits, room)
        if len(found) <= number:
            break
    return found


def _filled(bits: dict[int, int], room: int) -> list[list[int]]:
    """Put each decoder into the first table that has room for its bits."""
    tables: list[list[int]] = []
    rooms: list[int] = []
    for number, wanted in bits.items():
        at = next((at for at, left in enumerate(rooms) if left >= wanted), len(rooms))
        if at == len(rooms):
            tables.append([])
            rooms.append(room)
        tables[at].append(number)
        rooms[at] -= wanted
    return tables


def _sum_up(members: Sequence[tuple[BlockDecoder, float]], out: Array) -> None:
    """Write (units, numbers) what every number stands for; the bits of the first member are the lowest."""
    values: Array | None = None
    for decoder, weight in members:
        points = decoder.unit_points(weight, out.dtype)
        values = points if values is None else (values[:, None, :] + points[:, :, None]).reshape(len(values), -1)
    assert values is not None, "a table has members"
    out[:, : values.shape[1]] = values
