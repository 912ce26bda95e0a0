"""Source files that a job has open: each is opened once, and must be the one that was planned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from mergepipe.cache.sources import source_changed
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.errors import fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into
from mergepipe.plan.values import InputRef


class Located(Protocol):
    """A stored tensor of a file."""

    @property
    def ref(self) -> InputRef:
        """Which tensor of which source."""

    @property
    def file(self) -> CheckpointFile:
        """The file that holds it."""


class Files:
    """Open source files by path.

    Parameters
    ----------
    scattered
        Whether small ranges here and there are read, so that the kernel should not read on behind each.
    """

    def __init__(self, *, scattered: bool = False) -> None:
        self._fds: dict[Path, int] = {}
        self._scattered = scattered

    def close(self) -> None:
        """Close all of them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

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
        """Return the descriptor of the file that holds a tensor, opened when it is first asked for.

        Raises
        ------
        SourceChangedError
            If the file is not the one that was planned.
        StorageError
            If the file system refuses.
        """
        path = source.file.path
        if path not in self._fds:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise source_changed(source.ref.source, source.file) from None
            except OSError as error:
                fail_storage(error, path, "read")
            self._fds[path] = fd
            if FileIdentity.of(os.fstat(fd)) != source.file.identity:
                raise source_changed(source.ref.source, source.file)
            if self._scattered and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return self._fds[path]
