"""How far budgeted merges of one output are from its full read: computed block by block, nothing is written.

All budgets are compared in one pass over the inputs. A block's full result is made once; of budgets that leave the same
out of it, one is made for all; one that leaves nothing out differs by nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.blocks import make_block, needed_codes
from mergepipe.engine.coding import CodeKey
from mergepipe.engine.groups import GroupMaker
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.job import run_job
from mergepipe.engine.kernel import Scratch, typed
from mergepipe.engine.limits import JobSizes
from mergepipe.engine.passes import GroupPasses, reduce_now
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.reader import Reader
from mergepipe.engine.work import Group, InputKey, Job, TensorWork
from mergepipe.graph.blocks import BlockPlan, TensorRecipe, plan_block
from mergepipe.plan.sampling import with_levels
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The distance of one budgeted merge to the full read, over all elements that are merged, as they are stored.

    Attributes
    ----------
    squares, update_squares, output_squares
        The sums of the squares of budgeted less full, of full less base, and of full; float64, added block by block in
        plan order. Elements that are not finite make them so.
    largest
        The largest absolute difference.
    """

    squares: float
    update_squares: float
    output_squares: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found for some budgets, in their order, and the bytes of sources that were read for it."""

    deviations: tuple[Deviation, ...]
    bytes_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Adjacent blocks of a tensor to be compared: its full read, and one work per budget."""

    job: Job
    full: TensorWork
    budgeted: tuple[TensorWork, ...]

    @property
    def nbytes(self) -> int:
        """The task's share of the group's bytes, for progress; exact when summed over a tensor."""
        group = self.job.group
        return group.nbytes * self.job.stop // group.blocks - group.nbytes * self.job.start // group.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Sums over the blocks of a task; ``squares`` and ``largest`` per budget."""

    task: _Task
    squares: Array
    largest: Array
    update_squares: float
    output_squares: float
    bytes_read: int


class Comparer:
    """Compares budgets of one output.

    Parameters
    ----------
    maker
        Makes works and groups of the output's tensors.
    index, store
        What is known of the sources and their statistics: a survey came before.
    """

    def __init__(
        self, maker: GroupMaker, index: SourceIndex, store: StatisticStore, pool: WorkerPool, reporter: Reporter
    ) -> None:
        self._maker = maker
        self._index = index
        self._store = store
        self._pool = pool
        self._reporter = reporter

    def compare(self, plans: Sequence[OutputPlan], groups: Sequence[tuple[Group, int]]) -> Comparison:
        """Return how far each plan's merge is from the full read.

        Parameters
        ----------
        plans
            Resolved plans of the same output.
        groups
            From `groups`, with how many blocks a job takes of each.
        """
        squares, largest = np.zeros(len(plans)), np.zeros(len(plans))
        update = output = 0.0
        count = 0
        self._reporter.begin("comparing", sum(group.nbytes for group, _ in groups))
        try:
            for found in self._pool.run(_compare, self._tasks(plans, groups)):
                squares += found.squares
                largest = np.maximum(largest, found.largest)
                update, output = update + found.update_squares, output + found.output_squares
                count += found.bytes_read
                self._reporter.advance(found.task.nbytes)
        finally:
            self._reporter.end()
        pairs = zip(squares.tolist(), largest.tolist(), strict=True)
        return Comparison(
            deviations=tuple(
                Deviation(squares=square, update_squares=update, output_squares=output, largest=most)
                for square, most in pairs
            ),
            bytes_read=count,
        )

    def groups(self, plans: Sequence[OutputPlan]) -> list[Group]:
        """Return a group for each tensor that is merged, with its full read as the only work, and the codes of all."""
        return [
            self._group(plans[0], tensors)
            for tensors in zip(*(plan.tensors for plan in plans), strict=True)
            if tensors[0].decision is Decision.MERGE and is_mergeable(tensors[0].dtype)
        ]

    def _group(self, plan: OutputPlan, tensors: Sequence[TensorPlan]) -> Group:
        full = self._maker.work(plan, with_levels(replace(tensors[0], access=None)))
        group = self._maker.group([full])
        budgeted = [replace(full, recipe=TensorRecipe.of(tensor, plan.geometry)) for tensor in tensors]
        return replace(group, codes=self._maker.codes(budgeted, group.inputs))

    def _tasks(self, plans: Sequence[OutputPlan], groups: Sequence[tuple[Group, int]]) -> Iterator[_Task]:
        tensors = [{tensor.name: tensor for tensor in plan.tensors} for plan in plans]
        for group, blocks in groups:
            (full,) = group.works
            self._reduce(group, blocks)
            budgeted = tuple(
                replace(full, recipe=TensorRecipe.of(named[full.name], full.plan.geometry)) for named in tensors
            )
            for start in range(0, full.recipe.grid.count, blocks):
                stop = min(start + blocks, full.recipe.grid.count)
                yield _Task(job=Job(group=group, start=start, stop=stop), full=full, budgeted=budgeted)

    def _reduce(self, group: Group, blocks: int) -> None:
        """Find the reduction of the full read; its statistics are known, unless the catalog was damaged meanwhile."""
        passes = GroupPasses(group, self._index, self._store, HoldPool(0), JobSizes(blocks, blocks, blocks))
        reduce_now(passes, lambda jobs: self._pool.run(run_job, jobs))


def _compare(task: _Task, scratch: Scratch) -> _Found:
    """Make the blocks of a task with each budget, and add up how they differ.

    Raises
    ------
    SourceChangedError
        If a file is not what was planned.
    OperatorError
        If a result is not finite.
    """
    squares, largest = np.zeros(len(task.budgeted)), np.zeros(len(task.budgeted))
    update = output = 0.0
    reader = Reader(task.job, scratch)
    reader.read_cold()
    planned = [_plans(task, block, reader) for block in range(task.job.start, task.job.stop)]
    reader.read(_needed(task.full, planned))
    codes = needed_codes((task.full, plan) for plans in planned for plan in plans)
    reader.read_codes(codes)
    for plans in planned:
        full = _made(task.full, plans[0], reader, scratch, "full")
        output += _square(full)
        update += _square(_difference(full, _base(task.full, plans[0].block, reader, full)))
        known: dict[bytes, tuple[float, float]] = {plans[0].key: (0.0, 0.0)}
        for number, (work, plan) in enumerate(zip(task.budgeted, plans[1:], strict=True)):
            if plan.key not in known:
                difference = _difference(_made(work, plan, reader, scratch, "budgeted"), full)
                known[plan.key] = _square(difference), float(np.max(np.abs(difference), initial=0.0))
            squares[number] += known[plan.key][0]
            largest[number] = np.maximum(largest[number], known[plan.key][1])  # NaN stays
    return _Found(
        task=task,
        squares=squares,
        largest=largest,
        update_squares=update,
        output_squares=output,
        bytes_read=sum(reader.index_bytes(set()).values()) + _code_bytes(reader, codes),
    )


def _code_bytes(reader: Reader, codes: Mapping[CodeKey, Mapping[int, int]]) -> int:
    """Return the bytes of codes that were read."""
    return sum(
        sum(reader.code_bytes(key, block)[:level]) for key, levels in codes.items() for block, level in levels.items()
    )


def _plans(task: _Task, block: int, reader: Reader) -> list[BlockPlan]:
    """Return how a block comes about: by the full read, then with each budget."""
    digests = [reader.digest(key, block) if key else None for key in task.full.inputs]
    works = (task.full, *task.budgeted)
    return [plan_block(work.recipe, block, digests, task.full.reduction) for work in works]


def _needed(work: TensorWork, planned: Sequence[Sequence[BlockPlan]]) -> dict[InputKey, list[int]]:
    """Return the blocks of each input that any of these plans reads, and those of the base."""
    needed: dict[InputKey, set[int]] = {}
    for plans in planned:
        for slot in {0}.union(*(plan.reads for plan in plans)):
            key, grid = work.inputs[slot], work.recipe.input_grids[slot]
            if key is not None and grid is not None and plans[0].block < grid.count:
                needed.setdefault(key, set()).add(plans[0].block)
    return {key: sorted(blocks) for key, blocks in needed.items()}


def _made(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, name: str) -> Array:
    """Return the merged elements of a block as they would be stored, widened to float64, ``(n,)``."""
    grid = work.recipe.grid
    start, stop = grid.byte_range(plan.block)
    target = scratch.buffer(name, stop - start)
    make_block(work, plan, reader, scratch, target)
    values = typed(target, work.recipe.tensor.dtype)[: work.recipe.merged_elements(plan.block)]
    with np.errstate(all="ignore"):
        return values.astype(np.float64)


def _base(work: TensorWork, block: int, reader: Reader, full: Array) -> Array | float:
    """Return what the update is counted from: the base's values, or nothing where it has no such block."""
    grid = work.recipe.input_grids[0]
    values = reader.values(work, 0, block) if grid is not None and block < grid.count else None
    if values is None:
        return 0.0
    with np.errstate(all="ignore"):
        return values[: full.size].astype(np.float64)


def _difference(values: Array, other: Array | float) -> Array:
    with np.errstate(all="ignore"):  # infinities, where they are allowed
        return np.asarray(values - other)


def _square(values: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.add.reduce(values * values))
