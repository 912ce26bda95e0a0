"""Folders that last as long as the process that made them; what killed processes left is removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder below ``parent``, which is made too, and remove it in the end.

    It is locked before it gets its name, so that another process never takes it for one that was left behind.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left(parent, prefix)
        unnamed = Path(tempfile.mkdtemp(prefix=".mergepipe-", dir=parent))
        fd = os.open(unnamed, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        fail_storage(error, parent, "make a folder in")
    folder = unnamed.with_name(prefix + unnamed.name.removeprefix(".mergepipe-"))
    try:
        _is_free(fd)
        try:
            unnamed.rename(folder)
        except OSError as error:
            remove_tree(unnamed)
            fail_storage(error, folder, "make")
        crash_point("scratch.made")
        try:
            yield folder
        finally:
            remove_tree(folder)
    finally:
        os.close(fd)


def _remove_left(parent: Path, prefix: str) -> None:
    """Remove what processes left that are gone; what cannot be looked at, such as another user's, is left alone."""
    for left in sorted(parent.glob(f"{prefix}*")):
        try:
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _is_free(fd) and os.fstat(fd).st_uid == os.geteuid():
                remove_tree(left)
        finally:
            os.close(fd)


def _is_free(fd: int) -> bool:
    """Lock an open folder if nobody else has; return False as well where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
