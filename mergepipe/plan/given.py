"""What an output may do with an expert that is there as codes of its deltas alone. Pure, like all of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from mergepipe.errors import MergepipeError, PlanError
from mergepipe.plan.codes import may_be_coded
from mergepipe.plan.facts import tensor_facts
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan

WORKING = ("linear", "task_arithmetic", "dare_linear", "nearswap", "ram")
"""The operators that merge from codes alone: they need no numbers of whole tensors, and have a base."""


def given_errors(plan: OutputPlan) -> list[MergepipeError]:
    """Return what needs more of progressive checkpoints than they hold: an error for each of them and reason."""
    found: dict[tuple[str, str], PlanError] = {}
    for tensor in plan.tensors:
        for slot, ref in enumerate(tensor.slots):
            if ref is not None and ref.coded_only:
                for reason, hint in _reasons(plan, tensor, slot, ref):
                    found.setdefault((ref.source, reason), _error(plan, tensor, ref, reason, hint))
    for source, checkpoint in plan.sources.items():
        value = checkpoint.standalone
        if value is not None and value.block_elements != plan.geometry.block_elements:
            blocks = f"{value.block_elements:,} elements, and here they have {plan.geometry.block_elements:,}"
            reason = f"it has blocks of {blocks}"
            hint = "pack it again with this version of mergepipe"
            what = f"output `{plan.output.name}` cannot use the progressive checkpoint `{source}`: {reason}"
            found[source, "blocks"] = PlanError(what, hint=hint, output=plan.output.name, source=source)
    return list(found.values())


def _reasons(plan: OutputPlan, tensor: TensorPlan, slot: int, ref: InputRef) -> Iterator[tuple[str, str]]:
    budget = plan.output.budget
    name = tensor.operator.signature.name
    hint = f"operators that work: {', '.join(f'`{one}`' for one in WORKING)}"
    if tensor.operator.ignores_base or tensor.base_source is None:
        yield f"`{name}` without a base needs whole tensors, which are not there", hint
    elif slot == 0 or not tensor.is_expert(ref):
        yield "it is no base", "give the checkpoint that it was packed against"
    elif budget is None or not budget.uses_levels:
        yield "it is read in levels alone", 'give the output a budget with `precision = "levels"`'
    elif tensor.decision is Decision.EQUAL:
        yield "a tensor that is copied must lie there exactly", "pack it again with this version of mergepipe"
    elif tensor.operator.reduces(tensor.prepared, tensor_facts(tensor, plan.geometry)):
        yield f"`{name}` needs numbers of whole deltas, which are not there", hint
    elif not may_be_coded(tensor, ref, plan.geometry):
        reason = "a delta against the base's tensor is all that it has, and the shapes of that and of the output differ"
        yield reason, "use the whole expert"


def _error(plan: OutputPlan, tensor: TensorPlan, ref: InputRef, reason: str, hint: str) -> PlanError:
    return PlanError(
        f"output `{plan.output.name}` cannot merge `{tensor.name}` from the progressive checkpoint `{ref.source}`:"
        f" {reason}",
        hint=hint,
        output=plan.output.name,
        source=ref.source,
        tensor=tensor.name,
    )
