"""What a worker does with a job: read and hash what is cold, decide, read the rest, compute, hash, write.

Every byte that enters a merge is hashed in the buffer it is computed from, and compared with the digest that the
action key was made of. So a result can never be filed under content that it was not made from, however a source
changes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from mergepipe.cache.sources import source_changed
from mergepipe.digest import content_digest
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.kernel import Array, Scratch, all_finite, compute_block, convert, typed
from mergepipe.engine.meter import Meter
from mergepipe.engine.problems import input_difference, non_finite
from mergepipe.engine.work import BlockDone, Input, InputKey, Job, JobDone, TensorWork
from mergepipe.errors import InternalError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into
from mergepipe.graph.blocks import BlockPlan, find_block, plan_block
from mergepipe.plan.values import Decision


def run_job(job: Job, scratch: Scratch) -> JobDone:
    """Do a job.

    Raises
    ------
    SourceChangedError
        If a file is not the one that was planned, or its bytes are not what the catalog says.
    OperatorError
        If an input or a result is not finite, or sources that must agree do not.
    StorageError
        If a read or a write is refused.
    """
    reader = _Reader(job, scratch)
    try:
        reader.read_cold()
        return _run(job, reader, scratch)
    finally:
        reader.close()


def _run(job: Job, reader: _Reader, scratch: Scratch) -> JobDone:
    works = job.group.works
    meters = tuple(Meter() for _ in works)
    finished: list[list[BlockDone]] = []
    todo: list[list[BlockPlan]] = []
    for work, meter in zip(works, meters, strict=True):
        done, plans = _decide(job, work, reader)
        meter.cached += len(done)
        finished.append(done)
        todo.append(plans)
    reader.read(_needed(works, todo))
    claimed: set[tuple[InputKey, int]] = set()
    for work, plans, done, meter in zip(works, todo, finished, meters, strict=True):
        _count_reads(work, plans, reader, claimed, meter)
        for run in _runs(plans):
            done += _produce(work, run, reader, scratch, meter)
    return JobDone(
        job=job,
        hashed=reader.hashed(),
        done=tuple(finished),
        meters=meters,
        index_bytes=reader.index_bytes(claimed),
        nbytes=_progress(job),
    )


def _progress(job: Job) -> int:
    """Return the job's share of the group's bytes; exact when summed over all jobs."""
    group = job.group
    return group.nbytes * job.stop // group.blocks - group.nbytes * job.start // group.blocks


def _decide(job: Job, work: TensorWork, reader: _Reader) -> tuple[list[BlockDone], list[BlockPlan]]:
    """Split the job's blocks of one tensor into those that earlier builds hold and those to be made."""
    done: list[BlockDone] = []
    plans: list[BlockPlan] = []
    for block in range(job.start, min(job.stop, work.recipe.grid.count)):
        digests = [reader.digest(key, block) if key else None for key in work.inputs]
        if work.recipe.tensor.decision is Decision.EQUAL:
            input_difference(work.recipe.tensor, digests)
        plan = plan_block(work.recipe, block, digests)
        holding = find_block(work.candidates, block, plan.key) if job.reuse else None
        if holding is None:
            plans.append(plan)
        else:
            done.append(BlockDone(block, plan.key, holding.digest(block), holding))
    return done, plans


def _needed(works: Sequence[TensorWork], todo: Sequence[Sequence[BlockPlan]]) -> dict[InputKey, list[int]]:
    needed: dict[InputKey, dict[int, None]] = {}
    for work, plans in zip(works, todo, strict=True):
        for plan in plans:
            for slot in plan.reads:
                key = work.inputs[slot]
                if key is not None:
                    needed.setdefault(key, {})[plan.block] = None
    return {key: sorted(blocks) for key, blocks in needed.items()}


def _count_reads(
    work: TensorWork,
    plans: Iterable[BlockPlan],
    reader: _Reader,
    claimed: set[tuple[InputKey, int]],
    meter: Meter,
) -> None:
    """Count what was read for a tensor; a block that another output of the job counted already is borrowed."""
    tensor = work.recipe.tensor
    for plan in plans:
        for slot in plan.reads:
            key, ref = work.inputs[slot], tensor.slots[slot]
            if key is None or ref is None:
                continue
            is_expert = ref is not tensor.base and tensor.is_expert(ref)
            if (key, plan.block) in claimed:
                meter.borrowed += is_expert
                continue
            claimed.add((key, plan.block))
            count = reader.block_bytes(key, plan.block)
            if is_expert:
                meter.expert_bytes += count
                meter.expert_blocks += 1
            else:
                meter.base_bytes += count


def _runs(plans: Sequence[BlockPlan]) -> Iterable[list[BlockPlan]]:
    """Group plans of adjacent blocks, which are written together."""
    run: list[BlockPlan] = []
    for plan in plans:
        if run and plan.block != run[-1].block + 1:
            yield run
            run = []
        run.append(plan)
    if run:
        yield run


def _produce(
    work: TensorWork, run: Sequence[BlockPlan], reader: _Reader, scratch: Scratch, meter: Meter
) -> list[BlockDone]:
    """Make adjacent blocks of one tensor and write them in one go."""
    grid = work.recipe.grid
    first, last = grid.byte_range(run[0].block)[0], grid.byte_range(run[-1].block)[1]
    out = scratch.buffer("out", last - first)
    done = []
    for plan in run:
        start, stop = grid.byte_range(plan.block)
        target = out[start - first : stop - first]
        _make_block(work, plan, reader, scratch, target)
        done.append(BlockDone(plan.block, plan.key, content_digest(target), None))
        meter.computed += plan.copied is None
        meter.copied += plan.copied is not None
    work.shard.write(work.name, first, out)
    crash_point("engine.first-block")
    meter.written += len(out)
    return done


def _make_block(work: TensorWork, plan: BlockPlan, reader: _Reader, scratch: Scratch, target: memoryview) -> None:
    tensor = work.recipe.tensor
    if plan.copied is not None:
        key = work.inputs[plan.copied]
        assert key is not None, "a copied block has an input"
        target[:] = reader.data(key, plan.block)[: len(target)]
    else:
        _compute(work, plan, reader, scratch, target)
    must_be_finite = tensor.params.values["non_finite"] == "error" and is_mergeable(tensor.dtype)
    if must_be_finite and not all_finite(typed(target, tensor.dtype), tensor.dtype):
        inputs = [(ref, _values(work, slot, plan, reader)) for slot, ref in enumerate(tensor.slots) if ref]
        raise non_finite(work.plan, tensor, inputs)


def _compute(work: TensorWork, plan: BlockPlan, reader: _Reader, scratch: Scratch, target: memoryview) -> None:
    recipe = work.recipe
    out = typed(target, recipe.tensor.dtype)
    merged = recipe.merged_elements(plan.block)
    inputs = [_values(work, slot, plan, reader) if slot in plan.reads else None for slot in range(len(work.inputs))]
    if merged:
        compute_block(recipe, inputs, plan.sources, out[:merged], scratch)
    if merged < out.size:
        base = inputs[0]
        assert base is not None, "rows beyond the common ones come from the base"
        convert(base[merged : out.size], out[merged:])


def _values(work: TensorWork, slot: int, plan: BlockPlan, reader: _Reader) -> Array | None:
    key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
    if key is None or ref is None or not reader.has(key, plan.block):
        return None
    return typed(reader.data(key, plan.block), ref.info.dtype)


class _Reader:
    """The inputs of one job: which blocks are in memory, and their digests."""

    def __init__(self, job: Job, scratch: Scratch) -> None:
        self._job = job
        self._scratch = scratch
        self._inputs = job.group.inputs
        self._buffers: dict[InputKey, memoryview] = {}
        self._present: set[tuple[InputKey, int]] = set()
        self._found: dict[InputKey, list[bytes]] = {}
        self._fds: dict[object, int] = {}

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def index_bytes(self, claimed: set[tuple[InputKey, int]]) -> dict[InputKey, int]:
        """Return the bytes of cold inputs that were read for nothing but their digests."""
        return {
            key: sum(
                self.block_bytes(key, block)
                for block in range(self._job.start, self._stop(self._inputs[key]))
                if (key, block) not in claimed
            )
            for key in self._found
        }

    def _stop(self, source: Input) -> int:
        return min(self._job.stop, source.grid.count)

    def read_cold(self) -> None:
        """Read and hash the job's range of every input whose content is not known."""
        for key, source in self._inputs.items():
            if source.known is not None:
                continue
            blocks = range(self._job.start, self._stop(source))
            self._read_run(source, blocks)
            self._found[key] = [content_digest(self.data(key, block)) for block in blocks]

    def hashed(self) -> dict[InputKey, bytes]:
        return {key: b"".join(digests) for key, digests in self._found.items()}

    def digest(self, key: InputKey, block: int) -> bytes | None:
        source = self._inputs[key]
        if source.known is not None:
            return source.digest(block)
        digests = self._found[key]
        at = block - self._job.start
        return digests[at] if at < len(digests) else None

    def read(self, needed: dict[InputKey, list[int]]) -> None:
        """Read the blocks that are needed and not in memory, adjacent ones in one go; compare their digests."""
        for key, blocks in needed.items():
            source = self._inputs[key]
            if source.known is None:
                continue
            for run in _adjacent(blocks):
                self._read_run(source, run)
                for block in run:
                    if content_digest(self.data(key, block)) != source.digest(block):
                        raise source_changed(source.ref.source, source.file)

    def _read_run(self, source: Input, run: range) -> None:
        if not run:
            return
        start, stop = source.grid.byte_range(run.start)[0], source.grid.byte_range(run.stop - 1)[1]
        origin = source.grid.byte_range(self._job.start)[0]
        buffer = self._buffer(source)
        fd = self._open(source)
        target, offset = buffer[start - origin : stop - origin], source.ref.info.offset + start
        try:
            pread_into(fd, target, offset, path=source.file.path)
        except OSError as error:
            fail_storage(error, source.file.path, "read")
        self._present.update((source.key, block) for block in run)

    def _buffer(self, source: Input) -> memoryview:
        if source.key not in self._buffers:
            first = source.grid.byte_range(self._job.start)[0]
            last = source.grid.byte_range(self._stop(source) - 1)[1]
            self._buffers[source.key] = self._scratch.buffer(len(self._buffers), last - first)
        return self._buffers[source.key]

    def _open(self, source: Input) -> int:
        path = source.file.path
        if path not in self._fds:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise source_changed(source.ref.source, source.file) from None
            except OSError as error:
                fail_storage(error, path, "read")
            self._fds[path] = fd
            if FileIdentity.of(os.fstat(fd)) != source.file.identity:
                raise source_changed(source.ref.source, source.file)
        return self._fds[path]

    def has(self, key: InputKey, block: int) -> bool:
        return (key, block) in self._present

    def data(self, key: InputKey, block: int) -> memoryview:
        if (key, block) not in self._present:
            raise InternalError(f"block {block} of `{key[1]}` is used but was not read")
        grid = self._inputs[key].grid
        origin = grid.byte_range(self._job.start)[0]
        start, stop = grid.byte_range(block)
        return self._buffers[key][start - origin : stop - origin]

    def block_bytes(self, key: InputKey, block: int) -> int:
        start, stop = self._inputs[key].grid.byte_range(block)
        return stop - start


def _adjacent(blocks: Sequence[int]) -> Iterable[range]:
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield range(blocks[start], blocks[at - 1] + 1)
            start = at
