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
        self._lent = 0
        self._free: list[np.ndarray[Any, Any]] = []

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes may be lent now."""
        return self._lent + nbytes <= self.limit

    def lend(self, nbytes: int) -> memoryview:
        """Return writable memory; ask `fits` first. It is faulted in only where it is touched."""
        self._lent += nbytes
        self._free.sort(key=len)
        for index, array in enumerate(self._free):
            if len(array) >= nbytes:
                return memoryview(self._free.pop(index).data)[:nbytes]
        if self._free:
            self._free.pop()  # grow the largest instead of adding another one
        return memoryview(np.empty(nbytes, np.uint8).data)

    def take_back(self, views: Iterable[memoryview]) -> None:
        """Take back memory that was lent."""
        for view in views:
            self._lent -= len(view)
            if len(view):
                self._free.append(np.asarray(view.obj))
