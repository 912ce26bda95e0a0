"""The server that forks command lines for these tests: what it starts hears signals, and nothing waits for ever."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support.forked import ForkServer

# As a shell without job control starts what it puts into the background.
BACKGROUND = ("sh", "-c", "trap '' INT HUP TERM QUIT; exec \"$@\"", "sh")
SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def background():
    with ForkServer(BACKGROUND) as started:
        yield started


def ignored_signals():
    with Path("/proc/self/status").open(encoding="ascii") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))
    return {number for number in signal.Signals if mask >> number - 1 & 1}


def test_the_tests_hear_the_signals_that_they_send():
    assert not ignored_signals() & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_was_started_in_the_background_is_ended_by_a_signal(background, tmp_path, number):
    process = background.start(["status"], tmp_path, prelude=SLEEP)
    time.sleep(0.1)
    process.kill(number)
    result = process.wait(60)
    assert result.code in (-number, 1)
    assert result.seconds < 60


def check_gone(pid):
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_does_not_end_is_named_and_killed(background, tmp_path):
    process = background.start(["status", "--json"], tmp_path, prelude=SLEEP)
    time.sleep(0.1)
    words = r"`mergepipe status --json` \(process \d+\) did not end within 0\.2 s; waits in .*\n(.|\n)*asleep"
    with pytest.raises(TimeoutError, match=words):
        process.wait(0.2)
    check_gone(process.pid)


def test_nothing_outlives_its_server(tmp_path):
    with ForkServer() as server:
        process = server.start(["status"], tmp_path, prelude=SLEEP)
    check_gone(process.pid)
    with pytest.raises(RuntimeError, match="was killed"):
        process.wait(60)
