"""Asking the kernel for what jobs will read, before a worker waits for it. Advice only: nothing depends on it."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict

from mergepipe.engine.work import Group, Job

# The kernel reads no more ahead for one advice than a disk takes in one request; 1280 KiB is a usual limit.
_STEP = 1 << 20
# Reads what is in the page cache already and never waits; None where the system knows no such reads.
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
# How many files stay open for advice.
_FILES = 8


def advise(fd: int, offset: int, count: int) -> bool:
    """Ask for ``count`` bytes of a file from ``offset`` on; returns at once. Does nothing where one cannot ask.

    Returns
    -------
    bool
        Whether they seem to be in the page cache, so that nothing was asked for.
    """
    is_cached = _is_cached(fd, offset, (0, count // 2, count - 1))
    if not is_cached:
        ask_for(fd, offset, count)
    return is_cached


def ask_for(fd: int, offset: int, count: int) -> None:
    """Do what `advise` does, for what is known not to be in the page cache."""
    if hasattr(os, "posix_fadvise"):
        for start in range(0, count, _STEP):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset + start, min(_STEP, count - start), os.POSIX_FADV_WILLNEED)


def _is_cached(fd: int, offset: int, places: tuple[int, ...]) -> bool:
    """Return whether bytes behind an offset are in the page cache: of a range its ends and its middle.

    For what is there, each advice costs as much as reading a tenth of it.
    """
    if _NOWAIT is None:
        return False
    byte = [bytearray(1)]
    try:
        return all(os.preadv(fd, byte, offset + at, _NOWAIT) for at in places)
    except OSError:
        return False  # it would have to wait, or cannot tell


def read_cached(fd: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` from a file as far as the page cache has it, and return how many bytes that is; never waits."""
    if _NOWAIT is None:
        return 0
    try:
        return os.preadv(fd, [target], offset, _NOWAIT)
    except OSError:
        return 0  # it would have to wait, or cannot tell


class ReadAhead:
    """Asks for the inputs of jobs that wait for a worker.

    Only for inputs that are read whole whatever turns out: those whose content is not known, and the base where no
    earlier result may stand for the merge. What else is needed is decided by the job itself, which asks for all of it
    before it reads the first (`mergepipe.engine.reader`).
    """

    def __init__(self) -> None:
        self._fds: OrderedDict[str, int | None] = OrderedDict()
        self._cached: set[str] = set()  # the files of which all that was looked at last is in the page cache

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds.clear()

    def ask(self, job: Job) -> None:
        """Ask for what a job is sure to read; with the first of a group also for the headers of its codes."""
        if job.group.codes and job.start == 0:
            self._ask_for_headers(job.group)
        bases = {work.inputs[0] for work in job.group.works if not work.candidates}
        for key, source in job.group.inputs.items():
            if job.start >= source.grid.count or not (key in bases if source.known else source.is_missing(job.start)):
                continue
            fd = self._descriptor(key[0])
            if fd is not None:
                size = source.grid.block_bytes
                start, stop = job.start * size, min(job.stop * size, source.grid.nbytes)
                self._advise(key[0], fd, source.ref.info.offset + start, stop - start)

    def _ask_for_headers(self, group: Group) -> None:
        """Ask for where in their packs codes lie: a worker can ask for none of them before it has read that.

        If the first header is there, so are the others of the group.
        """
        for code in group.codes.values():
            if code.header is None:
                continue
            path, count = code.header
            with contextlib.suppress(OSError):  # whoever reads it will say what is wrong
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if advise(fd, 0, count):
                        return
                finally:
                    os.close(fd)

    def _advise(self, path: str, fd: int, offset: int, count: int) -> None:
        """Ask for a range. Where all went before it was there, it is if its end is."""
        if path in self._cached and _is_cached(fd, offset, (count - 1,)):
            return
        self._cached.discard(path)
        if advise(fd, offset, count):
            self._cached.add(path)

    def _descriptor(self, path: str) -> int | None:
        if path in self._fds:
            return self._fds[path]
        if len(self._fds) == _FILES:
            _, old = self._fds.popitem(last=False)  # the one that was opened first
            if old is not None:
                os.close(old)
        try:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fds[path] = None  # whoever reads it will say what is wrong
        return self._fds[path]
