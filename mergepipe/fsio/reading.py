"""Reading ranges of files into buffers that are used again and again, and small files as a whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from mergepipe.errors import SourceChangedError

LARGEST = 4 << 30
"""Bytes of a file that is read into memory: more than the manifest of a model of a trillion parameters has."""


def open_regular(path: Path) -> int:
    """Open a file for reading; links are followed, and nothing but a regular file is opened.

    A link in somebody's repository may lead to a device that never ends, and a pipe keeps whoever opens it waiting.

    Raises
    ------
    OSError
        If there is none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(0, "it is not a file", str(path))


def read_regular(path: Path, limit: int = LARGEST) -> bytes:
    """Return the bytes of a regular file.

    Raises
    ------
    OSError
        If there is none, or it has more than ``limit`` bytes: nothing is read then.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(0, f"it is too large: {size:,} bytes", str(path))
        return file.read(size + 1)


def pread_into(fd: int, buffer: memoryview, offset: int, *, path: object) -> None:
    """Fill ``buffer`` from the file at ``offset`` bytes, however little the kernel gives at a time.

    Raises
    ------
    SourceChangedError
        If the file ends too early: it was longer when its header was read.
    OSError
        If the kernel cannot read it.
    """
    while buffer:
        count = os.preadv(fd, (buffer,), offset)
        if count == len(buffer):
            return
        if count == 0:
            raise SourceChangedError(
                f"`{path}` ends before byte {offset + len(buffer):,}: it was changed while it was being read",
                hint="run the build again when the file is complete",
                path=str(path),
            )
        buffer = buffer[count:]
        offset += count
