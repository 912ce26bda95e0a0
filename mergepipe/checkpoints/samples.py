"""Samples of tensors: fixed runs of elements, spread over every block, which stand for it where it is not read whole.

A sample is about 3% of a block; of one with long rows, which has few of them, less than 1%. Where its runs lie follows
from the block's length, the length of its rows and its number alone, so that the same elements are compared in every
checkpoint, whatever its dtype, its files and the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

_SHARE = 32  # one element of so many
_RUNS = 8  # in a block: fewer meet too few of its rows, more take too many reads
# A block of rows of 8192 elements has 32 of them, where one of rows of 1024 has 256: so half the runs meet as large a
# share of the rows, and shorter ones will do, for a run never meets more than one. What each run takes to be read, not
# its length, is what a model of that size is measured for: four runs of 1 KiB are twice as fast as eight of 2 KiB.
_LONG_ROW = 1 << 13
_LONG_SHARE = 128
_LONG_RUNS = 4
_SHORTEST = 16  # elements; in blocks of up to so many times the runs everything is the sample
# 2^64 divided by the golden ratio: multiples of it, modulo 2^64, lie evenly over the range (Weyl's theorem; Knuth, The
# Art of Computer Programming, volume 3, section 6.4).
_GOLDEN = 0x9E3779B97F4A7C15
_RANGE_BITS = 64

Runs = tuple[tuple[int, int], ...]
"""Flat ranges of elements of a block, in order: (first, behind the last)."""


def _form(elements: int, row_elements: int) -> tuple[int, int]:
    """Return how many runs the sample of a block has, and the length of each."""
    runs, share = (_LONG_RUNS, _LONG_SHARE) if row_elements >= _LONG_ROW else (_RUNS, _SHARE)
    length = max(_SHORTEST, elements // (share * runs))
    return (runs, length) if length * runs < elements else (min(1, elements), elements)


@functools.lru_cache(maxsize=1 << 12)
def sample_runs(elements: int, block: int, row_elements: int) -> Runs:
    """Return which elements of a block are its sample.

    Each eighth of the block (quarter, where its rows are long) has a run of the same length, at a place that differs
    from one to the next and from block to block: a fixed distance could meet the same columns of every row.

    Parameters
    ----------
    elements
        How many the block has.
    block
        Its number within the tensor.
    row_elements
        How many a row of it has.
    """
    length = _form(elements, row_elements)[1]
    return tuple((start, start + length) for start in _starts(elements, block, row_elements))


def sample_starts(elements: int, first: int, stop: int, row_elements: int) -> tuple[list[int], int]:
    """Return where the runs of adjacent blocks of equal length begin, and how long each run is, in elements.

    Parameters
    ----------
    elements
        How many each block has.
    first, stop
        The numbers of the first block, from whose first element places count, and of the one behind the last.
    """
    starts = [
        (block - first) * elements + start
        for block in range(first, stop)
        for start in _starts(elements, block, row_elements)
    ]
    return starts, _form(elements, row_elements)[1]


def _starts(elements: int, block: int, row_elements: int) -> Iterator[int]:
    runs, length = _form(elements, row_elements)
    for number in range(runs):
        first, stop = number * elements // runs, (number + 1) * elements // runs
        draw = (block * runs + number + 1) * _GOLDEN % (1 << _RANGE_BITS)
        yield first + (draw * (stop - first - length + 1) >> _RANGE_BITS)


def sample_elements(elements: int, row_elements: int) -> int:
    """Return how many elements the sample of a block has."""
    runs, length = _form(elements, row_elements)
    return runs * length
