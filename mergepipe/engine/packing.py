"""Coding a whole expert against its base: every block is read once, hashed, measured and coded."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path

import array_api_compat.numpy as xp
import numpy as np

from mergepipe.cache.sources import source_changed
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import BlockGrid, Geometry, grid
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.standalone import StandaloneTensor
from mergepipe.digest import content_digest, source_digest, tensor_digest
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.coding import delta_of
from mergepipe.engine.kernel import Array, Scratch, typed
from mergepipe.engine.limits import TILE_ELEMENTS
from mergepipe.engine.pool import WorkerPool
from mergepipe.errors import fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into
from mergepipe.operators.contract import BlockInputs
from mergepipe.operators.norms import GramOfInputs
from mergepipe.progressive.encode import EncodedBlock, encode_block
from mergepipe.progressive.levels import LEVELS, MIN_ELEMENTS, SUFFIX
from mergepipe.progressive.writer import PackWriter
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

_RUN_BYTES = 4 << 20  # of one tensor, read by one task
_BYTES_PER_ELEMENT = 64  # what a worker has in memory for each element of a block: two inputs, float64, and the code
_STATISTIC = GramOfInputs(slots=(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """What a pass over base and expert found.

    Attributes
    ----------
    base, expert
        Their content digests.
    tensors
        Those of the expert, in natural order; those without a pack are to be kept exactly.
    sizes, residuals
        Over all packs, of each level: the bytes that it takes, and the square of the norm of what it lacks.
    square
        That of the norm of all coded deltas.
    code_bytes, header_bytes
        Of all packs, and of their headers among that.
    """

    base: bytes
    expert: bytes
    tensors: tuple[StandaloneTensor, ...]
    sizes: tuple[int, ...]
    residuals: tuple[float, ...]
    square: float
    code_bytes: int
    header_bytes: int


def worker_bytes(checkpoints: Sequence[Checkpoint], geometry: Geometry) -> int:
    """Return how much memory one worker needs."""
    grids = [grid(info.dtype, info.shape, geometry) for one in checkpoints for info in one.stored.values()]
    largest = max((one.block_rows * one.row_elements for one in grids), default=1)
    longest = max((one.row_elements * one.rows for one in grids), default=1)
    return _BYTES_PER_ELEMENT * min(largest, longest) + 2 * _RUN_BYTES


def code_expert(
    base: Checkpoint, expert: Checkpoint, geometry: Geometry, folder: Path, pool: WorkerPool, reporter: Reporter
) -> Coded:
    """Code an expert against its base into packs in a folder, and return what is known of both then.

    Raises
    ------
    SourceChangedError
        If a file changes meanwhile.
    StorageError
        If the file system refuses.
    """
    pass_ = _Pass(base, expert, geometry, folder)
    reporter.begin("packing", base.nbytes + expert.nbytes)
    try:
        for done in pool.run(_run, pass_.tasks()):
            pass_.take(done)
            reporter.advance(done.nbytes)
    finally:
        pass_.close()
        reporter.end()
    for checkpoint in (base, expert):
        for file in checkpoint.files:
            if FileIdentity.found(file.path) != file.identity:
                raise source_changed(checkpoint.label, file)
    return pass_.coded()


@dataclass(slots=True, kw_only=True)
class _Tensor:
    """A tensor of either checkpoint, or a pair of both, and what was found of it."""

    base: TensorInfo | None
    expert: TensorInfo | None
    number: int = 0
    is_coded: bool = False
    writer: PackWriter | None = None
    left: int = 0
    bases: bytearray = field(default_factory=bytearray)
    experts: bytearray = field(default_factory=bytearray)
    squares: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Adjacent blocks of a tensor; descriptors of the files that hold them."""

    tensor: _Tensor
    base: tuple[int, Path] | None
    expert: tuple[int, Path] | None
    geometry: Geometry
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class _Done:
    task: _Task
    bases: bytearray = field(default_factory=bytearray)
    experts: bytearray = field(default_factory=bytearray)
    squares: list[float] = field(default_factory=list)
    is_coded: bool = True
    nbytes: int = 0


class _Pass:
    """The tasks of a pass, and what they found; workers only run `_run`."""

    def __init__(self, base: Checkpoint, expert: Checkpoint, geometry: Geometry, folder: Path) -> None:
        self._base, self._expert, self._geometry, self._folder = base, expert, geometry, folder
        self._fds: dict[Path, int] = {}
        self._open: dict[int, PackWriter] = {}
        self._bases: list[tuple[str, bytes]] = []
        self._tensors: dict[str, StandaloneTensor] = {}
        self._sizes = np.zeros(LEVELS, np.int64)
        self._residuals = np.zeros(LEVELS)
        self._square = 0.0
        self._bytes = self._header_bytes = 0

    def tasks(self) -> Iterator[_Task]:
        """Yield the tasks, those of one tensor after those of another."""
        for number, (name, info) in enumerate(self._expert.stored.items()):
            other = self._base.stored.get(name)
            if other is not None and _may_be_coded(other, info, self._geometry):
                yield from self._tasks(_Tensor(base=other, expert=info, number=number, is_coded=True))
                continue
            yield from self._tasks(_Tensor(base=None, expert=info))
            if other is not None:
                yield from self._tasks(_Tensor(base=other, expert=None))
        for name, info in self._base.stored.items():
            if name not in self._expert.stored:
                yield from self._tasks(_Tensor(base=info, expert=None))

    def _tasks(self, tensor: _Tensor) -> Iterator[_Task]:
        infos = [info for info in (tensor.base, tensor.expert) if info is not None]
        layouts = [grid(info.dtype, info.shape, self._geometry) for info in infos]
        count, size = layouts[0].count, max(one.block_rows * one.row_bytes for one in layouts)
        if tensor.is_coded:
            tensor.writer = PackWriter(
                self._folder, shape=infos[0].shape, block_elements=self._geometry.block_elements
            )
            self._open[tensor.number] = tensor.writer
        step = max(1, _RUN_BYTES // max(1, size))
        starts = range(0, count, step)
        tensor.left = len(starts)
        if not count:
            self._finish(tensor)
        for start in starts:
            yield _Task(
                tensor=tensor,
                base=self._file(self._base, tensor.base),
                expert=self._file(self._expert, tensor.expert),
                geometry=self._geometry,
                start=start,
                stop=min(start + step, count),
            )

    def _file(self, checkpoint: Checkpoint, info: TensorInfo | None) -> tuple[int, Path] | None:
        """Return the descriptor and the path of the file that holds a tensor."""
        if info is None:
            return None
        file = checkpoint.files[info.file]
        if file.path not in self._fds:
            try:
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise source_changed(checkpoint.label, file) from None
            except OSError as error:
                fail_storage(error, file.path, "read")
            self._fds[file.path] = fd
            if FileIdentity.of(os.fstat(fd)) != file.identity:
                raise source_changed(checkpoint.label, file)
        return self._fds[file.path], file.path

    def take(self, done: _Done) -> None:
        """Enter what a task found; tasks come in order."""
        tensor = done.task.tensor
        tensor.bases += done.bases
        tensor.experts += done.experts
        tensor.squares += done.squares
        tensor.is_coded &= done.is_coded
        tensor.left -= 1
        if not tensor.left:
            self._finish(tensor)

    def _finish(self, tensor: _Tensor) -> None:
        base = expert = b""
        if tensor.base is not None:
            base = tensor_digest(tensor.base.dtype, tensor.base.shape, bytes(tensor.bases))
            self._bases.append((tensor.base.name, base))
        info = tensor.expert
        if info is None:
            return
        blocks = bytes(tensor.experts)
        expert = tensor_digest(info.dtype, info.shape, blocks)
        pack, seal = None, b""
        squares: tuple[float, ...] = ()
        if tensor.writer is not None:
            del self._open[tensor.number]
        if tensor.writer is not None and tensor.is_coded:
            pack = f"{tensor.number:05d}{SUFFIX}"
            header = tensor.writer.finish(base, expert, self._folder / pack, durable=True)
            seal, squares = header.seal, tuple(tensor.squares)
            sizes, residuals = header.prices()
            self._sizes += np.cumsum(sizes.sum(axis=1))
            self._residuals += (residuals**2).sum(axis=1)
            self._square += sum(squares)
            self._bytes += header.file_bytes
            self._header_bytes += header.nbytes
        elif tensor.writer is not None:
            tensor.writer.abandon()
        self._tensors[info.name] = StandaloneTensor(
            name=info.name, dtype=info.dtype, shape=info.shape, digest=expert, blocks=blocks,
            pack=pack, seal=seal, squares=squares,
        )  # fmt: skip

    def close(self) -> None:
        """Close files, and let go of packs that are not finished."""
        for writer in self._open.values():
            writer.abandon()
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                os.close(fd)

    def coded(self) -> Coded:
        """Return what was found."""
        return Coded(
            base=source_digest(self._bases),
            expert=source_digest((name, tensor.digest) for name, tensor in self._tensors.items()),
            tensors=tuple(self._tensors[name] for name in self._expert.stored),
            sizes=tuple(map(int, self._sizes)),
            residuals=tuple(map(float, self._residuals)),
            square=self._square,
            code_bytes=self._bytes,
            header_bytes=self._header_bytes,
        )


def _may_be_coded(base: TensorInfo, expert: TensorInfo, geometry: Geometry) -> bool:
    """Return whether a pair of tensors can have a code, as `mergepipe.plan.codes.may_be_coded` says of a plan's."""
    if base.shape != expert.shape or not (is_mergeable(base.dtype) and is_mergeable(expert.dtype)):
        return False
    layout = grid(expert.dtype, expert.shape, geometry)
    return layout.rows * layout.row_elements >= min(MIN_ELEMENTS, geometry.block_elements)


# --- in the workers ---------------------------------------------------------------------------------------------------


def _run(task: _Task, scratch: Scratch) -> _Done:
    done, tensor = _Done(task=task), task.tensor
    base = _blocks(task, tensor.base, task.base, scratch)
    expert = _blocks(task, tensor.expert, task.expert, scratch)
    for block in range(task.start, task.stop):
        if base is not None:
            done.bases += content_digest(base[block - task.start])
            done.nbytes += len(base[block - task.start])
        if expert is not None:
            done.experts += content_digest(expert[block - task.start])
            done.nbytes += len(expert[block - task.start])
        if base is not None and expert is not None and tensor.writer is not None:
            encoded, square = _code(tensor, base[block - task.start], expert[block - task.start], scratch)
            tensor.writer.put(block, encoded)
            done.squares.append(square)
            done.is_coded &= _is_usable(encoded, square)
    return done


def _blocks(
    task: _Task, info: TensorInfo | None, file: tuple[int, Path] | None, scratch: Scratch
) -> list[memoryview] | None:
    """Read the task's blocks of a tensor with one read."""
    if info is None or file is None:
        return None
    layout: BlockGrid = grid(info.dtype, info.shape, task.geometry)
    first, stop = layout.byte_range(task.start)[0], layout.byte_range(task.stop - 1)[1]
    buffer = scratch.buffer(("pack", info is task.tensor.base), stop - first)
    fd, path = file
    try:
        pread_into(fd, buffer, info.offset + first, path=path)
    except OSError as error:
        fail_storage(error, path, "read")
    ranges = [layout.byte_range(block) for block in range(task.start, task.stop)]
    return [buffer[start - first : end - first] for start, end in ranges]


def _is_usable(encoded: EncodedBlock, square: float) -> bool:
    """Return whether a code stands for its block: it has one, or there is nothing to code."""
    there = any(encoded.chunks) or float(encoded.residuals[-1]) == 0.0
    return there and bool(np.isfinite(encoded.residuals).all()) and bool(np.isfinite(square))


def _code(tensor: _Tensor, base: memoryview, expert: memoryview, scratch: Scratch) -> tuple[EncodedBlock, float]:
    """Return the code of a block, and the square of the norm of its delta."""
    assert tensor.base is not None, "a code is that of a pair"
    assert tensor.expert is not None, "a code is that of a pair"
    dtypes = (tensor.base.dtype, tensor.expert.dtype)
    if dtypes[0] == dtypes[1] and base == expert:
        return EncodedBlock(chunks=(b"",) * LEVELS, residuals=np.zeros(LEVELS)), 0.0
    shape = tensor.expert.shape
    encoded = encode_block(delta_of((base, expert), dtypes, scratch), shape[-1] if len(shape) > 1 else 1)
    work = "float64" if "F64" in dtypes else "float32"
    with np.errstate(all="ignore"):
        packed = _STATISTIC.measure(_tiles(typed(base, dtypes[0]), typed(expert, dtypes[1]), work, scratch))
    return encoded, float(np.frombuffer(packed, "<f8")[-1])


def _tiles(base: Array, expert: Array, work: str, scratch: Scratch) -> Iterator[BlockInputs]:
    """Cut a block into tiles as the engine does (`mergepipe.engine.kernel`): the sums are the same."""
    for start in range(0, base.size, TILE_ELEMENTS):
        part = base[start : start + TILE_ELEMENTS]
        wide = part
        if part.dtype != np.dtype(work):
            wide = scratch.tile("pack base", work, part.size)
            np.copyto(wide, part, casting="unsafe")
        yield BlockInputs(
            xp=xp,
            base=wide,
            experts=(expert[start : start + TILE_ELEMENTS],),
            deltas=(None,),
            shape=(part.size,),
            dtype=np.dtype(work),
            non_finite=True,
            scratch=functools.partial(_scratch, scratch, work, part.size),
            start=start,
            block=0,
            row_elements=1,
            memo={},
        )


def _scratch(scratch: Scratch, work: str, size: int, number: int) -> Array:
    return scratch.tile(("pack scratch", number), work, size)
