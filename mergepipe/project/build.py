"""The steps of a build for one output: what it is now, what a build made of it, and what is reported of that.

Nothing is published before every output is finished and, with ``--locked``, agrees with the lock. The lock is written
last. Killed between the two, the next build finds the outputs as they should be and writes the lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import format_digest
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.graph.inputs import source_pins
from mergepipe.lockfile.assemble import (
    ContentCounts,
    block_facts,
    content_counts,
    declared_output,
    expert_block_facts,
    location,
    locked_levels,
    locked_output,
)
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import LockedOutput
from mergepipe.plan.values import OutputPlan
from mergepipe.project.budgets import PENDING, resolved
from mergepipe.project.cards import CardFacts, card_facts
from mergepipe.project.facts import Facts, KnownOutput, LastBuild, current_facts, encode_files, known_output
from mergepipe.project.reasons import changed_reasons, cold_reasons
from mergepipe.project.reports import OutputReport, OutputStatus, bound_of, budget_notes
from mergepipe.project.stages import Plans, record_place, tokenizer_of
from mergepipe.publish.directory import recheck, touched_files
from mergepipe.publish.sidefiles import SideFile
from mergepipe.values import dataclass

UNREAD = "blocks that its budget buys were not read before"
"""The reason why an output is not up to date whose sources are known by samples, and single blocks of them are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One output before its build: its plan, its declared record, its side files, and what was built already.

    Attributes
    ----------
    card
        What its model card says beside its plan.
    target
        Its directory; of one that is not published, the place of its record.
    known
        What was built before.
    content_known
        Whether its tensors are what was built before, whatever became of its directory and its side files.
    reasons
        Why a build must make it anew; none if it is what it should be.
    only_touched
        Whether the reasons are no more than that its files were touched.
    """

    plan: OutputPlan
    declared: LockedOutput
    side_files: tuple[SideFile, ...]
    card: CardFacts
    target: Path
    known: KnownOutput | None
    content_known: bool
    reasons: tuple[str, ...]
    only_touched: bool
    forced: bool = False

    @property
    def name(self) -> str:
        """The output's name."""
        return self.plan.output.name

    @property
    def unchanged(self) -> bool:
        """Whether the output is what a build would make."""
        return self.known is not None and not self.reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One output after its build: its record, what was counted, and if it must be published what it is made of.

    ``blocks`` are the block digests of the tensors of a stage that the run has made or looked into.
    """

    prepared: Prepared
    locked: LockedOutput
    finished: FinishedOutput | None
    meter: Meter
    counts: Mapping[str, ContentCounts]
    expert_blocks: Mapping[str, int]
    seconds: float
    blocks: Mapping[str, bytes]


def prepare(plan: OutputPlan, plans: Plans, index: SourceIndex, catalog: Catalog, *, resolve: bool = True) -> Prepared:
    """Find out whether an output is what a build would make; reads side files, headers and the catalog.

    Parameters
    ----------
    resolve
        Whether to plan the budget also of an output that was not built before: to know that it was not takes no plan.
    """
    return _prepare(plan, plans.side_files(plan), card_facts(plan, plans), plans, index, catalog, resolve=resolve)


def prepare_again(prepared: Prepared, plans: Plans, index: SourceIndex, catalog: Catalog) -> Prepared:
    """Look again at an output that is made from stages, now that their content is known."""
    return looked_at_again(prepared, plans, index, catalog) if plans.stages_of(prepared.plan) else prepared


def looked_at_again(prepared: Prepared, plans: Plans, index: SourceIndex, catalog: Catalog) -> Prepared:
    """Look again at an output, now that more is known of what it is made from."""
    if prepared.unchanged or prepared.forced:
        return prepared
    return _again(prepared, prepared.plan, plans, index, catalog)


def prepare_resolved(
    prepared: Prepared, plan: OutputPlan, plans: Plans, index: SourceIndex, catalog: Catalog
) -> Prepared:
    """Look again at an output whose budget is resolved now: ``plan`` has its access set."""
    again = _again(prepared, plan, plans, index, catalog)
    if not prepared.forced:
        return again
    # What is replaced by force is written whatever else is known.
    return replace(again, reasons=again.reasons or prepared.reasons, forced=True, only_touched=False)


def _again(prepared: Prepared, plan: OutputPlan, plans: Plans, index: SourceIndex, catalog: Catalog) -> Prepared:
    return recheck_published(_prepare(plan, prepared.side_files, prepared.card, plans, index, catalog), catalog)


def _prepare(
    plan: OutputPlan,
    files: tuple[SideFile, ...],
    card: CardFacts,
    plans: Plans,
    index: SourceIndex,
    catalog: Catalog,
    *,
    resolve: bool = True,
) -> Prepared:
    target = record_place(plans.mergefile, plan.output)
    known = known_output(catalog, target)
    if resolve or known is not None:
        plan = resolved(plan, index, catalog, known.record.budget if known else None)
    declared = declared_output(plan, tokenizer_of(plan), index)
    facts = current_facts(plan, declared, files, index, card) if known is not None else None
    reasons = _reasons(plan, known, facts, plans, index, declared, target)
    touched = _touched(target, known) if known is not None and not reasons and plan.output.publish else ()
    return Prepared(
        plan=plan,
        declared=declared,
        side_files=files,
        card=card,
        target=target,
        known=known,
        content_known=known is not None and facts is not None and facts.same_content(known.record.facts),
        reasons=reasons or touched,
        only_touched=bool(touched),
    )


def _reasons(
    plan: OutputPlan,
    known: KnownOutput | None,
    facts: Facts | None,
    plans: Plans,
    index: SourceIndex,
    declared: LockedOutput,
    target: Path,
) -> tuple[str, ...]:
    if known is None:
        return ("it was not built here before",)
    pins = source_pins(plan, index)
    cold = [source for source, pin in pins.items() if pin is None]
    if not cold and plan.is_pending:  # what is known of all of them, and was another content, is the reason
        cold = [source for source, pin in pins.items() if pin != known.record.facts.sources.get(source)]
    if cold:
        return cold_reasons(cold, known.record, index, plans.stages, declared, _locations(plan, plans), target)
    if plan.is_pending:
        return (PENDING,)
    if facts is None:
        return (UNREAD,)
    if facts.key() != known.key:
        reasons = changed_reasons(known.record, facts, index, declared, _locations(plan, plans), target)
        return reasons or ("its recipe changed",)
    return ()


def _locations(plan: OutputPlan, plans: Plans) -> dict[str, dict[str, str]]:
    """Return where the sources of an output are, as declared; none of those that are outputs themselves."""
    declared = plans.mergefile.sources
    return {name: location(declared[name]) for name in plan.sources if name in declared}


def _touched(target: Path, known: KnownOutput) -> tuple[str, ...]:
    if not target.is_dir():
        return ("its directory is gone",)
    touched = touched_files(target, known.files)
    return (f"files in its directory were touched: {', '.join(touched[:5])}",) if touched else ()


def recheck_published(prepared: Prepared, catalog: Catalog) -> Prepared:
    """Hash published files that were touched: an output whose content is what it should be stays as it is."""
    known = prepared.known
    if known is None or not prepared.only_touched:
        return prepared
    checked = recheck(prepared.target, known.files, prepared.plan.geometry)
    if checked is None:
        return prepared
    published = catalog.published(prepared.target)
    assert published is not None, "it was there a moment ago, and nobody else writes while we hold the cache"
    catalog.record_published(prepared.target, replace(published, files=encode_files(checked)))
    return replace(prepared, reasons=(), only_touched=False)


def ready_unchanged(
    prepared: Prepared,
    lock_path: Path,
    finished: FinishedOutput | None = None,
    seconds: float = 0.0,
    meter: Meter | None = None,
) -> Ready:
    """Return the record of an output that is what it should be.

    Parameters
    ----------
    finished
        What the engine did to find that out, or to have the bytes of a stage at hand; None where the catalog was asked
        alone.
    meter
        What was read for it; None for nothing.
    """
    assert prepared.known is not None, "an unchanged output is known"
    record = prepared.known.record
    return Ready(
        prepared=prepared,
        locked=parse_lock(record.lock, lock_path).outputs[0],
        finished=None,
        meter=finished.meter if finished else _untouched(prepared, meter),
        counts={},
        expert_blocks={**record.expert_blocks, "read": 0},
        seconds=seconds,
        blocks=block_digests(finished) if finished else {},
    )


def _untouched(prepared: Prepared, measured: Meter | None) -> Meter:
    """Return the counts of an output that was not made, only measured if at all."""
    meter = Meter(cached=prepared.plan.blocks)
    if measured is not None:
        meter.add(measured)
    return meter


def block_digests(finished: FinishedOutput) -> dict[str, bytes]:
    """Return the packed block digests of every tensor."""
    return {tensor.name: tensor.block_digests for tensor in finished.tensors}


def is_confirmed(prepared: Prepared, index: SourceIndex) -> bool:
    """Return whether an output that had to be looked into turned out to be what it should be.

    Its sources were touched, or it is a stage whose bytes were needed.
    """
    known, plan = prepared.known, prepared.plan
    if known is None or prepared.forced or touched_files(prepared.target, known.files):
        return False
    facts = current_facts(plan, prepared.declared, prepared.side_files, index, prepared.card)
    return facts is not None and facts.key() == known.key


def ready_built(prepared: Prepared, finished: FinishedOutput, index: SourceIndex, seconds: float) -> Ready:
    """Return the record of an output whose shards are in packs."""
    plan = prepared.plan
    counts = {tensor.name: content_counts(plan, tensor, index) for tensor in plan.tensors}
    locked = locked_output(
        declared_output(plan, tokenizer_of(plan), index),
        finished,
        counts,
        {file.name: file.digest for file in prepared.side_files},
    )
    return Ready(
        prepared=prepared,
        locked=locked,
        finished=finished,
        meter=finished.meter,
        counts=counts,
        expert_blocks=expert_block_facts(counts, finished.meter),
        seconds=seconds,
        blocks=block_digests(finished),
    )


def last_build(ready: Ready, plans: Plans) -> LastBuild:
    """Return what the record tells of the build that made an output."""
    prepared, meter, finished = ready.prepared, ready.meter, ready.finished
    return LastBuild(
        reasons=list(prepared.reasons),
        run={
            "expert_bytes_read": meter.expert_bytes,
            "base_bytes_read": meter.base_bytes,
            "index_bytes_read": meter.index_bytes,
            "bytes_written": meter.written,
        },
        block_counts=block_facts(prepared.plan, meter),
        before=prepared.known.record.parts if prepared.known else None,
        cached=[tensor.name for tensor in finished.tensors if tensor.cached] if finished else [],
        locations=_locations(prepared.plan, plans),
    )


def report(ready: Ready, started: float) -> OutputReport:
    """Return what was done for one output."""
    plan, meter = ready.prepared.plan, ready.meter
    return OutputReport(
        name=plan.output.name,
        state="built" if ready.finished else "unchanged",
        path=plan.output.path if plan.output.publish else None,
        digest=format_digest(ready.locked.digest),
        operator=plan.output.operator,
        expert_bytes={"full": plan.expert_bytes, "planned": plan.planned_bytes, "read": meter.expert_bytes},
        base_bytes_read=meter.base_bytes,
        index_bytes_read=meter.index_bytes,
        bytes_written=meter.written,
        blocks=block_facts(plan, meter),
        expert_blocks=ready.expert_blocks,
        bound=bound_of(plan),
        seconds=ready.seconds or time.monotonic() - started,
        decisions=plan.decisions,
        notes=budget_notes(plan),
        levels=locked_levels(ready.locked),
    )


def status(prepared: Prepared) -> OutputStatus:
    """Return whether an output is what a build would make, for people."""
    never = prepared.known is None
    return OutputStatus(
        name=prepared.name,
        state="unbuilt" if never else "stale" if prepared.reasons else "up-to-date",
        path=prepared.plan.output.path if prepared.plan.output.publish else None,
        reasons=prepared.reasons,
    )
