"""The passes of one group: statistics as often as its reductions ask for them, then the merge.

Only the thread that runs the build calls these; what a pass is made of are jobs, which any worker may run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore, StatisticTable
from mergepipe.engine.coding import Coding
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.limits import JobSizes, job_sizes, kept_blocks, kept_bytes
from mergepipe.engine.problems import named
from mergepipe.engine.work import Group, InputKey, Job, JobDone, Measure, TensorWork, jobs_of
from mergepipe.errors import OperatorError
from mergepipe.graph.blocks import plan_statistic
from mergepipe.graph.reductions import key_recipe, open_table, start_reduction
from mergepipe.operators.contract import Statistic, StatisticValues
from mergepipe.values import dataclass


@dataclass(slots=True)
class Reducer:
    """One work's reduction, or survey, in the making: what it asked for last."""

    work: TensorWork
    steps: Generator[Sequence[Statistic], StatisticValues, Any]
    wanted: tuple[Statistic, ...]
    tables: dict[Statistic, StatisticTable] = field(default_factory=dict)


class GroupPasses:
    """Drives one group from reading to merged blocks.

    Parameters
    ----------
    sizes
        How many blocks jobs take.

    Attributes
    ----------
    unreported
        Bytes of `nbytes` that no job will count as gone through.
    """

    unreported = 0

    def __init__(
        self, group: Group, index: SourceIndex, store: StatisticStore, pool: HoldPool, sizes: JobSizes
    ) -> None:
        self.group = group
        self._index = index
        self._store = store
        self._pool = pool
        self._sizes = sizes
        self.reducers: list[Reducer] = []
        self._measures: tuple[Measure, ...] = ()
        self._tables: tuple[StatisticTable, ...] = ()  # of each measure
        self.codings: tuple[Coding, ...] = ()

    @property
    def hold_bytes(self) -> int:
        """Bytes to keep between the passes; 0 where nothing is kept: there is one pass, or a block is too much."""
        if not any(map(self.has_passes, self.group.works)):
            return 0
        grids = [source.grid for source in self.group.inputs.values()]
        return kept_bytes(grids, kept_blocks(grids, self._pool.limit))

    @property
    def nbytes(self) -> int:
        """Bytes to go through, for progress."""
        return self.group.nbytes

    def has_passes(self, work: TensorWork) -> bool:
        """Return whether what was read for a work's statistics is needed again."""
        return work.recipe.reduces and work.reduction is None

    def measuring(self) -> Iterator[Sequence[Job]]:
        """Yield the jobs of each pass that takes statistics; go on when the outcomes of all of them were taken.

        Raises
        ------
        OperatorError
            If the statistics have no usable result.
        """
        self.begin()
        while self.reducers or self.codings:
            opened = tuple(self._open(self.reducers))
            self._measures = tuple(measure for measure, _ in opened)
            self._tables = tuple(table for _, table in opened)
            missing = None if self.codings else self._missing()
            jobs = self._jobs(self._measures, missing, self.codings)
            if jobs:
                self._hold()
                yield jobs  # every job of a pass was taken when it goes on
            self._settle_inputs()
            self.coded()
            self.reducers = [reducer for reducer in self.reducers if self._go_on(reducer)]

    def merging(self) -> Sequence[Job]:
        """Return the jobs of the last pass."""
        return self._jobs()

    def _jobs(
        self,
        measures: tuple[Measure, ...] = (),
        wanted: Container[int] | None = None,
        codings: tuple[Coding, ...] = (),
    ) -> list[Job]:
        """Cut the group into jobs.

        A job can be gone through piece by piece if what it needs is known before it begins, or nothing is: else it must
        know all that it needs before it waits for the first, that the disk may work on all of it.
        """
        group, sizes = self.group, self._sizes
        cold = [source.known is None for source in group.inputs.values()]
        if codings or group.codes or group.adapters or (any(cold) and not all(cold)):
            return list(jobs_of(group, sizes.whole, measures, wanted, codings))
        return list(jobs_of(group, sizes.blocks, measures, wanted, piece=sizes.piece))

    def take(self, done: JobDone) -> None:
        """Enter what a job found of inputs and statistics."""
        for key, digests in done.hashed.items():
            self.group.hashed.setdefault(key, bytearray()).extend(digests)
        for found in done.measured:
            self._tables[found.measure].enter(found.block, found.key, found.value)
        self.group.claimed |= done.claimed

    def finish(self) -> dict[InputKey, int]:
        """Let go of memory, and let the index know the digests of what was read.

        Returns
        -------
        dict
            By input the bytes that were held and turned out not to be needed to merge.
        """
        self._settle_inputs()
        self.abandon()
        unused: dict[InputKey, int] = {}
        if self.group.held is not None:
            for key, block in self.group.present - self.group.claimed:
                start, stop = self.group.inputs[key].grid.byte_range(block)
                unused[key] = unused.get(key, 0) + stop - start
            self._pool.take_back(self.group.held.values())
            self.group.held = None
            self.group.present = set()
        return unused

    # --- parts ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the reductions that are not known."""
        for work in self.group.works:
            if work.recipe.reduces and work.reduction is None:
                self.reducers.append(Reducer(work, *start_reduction(work.recipe)))

    def done(self, work: TensorWork, value: Any) -> None:
        """Take what the statistics of a work came to."""
        work.reduction = value

    def coded(self) -> None:
        """Take what was coded: every block of every coding was."""

    def abandon(self) -> None:
        """Let go of what is unfinished, after an error or at the end."""
        for coding in self.codings:
            coding.writer.abandon()

    def _go_on(self, reducer: Reducer) -> bool:
        """Give a reduction what it asked for; return whether it asks for more."""
        work = reducer.work
        try:
            reducer.wanted = tuple(reducer.steps.send(reducer.tables))
        except StopIteration as stop:
            self.done(work, stop.value)
            return False
        except OperatorError as error:
            raise named(work, error) from error
        return True

    def _open(self, reducers: Iterable[Reducer]) -> Iterator[tuple[Measure, StatisticTable]]:
        """Open the table of every statistic that is wanted; works that want the same share it."""
        shared: dict[object, StatisticTable] = {}
        for reducer in reducers:
            work, is_first = reducer.work, not reducer.tables
            reducer.tables = {}
            for statistic in reducer.wanted:
                recipe = key_recipe(work.recipe, statistic)
                same = (
                    recipe,
                    tuple(work.inputs[slot] for slot in statistic.slots),
                    tuple(statistic.block_settings(block) for block in range(work.recipe.facts.blocks)),
                )
                if same not in shared:
                    table = shared[same] = open_table(self._store, work.recipe, statistic)
                    measure = Measure(
                        work=work, statistic=statistic, recipe=recipe, known=table.known, is_first=is_first
                    )
                    yield measure, table
                reducer.tables[statistic] = shared[same]

    def _missing(self) -> set[int] | None:
        """Enter what is known from earlier; return the blocks that must be measured, None for all of a cold group."""
        if self.group.cold:
            return None
        missing: set[int] = set()
        for measure, table in zip(self._measures, self._tables, strict=True):
            work = measure.work
            for block in range(work.recipe.facts.blocks):
                digests = [self.digest(key, block) for key in work.inputs]
                plan = plan_statistic(work.recipe, measure.statistic, measure.recipe, block, digests)
                if plan.key in measure.known:
                    table.enter(block, plan.key, None)
                else:
                    missing.add(block)
        return missing

    def digest(self, key: InputKey | None, block: int) -> bytes | None:
        """Return the digest of a block of an input whose content is known; None if it has no such block."""
        if key is None:
            return None
        adapter = self.group.adapters.get(key)
        if adapter is not None:
            return adapter.digest(block, self.digest(adapter.on, block))
        return self.group.inputs[key].digest(block)

    def _hold(self) -> None:
        group = self.group
        if group.held is None and (wanted := self.hold_bytes) and self._pool.fits(wanted):
            grids = {key: source.grid for key, source in group.inputs.items()}
            group.kept = kept_blocks(list(grids.values()), self._pool.limit)
            group.held = {key: self._pool.lend(kept_bytes([grid], group.kept)) for key, grid in grids.items()}

    def _settle_inputs(self) -> None:
        """Cold inputs of which every block was read are known from here on."""
        for key, source in self.group.inputs.items():
            if source.known is None:
                source.known = bytes(self.group.hashed.get(key, b""))
                enter = self._index.add if source.levels is None else self._index.add_blocks
                enter(source.ref.source, source.ref.info, source.known)
        for adapter in self.group.adapters.values():
            for factor in (adapter.factors.a, adapter.factors.b):
                if factor.known is not None and self._index.tensor(factor.ref.source, factor.ref.info) is None:
                    self._index.add(factor.ref.source, factor.ref.info, factor.known)


def sizes_of(group: Group, workers: int, memory: int | None) -> JobSizes:
    """Return how many blocks jobs of a group take; parameters as of `mergepipe.engine.limits.job_sizes`."""
    inputs = [source.grid for source in group.inputs.values()]
    return job_sizes([(work.plan, work.recipe) for work in group.works], inputs, workers, memory)


def reduce_now(passes: GroupPasses, run: Callable[[Sequence[Job]], Iterable[JobDone]]) -> None:
    """Run the passes that take statistics, one after the other."""
    for jobs in passes.measuring():
        for done in run(jobs):
            passes.take(done)
