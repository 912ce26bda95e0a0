"""The pipeline of a build: sources, plans, graph and engine, lock, publication. One function a step, in that order.

Nothing is published before every output is finished and, with ``--locked``, agrees with the lock. The lock is written
last. Killed between the two, the next build finds the outputs as they should be and writes the lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.digest import format_digest
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import CacheError, LockDiffersError
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import drop_temporary, replace_file
from mergepipe.graph.state import tensor_nodes
from mergepipe.lockfile.assemble import (
    ContentCounts,
    block_facts,
    content_counts,
    declared_output,
    expert_block_facts,
    locked_output,
    locked_source,
    manifest,
)
from mergepipe.lockfile.compare import Difference, compare_locks, declared_differences, render_differences
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
    recheck,
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
    tokenizer = plan.output.write.tokenizer or plan.definer
    definer = plan.sources[plan.definer]
    files = side_files(plan, _folder(checkpoints[tokenizer]), _folder(definer))
    declared = declared_output(plan, tokenizer, index)
    target = target_of(mergefile, plan.output)
    known = known_output(catalog, target)
    reasons = _reasons(plan, declared, files, known, index, catalog)
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


def _folder(checkpoint: Checkpoint) -> Path | None:
    return checkpoint.root if checkpoint.is_folder else None


def _reasons(
    plan: OutputPlan,
    declared: LockedOutput,
    files: tuple[SideFile, ...],
    known: KnownOutput | None,
    index: SourceIndex,
    catalog: Catalog,
) -> tuple[str, ...]:
    if known is None:
        return ("it was not built here before",)
    cold = tuple(source for source in plan.sources if index.digest(source) is None)
    if cold:
        return tuple(f"source `{source}` changed on disk, or was not read before" for source in cold)
    facts = current_facts(plan, declared, tensor_nodes(plan, index, catalog), files, index)
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


def is_confirmed(prepared: Prepared, index: SourceIndex, catalog: Catalog) -> bool:
    """Return whether an output that had to be looked into, as its sources were touched, turned out to be unchanged."""
    known, plan = prepared.known, prepared.plan
    if known is None or touched_files(prepared.target, known.files):
        return False
    facts = current_facts(plan, prepared.declared, tensor_nodes(plan, index, catalog), prepared.side_files, index)
    return facts is not None and facts.key() == known.key


def ready_built(prepared: Prepared, finished: FinishedOutput, index: SourceIndex, seconds: float) -> Ready:
    """Return the record of an output whose shards are in packs."""
    plan = prepared.plan
    tokenizer = plan.output.write.tokenizer or plan.definer
    counts = {tensor.name: content_counts(plan, tensor, index) for tensor in plan.tensors}
    locked = locked_output(
        declared_output(plan, tokenizer, index),
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


# --- the lock -----------------------------------------------------------------------------------------------------


def next_lock(
    old: Lockfile | None,
    mergefile: Mergefile,
    outputs: Sequence[LockedOutput],
    checkpoints: Mapping[str, Checkpoint],
    index: SourceIndex,
    geometry: int,
) -> Lockfile:
    """Return the lock after a build: entries of outputs that were not built stay as they are."""
    built = {output.name: output for output in outputs}
    kept = [o for o in (old.outputs if old else ()) if o.name in mergefile.outputs and o.name not in built]
    entries = [*built.values(), *kept]
    fresh = {name for output in built.values() for name in output.sources}
    sources = [
        locked_source(mergefile.sources[name], checkpoints[name], index.digest(name)) for name in sorted(fresh)
    ]
    used = {name for output in kept for name in output.sources} - fresh
    sources += [source for source in (old.sources if old else ()) if source.name in used]
    return Lockfile(geometry=geometry, sources=tuple(sources), outputs=tuple(entries))


def refuse_declared_changes(old: Lockfile | None, new: Lockfile, lock_path: Path, root: Path) -> None:
    """Stop a ``--locked`` build early if what is declared, or a source whose content is known, differs.

    Raises
    ------
    LockDiffersError
        Listing the differences, or saying that there is no lock.
    """
    _refuse(old, declared_differences(old, new) if old else (), lock_path, root)


def refuse_changes(old: Lockfile | None, new: Lockfile, lock_path: Path, root: Path) -> None:
    """Stop a ``--locked`` build before anything is published if the lock would change at all."""
    _refuse(old, compare_locks(old, new), lock_path, root)


def _refuse(old: Lockfile | None, differences: Sequence[Difference], lock_path: Path, root: Path) -> None:
    shown = lock_path.relative_to(root) if lock_path.is_relative_to(root) else lock_path
    if old is None:
        raise LockDiffersError(
            f"`{shown}` does not exist, and `--locked` keeps a build from writing it",
            hint="run `mergepipe build` and commit the lock",
            path=str(shown),
        )
    if differences:
        raise LockDiffersError(
            render_differences(differences, shown),
            hint="run `mergepipe build` without `--locked` to update the lock, and review the change",
            path=str(shown),
            differences=[difference.as_json() for difference in differences],
        )


def write_lock(path: Path, old: Lockfile | None, new: Lockfile) -> bool:
    """Write the lock if it says something else than the one that is there; return whether it did."""
    if old is not None and not compare_locks(old, new):
        drop_temporary(path)
        return False  # the text may differ (line ends, order of keys): it is not ours to change then
    replace_file(path, render_lock(new).encode(), point="lock")
    return True


# --- publication --------------------------------------------------------------------------------------------------


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
    facts = current_facts(
        prepared.plan,
        ready.locked,
        tensor_nodes(prepared.plan, index, catalog),
        prepared.side_files,
        index,
    )
    assert facts is not None, "every input of a finished output is known"
    record = render_lock(Lockfile(geometry=prepared.plan.geometry.id, sources=(), outputs=(ready.locked,)))
    with Publication(prepared.target, force=force) as publication:
        files = publication.assemble(contents)
        _confirm_packs(prepared.plan.output.name, finished, packs)
        published = encode_published(facts, files, record, dict(ready.expert_blocks))
        catalog.record_published(prepared.target, published)
        crash_point("publish.recorded")
        publication.swap()
        with catalog.transaction():
            for shard in finished.shards:
                packs.refresh(shard.pack)
            settled = encode_files(settled_files(prepared.target, files))
            catalog.record_published(prepared.target, replace(published, files=settled))


def _confirm_packs(output: str, finished: FinishedOutput, packs: PackStore) -> None:
    """Check that the packs that were just linked are what they were when their shards were finished.

    Raises
    ------
    CacheError
        If a published file that shares its bytes with one was written to meanwhile; nothing is published then.
    """
    changed = [shard for shard in finished.shards if not packs.refresh(shard.pack)]
    for shard in changed:
        packs.quarantine(shard.pack)
    if changed:
        raise CacheError(
            f"`{changed[0].shard.name}` of output `{output}` was written to while it was being published",
            hint="run the build again when nothing writes to the output directory any more",
            output=output,
        )


def check_names(prepared: Prepared, *, force: bool) -> None:
    """Check, before anything is merged, that no file of the user's has a name that the output needs.

    Raises
    ------
    PublishError
        Naming the files.
    """
    names = [file.name for file in prepared.side_files] + [shard.name for shard in prepared.plan.layout.shards]
    names += [CARD, MANIFEST, *([INDEX] if len(prepared.plan.layout.shards) > 1 else [])]
    check_collisions(prepared.target, names, force=force)


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
