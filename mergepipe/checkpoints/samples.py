"""Samples of tensors: fixed runs of elements, spread over every block, which stand for it where it is not read whole.

A sample is about 3% of a block. Where its runs lie follows from the block's length and number alone, so that the same
elements are compared in every checkpoint, whatever its dtype, its files and the machine.
"""

from __future__ import annotations

import functools

_SHARE = 32  # one element of so many
_RUNS = 8  # in a block: fewer meet too few of its rows, more take too many reads
_SHORTEST = 16  # elements; in blocks of up to `_RUNS` times as many everything is the sample
# 2^64 divided by the golden ratio: multiples of it, modulo 2^64, lie evenly over the range (Weyl's theorem; Knuth, The
# Art of Computer Programming, volume 3, section 6.4).
_GOLDEN = 0x9E3779B97F4A7C15
_RANGE_BITS = 64

Runs = tuple[tuple[int, int], ...]
"""Flat ranges of elements of a block, in order: (first, behind the last)."""


@functools.lru_cache(maxsize=1 << 12)
def sample_runs(elements: int, block: int) -> Runs:
    """Return which elements of a block are its sample.

    Each eighth of the block has a run of the same length, at a place that differs from one to the next and from block
    to block: a fixed distance could meet the same columns of every row.

    Parameters
    ----------
    elements
        How many the block has.
    block
        Its number within the tensor.
    """
    length = max(_SHORTEST, elements // (_SHARE * _RUNS))
    if length * _RUNS >= elements:
        return ((0, elements),) if elements else ()
    runs = []
    for number in range(_RUNS):
        first, stop = number * elements // _RUNS, (number + 1) * elements // _RUNS
        draw = (block * _RUNS + number + 1) * _GOLDEN % (1 << _RANGE_BITS)
        start = first + (draw * (stop - first - length + 1) >> _RANGE_BITS)
        runs.append((start, start + length))
    return tuple(runs)


def sample_elements(elements: int) -> int:
    """Return how many elements the sample of a block has."""
    return sum(stop - start for start, stop in sample_runs(elements, 0))
