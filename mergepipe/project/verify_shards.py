"""Hashing safetensors files block by block, in parallel, and naming what is not what was written.

Blocks are read at the places where they were written, whatever the header says now, so that damage to the header hides
nothing of the damage to the data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.checkpoints.geometry import BlockGrid, Geometry, grid
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.digest import DIGEST_SIZE, content_digest, digest_at, tensor_digest
from mergepipe.errors import FormatError
from mergepipe.fsio.reading import open_regular
from mergepipe.lockfile.records import LockedShard
from mergepipe.plan.layout import Shard, TensorSlot, shard_digest
from mergepipe.project.verify_header import header_differences
from mergepipe.project.verify_report import Problem
from mergepipe.reporting import Reporter
from mergepipe.units import format_count
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.kernel import Scratch
    from mergepipe.engine.pool import WorkerPool

_RUN_BYTES = 4 << 20  # read at once by a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """A tensor as it was written; ``blocks`` are its packed block digests, None where only the tensor's is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes
    blocks: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardToCheck:
    """A safetensors file to be hashed, and what it should hold.

    Attributes
    ----------
    where
        What messages call the file.
    kind
        Of the problems with its data: ``block`` for a published shard, ``pack`` for one in the cache.
    tensors
        In file order.
    hint, missing
        What to do if it is damaged, and if it is not there.
    """

    path: Path
    where: str
    kind: str
    shard: LockedShard
    tensors: tuple[ExpectedTensor, ...]
    hint: str
    missing: str


@dataclass(slots=True)
class CheckedShard:
    """What was found of one file."""

    problems: list[Problem] = field(default_factory=list)
    blocks: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A file that can be read: its size, the positions in it of its tensors, and their blocks."""

    check: ShardToCheck
    size: int
    offsets: tuple[int, ...]
    grids: tuple[BlockGrid, ...]

    def have(self, tensor: int) -> int:
        """Return how many blocks of a tensor lie within the file."""
        layout, room = self.grids[tensor], self.size - self.offsets[tensor]
        if room >= layout.nbytes:
            return layout.count
        return max(0, room) // max(1, layout.block_rows * layout.row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Adjacent blocks of one tensor of a file."""

    opened: _Opened
    tensor: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        layout = self.opened.grids[self.tensor]
        return layout.byte_range(self.stop - 1)[1] - layout.byte_range(self.start)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hashed:
    """The digests of the blocks of a run, None for those that cannot be read, and why."""

    run: _Run
    digests: tuple[bytes | None, ...]
    error: str | None


def check_shards(
    checks: Sequence[ShardToCheck], geometry: Geometry, pool: WorkerPool, reporter: Reporter
) -> list[CheckedShard]:
    """Hash files and compare them with what was written; reports progress, and holds a few blocks per worker.

    Returns
    -------
    list
        One for each of ``checks``.
    """
    found = [CheckedShard() for _ in checks]
    opened = [_open(check, geometry, result) for check, result in zip(checks, found, strict=True)]
    results = {id(one): result for one, result in zip(opened, found, strict=True) if one is not None}
    runs = [run for one in opened if one is not None for run in _runs(one)]
    reporter.begin("verifying", sum(run.nbytes for run in runs))
    tally = _Tally()
    try:
        for hashed in pool.run(_hash, runs):
            reporter.advance(hashed.run.nbytes)
            result = results[id(hashed.run.opened)]
            result.blocks += len(hashed.digests)
            result.bytes += hashed.run.nbytes
            tally.take(hashed)
    finally:
        reporter.end()
    for one in opened:
        if one is not None:
            results[id(one)].problems += tally.problems(one)
    return found


def _runs(opened: _Opened) -> Iterator[_Run]:
    """Yield the blocks that the file has; of one that is cut off, only those before its end."""
    for number, layout in enumerate(opened.grids):
        step = max(1, _RUN_BYTES // max(1, layout.block_rows * layout.row_bytes))
        have = opened.have(number)
        for start in range(0, have, step):
            yield _Run(opened=opened, tensor=number, start=start, stop=min(start + step, have))


def _hash(run: _Run, scratch: Scratch) -> _Hashed:
    layout, count = run.opened.grids[run.tensor], run.stop - run.start
    origin = layout.byte_range(run.start)[0]
    buffer = scratch.buffer("verify", run.nbytes)
    try:
        fd = os.open(run.opened.check.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            have = _read_up_to(fd, buffer, run.opened.offsets[run.tensor] + origin)
        finally:
            os.close(fd)
    except OSError as error:
        return _Hashed(run=run, digests=(None,) * count, error=error.strerror or type(error).__name__)
    digests: list[bytes | None] = []
    for block in range(run.start, run.stop):
        start, stop = (position - origin for position in layout.byte_range(block))
        digests.append(content_digest(buffer[start:stop]) if stop <= have else None)
    return _Hashed(run=run, digests=tuple(digests), error=None)


def _read_up_to(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer as far as the file goes; return how many bytes there were."""
    have = 0
    while have < len(buffer):
        count = os.preadv(fd, [buffer[have:]], offset + have)
        if count == 0:
            break
        have += count
    return have


# --- opening ----------------------------------------------------------------------------------------------------------


def _open(check: ShardToCheck, geometry: Geometry, result: CheckedShard) -> _Opened | None:
    """Look at a file's size and header; return it with the places of its tensors, None if it cannot be read."""
    try:
        fd = open_regular(check.path)
    except OSError as error:
        result.problems.append(unreadable(check.where, error, missing=check.missing, damaged=check.hint))
        return None
    try:
        size = os.fstat(fd).st_size
        if size != check.shard.bytes:
            more = f"{size:,} bytes and should have {check.shard.bytes:,}"
            result.problems.append(
                _problem(check, "file", f"has {more}", expected=check.shard.bytes, got=size)
            )
        grids = tuple(grid(tensor.dtype, tensor.shape, geometry) for tensor in check.tensors)
        offsets = _checked_header(check, fd, size, grids, result)
        return _Opened(check=check, size=size, offsets=offsets, grids=grids)
    except OSError as error:
        result.problems.append(unreadable(check.where, error, missing=check.missing, damaged=check.hint))
        return None
    finally:
        os.close(fd)


def unreadable(where: str, error: OSError, *, missing: str, damaged: str) -> Problem:
    """Return the problem of a file that cannot be read, with the hint for one that is not there or for another."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Problem(kind="file", where=where, what="is missing", hint=missing)
    what = f"cannot be read: {error.strerror or type(error).__name__}"
    return Problem(kind="file", where=where, what=what, hint=damaged)


def _checked_header(
    check: ShardToCheck, fd: int, size: int, grids: Sequence[BlockGrid], result: CheckedShard
) -> tuple[int, ...]:
    """Compare the header with the one that was written, and return where the tensors lie."""
    pairs = zip(check.tensors, grids, strict=True)
    slots = tuple(TensorSlot(name=t.name, dtype=t.dtype, shape=t.shape, nbytes=g.nbytes) for t, g in pairs)
    layout = Shard(name=check.shard.name, tensors=slots)
    offsets = tuple(layout.offsets[tensor.name] for tensor in check.tensors)
    digests = [tensor.digest for tensor in check.tensors]
    if layout.digest(digests) == check.shard.digest:
        for difference in header_differences(os.pread(fd, len(layout.header), 0), layout.header):
            facts = {} if difference.tensor is None else {"tensor": difference.tensor}
            result.problems.append(_problem(check, "header", difference.what, **facts))
        return offsets
    # Another version of mergepipe may write headers in another form: the one in the file must have the digest then.
    try:
        header = read_header(fd, check.path, size, label="output")
        places = {tensor.name: tensor.offset for tensor in header.tensors}
        if shard_digest(os.pread(fd, header.size, 0), digests) == check.shard.digest:
            return tuple(places[tensor.name] for tensor in check.tensors)
        what = "the header, or the order of the tensors, is not what was written"
    except FormatError as error:
        what = f"the header is damaged: {error.message.partition(chr(10))[0]}"
    except KeyError as error:
        what = f"the header has no tensor `{error.args[0]}`"
    result.problems.append(_problem(check, "header", what))
    return offsets


def _problem(check: ShardToCheck, kind: str, what: str, **facts: object) -> Problem:
    kind = check.kind if check.kind == "pack" else kind
    return Problem(kind=kind, where=check.where, what=what, hint=check.hint, facts={"file": check.shard.name, **facts})


# --- what differs -----------------------------------------------------------------------------------------------------


class _Tally:
    """Collects, by file and tensor, the blocks that are not what was written."""

    def __init__(self) -> None:
        self._bad: dict[tuple[int, int], dict[int, str]] = {}
        self._whole: dict[tuple[int, int], list[bytes | None]] = {}

    def take(self, hashed: _Hashed) -> None:
        """Compare the digests of a run."""
        run = hashed.run
        key, tensor = (id(run.opened), run.tensor), run.opened.check.tensors[run.tensor]
        if tensor.blocks is None:
            self._whole.setdefault(key, []).extend(hashed.digests)
        for block, digest in enumerate(hashed.digests, run.start):
            if digest is None:
                state = f"cannot be read: {hashed.error}" if hashed.error else "cut off"
            elif tensor.blocks is not None and digest != digest_at(tensor.blocks, block):
                state = "differ"
            else:
                continue
            self._bad.setdefault(key, {})[block] = state

    def problems(self, opened: _Opened) -> Iterator[Problem]:
        """Yield what is wrong with the data of a file, tensor by tensor."""
        for number, tensor in enumerate(opened.check.tensors):
            bad, have = self._bad.get((id(opened), number), {}), opened.have(number)
            for start, stop, state in _adjacent(bad):
                yield _block_problem(opened, number, start, stop, state)
            if have < opened.grids[number].count:
                yield _block_problem(opened, number, have, opened.grids[number].count, "cut off")
                continue
            digests = self._whole.get((id(opened), number), []) if tensor.blocks is None else None
            if digests is not None and not bad:
                packed = b"".join(digest or bytes(DIGEST_SIZE) for digest in digests)
                if tensor_digest(tensor.dtype, tensor.shape, packed) != tensor.digest:
                    what = f"tensor `{tensor.name}` differs"
                    yield _problem(opened.check, "block", what, tensor=tensor.name)


def _adjacent(bad: dict[int, str]) -> Iterator[tuple[int, int, str]]:
    """Yield (first block, block after the last, what is wrong) of runs of adjacent blocks."""
    blocks = sorted(bad)
    start = 0
    for at in range(1, len(blocks) + 1):
        end = at == len(blocks) or blocks[at] != blocks[at - 1] + 1 or bad[blocks[at]] != bad[blocks[start]]
        if end:
            yield blocks[start], blocks[at - 1] + 1, bad[blocks[start]]
            start = at


def _block_problem(opened: _Opened, number: int, start: int, stop: int, state: str) -> Problem:
    tensor = opened.check.tensors[number]
    what = f"tensor `{tensor.name}`: {block_words(opened.grids[number], start, stop, state)}"
    facts = block_facts(opened.grids[number], start, stop)
    return _problem(opened.check, "block", what, tensor=tensor.name, **facts)


def block_words(layout: BlockGrid, start: int, stop: int, state: str) -> str:
    """Return ``block 3 of 12 differs (rows 96 to 127)``; blocks and rows are counted from 0."""
    first, last = layout.rows_of(start)[0], layout.rows_of(stop - 1)[1] - 1
    unit = ("byte" if layout.row_bytes == 1 else "element") if layout.row_elements == 1 else "row"
    rows = f"{unit} {first:,}" if first == last else f"{unit}s {first:,} to {last:,}"
    if (start, stop) == (0, layout.count) and layout.count > 1:
        which, one = f"all {format_count(layout.count, 'block')}", False
    else:
        one = stop - start == 1
        which = f"{f'block {start:,}' if one else f'blocks {start:,} to {stop - 1:,}'} of {layout.count:,}"
    if state == "differ":
        verb = "differs" if one else "differ"
    else:
        verb = state if state.startswith("cannot") else f"{'is' if one else 'are'} {state}"
    return f"{which} {verb} ({rows})"


def block_facts(layout: BlockGrid, start: int, stop: int) -> dict[str, object]:
    """Return the facts of a run of blocks: half-open ranges of blocks, rows and elements, all from 0."""
    first, end = layout.rows_of(start)[0], layout.rows_of(stop - 1)[1]
    return {
        "blocks": [start, stop],
        "rows": [first, end],
        "elements": [first * layout.row_elements, end * layout.row_elements],
    }
