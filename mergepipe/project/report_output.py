"""Reporting built outputs: figures of the record, and what was measured of the weights, by tensor, module and layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mergepipe._version import __version__
from mergepipe.digest import format_digest
from mergepipe.errors import MergefileError, raise_collected
from mergepipe.lockfile.assemble import finite, locked_levels, tensor_levels
from mergepipe.lockfile.manifest_records import OUTPUT_KEY
from mergepipe.lockfile.records import LockedOutput, LockedTensor
from mergepipe.plan.budgeted import expert_bytes
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.project import build as steps
from mergepipe.project.contributions import Contribution, ContributionSums, total_contribution
from mergepipe.project.explain import explain_output
from mergepipe.project.explained import ExplainedProject, build_state, last_build_facts, module_contributions
from mergepipe.project.gather import select_outputs
from mergepipe.project.key_parts import BuildParts, build_parts
from mergepipe.project.measured import Looked, Measurement
from mergepipe.project.report_page import (
    OutputReported,
    OutputReports,
    ReportedBudget,
    ReportedCell,
    ReportedCost,
    ReportedLoss,
    ReportedSource,
    ReportedTensor,
)
from mergepipe.project.reports import Bound
from mergepipe.project.sweep_map import modules_of
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.contributions import TensorContributions

Found = Mapping[str, "TensorContributions"]


class ReportedProject(ExplainedProject):
    """A project whose built outputs are reported."""

    def reported(self, outputs: Sequence[str] = ()) -> OutputReports:
        """Return the reports of outputs, all of them by default.

        Raises
        ------
        MergefileError
            For each output that is not built, or is not what a build would make.
        """
        names = [output.name for output in select_outputs(self.mergefile, outputs)]
        with self._reading() as catalog:
            touched = [name for name, found in self.look(names, catalog).items() if found.prepared.only_touched]
        if touched:  # their files are hashed; those that are what they were count as untouched again
            with self._writing() as (catalog, _):
                for found in self.look(touched, catalog).values():
                    steps.recheck_published(found.prepared, catalog)
        with self._reading() as catalog:
            looked = self.look(names, catalog)
            self._check(looked)
            known = {name: self.known(found, None) for name, found in looked.items()}
        measured = {name: found or self.measure(name) for name, found in known.items()}
        return OutputReports(outputs={name: _reported(looked[name], measured[name]) for name in names})

    def _check(self, looked: Mapping[str, Looked]) -> None:
        """Refuse outputs of which there is nothing to report, all in one go."""
        errors = []
        for name, found in looked.items():
            status = steps.status(found.prepared)
            if status.state == "up-to-date":
                continue
            why = "is not built yet" if status.state == "unbuilt" else "is not what a build would make now"
            reasons = "" if status.state == "unbuilt" else "".join(f"\n  {reason}" for reason in status.reasons)
            errors.append(
                MergefileError(
                    f"output `{name}` {why}, and a report is of what was built{reasons}",
                    hint=f"build it first: `mergepipe build {name}`",
                    output=name,
                )
            )
        raise_collected(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the parts of a report are made from."""

    looked: Looked
    locked: LockedOutput
    found: Found
    keys: BuildParts

    @property
    def plan(self) -> OutputPlan:
        return self.looked.plan


def _reported(looked: Looked, measured: Measurement) -> OutputReported:
    plan, locked = looked.plan, looked.locked()
    assert locked is not None, "only what was built is reported"
    keys = build_parts(plan, looked.index)
    parts = _Parts(looked=looked, locked=locked, found=measured.tensors or {}, keys=keys)
    modules = modules_of(plan.tensors)
    contribution = total_contribution(plan, parts.found)
    return OutputReported(
        output=locked.name,
        path=locked.path,
        operator=locked.operator,
        operator_version=locked.operator_version,
        digest=format_digest(locked.digest),
        base=locked.base,
        experts=plan.output.expert_sources,
        mergepipe=__version__,
        sources=tuple(_source(looked, locked, name) for name in plan.sources),
        groups=explain_output(plan).groups,
        budget=_budget(looked, locked),
        cost=_cost(plan),
        last=last_build_facts(looked.prepared),
        contribution=contribution,
        modules=module_contributions(plan, parts.found),
        not_measured=(measured.why or "nothing is merged") if contribution is None else None,
        measured_bytes_read=measured.bytes_read,
        cells=_cells(parts, modules),
        tensors=tuple(
            _tensor(parts, tensor, record, modules[tensor.name])
            for tensor, record in zip(plan.tensors, locked.tensors, strict=True)
        ),
        decisions=plan.decisions,
    )


def _source(looked: Looked, locked: LockedOutput, name: str) -> ReportedSource:
    plan, checkpoint = looked.plan, looked.plan.sources[name]
    bases = {part.base.source for part in plan.parts if part.base is not None}
    experts = {member.source for part in plan.parts for member in part.experts}
    roles = [*(["base"] if name in bases else []), *(["expert"] if name in experts else [])]
    declared = looked.plans.mergefile.sources.get(name)
    location = {OUTPUT_KEY: name}
    if declared is not None:
        location = declared.location
    return ReportedSource(
        source=name,
        roles=tuple(roles or ["adapted"]),
        location=location,
        digest=format_digest(locked.sources[name]),
        tensors=len(checkpoint.stored),
        bytes=checkpoint.nbytes,
    )


def _budget(looked: Looked, locked: LockedOutput) -> ReportedBudget:
    plan, known = looked.plan, looked.prepared.known
    outcome, bound = plan.outcome, locked.bound
    blocks = dict(known.record.expert_blocks) if known is not None else {}
    blocks.pop("read", None)  # of the run, not of the plan
    return ReportedBudget(
        budget=locked.budget,
        expert_bytes={"full": locked.expert_bytes_full, "planned": locked.expert_bytes_planned},
        expert_blocks=blocks,
        by_expert=expert_bytes(plan) if outcome is None else dict(outcome.experts),
        bound=Bound(
            kind=str(bound["kind"]),
            absolute=_number(bound.get("absolute")),
            relative_to_update=_number(bound.get("relative_to_update")),
        ),
        expected_error=None if outcome is None else finite(outcome.expected),
        omitted_mass=0.0 if outcome is None else outcome.omitted_mass,
        losses=tuple(
            ReportedLoss(
                tensor=name,
                omitted_bytes=loss.omitted_bytes,
                bound=finite(loss.bound),
                expected=finite(loss.expected),
                omitted_mass=loss.omitted_mass,
            )
            for name, loss in (outcome.losses if outcome is not None else ())
        ),
        levels=locked_levels(locked),
    )


def _number(value: str | float | None) -> float | None:
    return None if value is None else finite(float(value))


def _cost(plan: OutputPlan) -> ReportedCost:
    return ReportedCost(
        expert_bytes=plan.planned_bytes,
        base_bytes=plan.base_bytes,
        output_bytes=sum(shard.size for shard in plan.layout.shards),
        blocks=plan.blocks,
        shards=len(plan.layout.shards),
        tensors=len(plan.tensors),
    )


def _cells(parts: _Parts, modules: Mapping[str, str]) -> tuple[ReportedCell, ...]:
    plan = parts.plan
    members: dict[tuple[int | None, str], list[tuple[TensorPlan, LockedTensor]]] = {}
    for tensor, record in zip(plan.tensors, parts.locked.tensors, strict=True):
        members.setdefault((tensor.layer, modules[tensor.name]), []).append((tensor, record))
    return tuple(_cell(parts, layer, module, found) for (layer, module), found in members.items())


def _cell(
    parts: _Parts, layer: int | None, module: str, members: Sequence[tuple[TensorPlan, LockedTensor]]
) -> ReportedCell:
    sums = ContributionSums()
    for tensor, _ in members:
        if tensor.name in parts.found:
            sums.add(parts.plan, tensor, parts.found[tensor.name])
    total = sums.total(parts.plan.output.expert_sources) if sums.tensors else None
    return ReportedCell(
        layer=layer,
        module=module,
        tensors=len(members),
        read=sum(record.read for _, record in members),
        total=sum(record.total for _, record in members),
        update_relative=None if total is None else total.update_relative,
        sign_agreement=None if total is None else total.sign_agreement,
        shares=_shares(total),
        levels=tensor_levels(parts.locked, [record for _, record in members]),
    )


def _shares(total: Contribution | None) -> dict[str, float | None]:
    return {} if total is None else {expert.source: expert.norm_share for expert in total.experts}


def _tensor(parts: _Parts, tensor: TensorPlan, record: LockedTensor, module: str) -> ReportedTensor:
    total = total_contribution(parts.plan, parts.found, [tensor.name]) if tensor.name in parts.found else None
    build = build_state(parts.looked.prepared, parts.keys, tensor.name)
    is_recorded = build.change.part != "recipe" or build.change.before is not None
    return ReportedTensor(
        name=tensor.name,
        layer=tensor.layer,
        module=module,
        operator=tensor.operator.signature.name,
        decision=tensor.decision.value,
        dtype=tensor.dtype,
        shape=tensor.shape,
        digest=format_digest(record.digest),
        read=record.read,
        total=record.total,
        state=build.state if is_recorded else None,
        why=build.change.text() if is_recorded else None,
        update_norm=None if total is None else total.update_norm,
        update_relative=None if total is None else total.update_relative,
        sign_agreement=None if total is None else total.sign_agreement,
        shares=_shares(total),
        cosines={} if total is None else {expert.source: expert.cosine for expert in total.experts},
        levels=tensor_levels(parts.locked, [record]),
        bytes_read=None if record.levels is None else record.levels.bytes,
    )
