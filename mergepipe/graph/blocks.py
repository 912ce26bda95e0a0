"""Block-level states of one output tensor: keys, zero deltas, equal blocks, and results that are already there.

The engine and the exported graph both get them from here, so what is shown is what is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergepipe.cache.catalog import Result, StagedTensor
from mergepipe.checkpoints.geometry import BlockGrid, Geometry
from mergepipe.digest import DIGEST_SIZE
from mergepipe.graph.keys import ABSENT, block_key
from mergepipe.operators.contract import Operator
from mergepipe.plan.values import Decision, TensorPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecipe:
    """What block states need of a tensor's plan, computed once per tensor."""

    operator: Operator
    tensor: TensorPlan
    grid: BlockGrid
    input_grids: tuple[BlockGrid | None, ...]

    @classmethod
    def of(cls, operator: Operator, tensor: TensorPlan, geometry: Geometry) -> TensorRecipe:
        """Return the recipe of a planned tensor."""
        return cls(
            operator=operator,
            tensor=tensor,
            grid=tensor.grid(geometry),
            input_grids=tuple(slot.grid(geometry) if slot else None for slot in tensor.slots),
        )

    def merged_rows(self, block: int) -> int:
        """Return how many leading rows of a block are merged; the rest is copied from the base."""
        first, stop = self.grid.rows_of(block)
        common = self.tensor.common_rows
        return stop - first if common is None else max(0, min(stop, common) - first)

    def elements(self, block: int) -> int:
        """Return how many elements a block of the output has."""
        first, stop = self.grid.rows_of(block)
        return (stop - first) * self.grid.row_elements

    def merged_elements(self, block: int) -> int:
        """Return how many leading elements of a block are merged."""
        return self.merged_rows(block) * self.grid.row_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """How one output block comes about.

    Attributes
    ----------
    key
        Its action key.
    sources
        Per slot, which slot's bytes stand for it: itself where it is read, an earlier slot of equal content, or
        None where it is no input or a zero delta.
    copied
        The slot whose bytes are the result, or None if it is computed.
    zero, shared
        Expert slots that were found to equal the base, or an earlier input.
    """

    block: int
    key: bytes
    sources: tuple[int | None, ...]
    copied: int | None
    zero: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots that must be read."""
        used = range(len(self.sources)) if self.copied is None else (self.copied,)
        return tuple(slot for slot in used if self.sources[slot] == slot)


def plan_block(recipe: TensorRecipe, block: int, digests: Sequence[bytes | None]) -> BlockPlan:
    """Return how a block comes about, from its inputs' block digests (None: the slot has no such block)."""
    tensor, merged = recipe.tensor, recipe.merged_elements(block)
    if tensor.decision is Decision.EQUAL:
        key = block_key(tensor.recipe, [digest or ABSENT for digest in digests], merged)
        sources = (0, *(None for _ in tensor.experts))
        return BlockPlan(block=block, key=key, sources=sources, copied=0, zero=(), shared=())
    if merged == 0:  # beyond the rows that all sources have
        digests = (digests[0], *(None for _ in tensor.experts))
    elif merged == recipe.elements(block) and not recipe.operator.uses_base:
        digests = (None, *digests[1:])
    key = block_key(tensor.recipe, [digest or ABSENT for digest in digests], merged)
    sources, zero, shared = _assign(recipe, digests)
    return BlockPlan(
        block=block,
        key=key,
        sources=sources,
        copied=_copied(recipe, block, sources, merged),
        zero=zero,
        shared=shared,
    )


def _assign(
    recipe: TensorRecipe, digests: Sequence[bytes | None]
) -> tuple[tuple[int | None, ...], tuple[int, ...], tuple[int, ...]]:
    """Find zero deltas and equal content. Equal means the same bytes in the same dtype, whoever holds them."""
    slots = recipe.tensor.slots
    seen: dict[tuple[str, bytes], int] = {}
    sources: list[int | None] = []
    zero: list[int] = []
    shared: list[int] = []
    for index, (slot, digest) in enumerate(zip(slots, digests, strict=True)):
        if slot is None or digest is None:
            sources.append(None)
            continue
        first = seen.setdefault((slot.info.dtype, digest), index)
        if first == 0 and index > 0 and recipe.operator.uses_base:
            zero.append(index)
            sources.append(None)
            continue
        if first != index:
            shared.append(index)
        sources.append(first)
    return tuple(sources), tuple(zero), tuple(shared)


def _copied(recipe: TensorRecipe, block: int, sources: tuple[int | None, ...], merged: int) -> int | None:
    """Return the slot whose bytes the block equals: by the operator's word, and in the same dtype and extent."""
    tensor = recipe.tensor
    if merged == 0:
        chosen: int | None = 0
    elif merged != recipe.elements(block):
        return None
    else:
        present = tuple(source is not None for source in sources[1:])
        index = recipe.operator.copied_input(tensor.prepared, present)
        chosen = None if index is None else index + 1
    if chosen is None:
        return None
    source = sources[chosen]
    slot = tensor.slots[chosen]
    if source is None or slot is None or slot.info.dtype != tensor.dtype:
        return None
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A place that holds finished blocks of a tensor: a pack, or (``result`` None) this output's own staged shard."""

    block_keys: bytes
    block_digests: bytes
    result: Result | None

    @classmethod
    def of_result(cls, result: Result) -> Holding:
        """Return the holding of a finished tensor."""
        return cls(block_keys=result.block_keys, block_digests=result.block_digests, result=result)

    @classmethod
    def of_staged(cls, staged: StagedTensor) -> Holding:
        """Return the holding of a tensor that an unfinished build left in staging."""
        return cls(block_keys=staged.block_keys, block_digests=staged.block_digests, result=None)

    def key(self, block: int) -> bytes:
        """Return the action key of the block held at this index."""
        return self.block_keys[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE]

    def digest(self, block: int) -> bytes:
        """Return the content digest of the block held at this index."""
        return self.block_digests[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE]


def find_block(holdings: Sequence[Holding], block: int, key: bytes) -> Holding | None:
    """Return the first place that holds a block under this action key."""
    return next((holding for holding in holdings if holding.key(block) == key), None)
