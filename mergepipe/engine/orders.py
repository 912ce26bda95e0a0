"""What a worker process is told of a job, and what it tells of the outcome: small values that `pickle` carries.

A worker process was forked off the one that runs the build and so has all groups as they were then. An order says
which of them it is about, and what has changed of it since; weights never pass through a pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mergepipe.engine.coding import Coding
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.meter import Meter
from mergepipe.engine.work import BlockMeasured, BlocksDone, Group, Input, InputKey, Job, JobDone, Measure, TensorWork
from mergepipe.operators.contract import Reduction, Statistic
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.progressive.writer import PutBlock

_CodeKey = tuple[InputKey, InputKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """A `Measure`; the work is told by its index in the group."""

    work: int
    statistic: Statistic
    recipe: bytes
    known: frozenset[bytes]
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coding:
    """A `Coding`: its inputs, and the file that its blocks are put into."""

    key: _CodeKey
    temporary: Path
    block_elements: int


class Order(NamedTuple):
    """A job, and what its group has come to since the process was forked. Inputs are told by their index in the group.

    Attributes
    ----------
    group
        Its number.
    known
        By input the packed block digests of those that were cold then.
    reductions
        By index of the work.
    held
        By input where in the shared memory its first blocks are kept between the passes, and their bytes; None where
        nothing is.
    kept
        How many blocks that are.
    present
        The (input, block) pairs of the job that lie there.
    """

    group: int
    start: int
    stop: int
    piece: int
    reuse: bool
    measures: tuple[_Measuring, ...]
    codings: tuple[_Coding, ...]
    known: Mapping[int, bytes]
    reductions: Mapping[int, Reduction]
    held: Sequence[tuple[int, int]] | None
    kept: int
    present: Sequence[tuple[int, int]]


class Outcome(NamedTuple):
    """As `JobDone`; inputs are told by their index in the group.

    Attributes
    ----------
    done
        Per work the first of adjacent blocks, their keys, their digests, and which of the work's candidates holds them;
        None if they were staged.
    meters
        Per work what `Meter` has, in order.
    measured
        What `BlockMeasured` has, in order.
    present
        The (input, block) pairs that were read into the shared memory.
    coded
        Per coding what is to be said of the blocks that were put into its file.
    codes
        The keys of codes that were read, and whether they were found to be damaged.
    """

    hashed: dict[int, bytes]
    done: tuple[list[tuple[int, bytes, bytes, int | None]], ...]
    meters: tuple[tuple[float, ...], ...]
    measured: list[tuple[int, int, bytes, bytes | None]]
    index_bytes: dict[int, int]
    claimed: list[tuple[int, int]]
    nbytes: int
    present: list[tuple[int, int]]
    coded: tuple[list[PutBlock], ...]
    codes: Mapping[_CodeKey, bool]


def order_of(job: Job, number: int, cold: Sequence[tuple[int, Input]], hold: HoldPool) -> Order | None:
    """Return the order of a job; None if what it works in cannot be shared.

    Parameters
    ----------
    number
        Of the group.
    cold
        The inputs of the group that were cold when processes were forked, with their indices.
    hold
        What lends the memory that groups keep between their passes.

    Raises
    ------
    StorageError
        If a file of codes cannot be begun.
    """
    group = job.group
    places: list[tuple[int, int]] | None = None
    present: list[tuple[int, int]] = []
    if group.held is not None:
        found = [hold.place(group.held[key]) for key in group.inputs]
        places = [place for place in found if place is not None]
        if len(places) < len(found):
            return None
        there, kept = group.present, range(job.start, min(job.stop, group.kept))
        present = [(at, block) for at, key in enumerate(group.inputs) for block in kept if (key, block) in there]
    works = {id(work): index for index, work in enumerate(group.works)}
    measures = [
        _Measuring(
            work=works[id(measure.work)],
            statistic=measure.statistic,
            recipe=measure.recipe,
            known=frozenset(measure.known),
            is_first=measure.is_first,
        )
        for measure in job.measures
    ]
    codings = [
        _Coding(key=one.key, temporary=one.writer.begun(), block_elements=one.writer.block_elements)
        for one in job.codings
    ]
    return Order(
        group=number,
        start=job.start,
        stop=job.stop,
        piece=job.piece,
        reuse=job.reuse,
        measures=tuple(measures),
        codings=tuple(codings),
        known={at: known for at, source in cold if (known := source.known) is not None},
        reductions={index: work.reduction for index, work in enumerate(group.works) if work.reduction is not None},
        held=places,
        kept=group.kept,
        present=present,
    )


def ordered_job(order: Order, group: Group, hold: HoldPool) -> Job:
    """Return the job that an order asks for, with its group as it has become."""
    keys = list(group.inputs)
    for at, known in order.known.items():
        group.inputs[keys[at]].known = known
    for index, reduction in order.reductions.items():
        group.works[index].reduction = reduction
    places = order.held
    group.held = None if places is None else {key: hold.at(*at) for key, at in zip(keys, places, strict=True)}
    group.kept = order.kept
    group.present = {(keys[at], block) for at, block in order.present}
    for work in group.works:
        work.shard.is_there()
    measures = [
        Measure(
            work=group.works[one.work],
            statistic=one.statistic,
            recipe=one.recipe,
            known=one.known,
            is_first=one.is_first,
        )
        for one in order.measures
    ]
    return Job(
        group=group,
        start=order.start,
        stop=order.stop,
        piece=order.piece,
        reuse=order.reuse,
        measures=tuple(measures),
        codings=tuple(_ordered_coding(one, group) for one in order.codings),
    )


def _ordered_coding(ordered: _Coding, group: Group) -> Coding:
    from mergepipe.progressive.writer import PackWriter  # where nothing is coded, it is not needed

    base, expert = (group.inputs[key] for key in ordered.key)
    writer = PackWriter(
        ordered.temporary.parent,
        shape=expert.ref.info.shape,
        block_elements=ordered.block_elements,
        temporary=ordered.temporary,
    )
    return Coding(base=base, expert=expert, writer=writer)


def outcome_of(done: JobDone, order: Order) -> Outcome:
    """Return what a worker process tells of a job that it did."""
    group = done.job.group
    at = {key: index for index, key in enumerate(group.inputs)}
    had = set(order.present)
    return Outcome(
        hashed={at[key]: digests for key, digests in done.hashed.items()},
        done=tuple(
            [(run.first, run.keys, run.digests, _candidate(work, run)) for run in runs]
            for work, runs in zip(group.works, done.done, strict=True)
        ),
        meters=tuple(meter.values() for meter in done.meters),
        measured=[(one.measure, one.block, one.key, one.value) for one in done.measured],
        index_bytes={at[key]: count for key, count in done.index_bytes.items()},
        claimed=[(at[key], block) for key, block in done.claimed],
        nbytes=done.nbytes,
        present=[pair for key, block in group.present if (pair := (at[key], block)) not in had],
        coded=tuple(coding.writer.told() for coding in done.job.codings),
        codes={key: code.is_damaged for key, code in group.codes.items() if code.was_read or code.is_damaged},
    )


def _candidate(work: TensorWork, run: BlocksDone) -> int | None:
    found = (index for index, holding in enumerate(work.candidates) if holding is run.holding)
    return None if run.holding is None else next(found)


def job_done(job: Job, outcome: Outcome) -> JobDone:
    """Return the outcome as that of the job that was ordered, and enter what it says of the group."""
    group = job.group
    keys = list(group.inputs)
    group.present.update([(keys[at], block) for at, block in outcome.present])
    for coding, put in zip(job.codings, outcome.coded, strict=True):
        coding.writer.enter(put)
    for key, is_damaged in outcome.codes.items():
        code = group.codes[key]
        code.was_read = True
        code.is_damaged |= is_damaged
    return JobDone(
        job=job,
        hashed={keys[at]: digests for at, digests in outcome.hashed.items()},
        done=tuple(
            [
                BlocksDone(first, packed, digests, None if candidate is None else work.candidates[candidate])
                for first, packed, digests, candidate in runs
            ]
            for work, runs in zip(group.works, outcome.done, strict=True)
        ),
        meters=tuple(Meter.of(values) for values in outcome.meters),
        measured=[BlockMeasured(*one) for one in outcome.measured],
        index_bytes={keys[at]: count for at, count in outcome.index_bytes.items()},
        claimed={(keys[at], block) for at, block in outcome.claimed},
        adapters={},
        nbytes=outcome.nbytes,
    )
