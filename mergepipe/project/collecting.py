"""Looking for garbage in cycles less often while a build plans and records: it makes many values, and few cycles."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ALLOCATIONS = 50_000


def seldom_collecting(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that lets the collector wait for more new values than usual; what was set is set again.

    A collector that is off stays off, and one that waits for longer waits as long.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        before = gc.get_threshold()
        if before[0]:
            gc.set_threshold(max(before[0], _ALLOCATIONS), *before[1:])
        try:
            return function(*args, **kwargs)
        finally:
            gc.set_threshold(*before)

    return wrapped
