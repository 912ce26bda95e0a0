"""Reductions of one tensor as far as the cache knows them: which statistics are there, and what they come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.digest import digest_at, record_digest
from mergepipe.graph.blocks import StatisticPlan, TensorRecipe, plan_statistic
from mergepipe.graph.keys import statistic_recipe
from mergepipe.operators.contract import Reducing, Reduction, Statistic
from mergepipe.plan.values import TensorPlan
from mergepipe.values import dataclass


def start_reduction(recipe: TensorRecipe) -> tuple[Reducing, tuple[Statistic, ...]]:
    """Begin a tensor's reduction: return its steps, and the statistics that it asks for first."""
    tensor = recipe.tensor
    steps = tensor.operator.reduce(tensor.prepared, recipe.facts, used_slots(tensor))
    return steps, tuple(next(steps))


def used_slots(tensor: TensorPlan) -> list[bool]:
    """Return which slots are inputs of the formula; a base that only stands for something else is none."""
    return [tensor.base is not None and tensor.uses_base, *(slot is not None for slot in tensor.experts)]


def most_rounds(recipe: TensorRecipe) -> int | None:
    """Return how often a tensor's reduction asks for statistics at most; None where that is not known.

    What a custom operator inherits is said of another `reduce` than its own.
    """
    operator = recipe.operator
    classes = type(operator).__mro__
    told, made = (next(n for n, one in enumerate(classes) if name in vars(one)) for name in ("rounds", "reduce"))
    found = None if told > made else operator.rounds(recipe.tensor.prepared, recipe.facts)
    return found if found is None or found > 0 else None


def key_recipe(recipe: TensorRecipe, statistic: Statistic) -> bytes:
    """Return the part of a statistic's key that does not depend on content."""
    return statistic_recipe(statistic, recipe.tensor, recipe.facts.row_elements if statistic.rowwise else 0)


def open_table(store: StatisticStore, recipe: TensorRecipe, statistic: Statistic) -> StatisticTable:
    """Return the table of a statistic of a tensor; it is looked for under the names of the source tensors."""
    refs = [recipe.tensor.slots[slot] for slot in statistic.slots]
    place = record_digest("place", [ref.info.name if ref else "" for ref in refs])
    owner = record_digest("owner", [ref.source if ref else "" for ref in refs])
    return store.table(key_recipe(recipe, statistic), place, owner, recipe.facts.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStatistic:
    """A statistic of one block that a reduction asks for, and whether its numbers are known."""

    number: int
    statistic: Statistic
    plan: StatisticPlan
    known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownReduction:
    """What is known of a tensor's reduction.

    Attributes
    ----------
    statistics
        Of every pass that can be foreseen, block by block.
    reduction
        None if numbers are missing.
    rounds
        How often it asked for statistics; where numbers are missing, it is in the last of these rounds.
    """

    statistics: tuple[KnownStatistic, ...]
    reduction: Reduction | None
    rounds: int


def known_reduction(recipe: TensorRecipe, known: Sequence[bytes | None], store: StatisticStore) -> KnownReduction:
    """Go through a tensor's reduction as far as the cache knows its numbers.

    Parameters
    ----------
    known
        Per slot the packed block digests; all slots that are inputs must be known.
    """
    steps, wanted = start_reduction(recipe)
    found: list[KnownStatistic] = []
    number = rounds = 0
    while True:
        rounds += 1
        tables: dict[Statistic, StatisticTable] = {}
        for statistic in wanted:
            tables[statistic] = open_table(store, recipe, statistic)
            found += _blocks(recipe, number, statistic, known, tables[statistic])
            number += 1
        if not all(table.complete for table in tables.values()):
            return KnownReduction(statistics=tuple(found), reduction=None, rounds=rounds)
        try:
            wanted = tuple(steps.send(tables))
        except StopIteration as stop:
            return KnownReduction(statistics=tuple(found), reduction=stop.value, rounds=rounds)


def _blocks(
    recipe: TensorRecipe, number: int, statistic: Statistic, known: Sequence[bytes | None], table: StatisticTable
) -> Iterator[KnownStatistic]:
    key = key_recipe(recipe, statistic)
    for block in range(recipe.facts.blocks):
        digests = [digest_at(packed, block) for packed in known]
        plan = plan_statistic(recipe, statistic, key, block, digests)
        held = table.holds(plan.key)
        if held:
            table.enter(block, plan.key, None)
        yield KnownStatistic(number=number, statistic=statistic, plan=plan, known=held)
