"""Explaining outputs with all that is known of them: content, access, why a build made them, and what experts gave."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli

from mergepipe.digest import format_digest
from mergepipe.errors import StorageError
from mergepipe.graph.histogram import added, tensor_histograms
from mergepipe.graph.inputs import slot_digest, source_pin
from mergepipe.lockfile.assemble import FULL_BUDGET, finite
from mergepipe.mergefile.locate import KeyPath, LineMap, locate
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.project import build as steps
from mergepipe.project.contributions import ContributionSums, ExpertShare, total_contribution
from mergepipe.project.explain import (
    ExplainedInput,
    ExplainedParam,
    OutputExplanation,
    TensorExplanation,
    explain_output,
    explain_tensor,
)
from mergepipe.project.explain_reads import error_shares, tensor_reads
from mergepipe.project.explain_values import (
    BuildState,
    LastBuildFacts,
    ModuleContribution,
    OutputSummary,
    SourceFacts,
)
from mergepipe.project.key_parts import FIRST, UNCHANGED, BuildParts, Change, build_parts, first_change
from mergepipe.project.measured import Looked, MeasuredProject, Measurement
from mergepipe.project.plan_report import levels_json
from mergepipe.project.reports import bound_of
from mergepipe.project.sweep_map import modules_of

NOT_ASKED = "it was not measured"
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_COPIED = "it is copied, not merged"
_NO_EXPERT = "no expert has a part in it"
_PATH_PART = re.compile(r'\[(?P<index>\d+)\]|\.?(?P<key>"(?:[^"\\]|\\.)*"|[A-Za-z0-9_-]+)')


class ExplainedProject(MeasuredProject):
    """A project whose outputs are explained."""

    def explained(
        self, output: str, tensor: str | None, *, measure: bool
    ) -> OutputExplanation | TensorExplanation:
        """Return the explanation of an output or of one tensor; see `Project.explain`."""
        names = None if tensor is None else [tensor]
        with self._reading() as catalog:
            looked = self.look([output], catalog)[output]
            found: OutputExplanation | TensorExplanation
            if tensor is None:
                found = replace(explain_output(looked.plan), summary=output_summary(looked))
            else:
                found = self._tensor(looked, tensor)
            known = self.known(looked, names)
        if known is None:
            known = self._measured(output, names) if measure else Measurement(tensors=None, why=NOT_ASKED)
        if isinstance(found, OutputExplanation):
            return _with_contributions(found, looked.plan, known)
        return _with_contribution(found, looked.plan, known)

    def _measured(self, output: str, names: Sequence[str] | None) -> Measurement:
        """Measure, unless what is found could not be kept: the rest can be explained without it."""
        try:
            return self.measure(output, names)
        except StorageError as error:
            path, cache = error.facts.get("path"), self._layout.root
            if error.facts.get("errno") not in _READ_ONLY or path is None or not Path(path).is_relative_to(cache):
                raise
            return Measurement(tensors=None, why=f"it is measured into the cache, and mergepipe {error.message}")

    def _tensor(self, looked: Looked, name: str) -> TensorExplanation:
        found = explain_tensor(looked.plan, name)
        plan, index = looked.plan, looked.index
        tensor = next(tensor for tensor in plan.tensors if tensor.name == name)
        lines = _lines(self.mergefile.path)
        reads = tensor_reads(plan, tensor, index)

        def known(explained: ExplainedInput, slot: int) -> ExplainedInput:
            ref = tensor.slots[slot]
            # What is known of a part alone has no digest.
            digest = None if ref is None or ref.levels is not None else slot_digest(ref, index)
            return replace(
                explained,
                params=_placed(explained.params, lines),
                digest=None if digest is None else format_digest(digest),
                reads=reads[slot],
            )

        locked = looked.locked()
        built = next((t.digest for t in locked.tensors if t.name == name), None) if locked is not None else None
        losses = error_shares(plan, index, looked.catalog)
        return replace(
            found,
            params=_placed(found.params, lines),
            base=None if found.base is None else known(found.base, 0),
            experts=tuple(known(expert, number + 1) for number, expert in enumerate(found.experts)),
            digest=None if built is None else format_digest(built),
            build=build_state(looked.prepared, build_parts(plan, index), name),
            error=None if losses is None else losses.get(name),
        )


# --- where values stand -----------------------------------------------------------------------------------------------


def _lines(path: Path) -> LineMap:
    """Return where the keys of a Mergefile stand; one that cannot be read any more costs line numbers."""
    try:
        return locate(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return LineMap({})


def parsed_path(text: str) -> KeyPath:
    """Return the parts of a key path as `mergepipe.mergefile.problems.key_path` writes it."""
    parts: list[str | int] = []
    for match in _PATH_PART.finditer(text):
        if match["index"] is not None:
            parts.append(int(match["index"]))
        else:
            key = match["key"]
            parts.append(str(tomli.loads(f"k = {key}")["k"]) if key.startswith('"') else key)
    return tuple(parts)


def _placed(params: Mapping[str, ExplainedParam], lines: LineMap) -> dict[str, ExplainedParam]:
    """Return parameters with the lines that they stand on, and the rules that give them."""
    found = {}
    for name, param in params.items():
        path = parsed_path(param.origin) if param.origin != "default" else ()
        rule = next((part for at, part in enumerate(path) if at and path[at - 1] == "rules"), None)
        found[name] = replace(
            param,
            line=lines.line(path) if path else None,
            rule=rule + 1 if isinstance(rule, int) else None,
        )
    return found


# --- builds -----------------------------------------------------------------------------------------------------------


def build_state(prepared: steps.Prepared, now: BuildParts, tensor: str) -> BuildState:
    """Return why a tensor was rebuilt or reused, or would be; ``now`` are the parts of its key as of now."""
    known = prepared.known
    if known is None:
        return BuildState(state="unbuilt", change=FIRST)
    record = known.record
    if prepared.reasons and not prepared.content_known:
        change = first_change(record.parts, now, tensor) if record.parts is not None else Change(part="recipe")
        return BuildState(state="unchanged" if change == UNCHANGED else "stale", change=change)
    if record.parts is None or record.last is None or tensor not in record.parts.tensors:
        return BuildState(state="rebuilt", change=Change(part="recipe"))
    change = first_change(record.last.before, record.parts, tensor)
    reused = change == UNCHANGED or tensor in record.last.cached
    return BuildState(state="reused" if reused else "rebuilt", change=change)


def last_build_facts(prepared: steps.Prepared) -> LastBuildFacts | None:
    """Return what the record tells of the build that made an output."""
    record = prepared.known.record if prepared.known is not None else None
    if record is None or record.last is None or record.parts is None:
        return None
    cached, parts = frozenset(record.last.cached), record.parts
    changes = {name: first_change(record.last.before, parts, name) for name in parts.tensors}
    reused = sum(name in cached or change == UNCHANGED for name, change in changes.items())
    return LastBuildFacts(
        reasons=tuple(record.last.reasons),
        run=dict(record.last.run),
        blocks=dict(record.last.block_counts),
        tensors={"rebuilt": len(changes) - reused, "reused": reused},
    )


def output_summary(looked: Looked) -> OutputSummary:
    """Return how an output stands."""
    plan, prepared, locked = looked.plan, looked.prepared, looked.locked()
    status, outcome = steps.status(prepared), plan.outcome
    return OutputSummary(
        state=status.state,
        reasons=status.reasons,
        is_resolved=not plan.is_pending,
        operator=plan.output.operator,
        path=status.path,
        digest=None if locked is None else format_digest(locked.digest),
        sources=tuple(_source(plan, name, looked) for name in plan.sources),
        budget=FULL_BUDGET if plan.output.budget is None else plan.output.budget.text(),
        expert_bytes={"full": plan.expert_bytes, "planned": plan.planned_bytes},
        expert_blocks={"total": plan.expert_blocks, "omitted": 0 if outcome is None else outcome.omitted_blocks},
        bound=bound_of(plan),
        expected_error=None if outcome is None else finite(outcome.expected),
        omitted_mass=0.0 if outcome is None else outcome.omitted_mass,
        last=last_build_facts(prepared),
        levels=_levels(plan, looked),
    )


def _levels(plan: OutputPlan, looked: Looked) -> Mapping[str, Mapping[str, int]] | None:
    if not plan.buys_levels or plan.is_pending:
        return None
    return levels_json(
        added(found for tensor in plan.tensors for found in tensor_histograms(plan, tensor, looked.index))
    )


def _source(plan: OutputPlan, name: str, looked: Looked) -> SourceFacts:
    bases = {part.base.source for part in plan.parts if part.base is not None}
    experts = {member.source for part in plan.parts for member in part.experts}
    roles = [*(["base"] if name in bases else []), *(["expert"] if name in experts else [])]
    digest = source_pin(plan, name, looked.index)
    return SourceFacts(
        source=name,
        roles=tuple(roles or ["adapted"]),
        digest=None if digest is None else format_digest(digest),
    )


# --- contributions ----------------------------------------------------------------------------------------------------


def _with_contribution(found: TensorExplanation, plan: OutputPlan, known: Measurement) -> TensorExplanation:
    total = None if known.tensors is None else total_contribution(plan, known.tensors, [found.tensor])
    if total is None:
        why = known.why or (_COPIED if found.decision != "merge" else _NO_EXPERT)
        return replace(found, not_measured=why)
    shares = {share.source: share for share in total.experts}
    experts = tuple(replace(expert, contribution=_share(expert, shares)) for expert in found.experts)
    return replace(found, contribution=total, experts=experts)


def _share(expert: ExplainedInput, shares: Mapping[str, ExpertShare]) -> ExpertShare | None:
    return shares.get(expert.source)


def _with_contributions(found: OutputExplanation, plan: OutputPlan, known: Measurement) -> OutputExplanation:
    if known.tensors is None:
        return replace(found, not_measured=known.why)
    total = total_contribution(plan, known.tensors)
    if total is None:
        return replace(found, not_measured=_NO_EXPERT)
    return replace(found, contribution=total, modules=module_contributions(plan, known.tensors))


def module_contributions(plan: OutputPlan, found: Mapping[str, Any]) -> tuple[ModuleContribution, ...]:
    """Return what the experts contributed by module, those with the larger updates first."""
    measured = [tensor for tensor in plan.tensors if tensor.name in found]
    modules = modules_of(measured)
    members: dict[str, list[TensorPlan]] = {}
    for tensor in measured:
        members.setdefault(modules[tensor.name], []).append(tensor)
    whole = math.fsum(found[tensor.name].update for tensor in measured)
    if len({found[tensor.name].base is None for tensor in measured}) > 1:
        whole = math.nan  # updates of a base, and whole values of what has none, are no sum
    rows = [_module(plan, module, tensors, found, whole) for module, tensors in members.items()]
    return tuple(sorted(rows, key=lambda row: -(row.update_share or 0.0)))


def _module(
    plan: OutputPlan, module: str, tensors: Sequence[TensorPlan], found: Mapping[str, Any], whole: float
) -> ModuleContribution:
    sums = ContributionSums()
    for tensor in tensors:
        sums.add(plan, tensor, found[tensor.name])
    known = math.isfinite(whole) and whole > 0 and math.isfinite(sums.update)
    return ModuleContribution(
        module=module,
        tensors=len(tensors),
        update_share=sums.update / whole if known else None,
        contribution=sums.total(plan.output.expert_sources),
    )
