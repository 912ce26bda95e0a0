"""Decoding several deltas of a block at once, where nothing but their weighted sum is wanted.

The bits of several experts at one position make one number, and a table of each unit says what sum of weighted points
that stands for: one lookup for all of them, where each by itself would take a lookup, a product and an addition.
Experts whose bits are more than a number of one byte holds go into further tables, and the sums are added.

All tables are worked on at once: what costs is the number of calls as much as the number of bytes, since threads that
work side by side wait for one another between any two calls.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.levels import LEVEL_BITS
from mergepipe.progressive.units import Units

Array = npt.NDArray[Any]

TILE = 1 << 17
"""Elements that are decoded at a time, at most."""
_INDEX_BITS = 8
_INDICES = 1 << 16
"""So many entries of tables can be counted in two bytes."""
_ENTRIES = 0.9
"""Tables are joined into one of so many entries at most for each element of a unit: more cost more than a lookup."""


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

    __slots__ = ("_begins", "_bits", "_joined", "_packed", "_per_tile", "_units", "_values", "unit_elements")

    def __init__(self, decoders: Sequence[BlockDecoder], weights: Sequence[float], dtype: np.dtype[Any]) -> None:
        units = self._units = decoders[0].units
        self.unit_elements = decoders[0].unit_elements
        tables = _tables(decoders)
        self._bits = [sum(LEVEL_BITS[decoders[one].level - 1] for one in table) for table in tables]
        self._joined = _joined(self._bits, units.size)
        if not tables:
            return
        self._packed = _packed([[decoders[one] for one in table] for table in tables], self._bits, units)
        # By table (units, numbers): a table for each unit.
        values = [_sums([(decoders[one], weights[one]) for one in table], dtype) for table in tables]
        self._values = values
        entries = [1 << sum(self._bits[: self._joined]), *(table.shape[1] for table in values[self._joined :])]
        self._per_tile = max(1, min(TILE // units.padded, _INDICES // max(entries)))
        self._begins = [np.arange(0, self._per_tile * count, count, dtype=np.uint16)[:, None] for count in entries]

    def fill(self, start: int, out: Array) -> None:
        """Write the sum at elements [start, start + len(out)) of the block into ``out``, 1-D of the work dtype."""
        if not self._bits:
            out[...] = 0
            return
        for first, last, low, high in self._units.tiles(start, start + len(out), self._per_tile):
            self._fill_units(first, last, low - first * self._units.size, out[low - start : high - start])

    def _fill_units(self, first: int, last: int, skip: int, out: Array) -> None:
        """Sum up units [first, last), and write what follows the first ``skip`` elements."""
        shape = (last - first, self._units.padded)
        is_direct = out.size == shape[0] * shape[1] and out.flags.c_contiguous
        total = out.reshape(shape) if is_direct else _workspace.array("total", shape, out.dtype)
        tables, found = self._tables(first, last), total
        for number, index in enumerate(self._indices(first, last)):
            if number == 1:
                found = _workspace.array("found", shape, out.dtype)
            # Every index is in range, and this way of making sure is the quickest.
            next(tables).take(index, out=found, mode="wrap")
            if number:
                np.add(total, found, out=total)
        if not is_direct:
            out[...] = total[:, : self._units.size].reshape(-1)[skip : skip + len(out)]

    def _tables(self, first: int, last: int) -> Iterator[Array]:
        """Yield the tables of units [first, last), (units, numbers) each; the first few are joined into one."""
        low = self._values[0][first:last]
        for number, table in enumerate(self._values[1 : self._joined]):
            high = table[first:last]
            joined = _workspace.array(("joined", number), (*high.shape, low.shape[1]), low.dtype)
            low = np.add(low[:, None, :], high[:, :, None], out=joined).reshape(len(low), -1)
        yield low
        for table in self._values[self._joined :]:
            yield table[first:last]

    def _indices(self, first: int, last: int) -> Iterator[Array]:
        """Yield by table (units, elements): where in the `_tables` of these units the sum of each element stands."""
        shape = (last - first, self._units.padded)
        numbers = self._numbers(first, last)
        narrow = _workspace.array("narrow", (len(numbers), *shape), np.uint16)
        np.copyto(narrow.reshape(numbers.shape), numbers)
        index = _workspace.array("index", shape, np.intp)
        bits = self._bits[0]
        for part, more in zip(narrow[1 : self._joined], self._bits[1:], strict=False):
            words = part.view(np.uint64)  # no number leaves its two bytes
            np.left_shift(words, bits, out=words)
            np.bitwise_or(narrow[0], part, out=narrow[0])
            bits += more
        for part, begins in zip((narrow[0], *narrow[self._joined :]), self._begins, strict=True):
            np.add(part, begins[: last - first], out=part)
            np.copyto(index, part)
            yield index

    def _numbers(self, first: int, last: int) -> Array:
        """Return (tables, elements) uint8: the bits of all members of a table at each element."""
        width = self._units.plane_bytes
        planes = self._packed[:, :, first * width : last * width]
        numbers = np.unpackbits(planes[0], axis=-1)
        words = numbers.view(np.uint64)
        for plane in planes[1:]:
            np.left_shift(words, 1, out=words)  # no number leaves its byte
            np.bitwise_or(words, np.unpackbits(plane, axis=-1).view(np.uint64), out=words)
        return numbers


def _packed(tables: Sequence[Sequence[BlockDecoder]], bits: Sequence[int], units: Units) -> Array:
    """Return (bits, tables, bytes) uint8: the planes of the members of each table, the last one's sign first.

    Tables of fewer bits than others begin with planes of zeros.
    """
    depth, size = max(bits), units.count * units.plane_bytes
    packed = np.empty((depth, len(tables), size), np.uint8)
    for table, members in enumerate(tables):
        at = depth - bits[table]
        packed[:at, table] = 0
        for member in reversed(members):
            for plane in member.unit_planes():
                row = packed[at, table]
                row[: len(plane)] = plane
                row[len(plane) :] = 0  # the last unit of a block may be short
                at += 1
    return packed


def _joined(bits: Sequence[int], unit: int) -> int:
    """Return how many tables, from the first on, are joined into one: sums are added from left to right either way."""
    count, total = 1, bits[0] if bits else 0
    while count < len(bits) and 1 << (total + bits[count]) <= min(_ENTRIES * unit, _INDICES):
        total += bits[count]
        count += 1
    return count


def _tables(decoders: Sequence[BlockDecoder]) -> list[list[int]]:
    """Return which decoders share a table: as few tables as may be, and of about equal size."""
    return _shared(tuple(0 if one.is_zero else LEVEL_BITS[one.level - 1] for one in decoders))


@functools.lru_cache(maxsize=1 << 10)  # blocks of a model differ in their levels, but in few ways
def _shared(wanted: tuple[int, ...]) -> list[list[int]]:
    """Return which decoders share a table, from the bits that each has; 0 for those without any."""
    bits = {number: one for number, one in enumerate(wanted) if one}
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


def _sums(members: Sequence[tuple[BlockDecoder, float]], dtype: np.dtype[Any]) -> Array:
    """Return (units, numbers): what every number stands for; the bits of the first member are the lowest.

    Additions are made with the units side by side: rows of few numbers are slow.
    """
    values: Array | None = None
    for decoder, weight in members:
        points = decoder.unit_points(weight, dtype)
        values = points if values is None else (values + points[:, None, :]).reshape(-1, points.shape[1])
    assert values is not None, "a table has members"
    return np.ascontiguousarray(values.T)
