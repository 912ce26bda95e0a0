"""The report of a plan: costs by expert, what of it the next build still has to do, and estimates of time and room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.speeds import recorded_seconds
from mergepipe.digest import format_digest
from mergepipe.engine.limits import check_memory, hold_bytes, peak_memory
from mergepipe.engine.meter import Meter
from mergepipe.graph.histogram import Histogram, added, tensor_histograms
from mergepipe.lockfile.assemble import finite
from mergepipe.plan.access import OMITTED
from mergepipe.plan.budgeted import expert_bytes
from mergepipe.plan.codes import coded_slots
from mergepipe.plan.output import plan_digest
from mergepipe.plan.sampling import whole_sources
from mergepipe.plan.values import OutputPlan
from mergepipe.project import build as steps
from mergepipe.project.budgets import PENDING
from mergepipe.project.forecast import Forecast, forecast
from mergepipe.project.levels import introduce
from mergepipe.project.moves import expert_name
from mergepipe.project.plan_report import (
    DiskReport,
    Loss,
    NextBuild,
    PlannedExpert,
    PlannedOutput,
    PlanReport,
)
from mergepipe.project.reports import bound_of, budget_notes
from mergepipe.project.room import disk_space
from mergepipe.project.stages import Plans
from mergepipe.project.timing import TimeEstimate, estimate_times


def prepare_all(plans: Plans, index: SourceIndex, catalog: Catalog) -> dict[str, steps.Prepared]:
    """Return by name what each output is now, with its access set as far as the cache knows what it follows from."""
    found = {}
    for plan in plans.plans:  # what an output is made from stands before it
        prepared = steps.prepare(plan, plans, index, catalog)
        introduce(prepared, plans, index)
        found[prepared.name] = prepared
    return found


def plan_report(
    plans: Plans,
    prepared: Mapping[str, steps.Prepared],
    index: SourceIndex,
    catalog: Catalog,
    workers: int,
    memory: int | None,
    measured: Mapping[str, Meter],
) -> PlanReport:
    """Return the report of the plans of some outputs.

    Parameters
    ----------
    measured
        By output name what was read just now to plan its budget.
    """
    resolved = [prepared[plan.output.name].plan for plan in plans.plans]
    build = forecast(plans, prepared, index, catalog, hold_bytes(memory))
    forecasts = build.outputs
    times = estimate_times(resolved, forecasts, recorded_seconds(catalog))
    memories = {plan.output.name: peak_memory([plan], workers, memory) for plan in resolved}

    def run_memory(run: Sequence[OutputPlan]) -> int:
        return memories[run[0].output.name] if len(run) == 1 else peak_memory(run, workers, memory)

    outputs = {}
    for plan in resolved:
        name = plan.output.name
        cold = _cold_bytes(plan, plans, index)
        outputs[name] = _planned_output(
            plan, forecasts[name], times[name], memories[name], cold, measured.get(name), index
        )
    made = [plan for plan in resolved if not forecasts[plan.output.name].unchanged]
    check_memory(made, memory)
    runs = [[plan for plan in level if not forecasts[plan.output.name].unchanged] for level in _levels(plans, prepared)]
    seconds = [times[plan.output.name].seconds for plan in made]
    known = [value for value in seconds if value is not None]
    return PlanReport(
        outputs=outputs,
        exact=all(output.next_build.exact for output in outputs.values()),
        bounded=build.total.bounded,
        reads={
            "expert_bytes": build.total.expert_bytes,
            "base_bytes": build.total.base_bytes,
            "index_bytes": build.total.index_bytes,
        },
        seconds=round(sum(known), 3) if len(known) == len(seconds) else None,
        peak_memory_bytes=max((run_memory(run) for run in runs if run), default=0),
        disks=_disks(plans, forecasts, catalog),
    )


def _disks(plans: Plans, forecasts: Mapping[str, Forecast], catalog: Catalog) -> tuple[DiskReport, ...]:
    return tuple(
        DiskReport(
            path=_shown(disk.path, plans.mergefile.root),
            cache=disk.cache,
            outputs=disk.outputs,
            needed=disk.needed,
            free=disk.free,
            fits=disk.fits,
        )
        for disk in disk_space(plans, forecasts, catalog.layout.root)
    )


def _levels(plans: Plans, prepared: Mapping[str, steps.Prepared]) -> list[list[OutputPlan]]:
    return [[prepared[plan.output.name].plan for plan in level] for level in plans.levels()]


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else str(path)


def _planned_output(
    plan: OutputPlan,
    found: Forecast,
    time: TimeEstimate,
    memory: int,
    cold: Mapping[str, int],
    measured: Meter | None,
    index: SourceIndex,
) -> PlannedOutput:
    moves = found.moves
    levels = _levels_by_expert(plan, index)
    experts = _experts(plan, found, cold, levels)
    return PlannedOutput(
        name=plan.output.name,
        path=plan.output.path if plan.output.publish else None,
        operator=plan.output.operator,
        digest=format_digest(plan_digest(plan)),
        tensors=len(plan.tensors),
        experts=experts,
        expert_bytes={
            "full": plan.expert_bytes,
            "planned": plan.planned_bytes,
            "cached": sum(expert.cached for expert in experts.values()),
            "to_read": moves.expert_bytes,
        },
        base_bytes=plan.base_bytes,
        blocks={"total": plan.blocks, "computed": moves.computed, "cached": moves.reused, "copied": moves.copied},
        expert_blocks={
            "total": plan.expert_blocks,
            "omitted": 0 if plan.outcome is None else plan.outcome.omitted_blocks,
        },
        bound=bound_of(plan),
        next_build=NextBuild(
            unchanged=found.unchanged,
            exact=moves.exact and not plan.is_pending,
            bounded=moves.bounded,
            expert_bytes=moves.expert_bytes,
            base_bytes=moves.base_bytes,
            index_bytes=moves.index_bytes,
            written=moves.written,
            unindexed=dict(cold),
        ),
        seconds=None if time.seconds is None or plan.is_pending else round(time.seconds, 3),
        not_timed=time.unknown,
        peak_memory_bytes=memory,
        output_bytes=sum(shard.size for shard in plan.layout.shards),
        shards=len(plan.layout.shards),
        decisions=plan.decisions,
        notes=_notes(plan),
        index_bytes_read=0 if measured is None else measured.index_bytes,
        expected_error=None if plan.outcome is None else finite(plan.outcome.expected),
        expected_error_uncertainty=None if plan.outcome is None else finite(plan.outcome.uncertainty),
        omitted_mass=0.0 if plan.outcome is None else plan.outcome.omitted_mass,
        losses=_losses(plan),
        levels=None if levels is None else added(levels.values()),
        codes=None if levels is None else _code_bytes(plan, index),
    )


def _levels_by_expert(plan: OutputPlan, index: SourceIndex) -> dict[str, Histogram] | None:
    """Return by expert how precisely its blocks are read; None where the budget buys no levels, or is not resolved."""
    if not plan.buys_levels or plan.outcome is None:
        return None
    found: dict[str, list[Histogram]] = {}
    for tensor in plan.tensors:
        histograms = tensor_histograms(plan, tensor, index)
        for number, (ref, histogram) in enumerate(zip(tensor.experts, histograms, strict=True)):
            if ref is not None and histogram:
                found.setdefault(expert_name(plan, tensor, number + 1, ref), []).append(histogram)
    return {name: added(histograms) for name, histograms in found.items()}


def _code_bytes(plan: OutputPlan, index: SourceIndex) -> dict[str, int]:
    """Return the bytes of the codes of all deltas of an output that have one, and of those that are not there."""
    known: dict[bytes, int] = {}
    missing = 0
    for tensor in plan.tensors:
        for coded in coded_slots(plan, tensor):
            digests = [index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert)]
            if digests[0] is None or digests[1] is None or coded.expert.coded_only:
                continue  # nothing had to be measured, or it came with a progressive checkpoint
            key = index.codes.key(digests[0], digests[1])
            prices = index.codes.prices(key) if key not in known else None
            if prices is not None:
                known[key] = int(prices.sizes.sum())
                missing += 0 if index.codes.has_pack(key) else known[key]
    return {"bytes": sum(known.values()), "missing": missing}


def _notes(plan: OutputPlan) -> tuple[str, ...]:
    pending = (f"{PENDING}: build what it is made from first",) if plan.is_pending else ()
    return (*plan.notes, *budget_notes(plan), *pending)


def _experts(
    plan: OutputPlan, found: Forecast, cold: Mapping[str, int], levels: Mapping[str, Histogram] | None
) -> dict[str, PlannedExpert]:
    full = expert_bytes(plan)
    planned = full if plan.outcome is None else plan.outcome.experts
    blocks, omitted = _expert_blocks(plan)
    return {
        name: PlannedExpert(
            full=full[name],
            planned=planned[name],
            cached=found.moves.cached.get(name, 0),
            to_read=found.moves.to_read.get(name, 0),
            index=found.moves.index.get(name, 0),
            blocks=blocks.get(name, 0),
            omitted=omitted.get(name, 0),
            indexed=name not in cold,
            levels=None if levels is None else levels.get(name, {}),
        )
        for name in full
    }


def _expert_blocks(plan: OutputPlan) -> tuple[dict[str, int], dict[str, int]]:
    """Return by expert its blocks in a full read, and those that the budget leaves out."""
    blocks: dict[str, int] = {}
    omitted: dict[str, int] = {}
    for tensor in plan.tensors:
        for slot, ref in enumerate(tensor.slots):
            if not slot or ref is None:
                continue
            name, count = expert_name(plan, tensor, slot, ref), plan.expert_cost(tensor, ref)[1]
            blocks[name] = blocks.get(name, 0) + count
            level = tensor.access.levels[slot - 1] if tensor.access is not None else None
            if level is not None:
                omitted[name] = omitted.get(name, 0) + level[:count].count(OMITTED)
    return blocks, omitted


def _cold_bytes(plan: OutputPlan, plans: Plans, index: SourceIndex) -> dict[str, int]:
    """Return by source what the next build reads of it whole, because its content is not known."""
    found: dict[str, int] = {}
    for source in whole_sources(plan):
        if source not in plans.stages:
            count = sum(info.nbytes for info in index.cold(source))
            found |= {source: count} if count else {}
    return found


def _losses(plan: OutputPlan) -> tuple[Loss, ...]:
    if plan.outcome is None:
        return ()
    whole = plan.outcome.expected
    return tuple(
        Loss(
            tensor=name,
            omitted_bytes=loss.omitted_bytes,
            bound=finite(loss.bound),
            expected=finite(loss.expected),
            omitted_mass=loss.omitted_mass,
            # Errors of tensors add up in their squares.
            error_share=finite((loss.expected / whole) ** 2) if whole else None,
        )
        for name, loss in plan.outcome.losses
    )
