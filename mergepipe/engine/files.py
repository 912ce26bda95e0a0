"""Source files that a job has open: each is opened once, and must be the one that was planned."""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe.cache.sources import source_changed
from mergepipe.engine.work import Input
from mergepipe.errors import fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into


class Files:
    """Open source files by path."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def close(self) -> None:
        """Close all of them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def read(self, source: Input, target: memoryview, start: int) -> None:
        """Fill ``target`` with bytes of a tensor, ``start`` bytes from its first.

        Raises
        ------
        SourceChangedError
            If the file is not the one that was planned.
        StorageError
            If the file system refuses.
        """
        fd = self._open(source)
        try:
            pread_into(fd, target, source.ref.info.offset + start, path=source.file.path)
        except OSError as error:
            fail_storage(error, source.file.path, "read")

    def _open(self, source: Input) -> int:
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
        return self._fds[path]
