"""The pipeline of a build: sources, plans, graph and engine, lock, publication. One function a step, in that order.

Nothing is published before every output is finished and, with ``--locked``, agrees with the lock. The lock is written
last. Killed between the two, the next build finds the outputs as they should be and writes the lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.place import Place
from mergepipe.digest import format_digest
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import CacheError
from mergepipe.fsio.crash import crash_point
from mergepipe.lockfile.assemble import (
    ContentCounts,
    block_facts,
    content_counts,
    declared_output,
    expert_block_facts,
    locked_output,
    manifest,
)
from mergepipe.lockfile.manifest import render_manifest
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import LockedOutput, Lockfile
from mergepipe.lockfile.writer import render_lock
from mergepipe.mergefile.schema import Mergefile
from mergepipe.plan.values import OutputPlan
from mergepipe.project.facts import (
    KnownOutput,
    changed_facts,
    current_facts,
    encode_files,
    encode_published,
    known_output,
)
from mergepipe.project.gather import target_of
from mergepipe.project.reports import EXACT, OutputReport
from mergepipe.publish.card import CARD, model_card
from mergepipe.publish.directory import (
    INDEX,
    MANIFEST,
    Contents,
    Publication,
    check_collisions,
    check_target,
    claim,
    recheck,
    recover_output,
    settled_files,
    touched_files,
)
from mergepipe.publish.sidefiles import SideFile, side_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One output before its build: its plan, its declared record, its side files, and what is published already."""

    plan: OutputPlan
    declared: LockedOutput
    side_files: tuple[SideFile, ...]
    target: Path
    known: KnownOutput | None
    reasons: tuple[str, ...]
    only_touched: bool
    forced: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether the published output is what a build would make."""
        return self.known is not None and not self.reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One output after its build: its record, what was counted, and if it must be published what it is made of."""

    prepared: Prepared
    locked: LockedOutput
    finished: FinishedOutput | None
    meter: Meter
    counts: Mapping[str, ContentCounts]
    expert_blocks: Mapping[str, int]
    seconds: float


def prepare(
    plan: OutputPlan, mergefile: Mergefile, checkpoints: Mapping[str, Checkpoint], index: SourceIndex, catalog: Catalog
) -> Prepared:
    """Find out whether an output is what a build would make; reads side files, headers and the catalog."""
    tokenizer = _tokenizer(plan)
    definer = plan.sources[plan.definer]
    files = side_files(plan, _folder(checkpoints[tokenizer], mergefile), _folder(definer, mergefile))
    declared = declared_output(plan, tokenizer, index)
    target = target_of(mergefile, plan.output)
    known = known_output(catalog, target)
    reasons = _reasons(plan, declared, files, known, index)
    touched = _touched(target, known) if known is not None and not reasons else ()
    return Prepared(
        plan=plan,
        declared=declared,
        side_files=files,
        target=target,
        known=known,
        reasons=reasons or touched,
        only_touched=bool(touched),
    )


def _tokenizer(plan: OutputPlan) -> str:
    """Return the source that the tokenizer and its side files come from."""
    return plan.output.write.tokenizer or plan.definer


def _folder(checkpoint: Checkpoint, mergefile: Mergefile) -> Place | None:
    """Return where a source's side files lie; None for a single file, which has none."""
    if not checkpoint.is_folder:
        return None
    shown = mergefile.sources[checkpoint.label].path or str(checkpoint.root)
    return Place(label=checkpoint.label, root=checkpoint.root, shown=shown)


def _reasons(
    plan: OutputPlan,
    declared: LockedOutput,
    files: tuple[SideFile, ...],
    known: KnownOutput | None,
    index: SourceIndex,
) -> tuple[str, ...]:
    if known is None:
        return ("it was not built here before",)
    cold = tuple(source for source in plan.sources if index.digest(source) is None)
    if cold:
        return tuple(f"source `{source}` changed on disk, or was not read before" for source in cold)
    facts = current_facts(plan, declared, files, index)
    if facts is not None and facts.key() != known.key:
        return changed_facts(known.record.facts, facts) or ("its recipe changed",)
    return ()


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


def ready_unchanged(prepared: Prepared, lock_path: Path, meter: Meter | None = None, seconds: float = 0.0) -> Ready:
    """Return the record of an output that is what it should be.

    Parameters
    ----------
    meter
        What was read to find that out; nothing where the catalog knew it.
    """
    assert prepared.known is not None, "an unchanged output is known"
    record = prepared.known.record
    locked = parse_lock(record.lock, lock_path).outputs[0]
    return Ready(
        prepared=prepared,
        locked=locked,
        finished=None,
        meter=meter or Meter(cached=prepared.plan.blocks),
        counts={},
        expert_blocks={**record.expert_blocks, "read": 0},
        seconds=seconds,
    )


def is_confirmed(prepared: Prepared, index: SourceIndex) -> bool:
    """Return whether an output that had to be looked into, as its sources were touched, turned out to be unchanged."""
    known, plan = prepared.known, prepared.plan
    if known is None or prepared.forced or touched_files(prepared.target, known.files):
        return False
    facts = current_facts(plan, prepared.declared, prepared.side_files, index)
    return facts is not None and facts.key() == known.key


def ready_built(prepared: Prepared, finished: FinishedOutput, index: SourceIndex, seconds: float) -> Ready:
    """Return the record of an output whose shards are in packs."""
    plan = prepared.plan
    counts = {tensor.name: content_counts(plan, tensor, index) for tensor in plan.tensors}
    locked = locked_output(
        declared_output(plan, _tokenizer(plan), index),
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
    )


# --- publication --------------------------------------------------------------------------------------------------


def take_over(target: Path, catalog: Catalog, *, force: bool) -> None:
    """Clean up what a killed build left beside an output directory, and check that it is ours to write.

    Raises
    ------
    PublishError
        If mergepipe did not make it, unless ``force``.
    """
    recover_output(target)
    known = known_output(catalog, target)
    if known is not None:
        claim(target, known.files)
    check_target(target, force=force)


def publish(
    ready: Ready, mergefile: Mergefile, index: SourceIndex, catalog: Catalog, packs: PackStore, *, force: bool
) -> None:
    """Put a finished output into its directory; an unchanged one is left alone.

    Raises
    ------
    StorageError
        If the file system refuses; the previous directory is intact then.
    """
    finished, prepared = ready.finished, ready.prepared
    if finished is None:
        return
    contents = _contents(ready, finished, mergefile, index, packs)
    facts = current_facts(prepared.plan, ready.locked, prepared.side_files, index)
    assert facts is not None, "every input of a finished output is known"
    record = render_lock(Lockfile(geometry=prepared.plan.geometry.id, sources=(), outputs=(ready.locked,)))
    with Publication(prepared.target, force=force) as publication:
        files = publication.assemble(contents)
        _confirm_packs(prepared.plan.output.name, finished, catalog, packs)
        published = encode_published(facts, files, record, dict(ready.expert_blocks))
        catalog.record_published(prepared.target, published)
        crash_point("publish.recorded")
        publication.swap()
        with catalog.transaction():
            for shard in finished.shards:
                packs.refresh(shard.pack)
            settled = encode_files(settled_files(prepared.target, files))
            catalog.record_published(prepared.target, replace(published, files=settled))


def _confirm_packs(output: str, finished: FinishedOutput, catalog: Catalog, packs: PackStore) -> None:
    """Check that the packs that were just linked are what they were when their shards were finished.

    Raises
    ------
    CacheError
        If a published file that shares its bytes with one was written to meanwhile; nothing is published then.
    """
    with catalog.transaction():  # one commit, however many shards
        changed = [shard for shard in finished.shards if not packs.refresh(shard.pack)]
    for shard in changed:
        packs.quarantine(shard.pack)
    if changed:
        raise CacheError(
            f"`{changed[0].shard.name}` of output `{output}` was written to while it was being published",
            hint="run the build again when nothing writes to the output directory any more",
            output=output,
        )


def check_names(prepared: Prepared, *, force: bool) -> Prepared:
    """Check, before anything is merged, that no file of the user's has a name that the output needs.

    With ``force``, an output that has such files is published again, which replaces them.

    Raises
    ------
    PublishError
        Naming the files.
    """
    names = [file.name for file in prepared.side_files] + [shard.name for shard in prepared.plan.layout.shards]
    names += [CARD, MANIFEST, *([INDEX] if len(prepared.plan.layout.shards) > 1 else [])]
    taken = check_collisions(prepared.target, names, force=force)
    if not taken:
        return prepared
    return replace(prepared, reasons=(*prepared.reasons, f"replacing {', '.join(taken)}"), forced=True)


def _contents(
    ready: Ready, finished: FinishedOutput, mergefile: Mergefile, index: SourceIndex, packs: PackStore
) -> Contents:
    plan = finished.plan
    files = {file.name: file.data for file in ready.prepared.side_files}
    shard_index = plan.layout.index()
    if shard_index is not None:
        files[INDEX] = shard_index
    files[CARD] = model_card(
        plan,
        {name: mergefile.sources[name].path or name for name in plan.sources},
        {name: format_digest(digest) for name, digest in ready.locked.sources.items()},
    )
    links = {shard.shard.name: packs.path(shard.pack) for shard in finished.shards}
    names = tuple(sorted({*files, *links, MANIFEST}))
    files[MANIFEST] = render_manifest(manifest(ready.locked, finished, index, mergefile, names, ready.counts))
    return Contents(links=links, files=files)


# --- the report ---------------------------------------------------------------------------------------------------


def report(ready: Ready, started: float) -> OutputReport:
    """Return what was done for one output."""
    plan, meter = ready.prepared.plan, ready.meter
    return OutputReport(
        name=plan.output.name,
        state="built" if ready.finished else "unchanged",
        path=plan.output.path,
        digest=format_digest(ready.locked.digest),
        operator=plan.output.operator,
        expert_bytes={"full": plan.expert_bytes, "planned": plan.expert_bytes, "read": meter.expert_bytes},
        base_bytes_read=meter.base_bytes,
        index_bytes_read=meter.index_bytes,
        bytes_written=meter.written,
        blocks=block_facts(plan, meter),
        expert_blocks=ready.expert_blocks,
        bound=EXACT,
        seconds=ready.seconds or time.monotonic() - started,
        decisions=plan.decisions,
    )
