"""How precisely the blocks of experts are read: counted by level, as they are planned, with the bytes that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mergepipe.cache.progressive import CodePrices
from mergepipe.errors import CacheError
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.prices import block_costs, code_key, first_equal
from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.codes import Coded, read_codes
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.cache.sources import SourceIndex

    Array = np.ndarray[Any, Any]

_CELLS = 256  # a level is a byte


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
    counted = first_equal(recipe, known) == np.arange(len(tensor.experts))[:, None]
    sizes, codes = block_costs(recipe), read_codes(plan, tensor)
    prices = coded_prices(codes, index)
    levels = np.full(counted.shape, EXACT, np.uint8)
    for number, ref in enumerate(tensor.experts):
        if ref is None or not any(map(tensor.is_expert, ref.stored)):
            counted[number] = False
            continue
        row = _levels(recipe, number, ref)
        levels[number, : len(row)], counted[number, len(row) :] = row, False
        if number + 1 in codes:
            at = np.flatnonzero((row != OMITTED) & (row != EXACT))
            stages = np.cumsum(prices[number + 1].sizes, axis=0)
            sizes[number, at] = stages[row[at] - 1, at]
    sizes[levels == OMITTED] = 0
    return _counts(levels, counted | (levels == OMITTED), sizes)


def _levels(recipe: TensorRecipe, expert: int, ref: InputRef) -> Array:
    """Return the level of each merged block that an expert has, uint8."""
    import numpy as np

    access, count = recipe.tensor.access, min(recipe.facts.blocks, ref.grid(recipe.geometry).count)
    row = access.levels[expert] if access is not None else None
    return np.full(count, EXACT, np.uint8) if row is None else np.frombuffer(row, np.uint8)[:count]


def _counts(levels: Array, counted: Array, sizes: Array) -> tuple[Histogram, ...]:
    """Return the histogram of each expert.

    Parameters
    ----------
    levels, counted, sizes
        Of each block its level, whether it counts, and what reading it takes; ``(experts, blocks)``.
    """
    import numpy as np

    cells = (np.arange(len(levels))[:, None] * _CELLS + levels)[counted]
    size = len(levels) * _CELLS
    blocks = np.bincount(cells, minlength=size).reshape(-1, _CELLS)
    # Sums of whole numbers below 2^53, which float64 has exactly.
    read = np.bincount(cells, weights=sizes[counted], minlength=size).reshape(-1, _CELLS)
    found: tuple[dict[int, LevelCount], ...] = tuple({} for _ in levels)
    for expert, level in np.argwhere(blocks).tolist():
        found[expert][level] = LevelCount(blocks=int(blocks[expert, level]), bytes=int(read[expert, level]))
    return found


def coded_prices(deltas: Mapping[int, Coded], index: SourceIndex) -> dict[int, CodePrices]:
    """Return by slot what the levels of the deltas come to that a resolved plan reads of a tensor.

    Raises
    ------
    CacheError
        If the catalog has lost that of one.
    """
    codes, found = index.codes, {}
    keys = {slot: code_key(coded, index, codes) for slot, coded in deltas.items()}
    known = codes.all_prices([key for key in keys.values() if key is not None])
    for slot, coded in deltas.items():
        given, key = index.given.code(coded.expert.source, coded.expert.info), keys[slot]
        if given is not None:
            sizes, residuals = given.header.prices()
            found[slot] = CodePrices(sizes=sizes, residuals=residuals, header=given.header.seal)
            continue
        prices = None if key is None else known.get(key) or codes.adopt(key)
        if prices is None:
            raise _lost(coded)
        found[slot] = prices
    return found


def _lost(coded: Coded) -> CacheError:
    return CacheError(
        f"what the progressive code of `{coded.expert.info.name}` of source `{coded.expert.source}` comes to was lost"
        " from the catalog",
        hint="check the cache with `mergepipe cache verify`, or remove it: it is filled again",
        source=coded.expert.source,
        tensor=coded.expert.info.name,
    )
