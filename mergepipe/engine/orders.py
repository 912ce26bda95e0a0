"""What a worker process is told of a job, and what it tells of the outcome: small values that `pickle` carries.

A worker process was forked off the one that runs the build and so has all groups as they were then. An order says
which of them it is about, and what has changed of it since; weights never pass through a pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.engine.coding import Coding
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.meter import Meter
from mergepipe.engine.work import BlockDone, BlockMeasured, Group, InputKey, Job, JobDone, Measure, TensorWork
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coding:
    """A `Coding`: its inputs, and the file that its blocks are put into."""

    key: _CodeKey
    temporary: Path
    block_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job, and what its group has come to since the process was forked.

    Attributes
    ----------
    group
        Its number.
    known
        By key the packed block digests of inputs that were cold then.
    reductions
        By index of the work.
    held
        By key where in the shared memory an input is kept between the passes, and its bytes; None where nothing is.
    present
        The (input, block) pairs of the job that lie there.
    """

    group: int
    start: int
    stop: int
    reuse: bool
    measures: tuple[_Measuring, ...]
    codings: tuple[_Coding, ...]
    known: Mapping[InputKey, bytes]
    reductions: Mapping[int, Reduction]
    held: Mapping[InputKey, tuple[int, int]] | None
    present: frozenset[tuple[InputKey, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """As `JobDone`.

    Attributes
    ----------
    done
        Per work the block, its key, its digest, and which of the work's candidates holds it; None if it was staged.
    present
        The (input, block) pairs that were read into the shared memory.
    coded
        Per coding what is to be said of the blocks that were put into its file.
    codes
        The keys of codes that were read, and whether they were found to be damaged.
    """

    hashed: dict[InputKey, bytes]
    done: tuple[list[tuple[int, bytes, bytes, int | None]], ...]
    meters: tuple[Meter, ...]
    measured: list[BlockMeasured]
    index_bytes: dict[InputKey, int]
    claimed: set[tuple[InputKey, int]]
    nbytes: int
    present: frozenset[tuple[InputKey, int]]
    coded: tuple[list[PutBlock], ...]
    codes: Mapping[_CodeKey, bool]


def order_of(job: Job, number: int, cold: Sequence[InputKey], hold: HoldPool) -> Order | None:
    """Return the order of a job; None if what it works in cannot be shared.

    Parameters
    ----------
    number
        Of the group.
    cold
        The inputs of the group that were cold when processes were forked.
    hold
        What lends the memory that groups keep between their passes.

    Raises
    ------
    StorageError
        If a file of codes cannot be begun.
    """
    group = job.group
    held = None if group.held is None else {key: hold.place(view) for key, view in group.held.items()}
    places = None if held is None else {key: place for key, place in held.items() if place is not None}
    if held is not None and len(places or ()) < len(held):
        return None
    works = {id(work): index for index, work in enumerate(group.works)}
    measures = [
        _Measuring(
            work=works[id(measure.work)],
            statistic=measure.statistic,
            recipe=measure.recipe,
            known=frozenset(measure.known),
        )
        for measure in job.measures
    ]
    codings = [
        _Coding(key=one.key, temporary=one.writer.begun(), block_elements=one.writer.block_elements)
        for one in job.codings
    ]
    blocks = range(job.start, job.stop)
    return Order(
        group=number,
        start=job.start,
        stop=job.stop,
        reuse=job.reuse,
        measures=tuple(measures),
        codings=tuple(codings),
        known={key: known for key in cold if (known := group.inputs[key].known) is not None},
        reductions={index: work.reduction for index, work in enumerate(group.works) if work.reduction is not None},
        held=places,
        present=frozenset((key, block) for key in places or () for block in blocks if (key, block) in group.present),
    )


def ordered_job(order: Order, group: Group, hold: HoldPool) -> Job:
    """Return the job that an order asks for, with its group as it has become."""
    for key, known in order.known.items():
        group.inputs[key].known = known
    for index, reduction in order.reductions.items():
        group.works[index].reduction = reduction
    group.held = None if order.held is None else {key: hold.at(*place) for key, place in order.held.items()}
    group.present = set(order.present)
    for work in group.works:
        work.shard.is_there()
    measures = [
        Measure(work=group.works[one.work], statistic=one.statistic, recipe=one.recipe, known=one.known)
        for one in order.measures
    ]
    return Job(
        group=group,
        start=order.start,
        stop=order.stop,
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
    return Outcome(
        hashed=done.hashed,
        done=tuple(
            [(block.block, block.key, block.digest, _candidate(work, block)) for block in blocks]
            for work, blocks in zip(group.works, done.done, strict=True)
        ),
        meters=done.meters,
        measured=done.measured,
        index_bytes=done.index_bytes,
        claimed=done.claimed,
        nbytes=done.nbytes,
        present=frozenset(group.present - order.present),
        coded=tuple(coding.writer.told() for coding in done.job.codings),
        codes={key: code.is_damaged for key, code in group.codes.items() if code.was_read or code.is_damaged},
    )


def _candidate(work: TensorWork, block: BlockDone) -> int | None:
    found = (index for index, holding in enumerate(work.candidates) if holding is block.holding)
    return None if block.holding is None else next(found)


def job_done(job: Job, outcome: Outcome) -> JobDone:
    """Return the outcome as that of the job that was ordered, and enter what it says of the group."""
    group = job.group
    group.present |= outcome.present
    for coding, put in zip(job.codings, outcome.coded, strict=True):
        coding.writer.enter(put)
    for key, is_damaged in outcome.codes.items():
        code = group.codes[key]
        code.was_read = True
        code.is_damaged |= is_damaged
    return JobDone(
        job=job,
        hashed=outcome.hashed,
        done=tuple(
            [
                BlockDone(block, key, digest, None if candidate is None else work.candidates[candidate])
                for block, key, digest, candidate in blocks
            ]
            for work, blocks in zip(group.works, outcome.done, strict=True)
        ),
        meters=outcome.meters,
        measured=outcome.measured,
        index_bytes=outcome.index_bytes,
        claimed=outcome.claimed,
        adapters={},
        nbytes=outcome.nbytes,
    )
