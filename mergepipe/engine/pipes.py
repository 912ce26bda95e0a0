"""The pipes between a build and the processes that it has forked: nobody else has an end of one.

So what comes through may be unpickled, here and nowhere else.
"""

from __future__ import annotations

import os
import pickle
import select
from typing import Any, BinaryIO

_LENGTH_BYTES = 4


def packed(value: object) -> bytes:
    """Return what a pipe carries of a value."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def write_order(file: BinaryIO, order: bytes) -> None:
    """Send a packed order to a worker process.

    Raises
    ------
    OSError
        If nobody is there to read it.
    """
    file.write(len(order).to_bytes(_LENGTH_BYTES, "little") + order)
    file.flush()


def read_outcome(file: BinaryIO) -> Any:
    """Wait for what a worker process tells.

    Raises
    ------
    Exception
        Any, where that ended before it had told all.
    """
    return pickle.load(file)  # noqa: S301 - from a process of ours


class Inbox:
    """The orders that come to a worker process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._is_closed = False

    def has_order(self) -> bool:
        """Return whether there is an order that need not be waited for."""
        return not self._is_closed and bool(self._poll.poll(0))

    def take(self) -> Any:
        """Wait for an order; None if there will not be any."""
        length = self._read(_LENGTH_BYTES)
        data = self._read(int.from_bytes(length, "little")) if length else b""
        self._is_closed = not data
        return pickle.loads(data) if data else None  # noqa: S301 - from the process that forked this one

    def _read(self, count: int) -> bytes:
        """Return so many bytes; none if whoever writes them is gone before."""
        found = os.read(self._fd, count)
        while found and len(found) < count:
            more = os.read(self._fd, count - len(found))
            found = found + more if more else b""
        return found
