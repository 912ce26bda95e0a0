"""Running the command line in a process of its own, as a user or a script does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND: tuple[str, ...] = (sys.executable, "-m", "mergepipe")
# What would make one machine's output differ from another's.
_LOOKS = ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
# Without bytecode every process compiles mergepipe anew, which takes longer than most commands.
_COSTS = ("PYTHONDONTWRITEBYTECODE",)


def hear_signals() -> None:
    """Let the signals that tests send end this process and those that it starts, whoever started it.

    A shell without job control starts what it puts into the background with Ctrl-C ignored, and `nohup` ignores a
    hang-up. Both are handed on to every process below, where a test would wait for ever for the end of one that it
    interrupted.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one process printed, how it ended (a negative code is a signal), and how long it took."""

    stdout: str
    stderr: str
    code: int
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Both streams, one after the other."""
        return f"{self.stdout}\n{self.stderr}"


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what steers mergepipe, its looks or its cost, plus ``extra``."""
    dropped = (*_LOOKS, *_COSTS)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MERGEPIPE_") and k not in dropped}
    return kept | dict(extra or {})


def start_process(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.Popen[str]:
    """Start a process in a session of its own, with both streams captured as text."""
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "encoding": "utf-8",
        "errors": "replace",
        "start_new_session": True,
    }
    return subprocess.Popen(list(argv), cwd=cwd, env=clean_environment(env), **(options | popen))


def kill_process(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to the process and everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def finish_process(process: subprocess.Popen[str], timeout: float, started: float) -> Result:
    """Wait for a process and return what it left; one that outlives ``timeout`` seconds is killed.

    Raises
    ------
    subprocess.TimeoutExpired
        If it had to be killed.
    """
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        kill_process(process)
        process.communicate(timeout=60)
        raise
    seconds = time.perf_counter() - started
    return Result(stdout=stdout, stderr=stderr, code=process.returncode, seconds=seconds)


def run_process(
    argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120, **popen: Any
) -> Result:
    """Run a process to its end."""
    started = time.perf_counter()
    return finish_process(start_process(argv, cwd, env, **popen), timeout, started)


def run_mergepipe(
    args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120, **popen: Any
) -> Result:
    """Run ``mergepipe ARGS`` in ``cwd`` with this interpreter and return what it printed and its exit code."""
    return run_process((*COMMAND, *args), cwd, env, timeout, **popen)


def start_mergepipe(
    args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.Popen[str]:
    """Start ``mergepipe ARGS`` without waiting for it, for tests that interfere with it."""
    return start_process((*COMMAND, *args), cwd, env, **popen)
