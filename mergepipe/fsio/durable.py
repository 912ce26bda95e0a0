"""Durable writes: a file is either the old one or the new one, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path

from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Flush a file or a directory (its entries) to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write and fsync a file that nobody reads yet."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at the current position, also when the kernel takes less at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset`` bytes, also when the kernel takes less at a time."""
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def take_room(fd: int, count: int) -> None:
    """Make an empty file ``count`` bytes long, and where the file system can, give it all of its blocks at once.

    A write that finds its block there takes a third less of the processor. Where there is no room for all of them,
    none is kept, and the write that finds none says so.

    The system call itself is asked for (fallocate(2)): ``posix_fallocate`` writes to every block where the file system
    cannot do it.

    Raises
    ------
    OSError
        If the file cannot be made longer.
    """
    allocate = getattr(ctypes.CDLL(None), "fallocate", None) if sys.platform == "linux" else None
    if allocate is not None and sys.maxsize > 1 << 32:
        allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if allocate(fd, 0, 0, count) != 0:
            os.ftruncate(fd, 0)
    os.ftruncate(fd, count)


def start_writeback(fd: int, offset: int, count: int) -> None:
    """Have the kernel begin to write what was just written to a file, so that a later fsync has less to wait for.

    Linux starts the writing of dirty pages of a range that is "not needed" any more, without waiting for it, and drops
    none that is not on the disk yet. Unlike an early fsync it does not take note of errors: the later one reports them.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)


def replace_file(path: Path, data: bytes, *, point: str = "file") -> None:
    """Replace a file's content atomically: temporary file, fsync, rename, directory fsync.

    The temporary name is fixed, so that a killed process leaves at most one file, which the next call overwrites.

    Parameters
    ----------
    point
        The crash points that are passed are called ``POINT.written`` and ``POINT.renamed``.

    Raises
    ------
    StorageError
        If the file system refuses; the old file is untouched then and no temporary file is left.
    """
    temporary = _temporary(path)
    try:
        write_file(temporary, data)
        crash_point(f"{point}.written")
        temporary.replace(path)
        crash_point(f"{point}.renamed")
        fsync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        fail_storage(error, path, "write")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def drop_temporary(path: Path) -> None:
    """Remove what a `replace_file` of this path that was killed left behind."""
    with contextlib.suppress(OSError):
        _temporary(path).unlink(missing_ok=True)


def _make_writable(folder: Path) -> None:
    """Make a folder and those in it writable for us: they are about to be removed."""
    folder.chmod(0o700)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _make_writable(path)


def _remove_folder(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except PermissionError:
        _make_writable(path)
        shutil.rmtree(path)


def remove_tree(path: Path) -> None:
    """Remove a file or directory tree if it exists, what is read-only included; never follows a symlink."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            _remove_folder(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        fail_storage(error, path, "remove")
