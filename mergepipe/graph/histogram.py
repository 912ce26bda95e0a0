"""How precisely the blocks of experts are read: counted by level, as they are planned, with the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergepipe.cache.progressive import CodePrices
from mergepipe.errors import CacheError
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.prices import block_costs, first_equal
from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.codes import Coded, read_codes
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan

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
    import numpy as np

    recipe = TensorRecipe.of(tensor, plan.geometry)
    if tensor.decision is not Decision.MERGE or not recipe.facts.blocks:
        return tuple({} for _ in tensor.experts)
    known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    own = first_equal(recipe, known) == np.arange(len(tensor.experts))[:, None]
    costs, codes = block_costs(recipe), read_codes(plan, tensor)
    return tuple(
        {}
        if ref is None or not any(map(tensor.is_expert, ref.stored))
        else _histogram(
            _levels(recipe, number, ref),
            own[number],
            costs[number],
            coded_prices(codes[number + 1], index) if number + 1 in codes else None,
        )
        for number, ref in enumerate(tensor.experts)
    )


def _levels(recipe: TensorRecipe, expert: int, ref: InputRef) -> Array:
    """Return the level of each merged block that an expert has, uint8."""
    import numpy as np

    access, count = recipe.tensor.access, min(recipe.facts.blocks, ref.grid(recipe.geometry).count)
    row = access.levels[expert] if access is not None else None
    return np.full(count, EXACT, np.uint8) if row is None else np.frombuffer(row, np.uint8)[:count]


def _histogram(levels: Array, own: Array, costs: Array, prices: CodePrices | None) -> Histogram:
    """Return the histogram of one expert, of blocks that are left out or that have content of their own.

    Parameters
    ----------
    levels
        Per block that the expert has.
    own, costs
        Per merged block whether its content is its own, and what the exact one takes.
    """
    import numpy as np

    count = len(levels)
    at = np.flatnonzero(own[:count] | (levels == OMITTED))
    counted, sizes = levels[at], costs[at]
    if prices is not None:
        coded = np.flatnonzero((counted != OMITTED) & (counted != EXACT))
        stages = np.cumsum(prices.sizes[:, at[coded]], axis=0)
        sizes[coded] = stages[counted[coded] - 1, np.arange(len(coded))]
    sizes[counted == OMITTED] = 0
    blocks = np.bincount(counted)
    found = {}
    for level in np.flatnonzero(blocks).tolist():
        size = int(sizes[counted == level].sum())
        found[level] = LevelCount(blocks=int(blocks[level]), bytes=size)
    return found


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
