"""Looking for garbage in cycles less often while a build plans and records: it makes many values, and few cycles."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ALLOCATIONS = 50_000
_lock = threading.Lock()
_running = 0
_before: tuple[int, int, int] | None = None  # what the first of those that run found


def seldom_collecting(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that lets the collector wait for more new values than usual; what was set is set again.

    A collector that is off stays off, and one that waits for longer waits as long. Where several run at once, in
    threads or one within the other, the last to end sets again what the first one found.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        _begin()
        try:
            return function(*args, **kwargs)
        finally:
            _end()

    return wrapped


def _begin() -> None:
    global _running, _before
    with _lock:
        if not _running:
            _before = gc.get_threshold()
            if _before[0]:
                gc.set_threshold(max(_before[0], _ALLOCATIONS), *_before[1:])
        _running += 1


def _end() -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running and _before is not None:
            gc.set_threshold(*_before)
