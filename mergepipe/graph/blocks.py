"""Block-level states of one output tensor: keys, zero deltas, equal blocks, and results that are already there.

The engine and the exported graph both get them from here, so what is shown is what is done.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import field

from mergepipe.cache.records import Result, StagedTensor
from mergepipe.checkpoints.geometry import BlockGrid, Geometry
from mergepipe.digest import DIGEST_SIZE
from mergepipe.graph.keys import ABSENT, block_key, code_digest, statistic_key
from mergepipe.operators.contract import Operator, Reduction, Statistic, TensorFacts
from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.recipe import input_form
from mergepipe.plan.values import Decision, InputRef, TensorPlan
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecipe:
    """What block states need of a tensor's plan, computed once per tensor."""

    tensor: TensorPlan
    slots: tuple[InputRef | None, ...]
    geometry: Geometry
    grid: BlockGrid
    input_grids: tuple[BlockGrid | None, ...]
    facts: TensorFacts
    rowwise: bool
    reduces: bool

    @classmethod
    def of(cls, tensor: TensorPlan, geometry: Geometry) -> TensorRecipe:
        """Return the recipe of a planned tensor."""
        facts = tensor_facts(tensor, geometry)
        merged = tensor.decision is Decision.MERGE and any(slot is not None for slot in tensor.experts)
        return cls(
            tensor=tensor,
            slots=tensor.slots,
            geometry=geometry,
            grid=tensor.grid(geometry),
            input_grids=tuple(slot.grid(geometry) if slot else None for slot in tensor.slots),
            facts=facts,
            rowwise=merged and tensor.operator.rowwise(tensor.prepared, facts),
            reduces=merged and facts.elements > 0 and tensor.operator.reduces(tensor.prepared, facts),
        )

    @property
    def operator(self) -> Operator:
        """The operator that merges the tensor."""
        return self.tensor.operator

    def merged_rows(self, block: int) -> int:
        """Return how many leading rows of a block are merged; the rest is copied from the base."""
        first, stop = self.grid.rows_of(block)
        common = self.tensor.common_rows
        return stop - first if common is None else max(0, min(stop, common) - first)

    def start(self, block: int) -> int:
        """Return the flat index of a block's first element in the output tensor."""
        return self.grid.rows_of(block)[0] * self.grid.row_elements

    def elements(self, block: int) -> int:
        """Return how many elements a block of the output has."""
        first, stop = self.grid.rows_of(block)
        return (stop - first) * self.grid.row_elements

    def input_bytes(self, block: int, slots: Iterable[int]) -> int:
        """Return the bytes that a block has in these slots together."""
        grids = [self.input_grids[slot] for slot in slots]
        extents = [grid.byte_range(block) for grid in grids if grid is not None]
        return sum(stop - start for start, stop in extents)

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
    omitted
        Expert slots that are left out: outside the access set.
    coded
        Expert slots of which an approximation is read, and its level.
    """

    block: int
    key: bytes
    sources: tuple[int | None, ...]
    copied: int | None
    zero: tuple[int, ...]
    shared: tuple[int, ...]
    omitted: tuple[int, ...] = ()
    coded: Mapping[int, int] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots that must be read exactly."""
        used = self._used
        return tuple([slot for slot in used if slot not in self.coded]) if self.coded else used

    @property
    def decodes(self) -> tuple[tuple[int, int], ...]:
        """The slots whose codes must be read, each with its level."""
        if not self.coded:
            return ()
        return tuple((slot, self.coded[slot]) for slot in self._used if slot in self.coded)

    @property
    def _used(self) -> tuple[int, ...]:
        if self.copied is not None:
            return (self.copied,) if self.sources[self.copied] == self.copied else ()
        return tuple([slot for slot, source in enumerate(self.sources) if source == slot])


def plan_block(
    recipe: TensorRecipe,
    block: int,
    digests: Sequence[bytes | None],
    reduction: Reduction | None = None,
    *,
    keyed: bool = True,
) -> BlockPlan:
    """Return how a block comes about, from its inputs' block digests (None: the slot has no such block).

    Where the recipe `reduces`, the reduction must be given. A block that is a copy of an input depends on neither the
    reduction nor its place.

    Parameters
    ----------
    keyed
        Whether the key is wanted, which costs more than all else. Without, it is empty, and the reduction is nothing.
    """
    tensor, elements = recipe.tensor, recipe.elements(block)
    merged = elements if tensor.common_rows is None else recipe.merged_elements(block)
    if tensor.decision is Decision.EQUAL:
        key = block_key(tensor.recipe, [digest or ABSENT for digest in digests], merged) if keyed else b""
        sources = (0, *(None for _ in tensor.experts))
        return BlockPlan(block=block, key=key, sources=sources, copied=0, zero=(), shared=())
    omitted, coded = _inexact(tensor, block, digests) if merged and tensor.access is not None else ((), {})
    seen = [None if slot in omitted else digest for slot, digest in enumerate(digests)] if omitted else [*digests]
    for slot, level in coded.items():
        if keyed:
            seen[slot] = code_digest(digests[0], digests[slot], level, recipe.grid.row_elements)
        else:  # equal where those are equal, and no digest
            seen[slot] = b"%d " % level + (digests[slot] or ABSENT)
    if merged == 0:  # beyond the rows that all sources have
        seen = [digests[0], *(None for _ in tensor.experts)]
    uses_base = tensor.uses_base
    anchored = bool(omitted or coded) and not uses_base
    unused = merged == elements and not (uses_base or anchored)
    if unused and not tensor.anchored:
        seen[0] = None
    sources, zero, shared = _assign(recipe, seen, zeros=uses_base)
    if anchored:  # the base's block stands for those that are left out
        sources = tuple(0 if slot in omitted else source for slot, source in enumerate(sources))
    elif unused:  # equal blocks of experts are read from the base, but it is no part of the result
        seen[0] = None
        sources = sources if 0 in sources[1:] else (None, *sources[1:])
    copied = _copied(recipe, elements, sources, merged, coded, anchored=anchored)
    computed = copied is None and merged > 0
    key = b""
    if keyed:
        key = block_key(
            tensor.recipe,
            [digest or ABSENT for digest in seen],
            merged,
            reduction=reduction.digest(block) if computed and reduction is not None else None,
            position=recipe.start(block) if computed and recipe.operator.names else None,
            anchor=input_form(tensor.base) if anchored else None,
        )
    return BlockPlan(
        block=block, key=key, sources=sources, copied=copied, zero=zero, shared=shared, omitted=omitted, coded=coded
    )


def _inexact(
    tensor: TensorPlan, block: int, digests: Sequence[bytes | None]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the slots that are left out of a block, and by slot the levels of approximations.

    Neither are slots that have no such block; an approximation of what equals the base is what it is.
    """
    if tensor.access is None:
        return (), {}
    levels = {slot: tensor.access.level(slot - 1, block) for slot in range(1, len(digests)) if digests[slot]}
    omitted = tuple(slot for slot, level in levels.items() if level == OMITTED)
    return omitted, {slot: level for slot, level in levels.items() if OMITTED < level < EXACT}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticPlan:
    """How a statistic of one block comes about; as `BlockPlan`, with ``sources`` for the statistic's slots alone."""

    block: int
    key: bytes
    sources: tuple[int | None, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots that must be read."""
        return tuple([slot for slot, source in enumerate(self.sources) if source == slot])


def plan_statistic(
    recipe: TensorRecipe, statistic: Statistic, key_recipe: bytes, block: int, digests: Sequence[bytes | None]
) -> StatisticPlan:
    """Return how a statistic of a block comes about.

    Parameters
    ----------
    key_recipe
        From `mergepipe.graph.keys.statistic_recipe`.
    digests
        Per slot of the tensor the block's digest; only those of the statistic's slots matter.
    """
    wanted = [digest if slot in statistic.slots else None for slot, digest in enumerate(digests)]
    key = key_of_statistic(recipe, statistic, key_recipe, block, digests)
    sources, _, _ = _assign(recipe, wanted, zeros=True)
    if statistic.deltas_only and not any(source is not None for source in sources[1:]):
        sources = (None,) * len(sources)
    return StatisticPlan(block=block, key=key, sources=sources)


def key_of_statistic(
    recipe: TensorRecipe, statistic: Statistic, key_recipe: bytes, block: int, digests: Sequence[bytes | None]
) -> bytes:
    """Return the key of a statistic of a block, which is all that those need who look for its numbers."""
    return statistic_key(
        key_recipe,
        [digests[slot] or ABSENT for slot in statistic.slots],
        recipe.merged_elements(block),
        recipe.start(block) if statistic.positional else None,
        statistic.block_settings(block),
    )


def _assign(
    recipe: TensorRecipe, digests: Sequence[bytes | None], *, zeros: bool
) -> tuple[tuple[int | None, ...], tuple[int, ...], tuple[int, ...]]:
    """Find equal content, and where ``zeros`` says so zero deltas. Equal is the same bytes in the same dtype."""
    slots = recipe.slots
    present = [digest for digest in digests if digest is not None]
    if len(set(present)) == len(present):  # nothing is equal: nearly always
        pairs = enumerate(zip(slots, digests, strict=True))
        return tuple([None if slot is None or digest is None else at for at, (slot, digest) in pairs]), (), ()
    seen: dict[tuple[str, bytes], int] = {}
    sources: list[int | None] = []
    zero: list[int] = []
    shared: list[int] = []
    for index, (slot, digest) in enumerate(zip(slots, digests, strict=True)):
        if slot is None or digest is None:
            sources.append(None)
            continue
        first = seen.setdefault((slot.info.dtype, digest), index)
        if first == 0 and index > 0 and zeros:
            zero.append(index)
            sources.append(None)
            continue
        if first != index:
            shared.append(index)
        sources.append(first)
    return tuple(sources), tuple(zero), tuple(shared)


def _copied(
    recipe: TensorRecipe,
    elements: int,
    sources: tuple[int | None, ...],
    merged: int,
    coded: Container[int],
    *,
    anchored: bool,
) -> int | None:
    """Return the slot whose bytes the block equals: by the operator's word, and in the same dtype and extent."""
    tensor = recipe.tensor
    if merged == 0:
        chosen: int | None = 0
    elif merged != elements:
        return None
    elif anchored and recipe.operator.rests_at_base(tensor.prepared) and not any(sources[1:]):
        chosen = 0  # every expert is left out, or equals the base
    else:
        present = tuple([source is not None for source in sources[1:]])
        index = recipe.operator.copied_input(tensor.prepared, present)
        chosen = None if index is None else index + 1
    source = None if chosen is None else sources[chosen]
    slot = None if source is None else recipe.slots[source]
    if slot is None or slot.lora is not None or slot.info.dtype != tensor.dtype or source in coded:
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
