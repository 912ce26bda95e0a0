"""Random numbers that are addressed by place: the same for any cutting, order, thread count and machine.

Each (seed, output tensor, expert source) has a stream of its own: numpy's Philox 4x64-10 (Salmon et al. 2011), a
generator that counts and so can start anywhere. Its key are the first 16 bytes of
``record_digest("mask", seed, tensor, source)``, read as two little-endian 64-bit words, low word first; its counter
starts at 0. The stream is what ``numpy.random.Philox(key=key).random_raw()`` yields: 64-bit words 0, 1, 2, ...
Element i of the tensor (flat index) has the 32-bit half ``i % 2`` (0 is the low half) of word ``i // 2``, as an
integer r; its random number is ``u = r / 2^32``, in [0, 1). An element is kept where ``u < p``, compared exactly.
"""

from __future__ import annotations

import math

from mergepipe.digest import record_digest
from mergepipe.operators.contract import Array

# numpy increments the counter, then turns it into 4 words of 64 bits: 8 elements.
_ELEMENTS_PER_COUNT = 8


def mask_key(seed: int, tensor: str, source: str) -> tuple[int, int]:
    """Return the two 64-bit words of the generator's key, low word first."""
    digest = record_digest("mask", seed, tensor, source)
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def random_words(key: tuple[int, int], start: int, count: int) -> Array:
    """Return the 32-bit numbers r of the elements ``start`` to ``start + count - 1`` (uint32)."""
    import numpy as np

    first = start // _ELEMENTS_PER_COUNT
    skip = start - first * _ELEMENTS_PER_COUNT
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=first)
    words = generator.random_raw(-(-(skip + count) // 2))
    result: Array = words.astype("<u8", copy=False).view("<u4")[skip : skip + count]
    return result


def last_kept(probability: float) -> int:
    """Return the largest r with ``r / 2^32 < probability``, which must be positive (at most 2^32 - 1)."""
    limit = math.ceil(math.ldexp(probability, 32))  # exact: scaling by a power of two
    return min(limit, 1 << 32) - 1
