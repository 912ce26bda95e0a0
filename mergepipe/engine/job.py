"""What a worker does with a job: read and hash what is cold, decide, read the rest, compute, hash, write.

Every byte that enters a merge is hashed in the buffer it is computed from, and compared with the digest that the
action key was made of. So a result can never be filed under content that it was not made from, however a source
changes meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from mergepipe.digest import content_digest
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.claims import Claims
from mergepipe.engine.coding import CodeKey, Coding
from mergepipe.engine.kernel import Array, Scratch, all_finite, compute_block, convert, measure_block, typed
from mergepipe.engine.meter import Meter
from mergepipe.engine.problems import input_difference, named, non_finite
from mergepipe.engine.reader import Reader
from mergepipe.engine.staging import StagedWrites
from mergepipe.engine.work import BlockMeasured, BlocksDone, InputKey, Job, JobDone, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.fsio.crash import crash_point
from mergepipe.graph.blocks import BlockPlan, StatisticPlan, find_block, plan_block, plan_statistic
from mergepipe.plan.values import Decision, TensorPlan
from mergepipe.progressive.decode import BlockDecoder


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
    reader = Reader(job, scratch)
    if job.measures or job.codings:
        return _measure(job, reader, scratch)
    return _Merge(job, reader, scratch).done()


def _measure(job: Job, reader: Reader, scratch: Scratch) -> JobDone:
    """Take the statistics of the job's blocks that are not known from earlier."""
    works = job.group.works
    meters = tuple(Meter() for _ in works)
    numbers = {id(work): number for number, work in enumerate(works)}
    measured: list[BlockMeasured] = []
    index_bytes: dict[InputKey, int] = {}
    for blocks in reader.pieces():
        started = time.perf_counter()
        reader.read_cold()
        todo = _to_measure(job, blocks, reader, measured)
        coded = [pair for coding in job.codings for pair in _to_code(blocks, coding, reader)]
        reader.read(_needed(_measured_slots(job, todo), _coded_blocks(coded)))
        _count_measured(meters, numbers, job, todo)
        began = _count_reading(meters, started)
        for index, plan in todo:
            measure = job.measures[index]
            inputs = _values(measure.work, plan, reader)
            value = measure_block(measure.work.recipe, measure.statistic, plan.block, inputs, plan.sources, scratch)
            measured.append(BlockMeasured(index, plan.block, plan.key, value))
            began, since = time.perf_counter(), began
            meters[numbers[id(measure.work)]].measuring_seconds += began - since
        for coding, block, differs in coded:
            coding.writer.put(block, reader.encoded(coding, block, differs=differs))
        if coded and meters:
            meters[0].measuring_seconds += time.perf_counter() - began
        _add(index_bytes, reader.index_bytes(set()))
    return JobDone(
        job=job,
        hashed=reader.hashed(),
        done=tuple([] for _ in works),
        meters=meters,
        measured=measured,
        index_bytes=index_bytes,
        claimed=set(),
        adapters={},
        nbytes=0,
    )


def _add(counts: dict[InputKey, int], more: dict[InputKey, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def _to_measure(
    job: Job, blocks: range, reader: Reader, measured: list[BlockMeasured]
) -> list[tuple[int, StatisticPlan]]:
    """Return the statistics of blocks that must be taken, by the index of the measure; enter those that are known."""
    todo = []
    for index, measure in enumerate(job.measures):
        work = measure.work
        for block in range(blocks.start, min(blocks.stop, work.recipe.facts.blocks)):
            digests = [reader.digest(key, block) if key else None for key in work.inputs]
            plan = plan_statistic(work.recipe, measure.statistic, measure.recipe, block, digests)
            if plan.key in measure.known:
                measured.append(BlockMeasured(index, block, plan.key, None))
            else:
                todo.append((index, plan))
    return todo


_ToCode = tuple[Coding, int, bool]
"""A delta, a block of it, and whether that differs from the base's."""


def _to_code(blocks: range, coding: Coding, reader: Reader) -> Iterator[_ToCode]:
    """Yield those of these blocks that a delta has that is being coded."""
    same_dtype = coding.base.ref.info.dtype == coding.expert.ref.info.dtype
    for block in range(blocks.start, min(blocks.stop, coding.expert.grid.count)):
        equal = same_dtype and reader.digest(coding.base.key, block) == reader.digest(coding.expert.key, block)
        yield coding, block, not equal


def _measured_slots(job: Job, todo: Iterable[tuple[int, StatisticPlan]]) -> Iterator[tuple[InputKey, int]]:
    """Yield what must be read for statistics."""
    for index, plan in todo:
        yield from _read_slots(job.measures[index].work, plan)


def _coded_blocks(coded: Iterable[_ToCode]) -> Iterator[tuple[InputKey, int]]:
    """Yield what must be read for codes."""
    for coding, block, differs in coded:
        if differs:
            yield coding.base.key, block
            yield coding.expert.key, block


def _count_measured(
    meters: Sequence[Meter], numbers: Mapping[int, int], job: Job, todo: Sequence[tuple[int, StatisticPlan]]
) -> None:
    """Count the inputs of blocks of which statistics are taken, each once; ``numbers`` are those of works by id."""
    counted: set[tuple[int, int, int]] = set()
    for index, plan in todo:
        measure = job.measures[index]
        if measure.is_first:
            number = numbers[id(measure.work)]
            new = {(number, slot, plan.block) for slot in plan.reads} - counted
            counted |= new
            meters[number].measured_bytes += measure.work.recipe.input_bytes(plan.block, [slot for _, slot, _ in new])


def _count_reading(meters: Sequence[Meter], started: float) -> float:
    """Count the time since ``started`` as time to read, for the first output; return the time now."""
    now = time.perf_counter()
    if meters:
        meters[0].reading_seconds += now - started
    return now


class _Merge:
    """Merges a job, piece by piece."""

    def __init__(self, job: Job, reader: Reader, scratch: Scratch) -> None:
        self._job = job
        self._works = job.group.works
        self._reader = reader
        self._scratch = scratch
        self._meters = tuple(Meter() for _ in self._works)
        self._claims = Claims(job.group, reader)
        self._finished: tuple[list[BlocksDone], ...] = tuple([] for _ in self._works)
        self._index_bytes: dict[InputKey, int] = {}
        # What is read is decided for all pieces at once, where nothing must be read for that.
        self._plans = None if reader.is_cold else self._decide(reader.blocks)

    def done(self) -> JobDone:
        """Do it."""
        job, reader = self._job, self._reader
        if self._plans is not None and job.piece:
            started = time.perf_counter()
            reader.ask(self._needed(self._plans))
            _count_reading(self._meters, started)
        with contextlib.ExitStack() as stack:
            writes = [stack.enter_context(work.shard.writing(work.name)) for work in self._works]
            for blocks in reader.pieces():
                self._make(blocks, writes)
        return JobDone(
            job=job,
            hashed=reader.hashed(),
            done=self._finished,
            meters=self._meters,
            measured=[],
            index_bytes=self._index_bytes,
            claimed=self._claims.claimed & job.group.present if job.group.held is not None else set(),
            adapters=self._claims.adapters,
            nbytes=job.nbytes,
        )

    def _make(self, blocks: range, writes: Sequence[StagedWrites]) -> None:
        """Make the blocks of a piece."""
        reader, meters, started = self._reader, self._meters, time.perf_counter()
        reader.read_cold()
        if self._plans is None:
            todo = self._decide(blocks)
        elif self._job.piece:
            todo = [[plan for plan in plans if plan.block in blocks] for plans in self._plans]
        else:
            todo = self._plans
        if self._job.group.codes:
            codes = needed_codes((work, plan) for work, plans in zip(self._works, todo, strict=True) for plan in plans)
            reader.ask_for_codes(codes)
            reader.read(self._needed(todo))
            reader.read_codes(codes)
        elif self._works:
            reader.read(self._needed(todo), asked=self._plans is not None and self._job.piece > 0)
        began = _count_reading(meters, started)
        for number, (work, plans) in enumerate(zip(self._works, todo, strict=True)):
            self._claims.count(number, plans, meters[number])
            for run in _runs(plans):
                self._finished[number].append(
                    _produce(work, run, reader, self._scratch, meters[number], writes[number])
                )
            if len(self._works) > 1:
                writes[number].close()  # there may be more outputs than a process may have open files
            began, since = time.perf_counter(), began
            meters[number].merging_seconds += began - since
        _add(self._index_bytes, reader.index_bytes(self._claims.claimed))

    def _needed(self, todo: Sequence[Sequence[BlockPlan]]) -> dict[InputKey, list[int]]:
        """Return the blocks that are read exactly, by input."""
        planned = ((work, plan) for work, plans in zip(self._works, todo, strict=True) for plan in plans)
        return _needed(pair for work, plan in planned for pair in _read_slots(work, plan))

    def _decide(self, blocks: range) -> list[list[BlockPlan]]:
        """Return by work which of these blocks are to be made; enter those that earlier builds hold."""
        todo = []
        for number, work in enumerate(self._works):
            found, tensor = [], work.recipe.tensor
            for block in range(blocks.start, min(blocks.stop, work.recipe.grid.count)):
                digests = [self._reader.digest(key, block) if key else None for key in work.inputs]
                if tensor.decision is Decision.EQUAL:
                    input_difference(tensor, digests)
                plan = plan_block(work.recipe, block, digests, work.reduction)
                holding = find_block(work.candidates, block, plan.key) if self._job.reuse else None
                if holding is None:
                    found.append(plan)
                else:
                    self._finished[number].append(BlocksDone(block, plan.key, holding.digest(block), holding))
                    self._meters[number].cached += 1
            todo.append(found)
        return todo


def _read_slots(work: TensorWork, plan: BlockPlan | StatisticPlan) -> Iterator[tuple[InputKey, int]]:
    """Yield the (input, block) pairs that must be read exactly."""
    for slot in plan.reads:
        key = work.inputs[slot]
        if key is not None:
            yield key, plan.block


def _needed(*pairs: Iterable[tuple[InputKey, int]]) -> dict[InputKey, list[int]]:
    needed: dict[InputKey, set[int]] = {}
    for key, block in itertools.chain(*pairs):
        found = needed.get(key)
        if found is None:
            needed[key] = {block}
        else:
            found.add(block)
    return {key: sorted(blocks) for key, blocks in needed.items()}


def needed_codes(planned: Iterable[tuple[TensorWork, BlockPlan]]) -> dict[CodeKey, dict[int, int]]:
    """Return by code and block the level that is needed, the best one of all outputs."""
    needed: dict[CodeKey, dict[int, int]] = {}
    for work, plan in planned:
        for slot, level in plan.decodes:
            blocks = needed.setdefault(work.code(slot), {})
            blocks[plan.block] = max(level, blocks.get(plan.block, 0))
    return needed


def _runs(plans: Sequence[BlockPlan]) -> Iterable[list[BlockPlan]]:
    """Group plans of adjacent blocks, all of them computed or all of them copied."""
    run: list[BlockPlan] = []
    for plan in plans:
        if run and (plan.block != run[-1].block + 1 or (plan.copied is None) != (run[-1].copied is None)):
            yield run
            run = []
        run.append(plan)
    if run:
        yield run


def _produce(
    work: TensorWork, run: Sequence[BlockPlan], reader: Reader, scratch: Scratch, meter: Meter, writes: StagedWrites
) -> BlocksDone:
    """Make adjacent blocks of one tensor and write them: what is computed in one go, what is copied as it was read."""
    grid = work.recipe.grid
    first, last = grid.byte_range(run[0].block)[0], grid.byte_range(run[-1].block)[1]
    if run[0].copied is None:
        out = scratch.buffer("out", last - first)
        digests = []
        for plan in run:
            start, stop = grid.byte_range(plan.block)
            target = out[start - first : stop - first]
            make_block(work, plan, reader, scratch, target)
            digests.append(content_digest(target))
            read = (*plan.reads, *[slot for slot, _ in plan.decodes])
            meter.merged_bytes += stop - start + work.recipe.input_bytes(plan.block, read)
        writes.write(first, out)
        meter.computed += len(run)
    else:
        digests = [_copy(work, plan, reader, scratch, writes) for plan in run]
        meter.copied += len(run)
    crash_point("engine.first-block")
    meter.written += last - first
    return BlocksDone(run[0].block, b"".join([plan.key for plan in run]), b"".join(digests), None)


def _copy(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, writes: StagedWrites) -> bytes:
    """Write a block that is one of an input, from where that was read to; return its digest, which is the input's."""
    start, stop = work.recipe.grid.byte_range(plan.block)
    key, data = _copied(work, plan, reader)
    out = data[: stop - start]
    _check_result(work, plan, reader, scratch, out)
    writes.write(start, out)
    digest = reader.digest(key, plan.block) if len(out) == len(data) else None
    return digest or content_digest(out)


def _copied(work: TensorWork, plan: BlockPlan, reader: Reader) -> tuple[InputKey, memoryview]:
    """Return the input that a block is copied from, and the bytes of its block."""
    assert plan.copied is not None, "it is copied"
    key = work.inputs[plan.copied]
    assert key is not None, "a copied block has an input"
    return key, reader.data(key, plan.block)


def make_block(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, target: memoryview) -> None:
    if plan.copied is not None:
        target[:] = _copied(work, plan, reader)[1][: len(target)]
    else:
        _compute(work, plan, reader, scratch, target)
    _check_result(work, plan, reader, scratch, target)


def _check_result(
    work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, result: memoryview
) -> None:
    """Refuse NaN and infinity in a block that was made, unless they are allowed."""
    tensor = work.recipe.tensor
    if _must_be_finite(tensor) and not all_finite(typed(result, tensor.dtype), scratch):
        found = zip(tensor.slots, _values(work, plan, reader), strict=True)
        raise non_finite(work.plan, tensor, [(ref, values) for ref, values in found if ref is not None])


def _values(work: TensorWork, plan: BlockPlan | StatisticPlan, reader: Reader) -> list[Array | None]:
    """Return per slot the values of a block, None where it is not read."""
    reads = plan.reads
    return [reader.values(work, slot, plan.block) if slot in reads else None for slot in range(len(work.inputs))]


def _must_be_finite(tensor: TensorPlan) -> bool:
    return tensor.params.values["non_finite"] == "error" and is_mergeable(tensor.dtype)


def _check_inputs(work: TensorWork, inputs: Sequence[Array | None], scratch: Scratch) -> None:
    """Look for NaN and infinity in what was read."""
    if any(values is not None and not all_finite(values, scratch) for values in inputs):
        tensor = work.recipe.tensor
        found = zip(tensor.slots, inputs, strict=True)
        raise non_finite(work.plan, tensor, [(ref, values) for ref, values in found if ref is not None])


def _compute(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, target: memoryview) -> None:
    recipe = work.recipe
    out = typed(target, recipe.tensor.dtype)
    merged = recipe.merged_elements(plan.block)
    read = _values(work, plan, reader)
    if _must_be_finite(recipe.tensor) and not recipe.operator.shows_non_finite:
        _check_inputs(work, [None if values is None else values[:merged] for values in read], scratch)
    inputs: list[Array | BlockDecoder | None] = [*read]
    for slot, level in plan.decodes:
        inputs[slot] = reader.decoder(work, slot, plan.block, level)
    if merged:
        try:
            compute_block(recipe, plan.block, inputs, plan.sources, work.reduction, out[:merged], scratch)
        except OperatorError as error:
            raise named(work, error) from error
    if merged < out.size:
        base = inputs[0]
        assert isinstance(base, np.ndarray), "rows beyond the common ones come from the base"
        convert(base[merged : out.size], out[merged:])
