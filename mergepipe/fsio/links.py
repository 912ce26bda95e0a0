"""Giving a file a second place without copying its bytes where the file system can: reflink, hard link, copy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_FICLONE = 0x40049409  # linux/fs.h: share the extents of one file with another
_CHUNK = 8 << 20
# Other disks, and file systems without hard links, or with no more of them.
_NO_LINK = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.ENOSYS, errno.EINVAL}
)


def place_file(source: Path, target: Path, *, mode: int = 0o444) -> str:
    """Make ``target`` (must not exist) hold the bytes of ``source``; return "reflink", "link" or "copy".

    A reflink comes first because an edit of one file then cannot reach the other. A hard link shares the inode and so
    its mode; users of linked files must check identity before trusting them.

    Raises
    ------
    OSError
        If neither works; a partial target is removed.
    """
    if _reflink(source, target, mode):
        return "reflink"
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    else:
        return "link"
    copy_file(source, target, mode=mode)
    return "copy"


def _reflink(source: Path, target: Path, mode: int) -> bool:
    with source.open("rb") as src:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            fcntl.ioctl(fd, _FICLONE, src.fileno())
        except OSError:
            target.unlink()
            return False
        else:
            os.fsync(fd)
            return True
        finally:
            os.close(fd)


def copy_file(source: Path, target: Path, *, mode: int = 0o644) -> None:
    """Copy bytes inside the kernel where it can, and fsync; a partial target is removed on failure."""
    with source.open("rb") as src:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _copy_bytes(src.fileno(), fd, os.fstat(src.fileno()).st_size)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                target.unlink()
            raise
        finally:
            os.close(fd)


def _copy_bytes(source: int, target: int, size: int) -> None:
    done = 0
    while done < size:
        try:
            moved = os.sendfile(target, source, done, min(_CHUNK, size - done))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            data = os.pread(source, min(_CHUNK, size - done), done)
            moved = os.write(target, data)
        if moved == 0:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        done += moved
