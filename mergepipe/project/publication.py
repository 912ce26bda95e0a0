"""Putting what was built where it belongs: into its output directory, and on record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.records import Published
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import content_digest
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import CacheError
from mergepipe.fsio.crash import crash_point
from mergepipe.lockfile.assemble_manifest import manifest
from mergepipe.lockfile.manifest import render_manifest
from mergepipe.lockfile.records import Lockfile
from mergepipe.lockfile.writer import render_lock
from mergepipe.plan.values import OutputPlan
from mergepipe.project.budgets import known_budget
from mergepipe.project.build import Prepared, Ready, last_build, prepare, recheck_published
from mergepipe.project.cards import output_card
from mergepipe.project.facts import current_facts, encode_files, encode_published, known_output
from mergepipe.project.key_parts import build_parts
from mergepipe.project.manifest_parts import Made, manifest_parts
from mergepipe.project.stages import Plans, record_place
from mergepipe.publish.card import CARD, has_foreign_card
from mergepipe.publish.directory import (
    INDEX,
    Contents,
    Publication,
    check_collisions,
    check_target,
    check_writable,
    claim,
    recover_output,
    settled_files,
    touched_files,
)
from mergepipe.publish.owned import MANIFEST
from mergepipe.reporting import Reporter


def check_new(plans: Plans, *, force: bool) -> None:
    """Check that the output directories may be written, where nothing is known of any of them.

    Raises
    ------
    PublishError
        If mergepipe did not make one, unless ``force``.
    """
    for plan in _published(plans.plans):
        check_target(record_place(plans.mergefile, plan.output), force=force)


def take_over(plans: Plans, catalog: Catalog, *, force: bool) -> None:
    """Clean up what a killed build left beside the output directories, and check that they are ours to write.

    Raises
    ------
    PublishError
        If mergepipe did not make one, unless ``force``.
    """
    for plan in _published(plans.plans):
        target = record_place(plans.mergefile, plan.output)
        recover_output(target)
        known = known_output(catalog, target)
        if known is not None:
            claim(target, known.files)
        check_target(target, force=force)


def _published(plans: Iterable[OutputPlan]) -> Iterable[OutputPlan]:
    return (plan for plan in plans if plan.output.publish)


def check_names(prepared: Prepared, *, force: bool) -> Prepared:
    """Check, before anything is merged, that no file of the user's has a name that the output needs.

    The card is no such file: one that somebody changed stays, and one that is as it was written is ours, also where it
    was changed for a while.

    With ``force``, an output that has such files is published again, which replaces them.

    Raises
    ------
    PublishError
        Naming the files.
    """
    if not prepared.plan.output.publish:
        return prepared
    names = [file.name for file in prepared.side_files] + [shard.name for shard in prepared.plan.layout.shards]
    names += [MANIFEST, *([INDEX] if len(prepared.plan.layout.shards) > 1 else [])]
    taken = check_collisions(prepared.target, names, force=force)
    if not taken:
        return prepared
    return replace(prepared, reasons=(*prepared.reasons, f"replacing {', '.join(taken)}"), forced=True)


def prepared_outputs(
    plans: Plans, index: SourceIndex, catalog: Catalog, introduce: Callable[[Prepared], None], *, force: bool
) -> dict[str, Prepared]:
    """Look at every output before a build, in order, and pass on what is known of it.

    Raises
    ------
    PublishError
        As `check_names`.
    StorageError
        If a directory that is not there yet, or that nothing is known of, cannot be put into its place.
    """
    prepared = {}
    for plan in plans.plans:
        found = recheck_published(prepare(plan, plans, index, catalog), catalog)
        _check_writable(found)
        prepared[plan.output.name] = check_names(found, force=force)
        introduce(found)
    return prepared


def _check_writable(prepared: Prepared) -> None:
    """Check, before anything is merged, the place of an output that is published whatever its inputs turn out to be."""
    is_published = prepared.known is None or not prepared.target.exists()
    if prepared.plan.output.publish and is_published:
        check_writable(prepared.target)


def publish(
    ready: Ready,
    plans: Plans,
    index: SourceIndex,
    catalog: Catalog,
    packs: PackStore,
    reporter: Reporter,
    *,
    made: Mapping[str, Ready],
    force: bool,
) -> None:
    """Put a finished output into its directory, if it is published, and on record; an unchanged one is left alone.

    Raises
    ------
    StorageError
        If the file system refuses; the previous directory is intact then.
    """
    finished, prepared = ready.finished, ready.prepared
    if finished is None:
        _record_blocks(ready, plans, catalog)
        return
    facts = current_facts(prepared.plan, ready.locked, prepared.side_files, index, prepared.card)
    assert facts is not None, "every input of a finished output is known"
    text = render_lock(Lockfile(geometry=prepared.plan.geometry.id, sources=(), outputs=(ready.locked,)))
    blocks = ready.blocks if plans.is_stage(prepared.name) else {}
    budget = known_budget(prepared.plan, index)
    parts, last = build_parts(prepared.plan, index), last_build(ready, plans)
    if not prepared.plan.output.publish:
        published = encode_published(facts, (), text, ready.expert_blocks, blocks, budget, parts, last)
        catalog.record_published(prepared.target, published)
        return
    contents = output_contents(ready, finished, plans, index, packs, made)
    with links_changing(catalog), Publication(prepared.target, force=force) as publication:
        files = publication.assemble(contents)
        _say_copied(prepared.target, publication.copied, reporter)
        published = encode_published(facts, files, text, ready.expert_blocks, blocks, budget, parts, last)
        _record_linked(prepared, finished, published, catalog, packs)
        crash_point("publish.recorded")
        retired = packs.intact(_packs_of(prepared))
        publication.swap()
        with catalog.transaction():
            for pack in retired:
                packs.unlinked(pack)
            for shard in finished.shards:
                packs.refresh(shard.pack)
            settled = encode_files(settled_files(prepared.target, files))
            catalog.record_published(prepared.target, replace(published, files=settled))


def _packs_of(prepared: Prepared) -> set[str]:
    """Return the packs of the shards that were published before."""
    return {file.digest.hex() for file in prepared.known.files if file.is_shard} if prepared.known else set()


def _say_copied(target: Path, copied: Sequence[str], reporter: Reporter) -> None:
    """Say that shards take their space twice: they lie on the disk of the cache, and it makes no links."""
    if copied:
        reporter.warn(
            f"the file system of `{target}` makes no links: {len(copied)} shards were copied from the cache, and take"
            " their space twice; `mergepipe cache prune --max-size 0` gives it back"
        )


@contextlib.contextmanager
def links_changing(catalog: Catalog) -> Iterator[None]:
    """Keep outputs known, of any project that shares the cache, whose files only gain or lose links meanwhile.

    Packs and published shards share their bytes, so that removing or linking one touches the other: its ctime changes.
    Files that were not as they were published before stay what they are.
    """
    before = [target for target in catalog.published_places() if _is_intact(target, catalog)]
    yield
    for target in before:
        known, published = known_output(catalog, target), catalog.published(target)
        if known is not None and published is not None:
            settled = settled_files(target, known.files)
            if settled != known.files:
                catalog.record_published(target, replace(published, files=encode_files(settled)))


def _is_intact(target: Path, catalog: Catalog) -> bool:
    known = known_output(catalog, target)
    return known is not None and target.is_dir() and not touched_files(target, known.files)


def _record_blocks(ready: Ready, plans: Plans, catalog: Catalog) -> None:
    """Add block digests to the record of an output that was no stage when it was built, and that was looked into."""
    known, target = ready.prepared.known, ready.prepared.target
    published = catalog.published(target)
    if not ready.blocks or known is None or known.record.blocks or published is None:
        return
    if plans.is_stage(ready.prepared.name):
        catalog.record_published(target, replace(published, record=known.record_with(ready.blocks)))


def _record_linked(
    prepared: Prepared, finished: FinishedOutput, published: Published, catalog: Catalog, packs: PackStore
) -> None:
    """Record what is being published, if the packs that were just linked are what they were when they were finished.

    Raises
    ------
    CacheError
        If a published file that shares its bytes with one was written to meanwhile; nothing is published then.
    """
    with catalog.transaction():  # one commit, however many shards
        changed = [shard for shard in finished.shards if not packs.refresh(shard.pack)]
        if not changed:
            catalog.record_published(prepared.target, published)
    for shard in changed:
        packs.quarantine(shard.pack)
    if changed:
        raise CacheError(
            f"`{changed[0].shard.name}` of output `{prepared.name}` was written to while it was being published",
            hint="run the build again when nothing writes to the output directory any more",
            output=prepared.name,
        )


def output_contents(
    ready: Ready,
    finished: FinishedOutput,
    plans: Plans,
    index: SourceIndex,
    packs: PackStore,
    made: Mapping[str, Ready],
) -> Contents:
    """Return what goes into the directory of an output; ``made`` are all outputs of the build, by name."""
    plan, mergefile = finished.plan, plans.mergefile
    files = {file.name: file.data for file in ready.prepared.side_files}
    shard_index = plan.layout.index()
    if shard_index is not None:
        files[INDEX] = shard_index
    if not has_foreign_card(ready.prepared.target):
        files[CARD] = output_card(finished, ready.locked, ready.prepared.card, files)
    links = {shard.shard.name: packs.path(shard.pack) for shard in finished.shards}
    names = tuple(sorted({*files, *links, MANIFEST}))
    generated = {name: content_digest(files[name]) for name in (INDEX, CARD) if name in files}
    others = {name: Made(plan=other.prepared.plan, locked=other.locked) for name, other in made.items()}
    parts = manifest_parts(plan, plans, others, index)
    record = manifest(ready.locked, finished, index, mergefile, names, generated, ready.counts, parts)
    files[MANIFEST] = render_manifest(record)
    return Contents(links=links, files=files)
