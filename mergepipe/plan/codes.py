"""Which deltas may be read from a progressive code instead of their source's blocks. Pure, like all of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.plan.access import is_coded
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.progressive.levels import MIN_ELEMENTS
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A delta that has a code: the slot of an expert, its stored tensor, and the base's that it is coded against."""

    slot: int
    expert: InputRef
    base: InputRef


def coded_slots(plan: OutputPlan, tensor: TensorPlan) -> tuple[Coded, ...]:
    """Return the deltas of a tensor that a budget may read as approximations; none without such a budget.

    Those that lie there as tensors of the shape of the base's: adapters are small, and rows that only some sources have
    are no delta. Tensors of less than `MIN_ELEMENTS` (or a block, where blocks are smaller) are read exactly: a code
    has a header.
    """
    budget = plan.output.budget
    if budget is None or not budget.uses_levels:
        return ()
    return tuple(
        Coded(slot=slot, expert=ref, base=tensor.base)
        for slot, ref in enumerate(tensor.slots)
        if slot and ref is not None and tensor.base is not None and may_be_coded(tensor, ref, plan.geometry)
    )


def may_be_coded(tensor: TensorPlan, ref: InputRef, geometry: Geometry) -> bool:
    """Return whether an expert's tensor can have a code."""
    base = tensor.base
    if tensor.decision is not Decision.MERGE or base is None or tensor.common_rows is not None:
        return False
    if not tensor.is_expert(ref) or any(one.lora is not None or one.levels is not None for one in (base, ref)):
        return False
    if any(one.info.shape != tensor.shape for one in (base, ref)):
        return False
    return tensor_facts(tensor, geometry).elements >= min(MIN_ELEMENTS, geometry.block_elements)


def read_codes(plan: OutputPlan, tensor: TensorPlan) -> Mapping[int, Coded]:
    """Return by slot the deltas that a resolved plan reads approximations of."""
    if tensor.access is None or tensor.base is None:
        return {}
    return {
        slot: Coded(slot=slot, expert=ref, base=tensor.base)
        for slot, ref in enumerate(tensor.slots)
        if slot and ref is not None and is_coded(tensor.access.levels[slot - 1])
    }
