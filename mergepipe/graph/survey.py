"""What a budget is planned from: norms of deltas, what each block costs to read, and how much each expert matters.

A survey takes statistics as a reduction does, and the reduction of the full read where there is one: whatever is left
out of a merge, its thresholds and coefficients are those of the full read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.digest import digest_at
from mergepipe.errors import OperatorError
from mergepipe.graph.blocks import TensorRecipe, key_of_statistic
from mergepipe.graph.given import given_squares
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.prices import (
    UnknownCodeError,
    block_costs,
    compared_slots,
    first_equal,
    level_prices,
    whole_tensor,
)
from mergepipe.graph.reductions import key_recipe, open_table, start_reduction
from mergepipe.graph.samples import estimated_tensor, known_estimates
from mergepipe.operators.contract import Reduction, Statistic, StatisticValues
from mergepipe.operators.norms import GramOfInputs
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.cache.progressive import CodeStore
    from mergepipe.operators.influence import Influence
    from mergepipe.plan.budget import BudgetTensor
    from mergepipe.plan.hull import LevelPrices

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
    live = compared_slots(recipe.tensor)
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
        influence=_influence(recipe, reduction),
    )


def _share_codes(prices: LevelPrices, same: Array) -> None:
    """Take codes from blocks whose content another expert has that has no code: what is shared has one level.

    Such an expert has more rows than the base, say, and the same ones as far as the base has any.
    """
    import numpy as np

    experts, blocks = np.nonzero((same != np.arange(len(same))[:, None]) & (prices.sizes[-1] == 0))
    prices.sizes[:, same[experts, blocks], blocks] = 0


def _influence(recipe: TensorRecipe, reduction: Reduction | None) -> Influence:
    """Return how deltas move a tensor. What a custom operator inherits is said of another `apply` than its own."""
    operator = recipe.operator
    found = operator.influence(recipe.tensor.prepared, recipe.facts, reduction)
    classes = type(operator).__mro__
    told, made = (next(n for n, one in enumerate(classes) if name in vars(one)) for name in ("influence", "apply"))
    return replace(found, linear=False) if operator.code and told > made else found


def known_survey(plan: OutputPlan, index: SourceIndex, store: StatisticStore, codes: CodeStore) -> Survey | None:
    """Return the survey of an output from what the cache knows alone; None if anything is missing."""
    found: dict[str, BudgetTensor] = {}
    for tensor in plan.tensors:
        if not is_surveyed(tensor):
            continue
        recipe = TensorRecipe.of(tensor, plan.geometry)
        if tensor.sampled:
            estimates = known_estimates(recipe, index, store)
            if estimates is None:
                return None
            found[tensor.name] = estimated_tensor(recipe, estimates)
            continue
        given = given_squares(tensor, index)
        known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
        if any(packed is None and slot is not None for packed, slot in zip(known, tensor.slots, strict=True)):
            return None
        measured = _known_tensor(recipe, known, store)
        if measured is None:
            return None
        try:
            prices = level_prices(plan, recipe, index, codes)
        except UnknownCodeError:
            return None
        found[tensor.name] = budget_tensor(recipe, known, measured, prices, given)
    return found


def _known_tensor(recipe: TensorRecipe, known: Sequence[bytes | None], store: StatisticStore) -> Measured | None:
    steps, wanted = start_survey(recipe)
    while True:
        tables: dict[Statistic, StatisticTable] = {}
        for statistic in wanted:
            tables[statistic] = open_table(store, recipe, statistic)
            key = key_recipe(recipe, statistic)
            for block in range(recipe.facts.blocks):
                found = key_of_statistic(recipe, statistic, key, block, _digests(known, block))
                if not tables[statistic].holds(found):
                    return None
                tables[statistic].enter(block, found, None)
        try:
            wanted = tuple(steps.send(tables))
        except StopIteration as stop:
            measured: Measured = stop.value
            return measured
        except OperatorError:
            return None  # the build says it, with the name of the tensor


def _digests(known: Sequence[bytes | None], block: int) -> list[bytes | None]:
    return [digest_at(packed, block) for packed in known]


def budget_tensor(
    recipe: TensorRecipe,
    known: Sequence[bytes | None],
    measured: Measured,
    prices: LevelPrices | None = None,
    given: Mapping[int, Array] | None = None,
) -> BudgetTensor:
    """Return what a budget is planned from for one tensor.

    Parameters
    ----------
    known
        Per slot the packed block digests; those of all inputs.
    prices
        What the levels between nothing and the exact block come to.
    given
        By expert that is there as a code alone, the squares of the norms of its delta (`given_squares`).
    """
    import numpy as np

    costs = block_costs(recipe)
    first = first_equal(recipe, known)
    costs[first < 0] = 0  # zero deltas
    same = np.where(first < 0, np.arange(len(first))[:, None], first)
    if prices is not None:
        _share_codes(prices, same)
    squares, exact = measured.squares, None
    if given:
        squares, exact = squares.copy(), np.ones(len(squares), np.bool_)
        for expert, values in given.items():
            squares[expert], exact[expert] = values, False
    return whole_tensor(
        recipe, squares, measured.gram, measured.influence, costs=costs, same=same, prices=prices, exact=exact
    )
