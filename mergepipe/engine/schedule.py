"""The order of work: which jobs fly, and when a group goes on to its next pass.

While the statistics of one group are waited for, jobs of the next ones run. Outcomes are taken in the order in which
jobs were started, so that the same build makes the same decisions whatever the threads do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import field

from mergepipe.engine.ahead import ReadAhead
from mergepipe.engine.crew import Crew
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.job import run_job
from mergepipe.engine.passes import GroupPasses
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.work import Job, JobDone
from mergepipe.values import dataclass


@dataclass(slots=True)
class _Active:
    """A group at work: the jobs of its present pass that were not started, and how many fly."""

    passes: GroupPasses
    steps: Iterator[Sequence[Job]]
    ready: deque[Job] = field(default_factory=deque)
    flying: int = 0
    merging: bool = False


class Scheduler:
    """Runs groups on a pool of workers.

    Parameters
    ----------
    taken
        Called with every outcome of a job, in order.
    finished
        Called with a group when all of its jobs were taken.
    """

    def __init__(
        self,
        pool: WorkerPool,
        hold: HoldPool,
        taken: Callable[[JobDone], None],
        finished: Callable[[GroupPasses], None],
    ) -> None:
        self._pool = pool
        self._hold = hold
        self._taken = taken
        self._finished = finished
        self._active: list[_Active] = []
        self._flying: deque[tuple[_Active, Future[JobDone]]] = deque()

    def run(self, groups: Iterable[GroupPasses], crew: Crew | None = None) -> None:
        """Run all groups; the first exception of a job is raised when its turn comes.

        Parameters
        ----------
        crew
            Processes that do the jobs; None where threads do.
        """
        waiting, ahead = deque(groups), ReadAhead()
        try:
            while True:
                while len(self._flying) < self._pool.ahead:
                    active = self._next(waiting)
                    if active is None:
                        break
                    active.flying += 1
                    job = active.ready.popleft()
                    ahead.ask(job)
                    submitted = self._pool.submit(run_job, job) if crew is None else crew.submit(job)
                    self._flying.append((active, submitted))
                if not self._flying:
                    return
                self._take()
        finally:
            for _, future in self._flying:
                future.cancel()
            ahead.close()

    def _next(self, waiting: deque[GroupPasses]) -> _Active | None:
        """Return the first group with a job that can start, beginning new groups as long as there is none."""
        while True:
            for active in self._active:
                if active.ready:
                    return active
            if not waiting or not self._room_for(waiting[0]):
                return None
            begun = _Active(waiting[0], waiting.popleft().measuring())
            self._active.append(begun)
            self._advance(begun)

    def _room_for(self, passes: GroupPasses) -> bool:
        """Return whether what a group keeps in memory can be had now; it waits for others that keep theirs."""
        return not self._active or self._hold.fits(passes.hold_bytes)

    def _take(self) -> None:
        active, future = self._flying.popleft()
        done = future.result()
        active.passes.take(done)
        self._taken(done)
        active.flying -= 1
        if not active.ready and not active.flying:
            self._advance(active)

    def _advance(self, active: _Active) -> None:
        """Go on to the group's next pass, or finish it."""
        if not active.merging:
            jobs = next(active.steps, None)
            active.merging = jobs is None
            active.ready.extend(active.passes.merging() if jobs is None else jobs)
            if active.ready:
                return
        self._active.remove(active)
        self._finished(active.passes)
