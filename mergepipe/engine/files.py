"""Source files that a worker has open: each is opened once, and in every job it must be the one that was planned."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from mergepipe.cache.sources import source_changed
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.errors import fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into
from mergepipe.plan.values import InputRef

FILES = 24
"""How many files of sources a process keeps open: those of a merge of many experts, in shards."""


class Located(Protocol):
    """A stored tensor of a file."""

    @property
    def ref(self) -> InputRef:
        """Which tensor of which source."""

    @property
    def file(self) -> CheckpointFile:
        """The file that holds it."""


class Files:
    """Open source files by path. They stay open from job to job, as many as `most` of them.

    Parameters
    ----------
    scattered
        Whether small ranges here and there are read, so that the kernel should not read on behind each.

    Attributes
    ----------
    most
        How many stay open.
    """

    def __init__(self, *, scattered: bool = False) -> None:
        self._fds: OrderedDict[Path, int] = OrderedDict()
        self._checked: dict[int, int] = {}  # those that this job has looked at, by the id of the `CheckpointFile`
        self._scattered = scattered
        self.most = FILES

    def close(self) -> None:
        """Close all of them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._checked.clear()

    def next_job(self) -> None:
        """Have every file looked at again before it is read: it must still be the one that was planned."""
        self._checked.clear()

    def read(self, source: Located, target: memoryview, start: int) -> None:
        """Fill ``target`` with bytes of a tensor, ``start`` bytes from its first.

        Raises
        ------
        SourceChangedError
            If the file is not the one that was planned.
        StorageError
            If the file system refuses.
        """
        fd = self.descriptor(source)
        try:
            pread_into(fd, target, source.ref.info.offset + start, path=source.file.path)
        except OSError as error:
            fail_storage(error, source.file.path, "read")

    def descriptor(self, source: Located) -> int:
        """Return the descriptor of the file that holds a tensor; it is closed when enough others were asked for.

        Raises
        ------
        SourceChangedError
            If the file is not the one that was planned.
        StorageError
            If the file system refuses.
        """
        fd = self._checked.get(id(source.file))
        if fd is None:
            path = source.file.path
            try:
                fd = self._open(path)
                found = os.fstat(fd)  # of one that was replaced, or written to, times have changed
            except FileNotFoundError:
                raise source_changed(source.ref.source, source.file) from None
            except OSError as error:
                fail_storage(error, path, "read")
            if FileIdentity.of(found) != source.file.identity:
                raise source_changed(source.ref.source, source.file)
            self._checked[id(source.file)] = fd
        return fd

    def _open(self, path: Path) -> int:
        """Return the descriptor of a file that is open already, or is opened now."""
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        if len(self._fds) >= self.most:
            _, fd = self._fds.popitem(last=False)  # the one that was not asked for the longest
            self._checked.clear()
            os.close(fd)
        fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._scattered and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd
