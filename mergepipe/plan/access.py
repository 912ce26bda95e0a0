"""Which blocks of its experts a tensor is made from, and how precisely: a level for every (expert, block).

A level is a byte: `OMITTED`, `EXACT`, and between them how many stages of a progressive code are read
(`mergepipe.progressive`): the delta is then known up to its residual.
"""

from __future__ import annotations

from mergepipe.digest import record_digest
from mergepipe.progressive.levels import CODE_VERSION, EXACT, LEVEL_BITS, OMITTED
from mergepipe.units import format_count
from mergepipe.values import dataclass

__all__ = ["EXACT", "OMITTED", "TensorAccess", "is_approximate", "is_coded", "level_name", "level_words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccess:
    """The access to the experts of one tensor.

    Attributes
    ----------
    levels
        Per expert, in expert order, a byte per block of the tensor that is merged; None: every block exactly.
    """

    levels: tuple[bytes | None, ...]

    def level(self, expert: int, block: int) -> int:
        """Return the level of a block of an expert (counted from 0)."""
        levels = self.levels[expert]
        return EXACT if levels is None or block >= len(levels) else levels[block]

    def omits(self, expert: int, block: int) -> bool:
        """Return whether a block of an expert is left out."""
        return self.level(expert, block) == OMITTED

    def omitted(self, block: int) -> tuple[int, ...]:
        """Return the experts that are left out of a block."""
        return tuple(expert for expert in range(len(self.levels)) if self.omits(expert, block))

    def inexact(self, block: int) -> tuple[int, ...]:
        """Return the experts that are left out of a block, or of which it takes an approximation."""
        return tuple(expert for expert in range(len(self.levels)) if self.level(expert, block) != EXACT)

    @property
    def is_full(self) -> bool:
        """Whether all is read exactly."""
        return all(levels is None or levels.count(EXACT) == len(levels) for levels in self.levels)

    @property
    def is_coded(self) -> bool:
        """Whether anything is read from a progressive code."""
        return any(is_coded(levels) for levels in self.levels)

    def found(self) -> frozenset[int]:
        """Return the levels that any block has, but for experts of which every block is exact."""
        return frozenset(level for levels in self.levels if levels is not None for level in levels)

    def digest(self) -> bytes:
        """Return the digest of all levels."""
        if self.is_coded:
            return record_digest("access-coded", CODE_VERSION, self.levels)
        return record_digest("access", self.levels)

    def matrix(self, blocks: int) -> bytes:
        """Return a row per expert, a byte per block of the tensor (``blocks`` of them), row after row."""
        return b"".join((levels or b"").ljust(blocks, bytes([EXACT])) for levels in self.levels)


def is_approximate(level: int) -> bool:
    """Return whether a level is one of a progressive code: neither nothing nor the exact block."""
    return OMITTED < level < EXACT


def level_name(level: int) -> str:
    """Return what a level is called where it is a key: ``omitted``, ``1`` and so on, ``exact``."""
    return {OMITTED: "omitted", EXACT: "exact"}.get(level, str(level))


def level_words(level: int) -> str:
    """Return what a level is called in words: ``left out``, ``level 3 (3 bits)``, ``exact``."""
    if not is_approximate(level):
        return "exact" if level == EXACT else "left out"
    return f"level {level} ({format_count(LEVEL_BITS[level - 1], 'bit')})"


def is_coded(levels: bytes | None) -> bool:
    """Return whether any of the levels is between `OMITTED` and `EXACT`."""
    return levels is not None and levels.count(OMITTED) + levels.count(EXACT) < len(levels)
