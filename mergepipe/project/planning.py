"""The report of a plan: costs by expert, and estimates of time and memory."""

from __future__ import annotations

from mergepipe.digest import format_digest
from mergepipe.engine.limits import peak_memory
from mergepipe.engine.meter import Meter
from mergepipe.lockfile.assemble import finite
from mergepipe.plan.budgeted import expert_bytes
from mergepipe.plan.output import plan_digest
from mergepipe.plan.values import OutputPlan
from mergepipe.project.budgets import PENDING
from mergepipe.project.reports import Loss, PlannedOutput, bound_of


def planned_output(
    plan: OutputPlan, workers: int, memory: int | None, rate: float | None, measured: Meter | None = None
) -> PlannedOutput:
    """Return the report of one output's plan.

    Parameters
    ----------
    rate
        Bytes read and written per second in earlier builds, None before the first.
    measured
        What was read to plan a budget; None for nothing.
    """
    moved = plan.planned_bytes + plan.base_bytes + plan.layout.total_size
    return PlannedOutput(
        name=plan.output.name,
        path=plan.output.path if plan.output.publish else None,
        operator=plan.output.operator,
        digest=format_digest(plan_digest(plan)),
        tensors=len(plan.tensors),
        experts=expert_bytes(plan) if plan.outcome is None else plan.outcome.experts,
        expert_bytes={"full": plan.expert_bytes, "planned": plan.planned_bytes},
        base_bytes=plan.base_bytes,
        blocks={"total": plan.blocks},
        expert_blocks={
            "total": plan.expert_blocks,
            "omitted": 0 if plan.outcome is None else plan.outcome.omitted_blocks,
        },
        bound=bound_of(plan),
        seconds=round(moved / rate, 3) if rate else None,
        peak_memory_bytes=peak_memory(plan, workers, memory),
        output_bytes=sum(shard.size for shard in plan.layout.shards),
        shards=len(plan.layout.shards),
        decisions=plan.decisions,
        notes=plan.notes if not plan.is_pending else (*plan.notes, f"{PENDING}: build what it is made from first"),
        index_bytes_read=0 if measured is None else measured.index_bytes,
        expected_error=None if plan.outcome is None else finite(plan.outcome.expected),
        omitted_mass=0.0 if plan.outcome is None else plan.outcome.omitted_mass,
        losses=_losses(plan),
    )


def _losses(plan: OutputPlan) -> tuple[Loss, ...]:
    return tuple(
        Loss(
            tensor=name,
            omitted_bytes=loss.omitted_bytes,
            bound=finite(loss.bound),
            expected=finite(loss.expected),
            omitted_mass=loss.omitted_mass,
        )
        for name, loss in (plan.outcome.losses if plan.outcome else ())
    )
