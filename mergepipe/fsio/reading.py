"""Reading ranges of files into buffers that are used again and again."""

from __future__ import annotations

import os

from mergepipe.errors import SourceChangedError


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
        count = os.preadv(fd, [buffer], offset)
        if count == 0:
            raise SourceChangedError(
                f"`{path}` ends before byte {offset + len(buffer):,}: it was changed while it was being read",
                hint="run the build again when the file is complete",
                path=str(path),
            )
        buffer = buffer[count:]
        offset += count
