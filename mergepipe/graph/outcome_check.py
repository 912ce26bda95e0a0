"""Whether what a budget is said to have come to fits the plan that it is about: checked before it is believed.

It is kept in the catalog, beside a checksum that anybody can make. Which blocks are worth reading is found by planning
alone; but that the levels are levels of these tensors, and that the bytes are those of these levels, follows from the
plan and the content of the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from mergepipe.cache.sources import SourceIndex
from mergepipe.errors import CacheError
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.histogram import coded_prices
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.prices import are_coded, ask_for_prices, block_costs, first_equal
from mergepipe.graph.survey import is_surveyed
from mergepipe.plan.access import EXACT, OMITTED, TensorAccess
from mergepipe.plan.codes import coded_slots, read_codes
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import BudgetOutcome, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVELS

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def fits_tensors(plan: OutputPlan, accesses: Mapping[str, TensorAccess]) -> bool:
    """Return whether access sets, by tensor name, are some of tensors that a plan merges, in levels that there are."""
    tensors = {tensor.name: tensor for tensor in plan.tensors if is_surveyed(tensor)}
    return all(name in tensors and _fits(plan, tensors[name], access) for name, access in accesses.items())


def _fits(plan: OutputPlan, tensor: TensorPlan, access: TensorAccess) -> bool:
    if len(access.levels) != len(tensor.experts) or access.is_full:
        return False
    blocks = tensor_facts(tensor, plan.geometry).blocks
    coded = {one.slot for one in coded_slots(plan, tensor)}
    for slot, (ref, levels) in enumerate(zip(tensor.experts, access.levels, strict=True), 1):
        if levels is None:
            continue
        found = set(levels) - {OMITTED, EXACT}
        if ref is None or len(levels) != blocks or levels.count(EXACT) == blocks:
            return False
        if found and (slot not in coded or max(found) > LEVELS):
            return False
    return True


def fits_content(plan: OutputPlan, index: SourceIndex) -> bool:
    """Return whether the counts of a resolved plan are those of its levels; all content must be known.

    False also where it is not known any more what codes come to that it reads: they are made again.
    """
    outcome = plan.outcome
    assert outcome is not None, "only a resolved plan has counts"
    deltas = [one for tensor in plan.tensors for one in read_codes(plan, tensor).values()]
    if not are_coded(deltas, index.codes, index):
        return False
    ask_for_prices(deltas, index.codes, index)
    experts = dict.fromkeys((expert.source for part in plan.parts for expert in part.experts), 0)
    read = omitted = 0
    try:
        for tensor in filter(is_surveyed, plan.tensors):
            counts, left_out = _tensor_counts(plan, tensor, index)
            omitted += left_out
            for expert, ref, count in zip(plan.parts[tensor.part].experts, tensor.experts, counts, strict=True):
                read += count
                if ref is not None:
                    experts[ref.source if ref.source in experts else expert.source] += count
    except (CacheError, _DoesNotFitError):
        return False
    for tensor in plan.tensors:
        for ref in tensor.experts:
            if ref is not None and ref.lora is not None and ref.source in experts:
                experts[ref.source] += plan.factor_bytes(tensor, ref)
    return (read, omitted, experts) == (outcome.block_bytes, outcome.omitted_blocks, outcome.experts)


class _DoesNotFitError(Exception):
    """Levels that the content does not have."""


def _tensor_counts(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> tuple[list[int], int]:
    """Return the bytes that are read of each expert of a tensor, each content once, and how many blocks are left out.

    Raises
    ------
    _DoesNotFitError
        If blocks of one content have several levels, or what costs nothing is left out.
    """
    import numpy as np

    recipe = TensorRecipe.of(tensor, plan.geometry)
    costs, own = block_costs(recipe), np.arange(len(tensor.experts))[:, None]
    first = np.broadcast_to(own, costs.shape)
    if not tensor.sampled:  # whether a block is the same as another was not known then
        first = first_equal(recipe, [slot_blocks(slot, index) if slot else None for slot in tensor.slots])
        costs[first < 0] = 0
        first = np.where(first < 0, own, first)
    levels = _levels(tensor, recipe.facts.blocks)
    read = np.where(levels == EXACT, costs, 0)
    for slot, coded in read_codes(plan, tensor).items():
        row = levels[slot - 1]
        at = np.flatnonzero((row != OMITTED) & (row != EXACT))
        read[slot - 1, at] = np.cumsum(coded_prices(coded, index).sizes, axis=0)[row[at] - 1, at]
    alone = first == own
    if (levels != np.take_along_axis(levels, first, axis=0)).any() or (levels[alone & (costs == 0)] != EXACT).any():
        raise _DoesNotFitError
    counts: list[int] = np.add.reduce(np.where(alone, read, 0), axis=1).tolist()
    return counts, int(np.count_nonzero((costs > 0) & (levels == OMITTED)))


def _levels(tensor: TensorPlan, blocks: int) -> Array:
    """Return the level of each merged block of each expert, uint8 ``(experts, blocks)``."""
    import numpy as np

    levels = np.full((len(tensor.experts), blocks), EXACT, np.uint8)
    for expert, row in enumerate(tensor.access.levels if tensor.access is not None else ()):
        if row is not None:
            levels[expert] = np.frombuffer(row, np.uint8)
    return levels


def fits_numbers(plan: OutputPlan, outcome: BudgetOutcome) -> bool:
    """Return whether what is said of errors is of a kind that there is and of tensors of a plan, and never negative."""
    from mergepipe.plan.bounds import BoundKind  # numpy comes with it

    bound = outcome.bound
    names = {tensor.name for tensor in plan.tensors}
    numbers = [bound.absolute, bound.relative_to_update, bound.relative_to_base]
    numbers += [outcome.expected, outcome.uncertainty, outcome.omitted_mass]
    for name, loss in outcome.losses:
        numbers += [loss.tensor, loss.omitted_bytes, loss.bound, loss.expected, loss.omitted_mass]
        if name not in names or loss.tensor >= len(names):
            return False
    return bound.kind in get_args(BoundKind) and not any(number is not None and number < 0 for number in numbers)
