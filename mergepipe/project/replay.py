"""Replay: an output made again from its manifest and the sources alone, and compared with it in every byte.

Everything is computed: nothing that an earlier build left in a cache is used, and the manifest's digests are what every
input is compared with as it is read, and every result before anything is published. The work is done in a folder of
its own that is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.packs import PackStore
from mergepipe.cache.statistics import StatisticStore
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.digest import content_digest
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import LockError, MergepipeError, PublishError, SourceChangedError, raise_collected
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.scratch import scratch_folder
from mergepipe.lockfile.manifest_records import Manifest
from mergepipe.plan.budgeted import without_outcome
from mergepipe.plan.sampling import sampled_sources
from mergepipe.plan.values import OutputPlan
from mergepipe.project import build as steps
from mergepipe.project.gather import check_overlap
from mergepipe.project.levels import LevelBuilder
from mergepipe.project.publication import output_contents
from mergepipe.project.replay_compare import layout_errors
from mergepipe.project.replay_index import CheckedIndex
from mergepipe.project.replay_plan import Places, Remade, read_manifest, remake
from mergepipe.project.replay_report import ReplayReport, replay_report
from mergepipe.project.replay_result import (
    generated_differences,
    record_errors,
    result_errors,
    shard_errors,
    side_file_errors,
)
from mergepipe.project.session import processors
from mergepipe.publish.card import CARD
from mergepipe.publish.directory import Contents, Publication, check_collisions, check_target, recover_output
from mergepipe.reporting import Reporter, SilentReporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.run import Engine
    from mergepipe.engine.survey import SurveyedOutput

DIRECTORY = "replayed"
"""Where outputs go that no directory is given for: below it under their names."""
_SCRATCH = ".mergepipe-replay-"
_ANOTHER = "choose another directory with `--out DIR`"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a replay is made; only the files that are written depend on it.

    Attributes
    ----------
    out
        The directory of the output; None for ``replayed/NAME``.
    check
        Whether to compare alone, and keep nothing.
    force
        Whether a directory may be replaced that holds something else.
    scratch
        Where the folder of the work in progress is made; None for beside the output, or with ``check`` the system's
        folder for temporary files.
    workers, memory
        Threads, one per processor by default; bytes for weights in flight.
    geometry
        The block geometry; another one than the default is for tests.
    """

    out: Path | None = None
    check: bool = False
    force: bool = False
    scratch: Path | None = None
    workers: int | None = None
    memory: int | None = None
    geometry: Geometry = field(default=GEOMETRY_1)


def replay(
    path: Path,
    places: Places | None = None,
    options: ReplayOptions | None = None,
    reporter: Reporter | None = None,
) -> ReplayReport:
    """Make an output again from its manifest.

    Parameters
    ----------
    path
        The manifest, or the directory that it is in.
    places
        Where what it needs is found.

    Returns
    -------
    ReplayReport
        What was compared. All of it is equal, otherwise there is an error.

    Raises
    ------
    MergepipeError
        If the manifest or a source is not what it should be (exit status 2), or the result is another one (1). Nothing
        is published then.
    """
    started = time.monotonic()
    places, options, reporter = places or Places(), options or ReplayOptions(), reporter or SilentReporter()
    manifest, file = read_manifest(path)
    remade = remake(manifest, file, places, geometry=options.geometry)
    raise_collected(layout_errors(remade.plan, manifest))
    out = None if options.check else _out(options.out, manifest)
    folder = _scratch_parent(options, out)
    if out is not None:
        _check_out(out, remade, folder, force=options.force)
    with _scratch(folder, remade, options.geometry) as catalog:
        return _Replay(remade, catalog, options, reporter).run(out, started)


class _Replay:
    """One replay, in its scratch folder."""

    def __init__(self, remade: Remade, catalog: Catalog, options: ReplayOptions, reporter: Reporter) -> None:
        self._remade = remade
        self._catalog = catalog
        self._options = options
        self._reporter = reporter
        self._packs = PackStore(catalog, options.geometry)
        self._index = CheckedIndex(catalog, remade, options.geometry)
        self._workers = options.workers or processors()
        self._builder = LevelBuilder(remade.plans, catalog, self._packs, self._index, self._run, self._survey, reporter)

    def run(self, out: Path | None, started: float) -> ReplayReport:
        """Make the output, compare it, and put it into its directory where it has one."""
        remade, plans = self._remade, self._remade.plans
        prepared = {plan.output.name: steps.prepare(plan, plans, self._index, self._catalog) for plan in plans.plans}
        for message in remade.plan.notes:
            self._reporter.note(message)
        builder = self._builder
        looked_at = builder.build(prepared)
        ready = {
            name: steps.ready_built(one, builder.finished[name], self._index, builder.seconds[name])
            for name, one in looked_at.items()
        }
        name = remade.plan.output.name
        finished, record = builder.finished[name], remade.records[name]
        files = ready[name].prepared.side_files
        raise_collected(
            [*shard_errors(finished, record, self._packs, self._reporter), *side_file_errors(files, record)]
        )
        raise_collected(e for n, one in ready.items() for e in record_errors(one.locked, remade.records[n]))
        contents = self._contents(ready, out)
        if out is not None:
            self._publish(contents, out)
        digests = {file: content_digest(data) for file, data in contents.files.items()}
        meters = [one.finished.meter for one in ready.values() if one.finished is not None]
        return replay_report(
            remade,
            out,
            meters=meters,
            side_files=[file.name for file in files],
            generated=generated_differences(digests, remade.manifest),
            seconds=time.monotonic() - started,
        )

    # --- merging --------------------------------------------------------------------------------------------------

    def _engine(self) -> Engine:
        from mergepipe.engine.run import Engine, EngineOptions  # imported only to build

        options = EngineOptions(workers=self._workers, memory=self._options.memory)
        return Engine(self._catalog, self._packs, self._index, self._reporter, options)

    def _run(self, plans: Sequence[OutputPlan]) -> Mapping[str, FinishedOutput]:
        """Run the engine, and compare inputs and results before anything is made of them."""
        try:
            self._sample([plan for plan in plans if sampled_sources(plan)])
            finished = self._engine().run(plans)
        except MergepipeError as error:
            self._explain(error, plans)
            raise
        for plan in plans:
            raise_collected(self._index.errors(plan))
        for name, output in finished.items():
            raise_collected(result_errors(output, self._remade.records[name], self._remade.tensors[name]))
        return finished

    def _sample(self, plans: Sequence[OutputPlan]) -> None:
        """Take the samples of blocks that stand for what is not read of the sources of these outputs."""
        if not plans:
            return
        from mergepipe.engine.pool import WorkerPool
        from mergepipe.engine.sampling import Sampler

        meters = {plan.output.name: self._builder.measured.setdefault(plan.output.name, Meter()) for plan in plans}
        pool = WorkerPool(self._workers)
        try:
            self._index.settle(dict.fromkeys(source for plan in plans for source in plan.sources))
            store = StatisticStore(self._catalog)
            Sampler(self._index, store, pool, self._reporter, meters).sample(list(map(without_outcome, plans)))
        finally:
            pool.close()

    def _explain(self, error: MergepipeError, plans: Sequence[OutputPlan]) -> None:
        """Raise a better error, where the sources are not what they were: a merge of them may fail in many ways.

        Raises
        ------
        MergepipeError
            About a source, or about the manifest.
        """
        if isinstance(error, SourceChangedError):
            return
        if "planned" in error.facts and "read" in error.facts:
            raise LockError(
                f"the manifest states {error.facts['planned']:,} bytes of expert blocks for output"
                f" `{error.facts.get('output')}`, and its access set takes {error.facts['read']:,}",
                hint="the manifest contradicts itself; get it as it was written",
            ) from error
        tensor = error.facts.get("tensor")
        if tensor is not None and error.kind() in ("operator", "plan"):
            for plan in plans:
                raise_collected(self._index.input_errors(plan, str(tensor)))

    def _survey(self, plans: Sequence[OutputPlan]) -> Mapping[str, SurveyedOutput]:
        raise AssertionError("the access sets are those of the manifest")

    # --- publishing -----------------------------------------------------------------------------------------------

    def _contents(self, ready: Mapping[str, steps.Ready], out: Path | None) -> Contents:
        """Return what goes into the directory: the side files that the output had, as far as the sources have them."""
        name = self._remade.plan.output.name
        stated = {file.name for file in self._remade.records[name].side_files}
        one = ready[name]
        files = tuple(file for file in one.prepared.side_files if file.name in stated)
        target = out if out is not None else one.prepared.target
        locked = replace(one.locked, side_files=tuple(f for f in one.locked.side_files if f.name in stated))
        one = replace(one, prepared=replace(one.prepared, side_files=files, target=target), locked=locked)
        assert one.finished is not None, "everything is made in a replay"
        return output_contents(one, one.finished, self._remade.plans, self._index, self._packs, ready)

    def _publish(self, contents: Contents, out: Path) -> None:
        self._index.check_unchanged()
        with Publication(out, force=self._options.force) as publication:
            publication.assemble(contents)
            publication.swap()
            crash_point("replay.swapped")


# --- places -------------------------------------------------------------------------------------------------------


def _out(given: Path | None, manifest: Manifest) -> Path:
    path = given if given is not None else Path(DIRECTORY, manifest.output.name)
    return Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _scratch_parent(options: ReplayOptions, out: Path | None) -> Path:
    """Return the folder that the scratch folder is made in: on the file system of the output, so that it only moves."""
    if options.scratch is not None:
        return Path(os.path.abspath(options.scratch))  # noqa: PTH100 - links stay as they are
    return Path(tempfile.gettempdir()) if out is None else _existing(out.parent)


def _check_out(out: Path, remade: Remade, scratch: Path, *, force: bool) -> None:
    """Check that the output may be written to its directory.

    Raises
    ------
    PublishError
        If it holds something else than this output, or lies where it must not.
    """
    name = remade.plan.output.name
    here = Path.cwd()
    if here.is_relative_to(out):
        raise PublishError(
            f"`{out}` is the current directory, or holds it, and would be replaced as a whole",
            hint=f"choose a directory of its own, such as `--out {name}`",
            path=str(out),
        )
    check_overlap(out, name, scratch, remade.plans.checkpoints, scratch / _SCRATCH, another=_ANOTHER)
    recover_output(out)
    check_target(out, force=force, another=_ANOTHER)
    if not force and out.is_dir() and any(out.iterdir()):
        with contextlib.suppress(MergepipeError):
            if read_manifest(out)[0].output.digest == remade.manifest.output.digest:
                check_collisions(out, [file for file in remade.manifest.files if file != CARD], force=False)
                return
        raise PublishError(
            f"the directory `{out}` holds another output",
            hint=f"{_ANOTHER}, or use `--force` to replace it",
            path=str(out),
        )


@contextlib.contextmanager
def _scratch(folder: Path, remade: Remade, geometry: Geometry) -> Iterator[Catalog]:
    """Make a cache of its own for the replay, and remove it again."""
    with scratch_folder(folder, _SCRATCH) as root:
        layout = CacheLayout(root)
        layout.create()
        catalog = Catalog(layout, geometry.block_elements, create=True)
        try:
            yield catalog
        finally:
            catalog.close()
