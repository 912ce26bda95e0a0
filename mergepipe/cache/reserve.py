"""Room set aside on the cache's disk, so that a build which fills it can still record what it finished."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from mergepipe.cache.layout import CacheLayout

_BYTES = 1 << 20


@contextlib.contextmanager
def reserve(layout: CacheLayout) -> Iterator[None]:
    """Hold a megabyte of the disk while a build runs; without the room for it, do without."""
    try:
        fd = os.open(layout.reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, _BYTES)
        finally:
            os.close(fd)
    except OSError:
        release(layout)
    try:
        yield
    finally:
        release(layout)


def release(layout: CacheLayout) -> None:
    """Give the room back."""
    with contextlib.suppress(OSError):
        layout.reserve.unlink()
