"""What a budget is planned from: norms of deltas, what each block costs to read, and how much each expert matters.

A survey takes statistics as a reduction does, and the reduction of the full read where there is one: whatever is left
out of a merge, its thresholds and coefficients are those of the full read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.digest import digest_at
from mergepipe.errors import OperatorError
from mergepipe.graph.blocks import TensorRecipe, plan_statistic
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.reductions import key_recipe, open_table, start_reduction
from mergepipe.operators.contract import Reduction, Statistic, StatisticValues
from mergepipe.operators.norms import GramOfInputs
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.operators.influence import Influence
    from mergepipe.plan.budget import BudgetTensor

    Array = np.ndarray[Any, Any]

Survey = Mapping[str, "BudgetTensor"]
"""By tensor name, in plan order, what a budget is planned from; tensors without experts are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the statistics of one tensor came to.

    Attributes
    ----------
    squares
        The squares of the norms of the deltas, float64 ``(experts, blocks)``.
    gram
        The inner products of base and deltas over the whole tensor, float64 ``(experts + 1, experts + 1)``.
    influence
        How much each expert matters.
    """

    squares: Array
    gram: Array
    influence: Influence


Measuring = Generator[Sequence[Statistic], StatisticValues, Measured]
"""Steps of a survey of one tensor: as those of a reduction."""


def is_surveyed(tensor: TensorPlan) -> bool:
    """Return whether a tensor is merged from any expert."""
    return tensor.decision is Decision.MERGE and any(slot is not None for slot in tensor.experts)


def start_survey(recipe: TensorRecipe) -> tuple[Measuring, tuple[Statistic, ...]]:
    """Begin the survey of a tensor: return its steps, and the statistics that it asks for first."""
    steps = _measuring(recipe)
    return steps, tuple(next(steps))


def _measuring(recipe: TensorRecipe) -> Measuring:
    tensor = recipe.tensor
    live = tuple(slot for slot, ref in enumerate(tensor.slots) if slot and ref is not None)
    statistic = GramOfInputs(slots=(0, *live))
    if not recipe.reduces:
        values = yield (statistic,)
        return _measured(recipe, values[statistic], live, None)
    steps, wanted = start_reduction(recipe)
    values = yield (statistic, *wanted)
    own = values[statistic]
    while True:
        try:
            wanted = tuple(steps.send(values))
        except StopIteration as stop:
            return _measured(recipe, own, live, stop.value)
        values = yield wanted


def _measured(
    recipe: TensorRecipe, values: Any, live: tuple[int, ...], reduction: Reduction | None
) -> Measured:
    import numpy as np

    from mergepipe.operators.norms import gram_blocks, scattered, squares, total_gram

    tensor, count = recipe.tensor, len(live) + 1
    packed = gram_blocks(values, count)
    found = np.zeros((len(tensor.experts), recipe.facts.blocks))
    found[[slot - 1 for slot in live]] = squares(packed, count)[1:]
    return Measured(
        squares=found,
        gram=scattered(total_gram(packed, count), (0, *live), len(tensor.slots)),
        influence=tensor.operator.influence(tensor.prepared, recipe.facts, reduction),
    )


def known_survey(plan: OutputPlan, index: SourceIndex, store: StatisticStore) -> Survey | None:
    """Return the survey of an output from what the cache knows alone; None if anything is missing."""
    found: dict[str, BudgetTensor] = {}
    for tensor in plan.tensors:
        if not is_surveyed(tensor):
            continue
        known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
        if any(packed is None and slot is not None for packed, slot in zip(known, tensor.slots, strict=True)):
            return None
        recipe = TensorRecipe.of(tensor, plan.geometry)
        measured = _known_tensor(recipe, known, store)
        if measured is None:
            return None
        found[tensor.name] = budget_tensor(recipe, known, measured)
    return found


def _known_tensor(recipe: TensorRecipe, known: Sequence[bytes | None], store: StatisticStore) -> Measured | None:
    steps, wanted = start_survey(recipe)
    while True:
        tables: dict[Statistic, StatisticTable] = {}
        for statistic in wanted:
            tables[statistic] = open_table(store, recipe, statistic)
            key = key_recipe(recipe, statistic)
            for block in range(recipe.facts.blocks):
                planned = plan_statistic(recipe, statistic, key, block, _digests(known, block))
                if not tables[statistic].holds(planned.key):
                    return None
                tables[statistic].enter(block, planned.key, None)
        try:
            wanted = tuple(steps.send(tables))
        except StopIteration as stop:
            measured: Measured = stop.value
            return measured
        except OperatorError:
            return None  # the build says it, with the name of the tensor


def _digests(known: Sequence[bytes | None], block: int) -> list[bytes | None]:
    return [digest_at(packed, block) for packed in known]


# --- costs --------------------------------------------------------------------------------------------------------


def budget_tensor(recipe: TensorRecipe, known: Sequence[bytes | None], measured: Measured) -> BudgetTensor:
    """Return what a budget is planned from for one tensor.

    Parameters
    ----------
    known
        Per slot the packed block digests; those of all inputs.
    """
    import numpy as np

    from mergepipe.plan.bounds import update_norm
    from mergepipe.plan.budget import BudgetTensor

    tensor, blocks = recipe.tensor, recipe.facts.blocks
    costs = np.zeros((len(tensor.experts), blocks), np.int64)
    same = np.repeat(np.arange(len(tensor.experts))[:, None], blocks, axis=1)
    priced = [(expert, ref) for expert, ref in enumerate(tensor.experts) if ref is not None and _read_ref(tensor, ref)]
    for block in range(blocks):
        digests = _digests(known, block)
        seen: dict[tuple[str, bytes], int] = {}
        if tensor.base is not None and digests[0] is not None:
            seen[tensor.base.info.dtype, digests[0]] = -1
        for expert, ref in priced:
            digest, stored = digests[expert + 1], _read_ref(tensor, ref)
            if digest is None or stored is None:
                continue  # there is no such block
            first = seen.setdefault((ref.info.dtype, digest), expert) if ref.lora is None else expert
            if first < 0:
                continue  # a zero delta
            costs[expert, block] = _block_bytes(stored, block, recipe)
            same[expert, block] = first
    with np.errstate(all="ignore"):
        norms = np.sqrt(measured.squares)
        base = float(np.sqrt(measured.gram[0, 0]))
    norms[np.isnan(norms)] = np.inf  # infinities and NaN, which `non_finite` allows, are read first
    gram = measured.gram
    update = None
    if measured.influence.combination is not None and np.isfinite(gram).all():
        update = update_norm(measured.influence.combination, gram)
    return BudgetTensor(
        norms=norms,
        costs=costs,
        influence=measured.influence,
        same=same,
        update=update,
        base=base if np.isfinite(base) else None,
    )


def _read_ref(tensor: TensorPlan, ref: InputRef) -> InputRef | None:
    """Return the stored tensor whose blocks are read for an expert and paid for; None where that is nothing.

    The factors of an adapter are free; what its deltas are added to is not, where that is an expert.
    """
    stored = ref if ref.lora is None else ref.lora.on
    return stored if stored is not None and tensor.is_expert(stored) else None


def _block_bytes(ref: InputRef, block: int, recipe: TensorRecipe) -> int:
    grid = ref.grid(recipe.geometry)
    if block >= grid.count:
        return 0
    start, stop = grid.byte_range(block)
    return stop - start
