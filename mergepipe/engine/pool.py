"""A pool of workers, each with buffers of its own, fed a few jobs ahead and drained in the order of submission."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mergepipe.engine.files import FILES
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.limits import JOBS_AHEAD, tile_elements

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


class WorkerPool:
    """Threads that run functions of (task, scratch).

    Parameters
    ----------
    workers
        How many threads.
    memory
        The limit for weights in flight, in bytes; None for none.

    Attributes
    ----------
    tile
        How many elements a thread works on at a time.
    """

    def __init__(self, workers: int, memory: int | None = None) -> None:
        self._workers = workers
        self.tile = tile_elements(memory)
        self._executor = self._threads()
        self._local = threading.local()
        self._scratches: list[Scratch] = []

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, thread_name_prefix="mergepipe")

    def rest(self) -> None:
        """Wait for jobs that run, and end the threads; they begin again with the next job."""
        self._executor.shutdown(wait=True)
        self._let_go()
        self._executor = self._threads()

    def _let_go(self) -> None:
        """Close what threads had open that have ended."""
        while self._scratches:
            self._scratches.pop().close()

    def _scratch(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch(self.tile)
            self._local.scratch.files.most = max(2, FILES // self._workers)
            self._scratches.append(self._local.scratch)
        scratch: Scratch = self._local.scratch
        return scratch

    @property
    def ahead(self) -> int:
        """How many tasks should be in flight: enough that no worker waits, few enough that memory stays bounded."""
        return self._workers * JOBS_AHEAD

    def submit(self, function: Callable[[Task, Scratch], Outcome], task: Task) -> Future[Outcome]:
        """Start one task."""
        return self._executor.submit(lambda: function(task, self._scratch()))

    def run(self, function: Callable[[Task, Scratch], Outcome], tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Yield the outcome of every task in order. The first exception stops the rest and is raised here."""
        flying: deque[Future[Outcome]] = deque()
        try:
            for task in tasks:
                flying.append(self.submit(function, task))
                if len(flying) >= self.ahead:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for future in flying:
                future.cancel()

    def close(self) -> None:
        """Wait for jobs that run, drop those that do not, and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._let_go()
