"""The Python API: a project is a Mergefile with a cache; whatever the command line does, it does through this."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.packs import PackStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.engine.results import FinishedOutput
from mergepipe.lockfile.reader import read_lock
from mergepipe.lockfile.records import LockedOutput, Lockfile
from mergepipe.mergefile.parse import LoadOperators, load_mergefile
from mergepipe.mergefile.schema import Budget, CustomOperator, Output
from mergepipe.operators.registry import operators, signatures
from mergepipe.plan.values import OutputPlan
from mergepipe.project import build as steps
from mergepipe.project import locking
from mergepipe.project.caches import ProjectCache, opened, writing
from mergepipe.project.collecting import seldom_collecting
from mergepipe.project.gather import check_targets, make_plans, open_sources, select_outputs, with_stages
from mergepipe.project.levels import LevelBuilder, introduce
from mergepipe.project.reports import BuildReport, CacheInfo, PruneReport, StatusReport
from mergepipe.project.stages import Plans
from mergepipe.reporting import Reporter, SilentReporter
from mergepipe.signatures import OperatorSignature

if TYPE_CHECKING:  # what only some commands need is imported by these: `status` is sooner done without
    from mergepipe.engine.run import Engine
    from mergepipe.engine.survey import SurveyedOutput
    from mergepipe.project.caches_report import CacheCheck
    from mergepipe.project.diff import DiffReport
    from mergepipe.project.evaluate import Command
    from mergepipe.project.explain import OutputExplanation, TensorExplanation
    from mergepipe.project.plan_report import PlanReport
    from mergepipe.project.report_page import OutputReports
    from mergepipe.project.signing import Signer
    from mergepipe.project.sweep_report import SweepReport
    from mergepipe.project.timing import BuildClock
    from mergepipe.project.verify import VerifyOptions
    from mergepipe.project.verify_report import VerifyReport

CACHE_DIRECTORY = ".mergecache"


def open_project(
    path: Path | str = "Mergefile.toml",
    *,
    cache_dir: Path | str | None = None,
    reporter: Reporter | None = None,
    workers: int | None = None,
    memory: int | None = None,
    geometry: Geometry = GEOMETRY_1,
    allow_custom: bool = False,
    load_custom: bool = True,
) -> Project:
    """Open a project: parse and check its Mergefile.

    Parameters
    ----------
    path
        The Mergefile.
    cache_dir
        Where digests and finished shards are kept; ``.mergecache`` beside the Mergefile by default.
    reporter
        Receives progress and messages.
    workers
        Threads; one per processor by default. Never changes a result.
    memory
        Bytes for the workers' buffers. Never changes a result.
    geometry
        The block geometry; another one than the default is for tests.
    allow_custom
        Whether the code of custom operators may run; the environment may allow it too.
    load_custom
        Whether it is loaded at all; without it, outputs of custom operators can be verified, and nothing else.

    Raises
    ------
    MergefileError
        For everything that is wrong in the Mergefile, in one go.
    """
    mergefile_path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a linked Mergefile
    cache = Path(os.path.abspath(cache_dir)) if cache_dir else mergefile_path.parent / CACHE_DIRECTORY  # noqa: PTH100
    return Project(
        mergefile_path,
        cache,
        reporter or SilentReporter(),
        workers or processors(),
        memory,
        geometry,
        allow_custom=allow_custom,
        load_custom=load_custom,
    )


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Project:
    """A Mergefile, its lock and its cache. Made by `open_project`."""

    def __init__(
        self,
        path: Path,
        cache: Path,
        reporter: Reporter,
        workers: int,
        memory: int | None,
        geometry: Geometry,
        *,
        allow_custom: bool = False,
        load_custom: bool = True,
    ) -> None:
        self._operators = dict(operators())
        self._allow_custom = allow_custom
        self.mergefile = load_mergefile(path, signatures(), self._loader(path, load=load_custom))
        self.lock_path = path.with_suffix(".lock")
        self._layout = CacheLayout(cache)
        self._reporter = reporter
        self._workers = workers
        self._memory = memory
        self._geometry = geometry

    # --- commands -------------------------------------------------------------------------------------------------

    @seldom_collecting
    def build(
        self, outputs: Sequence[str] = (), *, locked: bool = False, force: bool = False, signer: Signer | None = None
    ) -> BuildReport:
        """Build outputs (all of them by default) and what they are made from, and update the lock.

        Parameters
        ----------
        locked
            Fail, and publish nothing, if the lock would change.
        force
            Replace output directories that mergepipe did not make.
        signer
            Signs them (`mergepipe.project.signing.Signer`).

        Raises
        ------
        MergepipeError
            If anything stops the build: previous outputs and the lock are then what they were.
        """
        from mergepipe.project import publication, room, signing, timing

        started = time.monotonic()
        selected = select_outputs(self.mergefile, outputs)
        if locked and not self.lock_path.exists():
            locking.refuse_changes(None, _EMPTY_LOCK, self.lock_path, self.mergefile.root)
        plans = self._plans(selected)
        if not self._layout.catalog.exists():  # nothing is known of any output: refuse before anything is written
            publication.check_new(plans, force=force)
        with self._writing() as (catalog, waited):
            if waited:  # another build may have written what was looked at before
                plans = self._plans(selected)
            old, signatures = read_lock(self.lock_path), signing.Signatures(self.mergefile, signer)
            publication.take_over(plans, catalog, force=force)
            index = plans.index(catalog, self._geometry)
            packs = PackStore(catalog, self._geometry)
            clock = timing.BuildClock(catalog, self._reporter)
            builder = self._builder(plans, catalog, packs, index, clock)

            def lock_with(entries: Sequence[LockedOutput]) -> Lockfile:
                return locking.next_lock(old, entries, plans, index, self._geometry.id)

            prepared = publication.prepared_outputs(plans, index, catalog, builder.introduce, force=force)
            if locked:
                new = lock_with([p.declared for p in prepared.values()])
                locking.refuse_declared_changes(old, new, self.lock_path, self.mergefile.root)
            room.room_for_build(plans, prepared, index, catalog, self._memory)
            ready = self._bring_about(prepared, builder, index)
            new = lock_with([r.locked for r in ready])
            if locked:
                locking.refuse_changes(old, new, self.lock_path, self.mergefile.root)
            made = {r.prepared.name: r for r in ready}
            for one in ready:
                publication.publish(one, plans, index, catalog, packs, self._reporter, made=made, force=force)
            changed = locking.write_lock(self.lock_path, old, new)
            signed = signatures.renew(made, catalog, self._reporter)
            clock.finish()
        return BuildReport(
            lock_path=self.lock_path.name, lock_changed=changed, signed=signed,
            outputs={r.prepared.name: steps.report(r, started) for r in ready},
        )  # fmt: skip

    def plan(self, outputs: Sequence[str] = ()) -> PlanReport:
        """Return what a build of these outputs would read and make.

        Reads headers only and writes nothing, but for outputs with a budget: which blocks it buys follows from the
        lengths of the deltas, which are measured once and kept in the cache.

        Raises
        ------
        MergepipeError
            For everything that a build would refuse before it reads weights.
        """
        from mergepipe.project import room
        from mergepipe.project.planning import plan_report, prepare_all

        plans = self._plans(select_outputs(self.mergefile, outputs))
        with self._reading() as catalog:
            index = plans.index(catalog, self._geometry)
            prepared = prepare_all(plans, index, catalog)
            if not any(p.plan.is_pending for p in prepared.values()):
                return plan_report(plans, prepared, index, catalog, self._workers, self._memory, {})
        with self._writing() as (catalog, _):
            index = plans.index(catalog, self._geometry)
            builder = self._builder(plans, catalog, PackStore(catalog, self._geometry), index)
            prepared = prepare_all(plans, index, catalog)
            room.room_for_codes([p.plan for p in prepared.values()], index, self._layout.root, plans.stages)
            prepared = builder.measure(prepared)
            return plan_report(plans, prepared, index, catalog, self._workers, self._memory, builder.measured)

    def status(self, outputs: Sequence[str] = ()) -> StatusReport:
        """Return which outputs are what a build would make, and why the others are not; reads no weights."""
        selected = select_outputs(self.mergefile, outputs)
        old = read_lock(self.lock_path)
        plans = make_plans(
            self.mergefile, selected, self._operators, open_sources(self.mergefile, selected), self._geometry
        )
        with self._reading() as catalog:
            index = plans.index(catalog, self._geometry)
            prepared = []
            for plan in plans.plans:  # what an output is made from stands before it
                prepared.append(steps.prepare(plan, plans, index, catalog, resolve=False))
                introduce(prepared[-1], plans, index)
            statuses = {p.name: steps.status(p) for p in prepared}
            verified = all(p.unchanged for p in prepared)
            entries = [steps.ready_unchanged(p, self.lock_path).locked if verified else p.declared for p in prepared]
            new = locking.next_lock(old, entries, plans, index, self._geometry.id)
            lock_state = locking.lock_state(old, new, verified=verified)
        return StatusReport(lock_path=self.lock_path.name, lock_state=lock_state, outputs=statuses)

    def sweep(
        self, output: str, budgets: Sequence[Budget | str], *, measure: bool = False, mapped: bool = False,
        command: Command | None = None, precision: str | None = None,
    ) -> SweepReport:  # fmt: skip
        """Return what budgets come to for one output, whatever its own is; see `mergepipe.project.sweep`."""
        from mergepipe.project.sweep import SweptProject

        swept = SweptProject(self).swept
        return swept(output, budgets, measure=measure, mapped=mapped, command=command, precision=precision)

    def explain(
        self, output: str, tensor: str | None = None, *, measure: bool = True
    ) -> OutputExplanation | TensorExplanation:
        """Return how an output, or one tensor of it, comes about; ``measure`` lets weights be read to say what experts
        gave.

        Raises
        ------
        MergepipeError
            If there is no such output or tensor, and for everything that a build would refuse before it reads weights.
        """
        from mergepipe.project.explained import ExplainedProject

        return ExplainedProject(self).explained(output, tensor, measure=measure)

    def diff(self, old: str | None = None, new: str | None = None, *, tensors: bool = False) -> DiffReport:
        """Return what differs between two records of this project, and why; see `mergepipe.project.diff`."""
        from mergepipe.project.diff import diff

        path, cache = self.mergefile.path, self._layout.root
        return diff(old, new, mergefile=path, tensors=tensors, cache_dir=cache, reporter=self._reporter)

    def report(self, outputs: Sequence[str] = ()) -> OutputReports:
        """Return all that is told of built outputs: figures, maps and tables; see `mergepipe.project.report_output`."""
        from mergepipe.project.report_output import ReportedProject

        return ReportedProject(self).reported(outputs)

    def verify(self, targets: Sequence[str] = (), options: VerifyOptions | None = None) -> VerifyReport:
        """Check every byte of outputs (all by default), of the lock and of cached packs; changes nothing.

        A target that is no output is a directory, which is verified alone.

        Raises
        ------
        MergepipeError
            For what is neither; for sources that cannot be opened where they are needed.
        """
        from mergepipe.project.verify import VerifiedProject, VerifyOptions

        names = (targets,) if isinstance(targets, str) else targets
        return VerifiedProject(self).verified(names, options or VerifyOptions())

    @property
    def cache(self) -> ProjectCache:
        """The cache directory, to look after."""
        return ProjectCache(self._layout, self.lock_path, self._reporter, self._workers, self._geometry)

    def cache_info(self) -> CacheInfo:
        """Return what the cache directory holds."""
        return self.cache.info()

    def cache_prune(
        self, max_bytes: int | None = None, max_age_days: float | None = None, *, unreferenced: bool = False,
        keep: Sequence[Path | str] = (), dry_run: bool = False,
    ) -> PruneReport:  # fmt: skip
        """Remove packs that are not needed, and what killed builds left; see `mergepipe.project.caches`."""
        return self.cache.prune(max_bytes, max_age_days, unreferenced=unreferenced, keep=keep, dry_run=dry_run)

    def cache_verify(self, *, dry_run: bool = False) -> CacheCheck:
        """Check every pack and every row of the catalog, and take out of use what is damaged."""
        return self.cache.verify(dry_run=dry_run)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _bring_about(
        self,
        prepared: Mapping[str, steps.Prepared],
        builder: LevelBuilder,
        index: SourceIndex,
    ) -> list[steps.Ready]:
        """Build the outputs that are not what they should be; the order stays."""
        looked_at = builder.build(prepared)
        ready = []
        for name, p in looked_at.items():
            done, took = builder.finished.get(name), builder.seconds.get(name, 0.0)
            if done is None or p.unchanged or steps.is_confirmed(p, index):
                meter = done.meter if done else builder.measured.get(name)
                ready.append(steps.ready_unchanged(p, self.lock_path, done, took, meter))
            else:
                ready.append(steps.ready_built(p, done, index, took))
        return ready

    def _builder(
        self, plans: Plans, catalog: Catalog, packs: PackStore, index: SourceIndex, clock: BuildClock | None = None
    ) -> LevelBuilder:
        """Return what builds these plans level by level; a clock measures it."""

        def engine(reporter: Reporter) -> Engine:
            from mergepipe.engine.run import Engine, EngineOptions  # imported only to build

            options = EngineOptions(workers=self._workers, memory=self._memory)
            return Engine(catalog, packs, index, reporter, options)

        def run(some: Sequence[OutputPlan]) -> Mapping[str, FinishedOutput]:
            return clock.run(engine, some) if clock else engine(self._reporter).run(some)

        def survey(some: Sequence[OutputPlan]) -> Mapping[str, SurveyedOutput]:
            return engine(self._reporter).survey(some)

        return LevelBuilder(plans, catalog, packs, index, run, survey, self._reporter)

    def _loader(self, path: Path, *, load: bool) -> LoadOperators:
        """Return what loads custom operators into this project, where there are any and they are allowed."""

        def loaded(
            declared: Sequence[CustomOperator], unknown: Sequence[str]
        ) -> Mapping[str, OperatorSignature | None]:
            if not declared and not unknown:
                return {}
            from mergepipe.project.plugins import is_allowed, load_operators, offered

            if not load:
                return dict.fromkeys(offered(unknown))
            allowed = is_allowed(self._allow_custom)
            found = load_operators(declared, unknown, path.parent, path.name, allowed=allowed)
            self._operators |= found
            return {name: operator.signature for name, operator in found.items()}

        return loaded

    def _plans(self, selected: Sequence[Output]) -> Plans:
        """Open the sources of these outputs and plan them; everything that can be refused early is refused here."""
        checkpoints = open_sources(self.mergefile, selected)
        check_targets(self.mergefile, with_stages(self.mergefile, selected), checkpoints, self._layout.root)
        return make_plans(self.mergefile, selected, self._operators, checkpoints, self._geometry)

    def _writing(self) -> AbstractContextManager[tuple[Catalog, bool]]:
        """Hold the cache and open its catalog for writing; also say whether another process was waited for."""
        return writing(self._layout, self.lock_path, self._geometry, self._reporter)

    def _reading(self) -> AbstractContextManager[Catalog]:
        return self._opened(create=False)

    def _opened(self, *, create: bool) -> AbstractContextManager[Catalog]:
        return opened(self._layout, self._geometry, self._reporter, create=create)


_EMPTY_LOCK = Lockfile(geometry=GEOMETRY_1.id, sources=(), outputs=())
