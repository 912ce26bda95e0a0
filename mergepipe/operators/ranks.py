"""The k-th largest magnitude of a tensor, and which of the elements that equal it are taken."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mergepipe.operators.contract import Array
from mergepipe.operators.tables import DIGIT, DIGITS, Table, number_of
from mergepipe.values import dataclass

# Complete tables of 32-bit patterns are joined up to so many entries, of 8 bytes each, and gone through in pieces.
_JOINED_ENTRIES = 1 << 20
_PIECE = 1 << 16
_INFINITE = 0x7F800000


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Which of the elements that equal a magnitude are taken: so many, the lowest flat index first.

    Attributes
    ----------
    pattern
        The magnitude's bits.
    block, count
        Equal elements are taken in all blocks before `block`, in it only the first `count`, and none after it.
    """

    pattern: int
    block: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The k-th largest magnitude of a tensor.

    Attributes
    ----------
    pattern, width
        Its bit pattern, and how many bits that has.
    above
        How many elements are larger.
    equal
        How many equal it in each block (int64, one per block).
    rank
        The k that was asked for: so ``rank - above`` of the equal ones are among the k largest.
    """

    pattern: int
    width: int
    above: int
    equal: Array
    rank: int

    @property
    def value(self) -> float:
        """The magnitude itself."""
        if self.width == 32:
            return float(np.uint32(self.pattern).view(np.float32))
        return float(np.uint64(self.pattern).view(np.float64))

    def edge(self, count: int) -> Edge:
        """Return where it ends if the first `count` of the equal elements are taken."""
        before = np.cumsum(self.equal)
        block = int(np.searchsorted(before, count, side="left")) if count else 0
        return Edge(pattern=self.pattern, block=block, count=count - int(before[block] - self.equal[block]))

    def taken(self, count: int) -> Array:
        """Return how many of the first `count` equal elements lie in each block (int64, one per block)."""
        before = np.cumsum(self.equal) - self.equal
        return np.clip(count - before, 0, self.equal)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTables:
    """The complete tables of all blocks of a tensor, one after the other: 32-bit patterns but 0, and their counts.

    Attributes
    ----------
    keys, counts
        uint32.
    stops, zeros
        Per block where its entries end, and how many zeros it has.
    """

    keys: Array
    counts: Array
    stops: Array
    zeros: Array

    @classmethod
    def of(cls, values: Iterable[bytes]) -> JoinedTables | None:
        """Return the tables that these bytes state; None where some are coarse, wide, or all together large."""
        keys, counts, zeros = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)], []
        size, stops = 0, []
        for data in values:
            table = Table.decode(data)
            size += table.keys.size
            if table.shift or table.width != 2 * DIGIT or size > _JOINED_ENTRIES:
                return None
            keys.append(table.keys.astype(np.uint32))
            counts.append(table.counts.astype(np.uint32))
            stops.append(size)
            zeros.append(table.zeros)
        return cls(
            keys=np.concatenate(keys),
            counts=np.concatenate(counts),
            stops=np.asarray(stops, np.int64),
            zeros=np.asarray(zeros, np.int64),
        )

    def selection(self, rank: int) -> Selection:
        """Return the magnitude of a rank."""
        high, above = next_digit(self._folded(self.keys, self.counts), rank, 0)
        within = np.flatnonzero(self.keys >> np.uint32(DIGIT) == high)
        keys, counts = self.keys[within], self.counts[within]
        lows, low_counts = keys & np.uint32(DIGITS - 1), counts.astype(np.int64)
        if not high:
            lows, low_counts = np.append(lows, np.uint32(0)), np.append(low_counts, self.zeros.sum())
        low, above = _digit_of_few(lows, low_counts, rank, above)
        pattern = number_of((high, low))
        if pattern:
            same = np.flatnonzero(keys == pattern)
            blocks = np.searchsorted(self.stops, within[same], side="right")
            equal = np.bincount(blocks, weights=counts[same], minlength=self.stops.size).astype(np.int64)
        else:
            equal = self.zeros
        return Selection(pattern=pattern, width=2 * DIGIT, above=above, equal=equal, rank=rank)

    def sum_between(self, above: int, below: int | None) -> int:
        """Return the exact sum of the finite magnitudes whose patterns lie strictly between two, in units of 2^-1074.

        Parameters
        ----------
        above, below
            The patterns; -1 and None for all.
        """
        mask = self.keys < np.uint32(_INFINITE if below is None else min(below, _INFINITE))
        mask &= self.keys > np.uint32(max(above, 0))  # a zero adds nothing
        keys, counts = self.keys[mask], self.counts[mask].astype(np.int64)
        exponents = keys >> np.uint32(23)
        fractions = (keys & np.uint32((1 << 23) - 1) | (exponents != 0).astype(np.uint32) << np.uint32(23)).astype(
            np.int64
        )
        total = 0
        for shift in (0, 12):  # 12 bits at a time, so that 2^51 elements do not overflow
            sums = np.zeros(1 << 8, np.int64)
            np.add.at(sums, exponents, (fractions >> shift & 0xFFF) * counts)
            total += sum(int(part) << shift + max(place, 1) for place, part in enumerate(sums) if part)
        return total << 1074 - 150

    def _folded(self, keys: Array, counts: Array) -> Array:
        """Return how often each first digit occurs; in float64, which is exact up to 2^53."""
        folded = np.zeros(1 + (int(keys.max(initial=0)) >> DIGIT))
        for start in range(0, keys.size, _PIECE):
            piece = slice(start, start + _PIECE)
            found = np.bincount(keys[piece] >> np.uint32(DIGIT), weights=counts[piece])
            folded[: found.size] += found
        folded[0] += self.zeros.sum()
        return folded


def next_digit(counts: Array, rank: int, above: int) -> tuple[int, int]:
    """Return the digit of the magnitude of a rank, and how many are larger, given how many are for larger prefixes."""
    up_to = np.cumsum(counts)
    total = above + int(up_to[-1])
    digit = int(np.searchsorted(up_to, total - rank, side="right"))  # the last with at least `rank` from it on
    return digit, total - int(up_to[digit])


def _digit_of_few(digits: Array, counts: Array, rank: int, above: int) -> tuple[int, int]:
    """Return what `next_digit` does, from digits in any order and how often each entry counts (int64)."""
    order = np.argsort(digits, kind="stable")
    up_to = np.cumsum(counts[order])
    digit = digits[order[np.searchsorted(up_to, above + up_to[-1] - rank, side="right")]]
    return int(digit), above + int(counts[digits > digit].sum())
