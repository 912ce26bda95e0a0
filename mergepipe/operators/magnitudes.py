"""Exact order statistics of magnitudes: tables of the blocks, and the k-th largest magnitude of a whole tensor.

A magnitude is a float without its sign; its bit pattern, read as an integer, orders like its value. A pattern has
`width` bits (32 or 64, the sign bit being 0), cut into digits of 16 bits, the top one first. (NaN has larger patterns
than infinity: it counts as the largest magnitude.)

The *table* of a block counts its patterns. Of 16-bit checkpoints, a block of 2^18 deltas has some thousand patterns at
most, and the table states every one of them: it is *complete*, and answers every later question (another density,
another percentile) without the weights. Where there are too many, it is *coarse* and counts top digits alone; then
a second statistic, of the same class, looks into the one bin that holds the wanted magnitude, and so on down to the
last digit. Tables are folded one by one into 2^16 counters, so that memory does not grow with the tensor.

Equal magnitudes are told apart by their place: those with the lowest flat index come first. So the k largest of
a tensor are exactly k elements, and how many of the equal ones lie in a block follows from the tables too.

For a statistic of other non-negative numbers (a variance, an importance), derive from `Magnitudes` and override
`magnitudes`, `name` and, where needed, `deltas_only` and `rowwise`; `population` and `select` work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs, Statistic, StatisticValues
from mergepipe.operators.ranks import Edge, JoinedTables, Selection, next_digit
from mergepipe.operators.tables import ALWAYS, DIGIT, DIGITS, Counter, Table, number_of
from mergepipe.values import dataclass

# Tables that are kept decoded while a tensor's are gone through several times: about 12 bytes an entry.
_KEPT_ENTRIES = 1 << 19

# --- the statistic ------------------------------------------------------------------------------------------------


def patterns(values: Array) -> Array:
    """Return the bit patterns of the magnitudes of a float array: uint32 for float32, uint64 for float64."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    return np.asarray(values).view(unsigned) & unsigned.type((1 << (8 * unsigned.itemsize - 1)) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitudes(Statistic):
    """The table of the magnitudes of one expert's delta in a block, as bytes (`Table.decode`).

    Attributes
    ----------
    digits
        Count only patterns that begin with these digits; all where empty.
    """

    name: ClassVar[str] = "magnitudes"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    widens: ClassVar[bool] = True
    slots: tuple[int, ...]
    digits: tuple[int, ...] = ()

    def settings(self) -> tuple[Any, ...]:
        """Return the digits that are known; see `Statistic.settings`."""
        return (self.digits,)

    def magnitudes(self, inputs: BlockInputs) -> Array | None:
        """Return the numbers of a tile (work dtype, any sign) in an array to overwrite, or None where all are zero."""
        index = self.slots[-1] - 1
        return inputs.delta(index, 0) if inputs.has(index) else None

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the table of a block; see `Statistic.measure`."""
        counter: Counter | None = None
        for inputs in tiles:
            width = 8 * np.dtype(inputs.dtype).itemsize
            counter = counter or Counter(width, self.digits)
            values = self.magnitudes(inputs)
            if values is not None and self.digits:
                counter.add(self._within(patterns(values), width))
            elif values is not None:
                counter.add_floats(np.asarray(values))
            elif not any(self.digits):
                counter.add_zeros(inputs.shape[0])
        return (counter or Counter(32, self.digits)).table().encode()

    def _within(self, bits: Array, width: int) -> Array:
        unsigned = bits.dtype.type
        shift = unsigned(width - DIGIT * len(self.digits))
        return bits[bits >> shift == unsigned(number_of(self.digits))]


# --- questions about a whole tensor -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """How many numbers a tensor has, and how many of them are exactly zero."""

    elements: int
    zeros: int


def population(values: Iterable[bytes]) -> Population:
    """Return the number of elements and of zeros from the values of a `Magnitudes` without digits."""
    elements = zeros = 0
    for data in values:
        table = Table.decode(data)
        zeros += table.zeros
        elements += table.zeros + int(table.counts.sum())
    return Population(elements=elements, zeros=zeros)


Look = Callable[["Magnitudes", JoinedTables, Sequence[Selection]], None]
Selecting = Generator[Sequence[Statistic], StatisticValues, dict[Magnitudes, tuple[Selection, ...]]]


def most_rounds(work: str, elements: int) -> int:
    """Return in how many rounds `select` asks for statistics at most: one for each digit of a pattern.

    The tables of so few elements are complete.
    """
    return 1 if elements <= ALWAYS else 8 * np.dtype(work).itemsize // DIGIT


def select(
    wanted: Mapping[Magnitudes, Sequence[int]], look: Look | None = None, values: StatisticValues | None = None
) -> Selecting:
    """Find the k-th largest magnitudes of several statistics: ``found = yield from select({statistic: (k, ...)})``.

    Parameters
    ----------
    wanted
        By statistic (without digits) the ranks: 1 is the largest, the number of elements is the smallest.
    look
        Called with each statistic whose tables are complete and not too large together, and with what was selected.
    values
        Those of ``wanted``, where they were asked for before.

    Returns
    -------
    dict
        By statistic a `Selection` for each rank, in the order of the ranks.
    """
    if values is None:
        values = yield list(wanted)
    found: dict[Magnitudes, tuple[Selection, ...]] = {}
    for statistic, ranks in wanted.items():
        joined = JoinedTables.of(values[statistic])
        if joined is not None:
            found[statistic] = tuple(map(joined.selection, ranks))
            if look is not None:
                look(statistic, joined, found[statistic])
    searches = [
        _Search(statistic, rank) for statistic in wanted if statistic not in found for rank in wanted[statistic]
    ]
    room = _Room(_KEPT_ENTRIES)
    asked = {search.statistic: _Tables(values[search.statistic], room) for search in searches}
    while missing := list(dict.fromkeys(s.next for s in searches if not s.advance(asked) and s.next is not None)):
        values = yield missing
        asked |= {statistic: _Tables(values[statistic], room) for statistic in missing}
    selections = iter([search.selection(asked) for search in searches])
    found |= {
        statistic: tuple(next(selections) for _ in wanted[statistic]) for statistic in wanted if statistic not in found
    }
    return found


class _Room:
    """How many entries may still be kept, of all tables of a tensor together."""

    def __init__(self, entries: int) -> None:
        self.entries = entries


class _Tables:
    """The tables of a tensor's blocks, decoded as they are gone through; kept where they are few."""

    def __init__(self, values: Iterable[bytes], room: _Room) -> None:
        self._values = values
        self._room = room
        self._kept: list[Table] | None = None

    def __iter__(self) -> Iterator[Table]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Table] | None = []
        taken = 0
        try:
            for data in self._values:
                table = Table.decode(data)
                size = table.keys.size + 16
                if kept is not None and size <= self._room.entries:
                    kept.append(table)
                    taken, self._room.entries = taken + size, self._room.entries - size
                else:
                    kept = None
                    taken, self._room.entries = 0, self._room.entries + taken
                yield table
            self._kept = kept
        finally:
            if self._kept is None:  # also where nobody wanted the rest
                self._room.entries += taken


class _Search:
    """The way down to one magnitude, digit by digit."""

    def __init__(self, statistic: Magnitudes, rank: int) -> None:
        self.statistic, self.rank = statistic, rank
        self.digits: tuple[int, ...] = ()
        self.above = 0
        self.width = DIGIT  # until a table states it
        self.next: Magnitudes | None = None

    def advance(self, asked: Mapping[Magnitudes, _Tables]) -> bool:
        """Find further digits with the tables that are there; return whether all are found."""
        while DIGIT * len(self.digits) < self.width or not self.digits:
            counts = self._fold(asked)
            if counts is None:
                self.next = replace(self.statistic, digits=self.digits)
                return False
            digit, self.above = next_digit(counts, self.rank, self.above)
            self.digits = (*self.digits, digit)
        return True

    def _tables(self, asked: Mapping[Magnitudes, _Tables], depth: int) -> Iterator[Table | None]:
        """Yield for each block the table that tells `depth` digits apart within the known ones, if there is one."""
        known = [self.digits[:size] for size in range(min(depth, len(self.digits) + 1))]
        tables = [asked[s] for s in (replace(self.statistic, digits=digits) for digits in known) if s in asked]
        for block in zip(*tables, strict=True):
            yield next((table for table in block if table.resolves(depth)), None)

    def _fold(self, asked: Mapping[Magnitudes, _Tables]) -> Array | None:
        """Return how often each next digit occurs behind the known ones; None if some block does not tell."""
        counts = np.zeros(DIGITS, np.int64)
        depth = len(self.digits) + 1
        for table in self._tables(asked, depth):
            if table is None:
                return None
            self.width = table.width
            span = table.span(self.digits)
            shift = np.uint64(table.width - DIGIT * depth - table.shift)
            np.add.at(counts, (table.keys[span] >> shift & np.uint64(DIGITS - 1)).astype(np.intp), table.counts[span])
            counts[0] += 0 if any(self.digits) else table.zeros
        return counts

    def selection(self, asked: Mapping[Magnitudes, _Tables]) -> Selection:
        """Return what was found, with the number of equal elements of each block."""
        pattern = number_of(self.digits)
        equal = [
            (int(table.counts[table.span(self.digits)].sum()) if pattern else table.zeros) if table is not None else 0
            for table in self._tables(asked, len(self.digits))
        ]
        return Selection(
            pattern=pattern, width=self.width, above=self.above, equal=np.asarray(equal, np.int64), rank=self.rank
        )


# --- masks --------------------------------------------------------------------------------------------------------


def above(bits: Array, edge: Edge, inputs: BlockInputs, name: Hashable) -> Array:
    """Return where a tile's patterns are larger than the edge's, or equal and taken.

    Parameters
    ----------
    name
        What the count of equal elements is kept under in ``inputs.memo``, for the later tiles of the block.
    """
    pattern = bits.dtype.type(edge.pattern)
    if inputs.block < edge.block:
        return bits >= pattern
    mask: Array = bits > pattern
    return _with_first(mask, bits, edge, inputs, name)


def below(bits: Array, edge: Edge, inputs: BlockInputs, name: Hashable) -> Array:
    """Return where a tile's patterns are smaller than the edge's, or equal and taken; see `above`."""
    pattern = bits.dtype.type(edge.pattern)
    if inputs.block < edge.block:
        return bits <= pattern
    mask: Array = bits < pattern
    return _with_first(mask, bits, edge, inputs, name)


def _with_first(mask: Array, bits: Array, edge: Edge, inputs: BlockInputs, name: Hashable) -> Array:
    mask[first_equal(bits, edge, inputs, name)] = True
    return mask


def first_equal(bits: Array, edge: Edge, inputs: BlockInputs, name: Hashable) -> Array:
    """Return which of a tile's patterns equal the edge's and are taken, in the edge's block; see `above`."""
    left = inputs.memo.get(name, edge.count) if inputs.block == edge.block else 0
    if not left:
        return np.zeros(0, np.intp)
    found = np.flatnonzero(bits == bits.dtype.type(edge.pattern))[:left]
    inputs.memo[name] = left - found.size
    return found
