"""What the levels of the code are: how many, how many bits each adds, and under which key a pack is kept."""

from __future__ import annotations

import itertools

from mergepipe.digest import record_digest

CODE_VERSION = 1
"""Changes with every change of the bytes that a delta is coded into."""
LEVELS_VERSION = 2
"""Changes with every change of what is merged of codes: of the code, or of how decoded deltas are summed up."""
STAGE_BITS: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 2)
"""Bits for each element that a stage adds. Level k is the first k stages."""
LEVELS = len(STAGE_BITS)
LEVEL_BITS: tuple[int, ...] = tuple(itertools.accumulate(STAGE_BITS))
"""Bits for each element of levels 1, 2, ..."""
BLOCK_ELEMENTS = 2**18
"""Elements of a block in geometry 1."""
MIN_ELEMENTS = 1 << 14
"""Smaller tensors are not coded: they cost next to nothing, and tables and header would weigh too much."""
SUFFIX = ".planes"
"""How names of packs end."""
OMITTED = 0
EXACT = 255
"""The level, as plans write it, at which a block is read from its source."""


def pack_key(base_digest: bytes, expert_digest: bytes, block_elements: int = BLOCK_ELEMENTS) -> bytes:
    """Return the key (32 bytes) of the pack that codes an expert's tensor against the base's.

    Parameters
    ----------
    base_digest, expert_digest
        Digests of the two tensors, which have one shape.
    block_elements
        Of the block geometry.
    """
    return record_digest("progressive-pack", CODE_VERSION, block_elements, base_digest, expert_digest)
