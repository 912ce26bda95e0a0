"""Whether what a budget is said to have come to fits the plan that it is about: checked before it is believed.

It is kept in the catalog beside a checksum, which says that it is what was written, not that it is about this plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from mergepipe.graph.survey import is_surveyed
from mergepipe.plan.access import EXACT, OMITTED, TensorAccess
from mergepipe.plan.codes import coded_slots
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import BudgetOutcome, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVELS


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


def fits_numbers(plan: OutputPlan, outcome: BudgetOutcome) -> bool:
    """Return whether counts and errors are of experts and tensors of a plan, of a known kind, and none negative."""
    from mergepipe.plan.bounds import BoundKind  # numpy comes with it

    bound = outcome.bound
    names = {tensor.name for tensor in plan.tensors}
    numbers = [bound.absolute, bound.relative_to_update, bound.relative_to_base, *outcome.experts.values()]
    numbers += [outcome.block_bytes, outcome.omitted_blocks]
    numbers += [outcome.expected, outcome.uncertainty, outcome.omitted_mass]
    for name, loss in outcome.losses:
        numbers += [loss.tensor, loss.omitted_bytes, loss.bound, loss.expected, loss.omitted_mass]
        if name not in names or loss.tensor >= len(names):
            return False
    return (
        bound.kind in get_args(BoundKind)
        and outcome.experts.keys() == {expert.source for part in plan.parts for expert in part.experts}
        and not any(number is not None and number < 0 for number in numbers)
    )
