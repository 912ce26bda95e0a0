"""Tables that count bit patterns: what the order statistics of a block are kept as.

A pattern has `width` bits (32 or 64), cut into digits of 16 bits, the top one first. A *complete* table states every
pattern that occurs; where there are too many, a *coarse* one counts the patterns by their next digit.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from mergepipe.operators.contract import Array
from mergepipe.values import dataclass

DIGIT = 16
DIGITS = 1 << DIGIT
# A complete table has at most so many patterns, and one for so many elements: about 2% of the bytes of 16-bit weights.
# Small blocks may always have as many as `ALWAYS`.
_MOST = 8192
_ELEMENTS_PER_PATTERN = 32
ALWAYS = 1024
# Up to here sorting is as fast as counting.
_SORTED = 4096
_SAMPLE = 1 << 14
# Up to this share of patterns that do not end in zeros, those are sorted apart.
_FEW = 16
# So many patterns are looked at together to find those few: their last halves fill 64 bits.
_GROUPED = 4
_HEADER = struct.Struct("<BBBBBIQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """How often each pattern, or each range of patterns, occurs in a block.

    Attributes
    ----------
    width
        Bits of a pattern: 32 or 64.
    shift
        An entry counts the patterns that are ``key`` without their last `shift` bits; 0 where the table is complete.
    zeros
        How many magnitudes are exactly zero; no entry counts them.
    keys, counts
        Ascending (uint64) and their counts (int64).
    """

    width: int
    shift: int
    zeros: int
    keys: Array
    counts: Array

    def span(self, digits: Sequence[int]) -> slice:
        """Return the entries of the patterns that begin with these digits."""
        if not digits:
            return slice(0, self.keys.size)
        rest = self.width - DIGIT * len(digits) - self.shift
        low = number_of(digits) << rest
        first = int(np.searchsorted(self.keys, np.uint64(low), side="left"))
        last = int(np.searchsorted(self.keys, np.uint64(low + (1 << rest) - 1), side="right"))
        return slice(first, last)

    def resolves(self, depth: int) -> bool:
        """Return whether entries tell apart patterns by their first `depth` digits."""
        return self.shift <= self.width - DIGIT * depth

    def encode(self) -> bytes:
        """Return the table as bytes: planes of the gaps between keys and of the counts, compressed."""
        everything = int(np.bitwise_or.reduce(self.keys)) if self.keys.size else 0
        spare = (everything & -everything).bit_length() - 1 if everything else 0
        keys = self.keys >> np.uint64(spare)
        first = int(keys[0]) if keys.size else 0
        gaps, key_bytes = _planes(keys[1:] - keys[:-1])
        counts, count_bytes = _planes(self.counts.astype(np.uint64))
        header = _HEADER.pack(self.width, self.shift, spare, key_bytes, count_bytes, self.keys.size, first, self.zeros)
        return header + zlib.compress(gaps + counts, 1)

    @classmethod
    def decode(cls, data: bytes) -> Table:
        """Return the table that `encode` made into these bytes."""
        width, shift, spare, key_bytes, count_bytes, size, first, zeros = _HEADER.unpack_from(data)
        split, counted = max(size - 1, 0) * key_bytes, size * count_bytes
        # With room for what comes out and a byte more zlib is done in one go.
        raw = zlib.decompress(memoryview(data)[_HEADER.size :], bufsize=split + counted + 1)
        planes = np.frombuffer(raw, np.uint8)
        keys = np.empty(size, np.uint64)
        if size:
            keys[0] = first
            keys[1:] = _joined(planes[:split], key_bytes)
            np.add.accumulate(keys, out=keys)
            keys <<= np.uint64(spare)
        counts = _joined(planes[split:], count_bytes).astype(np.int64)
        return cls(width=width, shift=shift, zeros=zeros, keys=keys, counts=counts)


def _planes(values: Array) -> tuple[bytes, int]:
    """Return the bytes of numbers, all the lowest ones first, without those that are 0 throughout; and how many."""
    size = (int(np.maximum.reduce(values)).bit_length() + 7) // 8 if values.size else 0
    columns = values.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :size]
    return columns.tobytes(order="F"), size


def _joined(planes: Array, size: int) -> Array:
    if not size:
        return np.zeros(0, np.uint64)
    lowest, *others = planes.reshape(size, -1).astype(np.uint64)
    for place, plane in enumerate(others, 1):
        plane <<= np.uint64(8 * place)
        lowest |= plane
    return lowest


def number_of(digits: Sequence[int]) -> int:
    value = 0
    for digit in digits:
        value = value << DIGIT | digit
    return value


class Counter:
    """Counts patterns piece by piece and makes their table; what comes out does not depend on how they were cut.

    The difference of two bfloat16 numbers within a factor of two of each other is a bfloat16 number (Sterbenz 1974),
    and its pattern of 32 bits ends in 16 zeros. So of 16-bit checkpoints nearly all patterns are told apart by their
    first half, which is counted, and the few others are sorted. Where they are not few (float16, or deltas as large as
    the weights), patterns are scattered into 2^16 places by a multiplicative hash: the first to come to a place holds
    it, and the few others are sorted. Once there are too many distinct ones, only the digit after the known ones is
    counted.

    Parameters
    ----------
    width
        Bits of a pattern, 32 or 64.
    digits
        The leading digits that all patterns have in common.
    """

    def __init__(self, width: int, digits: Sequence[int]) -> None:
        self._width = width
        self._type = np.uint32 if width == 32 else np.uint64
        self._prefix = number_of(digits)
        self._shift = width - DIGIT * (len(digits) + 1)
        self._elements = self._zeros = 0
        self._by_digit: Array | None = None
        self._holder: Array | None = None
        self._counts = np.zeros(0, np.int64)
        self._used = 0
        self._others = np.zeros(0, self._type), np.zeros(0, np.int64)
        self._halves = np.zeros(0, np.int64)
        self._odd: list[Array] = []

    def add_zeros(self, count: int) -> None:
        """Count so many patterns that are zero."""
        self._elements += count
        self._zeros += count

    def add(self, bits: Array) -> None:
        """Count patterns (uint32 or uint64, by the width)."""
        self._elements += bits.size
        if not self._add_halves(bits, bits.copy):
            self._add_patterns(bits)

    def add_floats(self, values: Array) -> None:
        """Count the patterns of the magnitudes of floats (of the width), in an array that is overwritten."""
        bits = values.view(self._type)
        self._elements += bits.size
        if bits.size > _SAMPLE and np.count_nonzero(values[:_SAMPLE]) * 9 < _SAMPLE * 4:
            (places,) = (values != 0).nonzero()
            self._zeros += bits.size - places.size
            bits = bits.take(places, mode="clip")
        if not self._add_halves(bits, lambda: bits):
            bits &= self._type((1 << (self._width - 1)) - 1)
            self._add_patterns(bits)

    def _add_patterns(self, bits: Array) -> None:
        if self._by_digit is None and self._too_many(bits):
            self._count_digits_from_now()
        if self._by_digit is not None:
            self._add_digits(bits)
        elif bits.size <= _SORTED:
            self._add_others(bits)
        else:
            self._add_hashed(bits)

    def table(self) -> Table:
        """Return the table of all that was counted."""
        if self._by_digit is None:
            keys, counts = self._distinct()
            most = min(_MOST, max(ALWAYS, self._elements // _ELEMENTS_PER_PATTERN))
            if keys.size <= most:
                return self._table(keys.astype(np.uint64), counts, shift=0)
            self._count_digits_from_now()
        assert self._by_digit is not None
        used = np.flatnonzero(self._by_digit)
        keys = used.astype(np.uint64) | np.uint64(self._prefix << DIGIT)
        return self._table(keys, self._by_digit[used], shift=self._shift)

    def _table(self, keys: Array, counts: Array, *, shift: int) -> Table:
        zeros = self._zeros
        if not shift and keys.size and not keys[0]:
            zeros, keys, counts = zeros + int(counts[0]), keys[1:], counts[1:]
        return Table(width=self._width, shift=shift, zeros=zeros, keys=keys, counts=counts)

    def _too_many(self, bits: Array) -> bool:
        """Return whether there are certainly more distinct patterns than a complete table may have."""
        found = max(self._used, self._others[0].size)
        if self._holder is None and bits.size > _SAMPLE:  # a look at a few saves hashing all
            found = max(found, int(np.count_nonzero(np.bincount(_places(bits[:_SAMPLE])))))
        return found > _MOST

    def _add_halves(self, bits: Array, own: Callable[[], Array]) -> bool:
        """Count patterns by their first half, if nearly all end in zeros; return whether they were counted.

        Parameters
        ----------
        bits
            Patterns, whatever their top bits.
        own
            Returns an array of them to overwrite.
        """
        if bits.size <= _SORTED or self._width != 2 * DIGIT or self._prefix:
            return False
        if self._holder is not None or self._by_digit is not None:
            return False
        odd = _odd(bits)
        if odd is None:
            return False
        odd &= self._type((1 << 31) - 1)
        counts = _halves_counted(own())
        if odd.size:
            self._odd.append(odd)
            np.subtract.at(counts, odd >> self._type(DIGIT), 1)
        if counts.size > self._halves.size:
            counts, self._halves = self._halves, counts
        self._halves[: counts.size] += counts
        return True

    def _add_hashed(self, bits: Array) -> None:
        places = _places(bits)
        if self._holder is None:
            self._holder = np.zeros(DIGITS, self._type)
            self._counts = np.zeros(DIGITS, np.int64)
            self._holder[places] = bits
            self._holder[0] = 0  # the place of pattern 0, and of no other
        differs = self._holder.take(places) != bits
        if differs.any():
            new = np.flatnonzero(differs)
            self._add_new(bits[new], places[new])
        self._counts += np.bincount(places, minlength=DIGITS)
        self._used = int(np.count_nonzero(self._counts))

    def _add_new(self, bits: Array, places: Array) -> None:
        """Count patterns that their places do not hold; those that found a place free have it now."""
        assert self._holder is not None
        free = (self._holder[places] == 0) & (places != 0)
        self._holder[places[free]] = bits[free]
        left = np.flatnonzero(self._holder[places] != bits)
        if left.size:
            np.subtract.at(self._counts, places[left], 1)
            self._add_others(bits[left])

    def _add_others(self, bits: Array) -> None:
        found, counts = np.unique(bits, return_counts=True)
        self._others = _merged(*self._others, found, counts)

    def _distinct(self) -> tuple[Array, Array]:
        """Return all patterns that occur, ascending, and their counts."""
        found = self._others
        if self._holder is not None:
            used = np.flatnonzero(self._counts)
            order = used[np.argsort(self._holder[used])]
            found = _merged(self._holder[order], self._counts[order], *found)
        return _merged(*self._halves_and_odd(), *found) if self._halves.size else found

    def _halves_and_odd(self) -> tuple[Array, Array]:
        """Return what was counted by first halves, and what does not end in zeros: no pattern is both."""
        (used,) = (self._halves != 0).nonzero()
        keys, counts = (used << DIGIT).astype(self._type), self._halves[used]
        if self._odd:
            odd, odd_counts = _unique(np.concatenate(self._odd))
            keys, counts = np.concatenate((keys, odd)), np.concatenate((counts, odd_counts))
            order = np.argsort(keys, kind="stable")  # two runs in order, merged
            keys, counts = keys[order], counts[order]
        return keys, counts

    def _count_digits_from_now(self) -> None:
        keys, counts = self._distinct()
        self._by_digit = np.zeros(DIGITS, np.int64)
        if keys.size and not keys[0]:
            self._zeros += int(counts[0])
            keys, counts = keys[1:], counts[1:]
        np.add.at(self._by_digit, self._digits_of(keys), counts)
        self._holder, self._halves, self._odd = None, self._halves[:0], []

    def _add_digits(self, bits: Array) -> None:
        assert self._by_digit is not None
        zeros = bits.size - int(np.count_nonzero(bits))
        self._zeros += zeros
        self._by_digit += np.bincount(self._digits_of(bits), minlength=DIGITS)
        self._by_digit[0] -= zeros

    def _digits_of(self, bits: Array) -> Array:
        digits = (bits >> self._type(self._shift)).astype(np.intp)
        if self._prefix:
            digits &= DIGITS - 1
        return digits


def _odd(bits: Array) -> Array | None:
    """Return the patterns (uint32) that do not end in zeros; None where they are not few.

    Their last halves are looked at several at a time, for groups in which any one is not zero.
    """
    whole = bits.size // _GROUPED * _GROUPED
    groups, rest = bits[:whole].reshape(-1, _GROUPED), bits[whole:]
    together = bits[:whole].astype(np.uint16).view(np.uint64)
    (places,) = (together != 0).nonzero()
    if places.size * 2 > together.size:
        return None
    found = np.concatenate((groups.take(places, axis=0).reshape(-1), rest))
    found = found[found & np.uint32(DIGITS - 1) != 0]
    return found if found.size * _FEW <= bits.size else None


def _halves_counted(bits: Array) -> Array:
    """Return how often each first half occurs without its top bit; the patterns (uint32) are overwritten.

    Equal numbers in a row wait for one another, and most deltas of fine-tunes are zero: neighbours are counted apart.
    Their top bits tell them apart, the other way round in one of each pair, whichever that is.
    """
    pairs = bits[: bits.size & ~1].view(np.uint64)
    pairs ^= np.uint64(1 << 63)
    bits >>= np.uint32(DIGIT)
    found = np.bincount(bits, minlength=DIGITS >> 1)
    counts, others = found[: DIGITS >> 1], found[DIGITS >> 1 :]
    counts[: others.size] += others
    return counts


def _unique(bits: Array) -> tuple[Array, Array]:
    """Return the patterns that occur, ascending, and their counts (int64); those given, at least one, are sorted."""
    bits.sort()
    (first,) = (bits[1:] != bits[:-1]).nonzero()
    first += 1
    stops = np.concatenate((first, (bits.size,)))
    stops[1:] -= first
    return np.concatenate((bits[:1], bits[first])), stops


def _places(bits: Array) -> Array:
    if bits.dtype.itemsize == 4:
        return (bits * np.uint32(0x9E3779B1) >> np.uint32(32 - DIGIT)).astype(np.intp)
    return (bits * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - DIGIT)).astype(np.intp)


def _merged(first: Array, first_counts: Array, second: Array, second_counts: Array) -> tuple[Array, Array]:
    """Return patterns, ascending, with the sums of their counts; each of the two has them ascending already."""
    if not first.size or not second.size:
        return (second, second_counts) if second.size else (first, first_counts)
    places: Array = np.searchsorted(first, second)
    known = first.take(places, mode="clip") == second
    if known.any():
        first_counts = first_counts.copy()
        first_counts[places[known]] += second_counts[known]
        places, second, second_counts = places[~known], second[~known], second_counts[~known]
    places += np.arange(places.size)
    rest = np.ones(first.size + second.size, np.bool_)
    rest[places] = False
    keys, counts = np.empty(rest.size, first.dtype), np.empty(rest.size, np.int64)
    keys[places], counts[places] = second, second_counts
    keys[rest], counts[rest] = first, first_counts
    return keys, counts
