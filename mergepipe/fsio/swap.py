"""Swapping a directory into its final place atomically.

Where the kernel can exchange two names in one step (renameat2, RENAME_EXCHANGE), readers see the old directory or the
new one. Elsewhere two renames do it, with a journal beside them that the next run completes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mergepipe.digest import content_digest
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import fsync_path, remove_tree, write_file

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LONGEST_NAME = 200  # of 255 bytes that file systems allow, with room for what is added
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV)


def staging_path(target: Path) -> Path:
    """Return where the next version of ``target`` is assembled: beside it, under a fixed hidden name."""
    return _beside(target, "new")


def _retired_path(target: Path) -> Path:
    return _beside(target, "old")


def _journal_path(target: Path) -> Path:
    return _beside(target, "swap")


def _beside(target: Path, purpose: str) -> Path:
    """Return a hidden name beside ``target``; a long name is shortened to its digest."""
    name = target.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = content_digest(os.fsencode(name)).hex()[:32]
    return target.with_name(f".{name}.mergepipe-{purpose}")


@functools.cache
def _renameat2() -> Callable[[bytes, bytes], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    return lambda old, new: int(function(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE))


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing paths in one atomic step; return False where the system cannot.

    Raises
    ------
    OSError
        If it can but fails.
    """
    rename = _renameat2()
    if rename is None or os.environ.get("MERGEPIPE_NO_EXCHANGE"):
        return False
    if rename(os.fsencode(first), os.fsencode(second)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def swap_in(target: Path) -> Path | None:
    """Put the directory at ``staging_path(target)`` in the place of ``target``.

    Returns
    -------
    Path or None
        Where the previous directory is now (for the caller to salvage and remove), None if there was none.

    Raises
    ------
    OSError
        If the file system refuses; ``target`` is then as it was.
    """
    staged = staging_path(target)
    crash_point("publish.swap-begun")
    if not _is_there(target):
        staged.rename(target)
        retired = None
    elif exchange(staged, target):
        retired = staged
    else:
        retired = _two_step(staged, target)
    fsync_path(target.parent)
    crash_point("publish.swapped")
    return retired


def _is_there(path: Path) -> bool:
    """Return whether there is anything; unlike `os.path.lexists` an error is none of its answers."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def _two_step(staged: Path, target: Path) -> Path:
    retired = _retired_path(target)
    remove_tree(retired)
    journal = _journal_path(target)
    try:
        write_file(journal, b"swap\n")
        fsync_path(target.parent)
        crash_point("swap.journalled")
        target.rename(retired)
        crash_point("swap.retired")
        staged.rename(target)
        crash_point("swap.replaced")
        fsync_path(target.parent)
    except OSError:
        with contextlib.suppress(OSError):
            if not os.path.lexists(target):
                retired.rename(target)
            journal.unlink(missing_ok=True)
        raise
    journal.unlink()
    return retired


def has_leftovers(target: Path) -> bool:
    """Return whether a killed run left anything beside ``target``."""
    return any(os.path.lexists(path) for path in (staging_path(target), _retired_path(target), _journal_path(target)))


def recover_swap(target: Path) -> Path | None:
    """Complete or undo what a killed run left beside ``target``; return a retired directory to salvage, if any.

    A half-assembled directory is removed. If the two-step swap was cut between its renames, the new directory was
    complete, and takes its place.
    """
    staged, retired, journal = staging_path(target), _retired_path(target), _journal_path(target)
    if journal.exists():
        whole = next((path for path in (staged, retired) if os.path.lexists(path)), None)
        if whole is not None and not os.path.lexists(target):
            whole.rename(target)
            fsync_path(target.parent)
            crash_point("swap.completed")
        journal.unlink()
    return next((path for path in (retired, staged) if os.path.lexists(path)), None)
