"""Running a build: pending tensors through the workers, then shards to packs. The only thread that changes state.

Order of writes, and what a kill leaves behind:

1. blocks land in staged shards; digests of sources and of staged blocks are recorded now and then. Killed here, the
   next build re-hashes what staging holds and goes on.
2. a finished shard is fsynced, renamed into ``packs/``, the folder fsynced, and only then recorded with its results.
   Killed before the record, the pack is an unknown file that `cache prune` removes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.records import StagedTensor
from mergepipe.cache.reserve import release, reserve
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.engine.coding import let_go
from mergepipe.engine.codings import (
    BeginCodings,
    check_given,
    count_headers,
    first_codings,
    lacking_packs,
    remade_codings,
    uncoded_tensors,
)
from mergepipe.engine.crew import crew_for
from mergepipe.engine.finish import ShardFinisher
from mergepipe.engine.groups import GroupMaker
from mergepipe.engine.heap import keep_freed_memory
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.limits import JobSizes, check_memory, fitting_workers, hold_bytes, job_memory, pending_bytes
from mergepipe.engine.meter import Meter, RunMeters
from mergepipe.engine.passes import GroupPasses, sizes_of
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.problems import check_reads
from mergepipe.engine.results import FinishedOutput
from mergepipe.engine.schedule import Scheduler
from mergepipe.engine.staging import StagedShard, abandoned, staged_name
from mergepipe.engine.survey import CodePasses, SurveyedOutput, SurveyPasses, surveyed_outputs, surveyed_tensors
from mergepipe.engine.work import Group, JobDone, TensorWork
from mergepipe.errors import InternalError, MergepipeError, SourceChangedError
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree
from mergepipe.graph.compile import MergeGraph, compile_graph
from mergepipe.graph.inputs import slot_blocks
from mergepipe.plan.sampling import whole_sources
from mergepipe.plan.values import OutputPlan, first_users
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.deviation import Comparison

T = TypeVar("T")

# How often finished blocks are recorded while a build runs, in seconds.
_RECORD_EVERY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Machine facts that never change a result.

    Attributes
    ----------
    workers
        Threads that read, compute and write.
    memory
        Bytes that weights in flight may take; None for no limit beyond the defaults.
    """

    workers: int
    memory: int | None = None


class Engine:
    """Builds outputs into packs.

    Parameters
    ----------
    index
        What is known of the sources; it is filled up, and flushed to the catalog, while the engine runs.
    """

    def __init__(
        self, catalog: Catalog, packs: PackStore, index: SourceIndex, reporter: Reporter, options: EngineOptions
    ) -> None:
        self._catalog = catalog
        self._packs = packs
        self._index = index
        self._reporter = reporter
        self._options = options
        keep_freed_memory()
        self._store = StatisticStore(catalog, pending_bytes(options.memory))
        self._codes = index.codes
        self._hold = HoldPool(hold_bytes(options.memory))
        self._job_memory = options.memory
        self._workers = options.workers
        self._recorded_at = time.monotonic()
        self._unrecorded: dict[int, Group] = {}

    def run(self, plans: Sequence[OutputPlan]) -> Mapping[str, FinishedOutput]:
        """Bring every output's shards into packs; compute only what no earlier result holds.

        Returns
        -------
        Mapping
            By output name, its digests, its packs, and what the run counted.

        Raises
        ------
        MergepipeError
            If a source, a number or the disk stops the build; what was finished is kept for the next one.
        """
        for plan in plans:
            if plan.is_pending:
                raise InternalError(f"output `{plan.output.name}` is built before its budget was resolved")
        graph = compile_graph(plans, self._index, self._catalog)
        shards, left = self._shards(plans)
        maker = GroupMaker(self._index, self._catalog, shards, left)
        meters = {plan.output.name: Meter() for plan in plans}
        pool = self._pool(plans)
        try:
            with reserve(self._catalog.layout):
                works = self._merge(graph, maker, meters, pool)
            self._record()
            finisher = ShardFinisher(self._catalog, self._packs, self._index, maker, pool, self._reporter, self._passes)
            finished = {p.output.name: finisher.finish(p, graph, works, shards, meters[p.output.name]) for p in plans}
            count_headers(plans, self._index, meters)
            for plan in plans:
                check_reads(plan, meters[plan.output.name])
            self._drop_abandoned(plans)
            self._index.check_unchanged()
            return finished
        finally:
            pool.close()

    def _pool(self, plans: Sequence[OutputPlan]) -> WorkerPool:
        """Return as many workers as the memory limit allows.

        Raises
        ------
        PlanError
            If it is too small for one.
        """
        check_memory(plans, self._options.memory)
        self._job_memory = job_memory(plans, self._options.memory)
        self._workers = fitting_workers(plans, self._options.workers, self._options.memory)
        return WorkerPool(self._workers, self._options.memory)

    def _shards(
        self, plans: Iterable[OutputPlan]
    ) -> tuple[dict[tuple[str, str], StagedShard], dict[tuple[str, str], StagedTensor]]:
        """Return, by (output, tensor), the staged shard of each and what an unfinished build left of it.

        Rows about staged files that are gone are dropped.
        """
        folder = self._catalog.layout.staging
        shards: dict[tuple[str, str], StagedShard] = {}
        left: dict[tuple[str, str], StagedTensor] = {}
        for plan in plans:
            output = plan.output.name
            for shard in plan.layout.shards:
                rows = self._catalog.staged(staged_name(output, shard))
                staged = StagedShard(folder, output, shard, resumable=bool(rows))
                shards.update({(output, tensor.name): staged for tensor in shard.tensors})
                if staged.resumed:
                    left.update({(output, name): row for name, row in rows.items()})
                elif rows:
                    self._catalog.drop_staged([staged.name])
        return shards, left

    def _drop_abandoned(self, plans: Iterable[OutputPlan]) -> None:
        """Remove what killed builds left of layouts that these outputs no longer have."""
        for plan in plans:
            left = abandoned(self._catalog.layout.staging, plan.output.name)
            if left:
                self._catalog.drop_staged(path.stem for path in left)
                crash_point("engine.abandoned")
            for path in left:
                remove_tree(path)

    # --- merging --------------------------------------------------------------------------------------------------

    def _merge(
        self, graph: MergeGraph, maker: GroupMaker, meters: Mapping[str, Meter], pool: WorkerPool
    ) -> dict[tuple[str, str], TensorWork]:
        self._load_blocks(graph.plans.values())
        plans = list(graph.plans.values())
        uncoded = maker.groups(uncoded_tensors(plans, self._codes, self._index))
        self._code(uncoded, first_codings, plans, meters, pool)
        groups = maker.groups(graph.pending())
        groups += maker.hashing(dict.fromkeys(name for plan in plans for name in whole_sources(plan)), groups)
        self._code(lacking_packs(groups, self._codes), remade_codings, plans, meters, pool)
        self._run("merging", plans, [self._passes(group) for group in groups], meters, pool)
        return {(work.plan.output.name, work.name): work for group in groups for work in group.works}

    def _code(
        self,
        groups: Sequence[Group],
        begin: BeginCodings,
        plans: Sequence[OutputPlan],
        meters: Mapping[str, Meter],
        pool: WorkerPool,
    ) -> None:
        """Make the progressive packs that groups read."""
        if groups:
            passes = [
                CodePasses(group, self._index, self._store, self._hold, self._job_sizes(group), self._codes, begin)
                for group in groups
            ]
            self._run("coding", plans, passes, meters, pool)
            self._record()

    def survey(self, plans: Sequence[OutputPlan]) -> Mapping[str, SurveyedOutput]:
        """Measure what the budgets of these outputs are planned from; nothing is merged.

        Returns
        -------
        Mapping
            By output name what was found, and what was read for it, all of it as index bytes.

        Raises
        ------
        MergepipeError
            If a source or a number stops it; what was measured is kept for the next build.
        """
        from mergepipe.engine.sampling import Sampler  # no build needs it, nor what compares

        maker = GroupMaker(self._index, self._catalog, *self._shards(plans))
        meters = {plan.output.name: Meter() for plan in plans}
        pool = self._pool(plans)
        try:
            with reserve(self._catalog.layout):
                self._load_blocks(plans)
                self._index.settle(_sources(plans))
                sampler = Sampler(self._index, self._store, pool, self._reporter, meters)
                found = self._forgetting(lambda: sampler.sample(plans))
                passes = [self._survey_passes(group) for group in maker.groups(surveyed_tensors(plans))]
                if passes:
                    self._run("measuring", plans, passes, meters, pool)
            self._record()
        finally:
            pool.close()
        count_headers(plans, self._index, meters)
        found |= {name: tensor for one in passes for name, tensor in one.found.items()}
        return surveyed_outputs(plans, found, meters)

    def _forgetting(self, step: Callable[[], T]) -> T:
        """Run a step; what is known of a file that turns out to be another one is dropped."""
        try:
            return step()
        except SourceChangedError as error:
            self._index.forget(Path(error.facts["path"]))
            raise

    def compare(self, plans: Sequence[OutputPlan]) -> Comparison:
        """Return how far budgets of one output are from its full read (`mergepipe.engine.deviation`); writes nothing.

        Parameters
        ----------
        plans
            Resolved plans of the same output, whose survey was taken.
        """
        from mergepipe.engine.deviation import Comparer

        first = plans[:1]
        maker = GroupMaker(self._index, self._catalog, *self._shards(first))
        pool = WorkerPool(self._options.workers, self._options.memory)
        try:
            self._load_blocks(first)
            self._index.settle(_sources(first))
            comparer = Comparer(maker, self._index, self._store, pool, self._reporter)
            groups = [(group, self._job_blocks(group)) for group in comparer.groups(plans)]
            return self._forgetting(lambda: comparer.compare(plans, groups))
        finally:
            pool.close()

    def _run(
        self,
        phase: str,
        plans: Sequence[OutputPlan],
        passes: Sequence[GroupPasses],
        meters: Mapping[str, Meter],
        pool: WorkerPool,
    ) -> None:
        """Bring groups through their passes, and count what that moves."""
        self._index.settle(_sources(plans))
        run = RunMeters(meters, first_users(plans))
        scheduler = Scheduler(pool, self._hold, lambda done: self._take(done, run), lambda p: self._finish(p, run))
        try:
            with crew_for(passes, self._workers, self._options.memory, pool, self._hold) as crew:
                self._reporter.begin(phase, sum(one.nbytes for one in passes))
                scheduler.run(passes, crew)
        except (MergepipeError, KeyboardInterrupt) as error:
            pool.close()
            if isinstance(error, SourceChangedError):
                self._index.forget(Path(error.facts["path"]))
            self._record_what_is_finished()
            raise
        finally:
            for one in passes:
                one.abandon()
            self._reporter.end()

    def _load_blocks(self, plans: Iterable[OutputPlan]) -> None:
        """Have all block digests at hand that the records will state; what turns out to be damaged is cold again."""
        for plan in plans:
            for tensor in plan.tensors:
                for slot in tensor.slots:
                    if slot is not None:
                        slot_blocks(slot, self._index)

    def _survey_passes(self, group: Group) -> SurveyPasses:
        return SurveyPasses(group, self._index, self._store, self._hold, self._job_sizes(group), self._codes)

    def _passes(self, group: Group) -> GroupPasses:
        return GroupPasses(group, self._index, self._store, self._hold, self._job_sizes(group))

    def _job_blocks(self, group: Group) -> int:
        """Return how many blocks a job takes: a read of good size, within the memory that is allowed."""
        return self._job_sizes(group).whole

    def _job_sizes(self, group: Group) -> JobSizes:
        return sizes_of(group, self._workers, self._job_memory)

    def _take(self, done: JobDone, run: RunMeters) -> None:
        """Enter a job's results."""
        group = done.job.group
        for work, blocks, meter in zip(group.works, done.done, done.meters, strict=True):
            for run_of_blocks in blocks:
                work.take(run_of_blocks)
            run.meters[work.plan.output.name].add(meter)
        for key, count in done.index_bytes.items():
            run.owner(group, key).index_bytes += count
        for key, (number, is_expert) in done.adapters.items():
            factors, meter = group.adapters[key].factors, run.meters[group.works[number].plan.output.name]
            if not factors.counted:
                factors.counted = True
                meter.expert_bytes += factors.nbytes if is_expert else 0
                meter.adapter_bytes += factors.nbytes if is_expert else 0
                meter.base_bytes += 0 if is_expert else factors.nbytes
        self._reporter.advance(done.nbytes)
        self._unrecorded[id(group)] = group
        if time.monotonic() - self._recorded_at >= _RECORD_EVERY:
            self._record()

    def _finish(self, passes: GroupPasses, run: RunMeters) -> None:
        """Complete a group: count what was read and not merged."""
        group = passes.group
        self._reporter.advance(passes.unreported)
        for key, count in passes.finish().items():
            run.owner(group, key).index_bytes += count
        let_go(group, self._codes, self._reporter)
        check_given(group, self._index)
        for key, adapter in group.adapters.items():
            if adapter.factors.was_read and not adapter.factors.counted:
                adapter.factors.counted = True
                run.owner(group, key).index_bytes += adapter.factors.nbytes

    def _record(self) -> None:
        """Record digests of sources and of staged blocks, so that a killed build can go on from here."""
        self._index.flush()
        with self._catalog.transaction():
            self._store.flush()
            self._codes.flush()
            for group in self._unrecorded.values():
                for work in group.works:
                    if work.changed:
                        self._catalog.record_staged(work.shard.name, [work.staged()])
        self._unrecorded, self._recorded_at = {}, time.monotonic()
        crash_point("engine.tensor-recorded")

    def _record_what_is_finished(self) -> None:
        """Keep for the next build what this one finished before it failed; a second failure adds nothing."""
        release(self._catalog.layout)  # the disk may be full
        with contextlib.suppress(MergepipeError):
            self._record()


def _sources(plans: Iterable[OutputPlan]) -> list[str]:
    return list(dict.fromkeys(source for plan in plans for source in plan.sources))
