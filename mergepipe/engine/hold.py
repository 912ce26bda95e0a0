"""Memory for what groups keep between their passes, reused from group to group: fresh memory is slow to touch."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# How much more addresses are set aside than may ever be lent: pieces of all sizes come and go, and leave gaps.
_SPACE = 8
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, of which Python's `mmap` knows nothing before 3.13


class HoldPool:
    """Lends memory within a limit.

    Parameters
    ----------
    limit
        Bytes that may be lent at once. What does not fit at all is not held, but read again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lent = 0  # bytes of the arrays that are out, which may be larger than what was asked for
        self._free: list[Array] = []
        self._shared: _SharedMemory | None = None

    def share(self) -> None:
        """Lend memory that processes forked from now on have in common, from now on.

        Raises
        ------
        OSError
            If the system does not give it.
        """
        if self._shared is None and self.limit:
            self._shared = _SharedMemory(_SPACE * self.limit)
            self._free.clear()

    def place(self, view: memoryview) -> tuple[int, int] | None:
        """Return where in the shared memory something lent begins, and its bytes; None if it is not shared."""
        begin = None if self._shared is None else self._shared.offset(np.asarray(view.obj))
        return None if begin is None else (begin, len(view))

    def at(self, begin: int, nbytes: int) -> memoryview:
        """Return the memory at a `place`."""
        assert self._shared is not None, "only shared memory has places"
        return memoryview(self._shared.array(begin, nbytes).data)

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes may be lent now."""
        return self._lent + nbytes <= self.limit

    def lend(self, nbytes: int) -> memoryview:
        """Return writable memory; ask `fits` first. It is faulted in only where it is touched."""
        self._free.sort(key=len)
        for index, array in enumerate(self._free):
            if nbytes <= len(array) <= 2 * nbytes and self.fits(len(array)):
                self._lent += len(array)
                return memoryview(self._free.pop(index).data)[:nbytes]
        self._lent += nbytes
        while self._free and self._lent + sum(map(len, self._free)) > self.limit:
            dropped = self._free.pop()
            if self._shared is not None:
                self._shared.give_back(dropped)
        return memoryview(self._fresh(nbytes).data)

    def _fresh(self, nbytes: int) -> Array:
        found = None if self._shared is None else self._shared.take(nbytes)
        return np.empty(nbytes, np.uint8) if found is None else found

    def take_back(self, views: Iterable[memoryview]) -> None:
        """Take back memory that was lent."""
        for view in views:
            array = np.asarray(view.obj)
            self._lent -= len(array)
            if len(array):
                self._free.append(array)


class _SharedMemory:
    """A piece of address space that forked processes share, and which parts of it are taken. Pages come when touched.

    Parameters
    ----------
    size
        Bytes of address space.
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._map = mmap.mmap(-1, size, flags=flags)
        self._whole = np.frombuffer(self._map, np.uint8)
        self._begin: int = self._whole.ctypes.data
        self._gaps = [(0, size)]

    def array(self, begin: int, nbytes: int) -> Array:
        """Return a part."""
        return self._whole[begin : begin + nbytes]

    def offset(self, array: Array) -> int | None:
        """Return where an array begins; None if it is no part of this."""
        at = int(array.ctypes.data) - self._begin
        return at if 0 <= at < len(self._whole) else None

    def take(self, nbytes: int) -> Array | None:
        """Return a part that is free, on pages of its own; None if no gap is large enough."""
        size = _pages(nbytes)
        for index, (begin, stop) in enumerate(self._gaps):
            if stop - begin >= size:
                self._gaps[index : index + 1] = [(begin + size, stop)] if stop - begin > size else []
                return self.array(begin, nbytes)
        return None

    def give_back(self, array: Array) -> None:
        """Let go of a part, and of its memory."""
        begin = self.offset(array)
        if begin is None:
            return
        stop = begin + _pages(len(array))
        with contextlib.suppress(OSError):  # not every kernel can: then the next who takes it has it as it is
            self._map.madvise(mmap.MADV_REMOVE, begin, stop - begin)
        gaps: list[tuple[int, int]] = []
        for first, last in sorted([*self._gaps, (begin, stop)]):
            if gaps and gaps[-1][1] == first:
                gaps[-1] = (gaps[-1][0], last)
            else:
                gaps.append((first, last))
        self._gaps = gaps


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
