"""Staged shards: output files in the cache that workers write block by block at their final offsets."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from mergepipe.digest import record_digest
from mergepipe.errors import fail_storage
from mergepipe.fsio.durable import pwrite_all, start_writeback, take_room
from mergepipe.plan.layout import Shard


def staged_name(output: str, shard: Shard) -> str:
    """Return the name of a shard in staging: the same output with the same layout finds it again."""
    return f"{_prefix(output)}-{record_digest('staged', shard.name, shard.header).hex()[:32]}"


def _prefix(output: str) -> str:
    return record_digest("output-name", output).hex()[:16]


def abandoned(folder: Path, output: str) -> list[Path]:
    """Return the staged shards of an output; once it is finished, they are of layouts that it no longer has."""
    return sorted(folder.glob(f"{_prefix(output)}-*.safetensors"))


class StagedShard:
    """One shard in the making. It is created when the first block is written, and may be written from any thread.

    Parameters
    ----------
    folder
        The staging folder of the cache.
    resumable
        Whether a file of the right size left by an unfinished build may be written on.
    """

    def __init__(self, folder: Path, output: str, shard: Shard, *, resumable: bool) -> None:
        self.shard = shard
        self.name = staged_name(output, shard)
        self.path = folder / f"{self.name}.safetensors"
        self.resumed = resumable and self._is_whole()
        self._lock = threading.Lock()
        self._created = False

    def _is_whole(self) -> bool:
        try:
            return self.path.stat().st_size == self.shard.size
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file for one operation: an output may have more shards than a process may have open files."""
        fd = self.open()
        try:
            yield fd
        finally:
            os.close(fd)

    def open(self) -> int:
        """Return a descriptor of the file, which is created where it is not there."""
        with self._lock:
            if not self._created:
                self._create()
                self._created = True
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def _create(self) -> None:
        if self.resumed:
            self.path.chmod(0o644)  # it is read-only if a build was killed between two steps of its commit
        else:
            self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if self.resumed:
                os.ftruncate(fd, self.shard.size)
            else:
                take_room(fd, self.shard.size)
            pwrite_all(fd, memoryview(self.shard.header), 0)
        finally:
            os.close(fd)

    def ensure(self) -> None:
        """Create the file, if it is not there: before anything is written by several processes, or where nothing is.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        try:
            if not self._created:
                with self._opened():
                    pass
        except OSError as error:
            fail_storage(error, self.path, "write")

    def is_there(self) -> None:
        """Take note that another process has created the file."""
        self._created = True

    @contextlib.contextmanager
    def writing(self, tensor: str) -> Iterator[StagedWrites]:
        """Let bytes of a tensor be written, in several goes."""
        writes = StagedWrites(self, tensor)
        try:
            yield writes
        finally:
            writes.close()

    def write(self, tensor: str, start: int, data: memoryview) -> None:
        """Write bytes of a tensor, ``start`` bytes from its first.

        Raises
        ------
        StorageError
            If the file system refuses, such as a full disk.
        """
        with self.writing(tensor) as writes:
            writes.write(start, data)

    def read(self, tensor: str, start: int, count: int) -> bytes:
        """Return bytes of a tensor that were written before; fewer if they cannot be read, which is a miss."""
        try:
            with self._opened() as fd:
                return os.pread(fd, count, self.shard.offsets[tensor] + start)
        except OSError:
            return b""


class StagedWrites:
    """What one worker writes of one tensor: the file is open from the first write on, until it is closed."""

    def __init__(self, shard: StagedShard, tensor: str) -> None:
        self._shard = shard
        self._offset = shard.shard.offsets[tensor]
        self._fd: int | None = None
        self._start = self._stop = 0

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes of the tensor, ``start`` bytes from its first.

        Raises
        ------
        StorageError
            If the file system refuses, such as a full disk.
        """
        offset = self._offset + start
        try:
            if self._fd is None:
                self._fd, self._start, self._stop = self._shard.open(), offset, offset
            pwrite_all(self._fd, data, offset)
        except OSError as error:
            fail_storage(error, self._shard.path, "write")
        self._start, self._stop = min(self._start, offset), max(self._stop, offset + len(data))

    def close(self) -> None:
        """Have the kernel begin to write what was written to the disk, and close the file."""
        if self._fd is not None:
            start_writeback(self._fd, self._start, self._stop - self._start)
            os.close(self._fd)
            self._fd = None
