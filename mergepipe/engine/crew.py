"""Worker processes: each is forked off the build with all groups in it, and does the jobs that it is asked for.

Threads of one interpreter wait for one another between any two calls of numpy; on two cores that costs a build a fifth
to a third of its time. A process waits for nobody. Only orders and outcomes pass through pipes
(`mergepipe.engine.orders`): sources are read, and shards written, by the process that does the job.

A process can only help. Where a job fails in one, or the process is gone, a thread of the build does the job again: it
meets the same error, or makes the same bytes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import field
from typing import BinaryIO, NoReturn

from mergepipe.engine.hold import HoldPool
from mergepipe.engine.job import run_job
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.limits import SMALL_TILE, begun_ahead, takes_processes
from mergepipe.engine.orders import Outcome, job_done, order_of
from mergepipe.engine.passes import GroupPasses
from mergepipe.engine.pipes import packed, read_outcome, write_order
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.work import Group, Input, Job, JobDone
from mergepipe.engine.worker import do_orders
from mergepipe.errors import StorageError
from mergepipe.values import dataclass


@contextlib.contextmanager
def crew_for(
    passes: Sequence[GroupPasses], workers: int, memory: int | None, pool: WorkerPool, hold: HoldPool
) -> Iterator[Crew | None]:
    """Fork worker processes for jobs of these passes, as many as there are workers.

    None where threads do as well, or where there cannot be any: beside other threads, whose locks a forked process
    would find taken for ever (those of a notebook, say), and where the system's own libraries do not survive a fork.

    Parameters
    ----------
    memory
        The limit in bytes; None for none.
    """
    pool.rest()
    crew = Crew(passes, pool, hold, begun_ahead(memory))
    try:
        wanted = takes_processes(workers, memory, sum(one.nbytes for one in passes)) and _can_fork()
        yield crew if wanted and crew.begin(workers) else None
    finally:
        try:
            pool.rest()
        finally:  # an interrupt may come at any moment: who is not told to end never does
            crew.close()


def _can_fork() -> bool:
    return sys.platform == "linux" and threading.active_count() == 1


@dataclass(slots=True, eq=False)
class _Process:
    """A worker process and the pipes to it.

    Attributes
    ----------
    asked
        The jobs whose outcomes it owes, in the order in which it was asked.
    owed
        The bytes that these go through.
    is_gone
        Whether it ended by itself, or was killed.
    is_over
        Whether nobody waits any more for what was not done.
    """

    pid: int
    orders: BinaryIO
    outcomes: BinaryIO
    asked: deque[tuple[Job, Future[JobDone]]] = field(default_factory=deque)
    owed: int = 0
    is_gone: bool = False
    is_over: bool = False
    is_reaped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, order: bytes, job: Job, future: Future[JobDone]) -> bool:
        """Ask for a job; return whether there is somebody to ask."""
        with self.lock:
            if self.is_gone:
                return False
            self.asked.append((job, future))
            self.owed += job.nbytes
        with contextlib.suppress(OSError):  # whoever waits for the outcome sees to it that there is one
            write_order(self.orders, order)
        return True

    def answered(self) -> tuple[Job, Future[JobDone]]:
        """Return the job whose outcome came, which it owes no more."""
        with self.lock:
            job, future = self.asked.popleft()
            self.owed -= job.nbytes
        return job, future

    def end(self) -> None:
        """Tell it that nobody will ask any more."""
        with contextlib.suppress(OSError):
            self.orders.close()

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        if not (self.is_gone or self.is_reaped):  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(OSError):
            self.outcomes.close()
        if not self.is_reaped:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.is_reaped = True


class Crew:
    """Processes that do jobs of the groups that there were when they were forked.

    Parameters
    ----------
    passes
        Whose jobs they may be asked to do.
    pool
        The threads that do what no process can.
    hold
        What lends the memory that groups keep between their passes; it is shared with them.
    ahead
        How many jobs a process begins while it does another.
    """

    def __init__(self, passes: Sequence[GroupPasses], pool: WorkerPool, hold: HoldPool, ahead: int = 0) -> None:
        self._ahead = ahead
        self._passes = passes
        self._pool = pool
        self._hold = hold
        self._groups: list[Group] = []
        self._numbers: dict[int, int] = {}
        self._cold: list[list[tuple[int, Input]]] = []
        self._processes: list[_Process] = []
        self._receivers: list[threading.Thread] = []

    def begin(self, workers: int) -> bool:
        """Fork so many processes; return whether they could be had, with what memory and threads they take."""
        self._groups = [one.group for one in self._passes]
        self._numbers = {id(group): number for number, group in enumerate(self._groups) if _is_fit(group)}
        self._cold = [
            [(at, source) for at, source in enumerate(group.inputs.values()) if source.known is None]
            for group in self._groups
        ]
        try:
            if any(one.hold_bytes for one in self._passes):
                self._hold.share()
            for _ in range(workers):
                self._fork()
            for process in self._processes:  # when all are forked: no process is forked beside a thread
                self._listen_to(process)
        except (OSError, OverflowError, RuntimeError):  # the last for a thread that cannot be started
            self.close()
            return False
        return True

    def submit(self, job: Job) -> Future[JobDone]:
        """Have a job done: by the process that has the least to do, or by a thread."""
        order = self._order(job)
        if order is not None:
            future: Future[JobDone] = Future()
            future.set_running_or_notify_cancel()  # what was asked for is done
            for process in sorted(self._processes, key=lambda one: one.owed):
                if process.ask(order, job, future):
                    return future
        return self._pool.submit(run_job, job)

    def close(self) -> None:
        """End all processes, when they have done what they were asked for; at once where that is interrupted.

        However often it is, none is left, for the lock of the cache is given back next, and what a process wrote then
        would go into the shard of another build.
        """
        interrupted: BaseException | None = None
        is_closed = False
        while not is_closed:
            try:
                self._end(at_once=interrupted is not None)
                is_closed = True
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    # --- parts ----------------------------------------------------------------------------------------------------

    def _end(self, *, at_once: bool) -> None:
        for process in self._processes:
            process.is_over = True
            if at_once:
                process.kill()
        for process in self._processes:
            process.end()
        for receiver in self._receivers:
            receiver.join()
        for process in self._processes:
            process.wait()

    def _listen_to(self, process: _Process) -> None:
        receiver = threading.Thread(target=self._receive, args=(process,), name="mergepipe-outcomes", daemon=True)
        receiver.start()
        self._receivers.append(receiver)

    def _order(self, job: Job) -> bytes | None:
        """Return the order for a job; None if no process can do it."""
        number = self._numbers.get(id(job.group))
        if number is None:
            return None
        try:
            order = order_of(job, number, self._cold[number], self._hold)
            for work in job.group.works if not (job.measures or job.codings) else ():
                work.shard.ensure()  # here alone: two processes would each make a file of their own
        except StorageError:
            return None  # whoever does the job tells it
        if order is None:
            return None
        return packed(order)

    def _receive(self, process: _Process) -> None:
        """Take the outcomes of a process, until there are no more; do what it failed at, or left undone."""
        scratch = Scratch(self._pool.tile)
        with contextlib.suppress(Exception):  # whatever a process that is killed leaves half said
            while True:
                outcome: Outcome | None = read_outcome(process.outcomes)
                _settle(process, *process.answered(), outcome, scratch)
        with process.lock:
            process.is_gone = True
        for job, future in process.asked:
            _settle(process, job, future, None, scratch)
        scratch.close()

    def _fork(self) -> None:
        with _no_signals() as mask, contextlib.ExitStack() as undo:
            orders, ours = _pipe(undo)
            theirs, outcomes = _pipe(undo)
            with warnings.catch_warnings():  # that there may be threads: of libraries, which see to it themselves
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._serve(orders, outcomes, (ours, theirs), mask)
            undo.pop_all()
            os.close(orders)
            os.close(outcomes)
            self._processes.append(_Process(pid, os.fdopen(ours, "wb"), os.fdopen(theirs, "rb")))

    def _serve(self, orders: int, outcomes: int, others: tuple[int, int], mask: set[signal.Signals]) -> NoReturn:
        """Be a worker process: do what is asked until nobody can ask any more. Never comes back."""
        try:
            _hear_no_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            gc.freeze()  # to look through all that was there would be to copy it
            for fd in others:
                os.close(fd)
            for process in self._processes:  # those forked before: only the build may hold their pipes
                os.close(process.orders.fileno())
                os.close(process.outcomes.fileno())
            scratch = Scratch(SMALL_TILE)
            do_orders(orders, os.fdopen(outcomes, "wb"), self._groups, self._hold, scratch, self._ahead)
        finally:
            os._exit(0)  # whatever it was: nothing of the build may be done twice


@contextlib.contextmanager
def _no_signals() -> Iterator[set[signal.Signals]]:
    """Let signals wait: a process that was just forked would take an interrupt for the build's, and end the build."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield before  # type: ignore[misc]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hear_no_signals() -> None:
    """Have no part in what the program does at signals: the build sees to them, and to an interrupt."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    """Return both ends of a pipe, which ``undo`` closes."""
    ends = os.pipe()
    for fd in ends:
        undo.callback(os.close, fd)
    return ends


def _settle(process: _Process, job: Job, future: Future[JobDone], outcome: Outcome | None, scratch: Scratch) -> None:
    """Say what became of a job; where a process did not do it, do it here, as long as somebody waits for it."""
    if outcome is None and process.is_over:
        future.set_exception(InterruptedError())
        return
    try:
        future.set_result(run_job(job, scratch) if outcome is None else job_done(job, outcome))
    except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is waited for
        future.set_exception(error)


def _is_fit(group: Group) -> bool:
    """Return whether a process may work on a group.

    Not with adapters, whose factors are read once for all jobs. Not with operators that are not ours: what they keep
    between calls is not ours to copy.
    """
    return not group.adapters and not any(work.recipe.operator.code for work in group.works)
