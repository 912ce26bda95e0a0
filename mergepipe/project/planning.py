"""The report of a plan: costs by expert, and estimates of time and memory."""

from __future__ import annotations

from mergepipe.digest import format_digest
from mergepipe.engine.limits import peak_memory
from mergepipe.plan.output import plan_digest
from mergepipe.plan.values import OutputPlan
from mergepipe.project.reports import EXACT, PlannedOutput


def planned_output(plan: OutputPlan, workers: int, memory: int | None, rate: float | None) -> PlannedOutput:
    """Return the report of one output's plan.

    Parameters
    ----------
    rate
        Bytes read and written per second in earlier builds, None before the first.
    """
    experts = dict.fromkeys((expert.source for part in plan.parts for expert in part.experts), 0)
    for tensor in plan.tensors:
        for expert, slot in zip(plan.parts[tensor.part].experts, tensor.experts, strict=True):
            if slot is not None:
                # What stands for an expert may be another's: of the checkpoint that an adapter applies to, for one.
                source = slot.source if slot.source in experts else expert.source
                experts[source] += plan.expert_cost(tensor, slot)[0]
    moved = plan.expert_bytes + plan.base_bytes + plan.layout.total_size
    return PlannedOutput(
        name=plan.output.name,
        path=plan.output.path if plan.output.publish else None,
        operator=plan.output.operator,
        digest=format_digest(plan_digest(plan)),
        tensors=len(plan.tensors),
        experts=experts,
        expert_bytes={"full": plan.expert_bytes, "planned": plan.expert_bytes},
        base_bytes=plan.base_bytes,
        blocks={"total": plan.blocks},
        expert_blocks={"total": plan.expert_blocks, "omitted": 0},
        bound=EXACT,
        seconds=round(moved / rate, 3) if rate else None,
        peak_memory_bytes=peak_memory(plan, workers, memory),
        output_bytes=sum(shard.size for shard in plan.layout.shards),
        shards=len(plan.layout.shards),
        decisions=plan.decisions,
        notes=plan.notes,
    )
