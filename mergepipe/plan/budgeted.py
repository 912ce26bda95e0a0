"""Budgeted plans: what the planner chose, put into the plans of tensors and outputs. Pure, like all of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mergepipe.errors import PlanError
from mergepipe.plan.access import EXACT, TensorAccess
from mergepipe.plan.sampling import with_levels
from mergepipe.plan.values import BudgetOutcome, Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.plan.budget import BudgetTensor, Order
    from mergepipe.plan.selection import Selection

_LOSSES = 10  # tensors named in reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """In which order the expert blocks of an output are read: made once, cut for as many budgets as are wanted.

    Attributes
    ----------
    plan
        The output's plan, not resolved.
    tensors
        The names of the tensors that the order is about.
    """

    plan: OutputPlan
    tensors: tuple[str, ...]
    order: Order

    @property
    def expert_bytes(self) -> int:
        """What a share is a share of: the experts' bytes of a full read without the adapters' factors."""
        return self.plan.expert_bytes - self.plan.adapter_bytes


def reading_of(plan: OutputPlan, survey: Mapping[str, BudgetTensor]) -> Reading:
    """Return the order for an output from its survey (`mergepipe.graph.survey`)."""
    from mergepipe.plan.budget import reading_order

    sampled = any(tensor.sampled for tensor in plan.tensors)
    return Reading(plan=plan, tensors=tuple(survey), order=reading_order(list(survey.values()), sampled=sampled))


def with_access(plan: OutputPlan, survey: Mapping[str, BudgetTensor]) -> OutputPlan:
    """Return the plan with the access set that its own budget buys."""
    budget = plan.output.budget
    assert budget is not None, "only an output with a budget has an access set to be chosen"
    reading = reading_of(plan, survey)
    return with_selection(reading, reading.order.cut(reading.order.count(budget, reading.expert_bytes)))


def with_selection(reading: Reading, selection: Selection) -> OutputPlan:
    """Return the plan with an access set that was cut from its order."""
    chosen = dict(zip(reading.tensors, map(_access, selection.access()), strict=True))
    return with_outcome(reading.plan, chosen, _outcome(reading, selection))


def with_outcome(
    plan: OutputPlan, accesses: Mapping[str, TensorAccess | None], outcome: BudgetOutcome
) -> OutputPlan:
    """Return a plan with the access sets of its tensors, by name; nothing is left out of those that are not there."""
    tensors = tuple(with_levels(replace(tensor, access=accesses.get(tensor.name))) for tensor in plan.tensors)
    resolved = replace(plan, tensors=tensors, outcome=outcome)
    base_bytes = sum(
        resolved.base_cost(tensor, slot) for tensor in tensors for slot in tensor.slots if slot is not None
    )
    return replace(resolved, base_bytes=base_bytes)


def without_outcome(plan: OutputPlan) -> OutputPlan:
    """Return a resolved plan as it was before its budget was."""
    tensors = tuple(with_levels(replace(tensor, access=None)) for tensor in plan.tensors)
    return replace(plan, outcome=None, tensors=tensors)


def _access(levels: Sequence[bytes | None]) -> TensorAccess | None:
    """Return the access of a tensor, None where nothing is left out."""
    access = TensorAccess(
        levels=tuple(None if level is None or level.count(EXACT) == len(level) else level for level in levels)
    )
    return None if access.is_full else access


def _outcome(reading: Reading, selection: Selection) -> BudgetOutcome:
    plan = reading.plan
    experts = dict.fromkeys((expert.source for part in plan.parts for expert in part.experts), 0)
    named = {tensor.name: tensor for tensor in plan.tensors}
    for name, counts in zip(reading.tensors, selection.slot_bytes(), strict=True):
        tensor = named[name]
        for expert, slot, count in zip(plan.parts[tensor.part].experts, tensor.experts, counts, strict=True):
            if slot is not None:
                source = slot.source if slot.source in experts else expert.source
                experts[source] += int(count)
    for tensor in plan.tensors:
        for slot in tensor.experts:
            if slot is not None and slot.lora is not None and slot.source in experts:
                experts[slot.source] += plan.factor_bytes(tensor, slot)
    return BudgetOutcome(
        block_bytes=selection.planned_bytes,
        omitted_blocks=selection.full_blocks - selection.blocks,
        bound=selection.bound,
        expected=selection.expected,
        uncertainty=selection.uncertainty,
        omitted_mass=selection.omitted_mass,
        experts=experts,
        losses=tuple((reading.tensors[loss.tensor], loss) for loss in selection.losses(_LOSSES)),
    )


def settled(plan: OutputPlan) -> OutputPlan:
    """Return the plan of a full read where a budget in bytes allows for one: nothing has to be measured for that."""
    budget = plan.output.budget
    limit = None if budget is None else budget.expert_reads
    if budget is None or budget.coarse or limit is None or limit < plan.expert_bytes - plan.adapter_bytes:
        return plan
    from mergepipe.plan.bounds import ErrorBound

    tensors = tuple(replace(tensor, base=_own_base(tensor), anchored=False) for tensor in plan.tensors)
    outcome = BudgetOutcome(
        block_bytes=plan.expert_bytes - plan.adapter_bytes,
        omitted_blocks=0,
        bound=ErrorBound(kind="exact", absolute=0.0, relative_to_update=0.0, relative_to_base=0.0),
        expected=0.0,
        omitted_mass=0.0,
        experts=expert_bytes(plan),
        losses=(),
        is_measured=False,
    )
    return replace(plan, tensors=tensors, outcome=outcome)


def _own_base(tensor: TensorPlan) -> InputRef | None:
    """Return the base as it is without a budget: not there where it only stands for what is left out."""
    return None if tensor.anchored and tensor.common_rows is None else tensor.base


def expert_bytes(plan: OutputPlan) -> dict[str, int]:
    """Return by expert the bytes of a full read."""
    experts = dict.fromkeys((expert.source for part in plan.parts for expert in part.experts), 0)
    for tensor in plan.tensors:
        for expert, slot in zip(plan.parts[tensor.part].experts, tensor.experts, strict=True):
            if slot is not None:
                # What stands for an expert may be another's: of the checkpoint that an adapter applies to, for one.
                source = slot.source if slot.source in experts else expert.source
                experts[source] += plan.expert_cost(tensor, slot)[0]
    return experts


def check_budget(plan: OutputPlan) -> PlanError | None:
    """Return what keeps an output from having a budget: tensors for whose blocks no base can stand in."""
    if not plan.output.is_budgeted:
        return None
    for tensor in plan.tensors:
        if tensor.decision is Decision.MERGE and _is_unanchored(tensor) and _reads_experts(tensor):
            return PlanError(
                f"output `{plan.output.name}` has a budget, and `{tensor.operator.signature.name}` reads"
                f" `{tensor.name}` whole: no base takes the place of what is left out",
                hint="remove the budget, or merge with an operator that has a base (`linear`, `task_arithmetic`, ...)",
                output=plan.output.name,
                tensor=tensor.name,
            )
    return None


def _reads_experts(tensor: TensorPlan) -> bool:
    slots: list[InputRef] = [slot for slot in tensor.experts if slot is not None]
    return any(tensor.is_expert(ref) for slot in slots for ref in slot.stored)


def _is_unanchored(tensor: TensorPlan) -> bool:
    return tensor.operator.ignores_base or tensor.base_source is None
