"""Making some blocks of an output again, to compare their digests: by the path that a build takes, and nothing is kept.

What is known of earlier results is not used; what is known of sources and their statistics is, as in a build: every
byte that is read is compared with its digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.cache.reserve import reserve
from mergepipe.digest import content_digest
from mergepipe.engine.blocks import make_block, needed_codes
from mergepipe.engine.groups import GroupMaker
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.job import run_job
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.limits import JobSizes
from mergepipe.engine.meter import Meter
from mergepipe.engine.passes import GroupPasses, reduce_now
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.reader import Reader
from mergepipe.engine.run import Engine
from mergepipe.engine.sampling import Sampler
from mergepipe.engine.work import Group, InputKey, Job, TensorWork, jobs_of
from mergepipe.errors import SourceChangedError
from mergepipe.graph.blocks import BlockPlan, plan_block
from mergepipe.plan.sampling import sampled_sources
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBlock:
    """A block that was made again: the digest that came out, and its bytes."""

    tensor: str
    block: int
    digest: bytes
    nbytes: int


class RecomputingEngine(Engine):
    """An engine that makes single blocks of an output and looks at them."""

    def learn(self, plan: OutputPlan, names: Sequence[str]) -> None:
        """Have the digests of all inputs of some tensors in the index; those that are not known are read whole.

        Raises
        ------
        SourceChangedError
            If a source changes meanwhile.
        """
        self._index.settle(plan.sources)
        self._load_blocks([plan])
        maker, pool = GroupMaker(self._index, self._catalog, *self._shards([plan])), WorkerPool(self._options.workers)
        try:
            with reserve(self._catalog.layout):
                if sampled_sources(plan):  # samples stand for the blocks that it does not read
                    meters = {plan.output.name: Meter()}
                    Sampler(self._index, self._store, pool, self._reporter, meters).sample([plan])
                for group in self._groups(maker, plan, names):
                    self._hash(group, pool)
            self._record()
        except SourceChangedError as error:
            self._index.forget(Path(error.facts["path"]))
            raise
        finally:
            pool.close()

    def _groups(self, maker: GroupMaker, plan: OutputPlan, names: Sequence[str]) -> Iterator[Group]:
        wanted = frozenset(names)
        for tensor in plan.tensors:
            if tensor.name in wanted:
                yield maker.group([maker.work(plan, replace(tensor, access=None))])  # as if it were read whole

    def _hash(self, group: Group, pool: WorkerPool) -> None:
        """Read the inputs of a group whose content is not known, and the factors of adapters."""
        cold = {key: source for key, source in group.inputs.items() if source.known is None}
        for adapter in group.adapters.values():
            adapter.factors.digests()
        hashing = Group(works=(), inputs=cold, adapters=group.adapters)
        passes = GroupPasses(hashing, self._index, self._store, HoldPool(0), JobSizes(1, 1, 1))
        if cold:
            for done in pool.run(run_job, jobs_of(hashing, self._job_blocks(hashing))):
                passes.take(done)
        passes.finish()

    def recompute(self, plan: OutputPlan, wanted: Mapping[str, Sequence[int]]) -> Iterator[MadeBlock]:
        """Make blocks again, and yield them in plan order; reports their bytes as progress.

        Parameters
        ----------
        plan
            A resolved plan; `learn` was called for these tensors.
        wanted
            By tensor the blocks, in order.

        Raises
        ------
        SourceChangedError
            If a source is not what the index says.
        OperatorError
            If a result is not finite.
        """
        maker, pool = GroupMaker(self._index, self._catalog, *self._shards([plan])), WorkerPool(self._options.workers)
        tensors = [tensor for tensor in plan.tensors if wanted.get(tensor.name)]
        self._reporter.begin("rebuilding", sum(self._nbytes(plan, t, wanted[t.name]) for t in tensors))
        try:
            for found in pool.run(_make, self._tasks(maker, plan, tensors, wanted, pool)):
                self._reporter.advance(sum(block.nbytes for block in found))
                yield from found
            self._record()  # the statistics that had to be taken
        except SourceChangedError as error:
            self._index.forget(Path(error.facts["path"]))
            raise
        finally:
            self._reporter.end()
            pool.close()

    def _nbytes(self, plan: OutputPlan, tensor: TensorPlan, blocks: Sequence[int]) -> int:
        layout = tensor.grid(plan.geometry)
        return sum(stop - start for start, stop in map(layout.byte_range, blocks))

    def _tasks(
        self,
        maker: GroupMaker,
        plan: OutputPlan,
        tensors: Sequence[TensorPlan],
        wanted: Mapping[str, Sequence[int]],
        pool: WorkerPool,
    ) -> Iterator[Job]:
        for tensor in tensors:
            group = maker.group([maker.work(plan, tensor)])
            sizes = self._job_sizes(group)
            passes = GroupPasses(group, self._index, self._store, HoldPool(0), sizes)
            reduce_now(passes, lambda jobs: pool.run(run_job, jobs))
            yield from (Job(group=group, start=s, stop=e) for s, e in _runs(wanted[tensor.name], sizes.whole))


def _runs(blocks: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, after the last) of adjacent blocks, at most so many."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or at - start == most:
            yield blocks[start], blocks[at - 1] + 1
            start = at


def _make(job: Job, scratch: Scratch) -> list[MadeBlock]:
    """Make the blocks of a job, which has one tensor."""
    (work,) = job.group.works
    reader = Reader(job, scratch)
    plans = [_plan(work, block, reader) for block in range(job.start, job.stop)]
    reader.read(_needed(work, plans))
    reader.read_codes(needed_codes((work, plan) for plan in plans))
    made = []
    for plan in plans:
        start, stop = work.recipe.grid.byte_range(plan.block)
        target = scratch.buffer("out", stop - start)
        make_block(work, plan, reader, scratch, target)
        found = MadeBlock(tensor=work.name, block=plan.block, digest=content_digest(target), nbytes=stop - start)
        made.append(found)
    return made


def _plan(work: TensorWork, block: int, reader: Reader) -> BlockPlan:
    digests = [reader.digest(key, block) if key else None for key in work.inputs]
    return plan_block(work.recipe, block, digests, work.reduction)


def _needed(work: TensorWork, plans: Sequence[BlockPlan]) -> dict[InputKey, list[int]]:
    needed: dict[InputKey, list[int]] = {}
    for plan in plans:
        for slot in plan.reads:
            key = work.inputs[slot]
            if key is not None and plan.block not in needed.setdefault(key, []):
                needed[key].append(plan.block)
    return needed
