"""Which tensors a budget measures by samples (`stats = "sample"`), and which sources are then not read whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan


def with_sampling(plan: OutputPlan) -> OutputPlan:
    """Return a plan that says of each tensor whether its experts are measured by samples."""
    budget = plan.output.budget
    if budget is None or budget.stats != "sample" or not plan.is_pending:
        return plan
    return replace(
        plan,
        tensors=tuple(
            replace(tensor, sampled=_is_sampled(tensor, plan.sources, plan.geometry)) for tensor in plan.tensors
        ),
    )


def _is_sampled(tensor: TensorPlan, sources: Mapping[str, Checkpoint], geometry: Geometry) -> bool:
    """Return whether samples say enough of a tensor.

    They do not where the operator's reduction sees whole tensors: thresholds and coefficients are those of the full
    read. Tensors of other shapes or adapters are measured whole, too, and so is what outputs of the project give: their
    content is known without reading it.
    """
    slots = [slot for slot in tensor.slots if slot is not None]
    if tensor.decision is not Decision.MERGE or not any(tensor.experts) or tensor.base is None:
        return False
    if any(slot.lora is not None or slot.info.shape != tensor.shape for slot in slots):
        return False
    if any(sources[slot.source].is_planned for slot in slots):
        return False
    facts = tensor_facts(tensor, geometry)
    return facts.elements > 0 and not tensor.operator.reduces(tensor.prepared, facts)


def sampled_slots(tensor: TensorPlan) -> tuple[int, ...]:
    """Return the slots of a tensor of which blocks may be left unread: experts of a sampled one, never its base."""
    if not tensor.sampled:
        return ()
    return tuple(
        slot for slot, ref in enumerate(tensor.slots) if slot and ref is not None and tensor.is_expert(ref)
    )


def sampled_sources(plan: OutputPlan) -> tuple[str, ...]:
    """Return the sources that an output does not read whole: samples of all of their tensors stand for them."""
    if plan.output.budget is None or plan.output.budget.stats != "sample":
        return ()
    found: dict[str, None] = {}
    for tensor in plan.tensors:
        for slot in sampled_slots(tensor):
            ref = tensor.slots[slot]
            if ref is not None:
                found[ref.source] = None
    return tuple(found)


def whole_sources(plan: OutputPlan) -> tuple[str, ...]:
    """Return the sources that an output reads whole."""
    sampled = sampled_sources(plan)
    return tuple(source for source in plan.sources if source not in sampled)


def with_levels(tensor: TensorPlan) -> TensorPlan:
    """Return a tensor whose sampled experts say which of their blocks are read, once its access set is known."""
    if not tensor.sampled:
        return tensor
    sampled, access = sampled_slots(tensor), tensor.access
    experts = tuple(
        ref
        if ref is None or number + 1 not in sampled
        else replace(ref, levels=None if access is None else access.levels[number])
        for number, ref in enumerate(tensor.experts)
    )
    return replace(tensor, experts=experts)

