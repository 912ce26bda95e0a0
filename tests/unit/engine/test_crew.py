"""Worker processes as such: whatever the system refuses, and whoever interrupts, nothing of them is left behind."""

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mergepipe.engine import crew as module
from mergepipe.engine.crew import Crew
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.work import Group


def crew_of(limit=0):
    passes = [SimpleNamespace(group=Group(works=(), inputs={}), hold_bytes=limit)]
    return Crew(passes, WorkerPool(1), HoldPool(limit))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def every_second(function, error):
    """Return a function of which every second call fails."""
    calls = iter(range(1000))

    def sometimes(*arguments):
        if next(calls) % 2:
            raise error
        return function(*arguments)

    return sometimes


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


@pytest.mark.parametrize("name", ["fork", "pipe"])
def test_what_was_opened_for_a_process_that_cannot_be_had_is_closed(monkeypatch, name):
    before = descriptors()
    monkeypatch.setattr(os, name, every_second(getattr(os, name), BlockingIOError(11, "not now")))
    crew = crew_of()
    assert not crew.begin(2)
    assert descriptors() == before
    crew.close()


def test_where_no_more_threads_can_be_had_there_are_no_processes(monkeypatch):
    before, crew = descriptors(), crew_of()
    monkeypatch.setattr(threading.Thread, "start", every_second(threading.Thread.start, RuntimeError("no thread")))
    assert not crew.begin(2)
    assert all(process.is_reaped for process in crew._processes)
    assert descriptors() == before
    assert [thread for thread in threading.enumerate() if thread.name == "mergepipe-outcomes"] == []


def test_more_memory_than_there_are_addresses_is_not_shared():
    assert not crew_of(1 << 62).begin(1)


def test_an_interrupt_right_after_the_fork_does_not_make_a_process_take_itself_for_the_build(monkeypatch):
    fork, main = os.fork, os.getpid()

    def interrupted():
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", interrupted)
    crew = crew_of()
    try:
        assert crew.begin(2)
        crew.close()
    finally:
        if os.getpid() != main:
            os._exit(1)
    assert [thread for thread in threading.enumerate() if thread.name == "mergepipe-outcomes"] == []


def test_what_a_program_does_at_a_signal_no_process_does(tmp_path):
    def note(number, frame):
        with (tmp_path / "heard").open("a") as file:
            file.write(f"{os.getpid()}\n")

    before = signal.signal(signal.SIGUSR1, note)
    try:
        crew = crew_of()
        assert crew.begin(2)
        for process in crew._processes:
            os.kill(process.pid, signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        crew.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "heard").read_text() == f"{os.getpid()}\n"


def test_interrupted_while_it_waits_for_processes_it_ends_them_at_once():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        crew = crew_of()
        assert crew.begin(2)
        os.kill(crew._processes[0].pid, signal.SIGSTOP)  # as one that waits for a disk that does not answer
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            crew.close()
        assert time.monotonic() - started < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for process in crew._processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_interrupted_again_while_it_waits_for_threads_it_ends_its_processes(monkeypatch):
    monkeypatch.setattr("mergepipe.engine.limits.FORK_BYTES", 0)
    monkeypatch.setattr(module, "_can_fork", lambda: True)
    passes = [SimpleNamespace(group=Group(works=(), inputs={}), hold_bytes=0, nbytes=1)]
    pool = WorkerPool(2)

    def interrupted():
        raise KeyboardInterrupt

    crew_for = module.crew_for(passes, 2, None, pool, HoldPool(0))
    crew = crew_for.__enter__()
    monkeypatch.setattr(pool, "rest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crew_for.__exit__(None, None, None)
    assert len(crew._processes) == 2
    assert all(process.is_reaped for process in crew._processes)
