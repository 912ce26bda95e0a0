"""Locks between processes. They belong to an open file, so a killed holder leaves none behind.

Some network file systems have no such locks. There a marker file stands in for the lock of a cache: it names the
process that made it, so that one whose process is gone is taken over on the same machine; another machine's must be
removed by hand. The user is told so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.errors import CacheError, fail_storage

if TYPE_CHECKING:  # and imported by those that lock: who only looks is sooner done without
    from filelock import BaseFileLock

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


def _ignore(_: str) -> None:
    """Tell nobody."""


@contextlib.contextmanager
def exclusive(
    path: Path, *, on_wait: Callable[[], None], warn: Callable[[str], None] = _ignore, timeout: float = -1
) -> Iterator[None]:
    """Hold the lock file at ``path``; call ``on_wait`` once if another process has it, then wait.

    Parameters
    ----------
    warn
        Told, in words for the user, that the file system has no locks, and what stands in for them.
    timeout
        Seconds to wait at most; negative for no limit.

    Raises
    ------
    CacheError
        If it is still held after ``timeout``.
    StorageError
        If the lock file cannot be made.
    """
    try:
        lock = _lock_at(path, warn)
        _acquire(lock, path, on_wait, timeout)
    except OSError as error:
        fail_storage(error, path, "lock")
    try:
        yield
    finally:
        lock.release()


def has_locks(directory: Path) -> bool:
    """Return whether the file system of a directory has locks that end with the process that holds them.

    True as well where the directory cannot be opened: whoever locks something in it is told why.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    else:
        return True
    finally:
        os.close(fd)


def _lock_at(path: Path, warn: Callable[[str], None]) -> BaseFileLock:
    from filelock import FileLock, SoftFileLock

    if has_locks(path.parent):
        return FileLock(path)
    marker = path.with_name(f"{path.name}.held")
    warn(
        f"the file system of the cache `{path.parent}` has no locks; `{marker.name}` in it stands in for one. If a"
        " build on another machine is killed, that file stays: remove it then, or use a `--cache-dir` on a local disk"
    )
    return SoftFileLock(marker)


def _acquire(lock: BaseFileLock, path: Path, on_wait: Callable[[], None], timeout: float) -> None:
    from filelock import Timeout

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


def hold_place(stack: contextlib.ExitStack, target: Path) -> None:
    """Make the folder that a directory will lie in, and hold it against others who publish there.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(directory_lock(target.parent))
    except OSError as error:
        fail_storage(error, target.parent, "prepare")
