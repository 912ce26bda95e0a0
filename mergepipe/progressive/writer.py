"""Writing progressive packs: files that are whole or not there.

Blocks are coded in any order, by several threads and processes, and the file is in the order of stages. A chunk goes
where it will lie if none before it is short for rows of zeros; those that lie too far back in the end are moved. So no
more than a few chunks are ever in memory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.digest import DIGEST_SIZE, content_digest
from mergepipe.errors import InternalError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import fsync_path, pwrite_all
from mergepipe.fsio.reading import pread_into
from mergepipe.progressive.encode import EncodedBlock
from mergepipe.progressive.header import PackGrid, PackHeader, header_bytes
from mergepipe.progressive.levels import BLOCK_ELEMENTS, LEVELS, SUFFIX, pack_key
from mergepipe.progressive.units import Units
from mergepipe.values import dataclass

Array = npt.NDArray[Any]

TEMPORARY_SUFFIX = ".planes-tmp"
"""How names end of files that a killed writer left; they begin with a dot, and nobody reads them."""
_READ_ONLY = 0o444
_COPY_BYTES = 1 << 20
_numbers = itertools.count()  # no two writers of a process have one name, also one after the other


@dataclass(frozen=True, slots=True)
class PutBlock:
    """What a pack says of a block whose chunks another process has put into its file.

    Attributes
    ----------
    sizes
        (LEVELS,) uint32.
    digests
        (LEVELS, DIGEST_SIZE) uint8.
    residuals
        (LEVELS,) float64.
    """

    block: int
    sizes: Array
    digests: Array
    residuals: Array


class PackWriter:
    """Writes one pack. Every block is put once, by any thread, in any order.

    Which content it codes may be known only when all of it was read, so its name comes last.

    Parameters
    ----------
    folder
        Where it will lie; the folder must be there when the first block is put.
    shape
        Of both tensors.
    block_elements
        Of the block geometry.
    temporary
        The file that another process has begun (`begun`): blocks are put into it, and told to that process (`told`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        shape: tuple[int, ...],
        block_elements: int = BLOCK_ELEMENTS,
        temporary: Path | None = None,
    ) -> None:
        self.folder = folder
        self.shape = tuple(shape)
        self.block_elements = block_elements
        self._grid = PackGrid.of(self.shape, block_elements)
        blocks = self._grid.blocks
        self._sizes = np.zeros((LEVELS, blocks), np.uint32)
        self._digests = np.zeros((LEVELS, blocks, DIGEST_SIZE), np.uint8)
        self._residuals = np.zeros((LEVELS, blocks))
        self._is_put = np.zeros(blocks, np.bool_)
        self._places = _places(self._grid, header_bytes(len(self.shape), blocks))
        self._lock = threading.Lock()
        self._is_over = False
        self._temporary = temporary

    def put(self, block: int, encoded: EncodedBlock) -> None:
        """Add a block; nothing is done where the pack was abandoned.

        Raises
        ------
        StorageError
            If the file system refuses.
        InternalError
            If the block was added before.
        """
        with self._lock:
            if self._is_over:
                return
            self._mark(block)
        try:
            with self._opened() if any(encoded.chunks) else contextlib.nullcontext((-1, None)) as (fd, _):
                self._write(fd, block, encoded)
        except OSError as error:
            if not self._is_over:  # else it was abandoned meanwhile
                fail_storage(error, self.folder, "write in")

    def begun(self) -> Path:
        """Return the file that blocks are put into.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        try:
            with self._opened() as (_, temporary):
                return temporary
        except OSError as error:
            fail_storage(error, self.folder, "write in")

    def told(self) -> list[PutBlock]:
        """Return what is to be said of the blocks that were put here."""
        return [
            PutBlock(int(block), self._sizes[:, block], self._digests[:, block], self._residuals[:, block])
            for block in np.flatnonzero(self._is_put)
        ]

    def enter(self, blocks: Iterable[PutBlock]) -> None:
        """Take note of blocks that another process has put into the file.

        Raises
        ------
        InternalError
            If one was added before.
        """
        with self._lock:
            for one in blocks:
                self._mark(one.block)
                self._sizes[:, one.block] = one.sizes
                self._digests[:, one.block] = one.digests
                self._residuals[:, one.block] = one.residuals

    def _mark(self, block: int) -> None:
        if self._is_put[block]:
            raise InternalError(f"block {block} of a pack in `{self.folder}` is added twice")
        self._is_put[block] = True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, Path]]:
        """Open the file for as long as it is written to: many packs are made at once, and descriptors are few."""
        with self._lock:
            if self._temporary is not None:
                fd = os.open(self._temporary, os.O_RDWR | os.O_CLOEXEC)
            elif self._is_over:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            else:
                fd, self._temporary = _new_file(self.folder)
        try:
            yield fd, self._temporary
        finally:
            os.close(fd)

    def _write(self, fd: int, block: int, encoded: EncodedBlock) -> None:
        for stage, chunk in enumerate(encoded.chunks):
            place, room = self._places[stage].of(block)
            if len(chunk) > room:
                raise InternalError(f"stage {stage + 1} of block {block} has {len(chunk)} bytes, {room} at most")
            self._sizes[stage, block] = len(chunk)
            self._digests[stage, block] = np.frombuffer(content_digest(chunk), np.uint8)
            pwrite_all(fd, memoryview(chunk), place)
        self._residuals[:, block] = encoded.residuals

    def finish(
        self, base_digest: bytes, expert_digest: bytes, path: Path | None = None, *, durable: bool = False
    ) -> PackHeader:
        """Write the pack under its final name and return its header; an older file of that name is replaced.

        Parameters
        ----------
        base_digest, expert_digest
            Tensor digests of the two tensors.
        path
            Its final name; by default that of its key (`pack_path`).
        durable
            Whether to wait until it is on the disk. What is cut short by a power failure is found when it is read.

        Raises
        ------
        StorageError
            If the file system refuses; nothing is left then.
        InternalError
            If a block is missing.
        """
        if not self._is_put.all():
            raise InternalError(f"block {int(self._is_put.argmin())} of a pack was not added")
        key = pack_key(base_digest, expert_digest, self.block_elements)
        path = self.folder / f"{key.hex()}{SUFFIX}" if path is None else path
        header = PackHeader(
            base_digest=base_digest,
            expert_digest=expert_digest,
            shape=self.shape,
            block_elements=self.block_elements,
            sizes=self._sizes,
            digests=self._digests,
            residuals=self._residuals,
            path=str(path),
        )
        try:
            with self._opened() as (fd, temporary):
                self._assemble(fd, header)
                os.ftruncate(fd, header.file_bytes)
                os.fchmod(fd, os.fstat(fd).st_mode & _READ_ONLY)
                if durable:
                    os.fsync(fd)
            crash_point("planes.written")
            os.replace(temporary, path)  # noqa: PTH105
            crash_point("planes.renamed")
            if durable:
                fsync_path(path.parent)
        except OSError as error:
            fail_storage(error, path, "write")
        finally:
            self.abandon()
        return header

    def _assemble(self, fd: int, header: PackHeader) -> None:
        """Write the header, and move what lies too far back: runs of chunks, in order, each towards the beginning."""
        pwrite_all(fd, memoryview(header.dump()), 0)
        for stage, places in enumerate(self._places):
            now = places.all()
            sizes = self._sizes[stage].astype(np.int64)
            target = header.chunk_range(stage, 0)[0] + np.cumsum(sizes) - sizes if len(sizes) else now
            moved = np.flatnonzero((target != now) & (sizes > 0))
            for run in np.split(moved, np.flatnonzero(np.diff(now[moved]) != sizes[moved[:-1]]) + 1):
                if len(run):
                    self._move(fd, int(now[run[0]]), int(target[run[0]]), int(sizes[run].sum()))

    def _move(self, fd: int, source: int, target: int, size: int) -> None:
        buffer = memoryview(bytearray(min(_COPY_BYTES, size)))
        for done in range(0, size, _COPY_BYTES):
            part = buffer[: min(_COPY_BYTES, size - done)]
            pread_into(fd, part, source + done, path=self.folder)
            pwrite_all(fd, part, target + done)

    def abandon(self) -> None:
        """Leave nothing behind but what was finished. Allowed at any time, also after `finish`."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            temporary = self._temporary
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the chunks of a stage lie if none is short: all as large as the first, but for the last block's."""

    start: int
    room: int
    last: int
    blocks: int

    def of(self, block: int) -> tuple[int, int]:
        """Return where a block's chunk begins, and how large it may be."""
        return self.start + block * self.room, self.last if block == self.blocks - 1 else self.room

    def all(self) -> Array:
        """Return where they all begin."""
        return self.start + np.arange(self.blocks, dtype=np.int64) * self.room


def _places(grid: PackGrid, start: int) -> list[_Places]:
    """Return the places of all stages, the first of which begins at ``start``."""
    places = []
    for stage in range(LEVELS if grid.blocks else 0):
        first, last = (
            Units.of(grid.elements_of(block), grid.row_elements).chunk_bytes(stage) for block in (0, grid.blocks - 1)
        )
        places.append(_Places(start, first, last, grid.blocks))
        start += first * (grid.blocks - 1) + last
    return places


def _new_file(folder: Path) -> tuple[int, Path]:
    """Make a new hidden file; return its descriptor and its path."""
    for number in _numbers:
        temporary = folder / f".{os.getpid()}-{number}{TEMPORARY_SUFFIX}"
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return os.open(temporary, flags, 0o666), temporary  # the umask takes from the mode what it takes
    raise AssertionError("unreachable")
