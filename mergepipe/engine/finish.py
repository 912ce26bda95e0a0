"""Finishing shards: what earlier builds hold is copied in, checked on the way, and the shard becomes a pack.

A shard in which nothing was written and whose pack is there already is taken as it is. A block that does not have the
digest it should is a miss: its pack is quarantined, and the block is computed again from the sources.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.records import Result
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import DIGEST_SIZE, content_digest, tensor_digest
from mergepipe.engine.coding import let_go
from mergepipe.engine.groups import GroupMaker
from mergepipe.engine.job import run_job
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.meter import Meter
from mergepipe.engine.passes import GroupPasses, reduce_now
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.results import FinishedOutput, FinishedShard, FinishedTensor
from mergepipe.engine.staging import StagedShard
from mergepipe.engine.work import Group, Job, TensorWork
from mergepipe.errors import InternalError, SourceChangedError
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.reading import pread_into
from mergepipe.graph.blocks import Holding
from mergepipe.graph.compile import MergeGraph
from mergepipe.graph.state import current_key
from mergepipe.plan.layout import Shard
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

_COPY_BLOCKS = 4  # blocks per copy task: the same read size as a job's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """Adjacent blocks of one tensor that lie together in one place."""

    work: TensorWork
    start: int
    stop: int
    holding: Holding
    pack: Path | None


class ShardFinisher:
    """Turns works and clean tensors into packs."""

    def __init__(
        self,
        catalog: Catalog,
        packs: PackStore,
        index: SourceIndex,
        maker: GroupMaker,
        pool: WorkerPool,
        reporter: Reporter,
        passes: Callable[[Group], GroupPasses],
    ) -> None:
        self._passes = passes
        self._catalog = catalog
        self._packs = packs
        self._index = index
        self._maker = maker
        self._pool = pool
        self._reporter = reporter

    def finish(
        self,
        plan: OutputPlan,
        graph: MergeGraph,
        works: Mapping[tuple[str, str], TensorWork],
        shards: Mapping[tuple[str, str], StagedShard],
        meter: Meter,
    ) -> FinishedOutput:
        """Finish every shard of one output."""
        planned = {tensor.name: tensor for tensor in plan.tensors}
        tensors: dict[str, FinishedTensor] = {}
        finished = []
        for shard in plan.layout.shards:
            staged = shards[plan.output.name, shard.tensors[0].name]
            members = [self._member(plan, graph, works, planned[slot.name], meter) for slot in shard.tensors]
            pack, made = self._finish_shard(plan, staged, members, meter)
            tensors.update((tensor.name, tensor) for tensor in made)
            finished.append(FinishedShard(shard=shard, pack=pack, digest=bytes.fromhex(pack)))
            crash_point("engine.shard-complete")
        return FinishedOutput(
            plan=plan,
            tensors=tuple(tensors[tensor.name] for tensor in plan.tensors),
            shards=tuple(finished),
            meter=meter,
        )

    def _member(
        self,
        plan: OutputPlan,
        graph: MergeGraph,
        works: Mapping[tuple[str, str], TensorWork],
        tensor: TensorPlan,
        meter: Meter,
    ) -> TensorWork:
        """Return the work of a tensor; for a clean one, a work whose blocks all lie in its result's pack."""
        work = works.get((plan.output.name, tensor.name))
        if work is not None:
            return work
        node = graph.tensor(plan.output.name, tensor.name)
        assert node.result is not None, "a tensor without work is clean"
        work = self._maker.work(plan, tensor)
        holding = Holding.of_result(node.result)
        work.keys[:], work.digests[:] = holding.block_keys, holding.block_digests
        work.holdings = dict.fromkeys(range(work.recipe.grid.count), holding)
        meter.cached += work.recipe.grid.count
        return work

    def _finish_shard(
        self, plan: OutputPlan, staged: StagedShard, members: Sequence[TensorWork], meter: Meter
    ) -> tuple[str, Sequence[FinishedTensor]]:
        """Return the pack that a shard is, and its tensors."""
        made = [self._finished(plan, member) for member in members]
        name = staged.shard.digest([tensor.digest for tensor in made]).hex()
        if self._packs.usable(name):  # also where blocks were computed again and came out as before
            self._record_new_keys(self._results(plan, staged.shard, members, made, name))
            return name, made
        copies = [copy for member in members for copy in self._copies(member)]
        self._reporter.begin("copying", sum(_nbytes(copy) for copy in copies))
        try:
            for copy, bad in zip(copies, self._pool.run(_copy_in, copies), strict=True):
                self._recompute(copy, bad, meter)
                moved = _nbytes(copy, bad) if copy.holding.result is not None else 0
                meter.written += moved
                meter.moved_bytes += moved
                self._reporter.advance(_nbytes(copy))
        finally:
            self._reporter.end()
        staged.ensure()
        self._packs.adopt(staged.path, name, self._results(plan, staged.shard, members, made, name))
        return name, made

    def _copies(self, work: TensorWork) -> Iterator[_Copy]:
        """Group the blocks that are not in the staged shard yet into runs of one holding."""
        blocks = sorted(work.holdings)
        start = 0
        for at in range(1, len(blocks) + 1):
            holding = work.holdings[blocks[start]]
            if (
                at == len(blocks)
                or blocks[at] != blocks[at - 1] + 1
                or work.holdings[blocks[at]] is not holding
                or at - start == _COPY_BLOCKS
            ):
                pack = self._packs.path(holding.result.pack) if holding.result else None
                yield _Copy(work=work, start=blocks[start], stop=blocks[at - 1] + 1, holding=holding, pack=pack)
                start = at

    def _recompute(self, copy: _Copy, bad: Sequence[int], meter: Meter) -> None:
        """Compute blocks again whose earlier bytes are damaged or gone."""
        if not bad:
            return
        work, result = copy.work, copy.holding.result
        if result is not None and self._catalog.pack_identity(result.pack) is not None:
            self._packs.quarantine(result.pack)
            self._reporter.warn(
                f"the cached shard {result.pack[:16]}… is damaged or missing: it was taken out of use, and what is"
                " needed of it is computed again"
            )
        group = self._maker.group([work])
        passes = self._passes(group)
        reduce_now(passes, lambda jobs: self._pool.run(run_job, jobs))
        passes.finish()
        jobs = [Job(group=group, start=block, stop=block + 1, reuse=False) for block in bad]
        for block, done in zip(bad, self._pool.run(run_job, jobs), strict=True):
            (found,) = done.done[0]
            at = block * DIGEST_SIZE
            if found.digests != bytes(work.digests[at : at + DIGEST_SIZE]):
                raise InternalError(
                    f"block {block} of `{work.name}` was computed again with another result than before",
                    hint="please report this; deleting the cache directory gets around it",
                    tensor=work.name,
                    block=block,
                )
            meter.add(done.meters[0])
            meter.cached -= 1
        let_go(group, CodeStore(self._catalog), self._reporter)

    # --- recording ------------------------------------------------------------------------------------------------

    def _finished(self, plan: OutputPlan, member: TensorWork) -> FinishedTensor:
        tensor, blocks = member.recipe.tensor, bytes(member.digests)
        key = current_key(plan, tensor, self._index)
        assert key is not None, "every input of a finished tensor is known"
        return FinishedTensor(
            name=member.name,
            key=key,
            digest=tensor_digest(tensor.dtype, tensor.shape, blocks),
            block_digests=blocks,
            cached=bool(member.holdings) and len(member.holdings) == member.recipe.grid.count,
        )

    def _results(
        self,
        plan: OutputPlan,
        shard: Shard,
        members: Sequence[TensorWork],
        made: Sequence[FinishedTensor],
        pack: str,
    ) -> Iterator[Result]:
        for member, finished in zip(members, made, strict=True):
            tensor = member.recipe.tensor
            yield Result(
                key=finished.key,
                output=plan.output.name,
                tensor=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                recipe=tensor.recipe,
                digest=finished.digest,
                block_keys=bytes(member.keys),
                block_digests=finished.block_digests,
                pack=pack,
                offset=shard.offsets[tensor.name],
            )

    def _record_new_keys(self, results: Iterable[Result]) -> None:
        """Enter results whose inputs are new but whose values are what an earlier build made."""
        found = list(results)
        known = self._catalog.results(result.key for result in found)
        new = [result for result in found if result.key not in known]
        if new:
            self._catalog.record_results(new)


def _nbytes(copy: _Copy, without: Sequence[int] = ()) -> int:
    grid = copy.work.recipe.grid
    left_out = sum(stop - start for start, stop in map(grid.byte_range, without))
    return grid.byte_range(copy.stop - 1)[1] - grid.byte_range(copy.start)[0] - left_out


def _copy_in(copy: _Copy, scratch: Scratch) -> list[int]:
    """Copy blocks into the staged shard, or check those that are there already; return those that are not right."""
    grid = copy.work.recipe.grid
    origin = grid.byte_range(copy.start)[0]
    data = _held_bytes(copy, origin, scratch)
    if data is None:
        return list(range(copy.start, copy.stop))
    ranges = {block: grid.byte_range(block) for block in range(copy.start, copy.stop)}
    bad = [
        block
        for block, (start, stop) in ranges.items()
        if content_digest(data[start - origin : stop - origin]) != copy.holding.digest(block)
    ]
    if copy.pack is None:
        return bad
    if not bad:
        copy.work.shard.write(copy.work.name, origin, data)
    for block, (start, stop) in ranges.items() if bad else ():
        if block not in bad:
            copy.work.shard.write(copy.work.name, start, data[start - origin : stop - origin])
    return bad


def _held_bytes(copy: _Copy, origin: int, scratch: Scratch) -> memoryview | None:
    """Return the bytes where they are held now, or None if that place is gone."""
    count = _nbytes(copy)
    if copy.pack is None or copy.holding.result is None:
        data = copy.work.shard.read(copy.work.name, origin, count)
        return memoryview(data) if len(data) == count else None
    buffer = scratch.buffer("copy", count)
    try:
        fd = os.open(copy.pack, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        pread_into(fd, buffer, copy.holding.result.offset + origin, path=copy.pack)
    except (OSError, SourceChangedError):
        return None
    finally:
        os.close(fd)
    return buffer
