"""Locks between processes. They belong to an open file, so a killed holder leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from mergepipe.errors import CacheError, fail_storage


@contextlib.contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None], timeout: float = -1) -> Iterator[None]:
    """Hold the lock file at ``path``; call ``on_wait`` once if another process has it, then wait.

    Parameters
    ----------
    timeout
        Seconds to wait at most; negative for no limit.

    Raises
    ------
    CacheError
        If it is still held after ``timeout``.
    StorageError
        If the lock file cannot be made.
    """
    lock = FileLock(path)
    try:
        _acquire(lock, path, on_wait, timeout)
    except OSError as error:
        fail_storage(error, path, "lock")
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, path: Path, on_wait: Callable[[], None], timeout: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        try:
            lock.acquire(timeout=timeout, poll_interval=0.05)
        except Timeout:
            raise CacheError(
                f"another mergepipe process holds the cache `{path.parent}`",
                hint="wait until it has finished, or use another `--cache-dir`",
                path=str(path),
            ) from None


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold an advisory lock on a directory itself, so that no lock file lies among a user's files.

    Two caches may publish into one directory; file systems without flock do without this protection.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
