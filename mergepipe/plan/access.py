"""Which blocks of its experts a tensor is made from: the access set, as a level for every (expert, block).

A level is a byte: `OMITTED`, `EXACT`, and between them what is kept for a number of planes of a delta.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergepipe.digest import record_digest

OMITTED = 0
EXACT = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccess:
    """The access to the experts of one tensor.

    Attributes
    ----------
    levels
        Per expert, in expert order, a byte per block of the tensor that is merged; None: every block exactly.
    """

    levels: tuple[bytes | None, ...]

    def omits(self, expert: int, block: int) -> bool:
        """Return whether a block of an expert (counted from 0) is left out."""
        levels = self.levels[expert]
        return levels is not None and block < len(levels) and levels[block] == OMITTED

    def omitted(self, block: int) -> tuple[int, ...]:
        """Return the experts that are left out of a block."""
        return tuple(expert for expert in range(len(self.levels)) if self.omits(expert, block))

    @property
    def is_full(self) -> bool:
        """Whether nothing is left out."""
        return all(levels is None or levels.count(EXACT) == len(levels) for levels in self.levels)

    def digest(self) -> bytes:
        """Return the digest of all levels."""
        return record_digest("access", self.levels)

    def matrix(self, blocks: int) -> bytes:
        """Return a row per expert, a byte per block of the tensor (``blocks`` of them), row after row."""
        return b"".join((levels or b"").ljust(blocks, bytes([EXACT])) for levels in self.levels)
