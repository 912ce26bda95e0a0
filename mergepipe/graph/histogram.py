"""How precisely the blocks of experts are read: counted by level, as they are planned, with the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergepipe.cache.progressive import CodePrices
from mergepipe.errors import CacheError
from mergepipe.graph.alike import alike_blocks, blocks_bytes
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.inputs import slot_blocks
from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.codes import Coded, read_codes
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.cache.sources import SourceIndex

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCount:
    """Blocks of experts at one level, and the bytes that are read of them."""

    blocks: int
    bytes: int


Histogram = Mapping[int, LevelCount]
"""By level, lowest first: `OMITTED`, the number of planes, `EXACT`. Levels at which nothing is are not there."""


def added(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms."""
    found: dict[int, tuple[int, int]] = {}
    for histogram in histograms:
        for level, count in histogram.items():
            blocks, size = found.get(level, (0, 0))
            found[level] = blocks + count.blocks, size + count.bytes
    return {level: LevelCount(blocks=found[level][0], bytes=found[level][1]) for level in sorted(found)}


def tensor_histograms(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> tuple[Histogram, ...]:
    """Return per expert of a tensor how precisely its blocks are read; all content that is read must be known.

    Blocks that equal the base's or an earlier input's are not counted: nothing is read for them. Nor are the factors of
    adapters, which are read whole.

    Raises
    ------
    CacheError
        If the catalog has lost what a code comes to.
    """
    if tensor.decision is not Decision.MERGE:
        return tuple({} for _ in tensor.experts)
    recipe = TensorRecipe.of(tensor, plan.geometry)
    known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    codes = {slot: _cumulated(coded_prices(coded, index)) for slot, coded in read_codes(plan, tensor).items()}
    found: list[list[Histogram]] = [[] for _ in tensor.slots]
    for alike in alike_blocks(recipe, known):
        count = len(alike.blocks)
        for slot in alike.plan.omitted:
            found[slot].append({OMITTED: LevelCount(blocks=count, bytes=0)})
        for slot, level in alike.plan.decodes:
            size = int(codes[slot][level - 1][list(alike.blocks)].sum())
            found[slot].append({level: LevelCount(blocks=count, bytes=size)})
        for slot in _exact_experts(recipe, alike.plan.block, alike.plan.reads):
            found[slot].append({EXACT: LevelCount(blocks=count, bytes=_stored_bytes(recipe, slot, alike.blocks))})
    return tuple(added(histograms) for histograms in found[1:])


def coded_prices(coded: Coded, index: SourceIndex) -> CodePrices:
    """Return what the levels of a delta come to that a resolved plan reads.

    Raises
    ------
    CacheError
        If the catalog has lost it.
    """
    base, expert = (index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert))
    given = index.given.code(coded.expert.source, coded.expert.info)
    if given is not None:
        sizes, residuals = given.header.prices()
        return CodePrices(sizes=sizes, residuals=residuals, header=given.header.seal)
    codes = index.codes
    key = None if base is None or expert is None else codes.key(base, expert)
    found = None if key is None else codes.prices(key) or codes.adopt(key)
    if found is None:
        raise CacheError(
            f"what the progressive code of `{coded.expert.info.name}` of source `{coded.expert.source}` comes to was"
            " lost from the catalog",
            hint="check the cache with `mergepipe cache verify`, or remove it: it is filled again",
            source=coded.expert.source,
            tensor=coded.expert.info.name,
        )
    return found


def _cumulated(prices: CodePrices) -> Array:
    """Return the bytes of each level of each block."""
    import numpy as np

    return np.cumsum(prices.sizes, axis=0)


def _exact_experts(recipe: TensorRecipe, block: int, reads: Sequence[int]) -> Sequence[int]:
    """Return the slots among these that are blocks of experts and paid for."""
    tensor = recipe.tensor
    if not recipe.merged_rows(block):
        return ()
    return [
        slot
        for slot in reads
        if slot and (ref := tensor.slots[slot]) is not None and any(tensor.is_expert(part) for part in ref.stored)
    ]


def _stored_bytes(recipe: TensorRecipe, slot: int, blocks: Sequence[int]) -> int:
    """Return the bytes of blocks of an expert; of what an adapter applies to where that is an expert's."""
    tensor, ref = recipe.tensor, recipe.tensor.slots[slot]
    stored = ref if ref is None or ref.lora is None else ref.lora.on
    if stored is None or not tensor.is_expert(stored):
        return 0
    grid = stored.grid(recipe.geometry)
    return blocks_bytes(grid, [block for block in blocks if block < grid.count])
