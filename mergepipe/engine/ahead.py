"""Asking the kernel for what jobs will read, before a worker waits for it. Advice only: nothing depends on it."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

from mergepipe.engine.work import Input, Job

# The kernel reads no more ahead for one advice than a disk takes in one request; 1280 KiB is a usual limit.
_STEP = 1 << 20
# How many files stay open for advice.
_FILES = 64


def advise(fd: int, offset: int, count: int) -> None:
    """Ask for ``count`` bytes of a file from ``offset`` on; returns at once. Does nothing where one cannot ask."""
    if hasattr(os, "posix_fadvise"):
        for start in range(0, count, _STEP):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset + start, min(_STEP, count - start), os.POSIX_FADV_WILLNEED)


class ReadAhead:
    """Asks for the inputs of jobs that wait for a worker.

    Only for inputs that are read whole whatever turns out: those whose content is not known. What else is needed is
    decided by the job itself, which asks for all of it before it reads the first (`mergepipe.engine.reader`).
    """

    def __init__(self) -> None:
        self._fds: OrderedDict[Path, int | None] = OrderedDict()

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds.clear()

    def ask(self, job: Job) -> None:
        """Ask for what a job is sure to read."""
        for source in job.group.inputs.values():
            stop = min(job.stop, source.grid.count)
            if source.known is None and job.start < stop and source.is_missing(job.start):
                start, end = source.grid.byte_range(job.start)[0], source.grid.byte_range(stop - 1)[1]
                fd = self._descriptor(source)
                if fd is not None:
                    advise(fd, source.ref.info.offset + start, end - start)

    def _descriptor(self, source: Input) -> int | None:
        path = source.file.path
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        if len(self._fds) == _FILES:
            _, old = self._fds.popitem(last=False)
            if old is not None:
                os.close(old)
        try:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fds[path] = None  # whoever reads it will say what is wrong
        return self._fds[path]
