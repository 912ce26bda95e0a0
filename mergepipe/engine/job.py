"""What a worker does with a job: read and hash what is cold, decide, read the rest, compute, hash, write.

Every byte that enters a merge is hashed in the buffer it is computed from, and compared with the digest that the
action key was made of. So a result can never be filed under content that it was not made from, however a source
changes meanwhile.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mergepipe.digest import content_digest
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.adapters import AdapterInput
from mergepipe.engine.coding import CodeKey, Coding
from mergepipe.engine.kernel import Array, Scratch, all_finite, compute_block, convert, measure_block, typed
from mergepipe.engine.meter import Meter
from mergepipe.engine.problems import input_difference, named, non_finite
from mergepipe.engine.reader import Reader
from mergepipe.engine.work import BlockDone, BlockMeasured, InputKey, Job, JobDone, TensorWork
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
    try:
        started = time.perf_counter()
        reader.read_cold()
        return (_measure if job.measures or job.codings else _merge)(job, reader, scratch, started)
    finally:
        reader.close()


def _measure(job: Job, reader: Reader, scratch: Scratch, started: float) -> JobDone:
    """Take the statistics of the job's blocks that are not known from earlier."""
    works = job.group.works
    meters = tuple(Meter() for _ in works)
    numbers = {id(work): number for number, work in enumerate(works)}
    todo: list[tuple[int, StatisticPlan]] = []
    measured: list[BlockMeasured] = []
    for index, measure in enumerate(job.measures):
        work = measure.work
        for block in range(job.start, min(job.stop, work.recipe.facts.blocks)):
            digests = [reader.digest(key, block) if key else None for key in work.inputs]
            plan = plan_statistic(work.recipe, measure.statistic, measure.recipe, block, digests)
            if plan.key in measure.known:
                measured.append(BlockMeasured(index, block, plan.key, None))
            else:
                todo.append((index, plan))
    coded = [pair for coding in job.codings for pair in _to_code(job, coding, reader)]
    reader.read(_needed(_measured_slots(job, todo), _coded_blocks(coded)))
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
    return JobDone(
        job=job,
        hashed=reader.hashed(),
        done=tuple([] for _ in works),
        meters=meters,
        measured=measured,
        index_bytes=reader.index_bytes(set()),
        claimed=set(),
        adapters={},
        nbytes=0,
    )


_ToCode = tuple[Coding, int, bool]
"""A delta, a block of it, and whether that differs from the base's."""


def _to_code(job: Job, coding: Coding, reader: Reader) -> Iterator[_ToCode]:
    """Yield the job's blocks of a delta that is being coded."""
    same_dtype = coding.base.ref.info.dtype == coding.expert.ref.info.dtype
    for block in range(job.start, min(job.stop, coding.expert.grid.count)):
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


def _count_reading(meters: Sequence[Meter], started: float) -> float:
    """Count the time since ``started`` as time to read, for the first output; return the time now."""
    now = time.perf_counter()
    if meters:
        meters[0].reading_seconds += now - started
    return now


def _merge(job: Job, reader: Reader, scratch: Scratch, started: float) -> JobDone:
    works = job.group.works
    meters = tuple(Meter() for _ in works)
    finished: list[list[BlockDone]] = []
    todo: list[list[BlockPlan]] = []
    for work, meter in zip(works, meters, strict=True):
        done, plans = _decide(job, work, reader)
        meter.cached += len(done)
        finished.append(done)
        todo.append(plans)
    planned = [(work, plan) for work, plans in zip(works, todo, strict=True) for plan in plans]
    codes = needed_codes(planned)
    reader.ask_for_codes(codes)
    reader.read(_needed(pair for work, plan in planned for pair in _read_slots(work, plan)))
    reader.read_codes(codes)
    began = _count_reading(meters, started)
    reads = _Reads(job, reader)
    for number, (work, plans, done, meter) in enumerate(zip(works, todo, finished, meters, strict=True)):
        reads.count(number, plans, meter)
        for run in _runs(plans):
            done += _produce(work, run, reader, scratch, meter)
        began, since = time.perf_counter(), began
        meter.merging_seconds += began - since
    return JobDone(
        job=job,
        hashed=reader.hashed(),
        done=tuple(finished),
        meters=meters,
        measured=[],
        index_bytes=reader.index_bytes(reads.claimed),
        claimed=reads.claimed,
        adapters=reads.adapters,
        nbytes=_progress(job),
    )


def _progress(job: Job) -> int:
    """Return the job's share of the group's bytes; exact when summed over all jobs."""
    group = job.group
    return group.nbytes * job.stop // group.blocks - group.nbytes * job.start // group.blocks


def _decide(job: Job, work: TensorWork, reader: Reader) -> tuple[list[BlockDone], list[BlockPlan]]:
    """Split the job's blocks of one tensor into those that earlier builds hold and those to be made."""
    done: list[BlockDone] = []
    plans: list[BlockPlan] = []
    for block in range(job.start, min(job.stop, work.recipe.grid.count)):
        digests = [reader.digest(key, block) if key else None for key in work.inputs]
        if work.recipe.tensor.decision is Decision.EQUAL:
            input_difference(work.recipe.tensor, digests)
        plan = plan_block(work.recipe, block, digests, work.reduction)
        holding = find_block(work.candidates, block, plan.key) if job.reuse else None
        if holding is None:
            plans.append(plan)
        else:
            done.append(BlockDone(block, plan.key, holding.digest(block), holding))
    return done, plans


def _read_slots(work: TensorWork, plan: BlockPlan | StatisticPlan) -> Iterator[tuple[InputKey, int]]:
    """Yield the (input, block) pairs that must be read exactly."""
    for slot in plan.reads:
        key = work.inputs[slot]
        if key is not None:
            yield key, plan.block


def _needed(*pairs: Iterable[tuple[InputKey, int]]) -> dict[InputKey, list[int]]:
    needed: dict[InputKey, set[int]] = {}
    for key, block in itertools.chain(*pairs):
        needed.setdefault(key, set()).add(block)
    return {key: sorted(blocks) for key, blocks in needed.items()}


def needed_codes(planned: Iterable[tuple[TensorWork, BlockPlan]]) -> dict[CodeKey, dict[int, int]]:
    """Return by code and block the level that is needed, the best one of all outputs."""
    needed: dict[CodeKey, dict[int, int]] = {}
    for work, plan in planned:
        for slot, level in plan.decodes:
            blocks = needed.setdefault(work.code(slot), {})
            blocks[plan.block] = max(level, blocks.get(plan.block, 0))
    return needed


class _Reads:
    """Counts what a job reads to merge; a block that another output of the job counted already is borrowed.

    Attributes
    ----------
    claimed
        The (input, block) pairs that were counted.
    adapters
        By key of an adapter's tensor the index of the work that used it first, and whether as an expert.
    """

    def __init__(self, job: Job, reader: Reader) -> None:
        self._group = job.group
        self._reader = reader
        self.claimed: set[tuple[InputKey, int]] = set()
        self._stages: set[tuple[CodeKey, int, int]] = set()
        self._approximated: set[tuple[InputKey, int]] = set()
        self.adapters: dict[InputKey, tuple[int, bool]] = {}

    def count(self, number: int, plans: Iterable[BlockPlan], meter: Meter) -> None:
        """Count for the work of this number."""
        tensor = self._group.works[number].recipe.tensor
        kinds = [self._kind(number, slot) for slot in range(len(tensor.slots))]
        for plan in plans:
            self._coded(self._group.works[number], plan, meter)
            for slot in plan.reads:
                kind = kinds[slot]
                if kind is None:
                    continue
                key, adapter, is_base, is_expert = kind
                if adapter is None:
                    self._stored((key, plan.block), meter, expert=is_expert, pair=is_expert)
                    continue
                # Its factors' bytes are counted once, by the thread that runs the build.
                self.adapters.setdefault(key, (number, is_expert))
                if is_expert:
                    self._pair((key, plan.block), meter)
                on = adapter.lora.on
                if on is not None and adapter.on is not None:
                    expert = not is_base and tensor.is_expert(on)
                    self._stored((adapter.on, plan.block), meter, expert=expert, pair=False)

    def _coded(self, work: TensorWork, plan: BlockPlan, meter: Meter) -> None:
        """Count the stages of codes, each once, as they were planned."""
        for slot, level in plan.decodes:
            code = work.code(slot)
            for stage, count in enumerate(self._reader.code_bytes(code, plan.block)[:level]):
                first = (code, plan.block, stage) not in self._stages
                self._stages.add((code, plan.block, stage))
                meter.expert_bytes += count if first else 0
                meter.borrowed_bytes += 0 if first else count
            pair = (code[1], plan.block)  # the block itself is not read: it is not claimed
            first = pair not in self._approximated
            self._approximated.add(pair)
            meter.expert_blocks += first
            meter.borrowed += not first

    def _kind(self, number: int, slot: int) -> tuple[InputKey, AdapterInput | None, bool, bool] | None:
        """Return a slot's key, its adapter, and whether it is the base, or an expert; None if it has no input."""
        work = self._group.works[number]
        key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
        if key is None or ref is None:
            return None
        is_base = ref is work.recipe.tensor.base
        return key, self._group.adapters.get(key), is_base, not is_base and work.recipe.tensor.is_expert(ref)

    def _pair(self, pair: tuple[InputKey, int], meter: Meter) -> None:
        """Count an (expert, block) pair."""
        first = pair not in self.claimed
        self.claimed.add(pair)
        meter.expert_blocks += first
        meter.borrowed += not first

    def _stored(self, block: tuple[InputKey, int], meter: Meter, *, expert: bool, pair: bool) -> None:
        """Count the bytes of a stored block, unless they were, and where asked for the pair."""
        count = self._reader.block_bytes(*block)
        first = block not in self.claimed
        self.claimed.add(block)
        if not first:
            meter.borrowed_bytes += count if expert else 0
        elif expert:
            meter.expert_bytes += count
        else:
            meter.base_bytes += count
        if pair:
            meter.expert_blocks += first
            meter.borrowed += not first


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
    work: TensorWork, run: Sequence[BlockPlan], reader: Reader, scratch: Scratch, meter: Meter
) -> list[BlockDone]:
    """Make adjacent blocks of one tensor and write them in one go."""
    grid = work.recipe.grid
    first, last = grid.byte_range(run[0].block)[0], grid.byte_range(run[-1].block)[1]
    out = scratch.buffer("out", last - first)
    done = []
    for plan in run:
        start, stop = grid.byte_range(plan.block)
        target = out[start - first : stop - first]
        make_block(work, plan, reader, scratch, target)
        done.append(BlockDone(plan.block, plan.key, content_digest(target), None))
        meter.computed += plan.copied is None
        meter.copied += plan.copied is not None
    work.shard.write(work.name, first, out)
    crash_point("engine.first-block")
    meter.written += len(out)
    return done


def make_block(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, target: memoryview) -> None:
    tensor = work.recipe.tensor
    if plan.copied is not None:
        key = work.inputs[plan.copied]
        assert key is not None, "a copied block has an input"
        target[:] = reader.data(key, plan.block)[: len(target)]
    else:
        _compute(work, plan, reader, scratch, target)
    if _must_be_finite(tensor) and not all_finite(typed(target, tensor.dtype), scratch):
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
