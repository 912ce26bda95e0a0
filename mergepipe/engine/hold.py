"""Memory for what groups keep between their passes, reused from group to group: fresh memory is slow to touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


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
        self._free: list[np.ndarray[Any, Any]] = []

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
            self._free.pop()
        return memoryview(np.empty(nbytes, np.uint8).data)

    def take_back(self, views: Iterable[memoryview]) -> None:
        """Take back memory that was lent."""
        for view in views:
            array = np.asarray(view.obj)
            self._lent -= len(array)
            if len(array):
                self._free.append(array)
