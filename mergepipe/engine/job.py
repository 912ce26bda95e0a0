"""What a worker does with a job: read and hash what is cold, decide, read the rest, compute, hash, write.

Every byte that enters a merge is hashed in the buffer it is computed from, and compared with the digest that the
action key was made of. So a result can never be filed under content that it was not made from, however a source
changes meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mergepipe.digest import content_digest
from mergepipe.engine.blocks import (
    block_values,
    check_result,
    copied_block,
    make_block,
    needed_blocks,
    needed_codes,
    read_slots,
)
from mergepipe.engine.claims import Claims
from mergepipe.engine.coding import CodeKey, Coding
from mergepipe.engine.kernel import Scratch, measure_block
from mergepipe.engine.meter import Meter
from mergepipe.engine.problems import input_difference
from mergepipe.engine.reader import Reader
from mergepipe.engine.staging import StagedWrites
from mergepipe.engine.work import BlockMeasured, BlocksDone, InputKey, Job, JobDone, TensorWork
from mergepipe.fsio.crash import crash_point
from mergepipe.graph.blocks import BlockPlan, StatisticPlan, find_block, plan_block, plan_statistic
from mergepipe.plan.values import Decision


def begin_merge(job: Job, scratch: Scratch, turn: int = 0) -> BegunMerge | None:
    """Decide what a job of known content reads, and ask for it, while another is still being done; None for other jobs.

    Not where statistics are taken, content is found by reading, or inputs are kept between passes: what such a job
    needs is known when those before it are done.

    Parameters
    ----------
    turn
        Tells it from the other jobs that were begun: what is read at once lies in buffers of its own.

    Raises
    ------
    PackError, SourceChangedError, StorageError
        As `run_job` would.
    """
    if job.measures or job.codings or job.group.held is not None or job.group.cold:
        return None
    merge = BegunMerge(job, Reader(job, scratch, turn), scratch)
    merge.ask()
    return merge


def run_job(job: Job, scratch: Scratch, begun: BegunMerge | None = None) -> JobDone:
    """Do a job.

    Parameters
    ----------
    begun
        What `begin_merge` made of it.

    Raises
    ------
    SourceChangedError
        If a file is not the one that was planned, or its bytes are not what the catalog says.
    OperatorError
        If an input or a result is not finite, or sources that must agree do not.
    StorageError
        If a read or a write is refused.
    """
    if begun is not None:
        return begun.done()
    reader = Reader(job, scratch)
    if job.measures or job.codings:
        return _measure(job, reader, scratch)
    return BegunMerge(job, reader, scratch).done()


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
        reader.read(needed_blocks(_measured_slots(job, todo), _coded_blocks(coded)))
        _count_measured(meters, numbers, job, todo)
        began = _count_reading(meters, started)
        for index, plan in todo:
            measure = job.measures[index]
            inputs = block_values(measure.work, plan, reader)
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
        yield from read_slots(job.measures[index].work, plan)


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


class BegunMerge:
    """A job that is merged, piece by piece.

    Parameters
    ----------
    reader
        That of the job.
    """

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
        self._codes: dict[CodeKey, dict[int, int]] | None = None  # those that were asked for
        self._was_asked = False

    def ask(self) -> None:
        """Ask the kernel for all that the job reads, if that is decided; take the codes that need no waiting."""
        if self._plans is None or self._was_asked:
            return
        started = time.perf_counter()
        if self._job.group.codes:
            self._codes = self._ask_for_codes(self._plans)
        self._reader.ask(self._needed(self._plans))
        self._was_asked = True
        _count_reading(self._meters, started)

    def done(self) -> JobDone:
        """Do the job."""
        job, reader = self._job, self._reader
        self.ask()
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
            codes = self._ask_for_codes(todo) if self._codes is None else self._codes
            reader.read(self._needed(todo), asked=self._was_asked)
            reader.read_codes(codes)
        elif self._works:
            reader.read(self._needed(todo), asked=self._was_asked)
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

    def _ask_for_codes(self, todo: Sequence[Sequence[BlockPlan]]) -> dict[CodeKey, dict[int, int]]:
        """Ask for the codes that are needed, take those that need no waiting, and return what is needed."""
        codes = needed_codes((work, plan) for work, plans in zip(self._works, todo, strict=True) for plan in plans)
        self._reader.ask_for_codes(codes)
        return codes

    def _needed(self, todo: Sequence[Sequence[BlockPlan]]) -> dict[InputKey, list[int]]:
        """Return the blocks that are read exactly, by input."""
        planned = ((work, plan) for work, plans in zip(self._works, todo, strict=True) for plan in plans)
        return needed_blocks(pair for work, plan in planned for pair in read_slots(work, plan))

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
    key, data = copied_block(work, plan, reader)
    out = data[: stop - start]
    check_result(work, plan, reader, scratch, out)
    writes.write(start, out)
    digest = reader.digest(key, plan.block) if len(out) == len(data) else None
    return digest or content_digest(out)
