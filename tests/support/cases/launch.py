"""Builds under bad conditions: limits, a full disk, a kill, a file that changes meanwhile, another build beside."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cases.project import TIMEOUT, Project
from support.cli import Result, finish_process, kill_process, run_process, start_process

_PAGE = 4096
_LIMIT = (
    "import os, resource, sys; size = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); os.execvp(sys.argv[2], sys.argv[2:])"
)
# Arguments: size, mount point, bytes of ballast, folder that gets a copy of what was on the disk, command.
_ON_SMALL_DISK = """
size=$1 at=$2 ballast=$3 seen=$4; shift 4
mount -t tmpfs -o "size=$size" tmpfs "$at" || exit 125
head -c "$ballast" /dev/zero > "$at/ballast"
"$@"
code=$?
rm -f "$at/ballast"
cp -a "$at/." "$seen"
exit $code
"""


def build_with_file_limit(project: Project, size: int, *flags: str) -> Result:
    """Build with a limit of ``size`` bytes on every file that the process writes."""
    # Through a process of its own: a function run between fork and exec is not safe beside threads.
    wrapper = (sys.executable, "-I", "-S", "-c", _LIMIT, str(size))
    return project.build(*flags, wrapper=wrapper, env={"PYTHONDONTWRITEBYTECODE": "1"})


@functools.cache
def can_mount() -> bool:
    """Return whether this machine lets us mount a small disk in a namespace of our own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        argv = ("unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", folder)
        return run_process(argv, Path(folder)).code == 0
    return False


def build_on_small_disk(project: Project, size: int, disk: Path, *flags: str) -> tuple[Result, Path]:
    """Build with a disk of ``size`` bytes mounted at ``disk``, an existing folder above the output.

    The mount lives in a namespace of the process, so that nothing is left even if the test dies. The disk gets
    ballast where the output would have fitted.

    Returns
    -------
    The result, and a folder with a copy of what was on the disk at the end.
    """
    seen = Path(tempfile.mkdtemp(dir=project.workdir))
    ballast = max(0, size - _size_of_output(project) + _PAGE)
    script = ("unshare", "-rm", "sh", "-c", _ON_SMALL_DISK, "sh", str(size), str(disk), str(ballast), str(seen))
    return project.build(*flags, wrapper=script), seen


def _size_of_output(project: Project) -> int:
    copy = project.fresh()
    copy.build()
    return sum(-(-path.stat().st_size // _PAGE) * _PAGE for path in copy.out.rglob("*") if path.is_file())


def build_and_kill(project: Project, seconds: float, *flags: str) -> Result:
    """Start a build and kill it after some seconds; one that ended before is left alone."""
    started = time.perf_counter()
    process = start_process(project.build_command(*flags), project.root)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_process(process)
    return finish_process(process, TIMEOUT, started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to interfere with a running build: at a share of a plain build's time, or while it has a file open."""

    share: float | None = None

    def __str__(self) -> str:
        """Return the moment in words."""
        return "while the file is open" if self.share is None else f"at {self.share:.0%} of the build's time"


_SHARES = (0.0, 0.5, 0.65, 0.8, 0.95)
MOMENTS = (*(Moment(share=share) for share in _SHARES), Moment())


def build_meanwhile(
    project: Project, moment: Moment, duration: float, path: Path, action: Callable[[], None], *flags: str
) -> Result:
    """Build, and at some moment perform ``action``, which changes the file ``path``.

    Parameters
    ----------
    duration
        Seconds that such a build takes undisturbed.
    """
    started = time.perf_counter()
    process = start_process(project.build_command(*flags), project.root)
    try:
        if moment.share is None:
            _when_open(process, path, action)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment.share * duration)
            action()
    except BaseException:
        kill_process(process)
        process.communicate(timeout=60)
        raise
    return finish_process(process, TIMEOUT, started)


def _when_open(process: subprocess.Popen[str], path: Path, action: Callable[[], None]) -> None:
    """Wait until the process has the file open, and act while it is stopped; act in any case."""
    wanted = path.resolve()
    deadline = time.perf_counter() + TIMEOUT
    while process.poll() is None and time.perf_counter() < deadline:
        if _has_open(process.pid, wanted):
            os.kill(process.pid, signal.SIGSTOP)
            action()
            os.kill(process.pid, signal.SIGCONT)
            return
        time.sleep(0.0002)
    action()


def _has_open(pid: int, path: Path) -> bool:
    folder = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):
                if (folder / entry).readlink() == path:
                    return True
    return False


def build_together(project: Project, count: int, flags: Sequence[str]) -> list[Result]:
    """Start several builds of one project at once and wait for all of them."""
    started = time.perf_counter()
    processes = [start_process(project.build_command(*flags), project.root) for _ in range(count)]
    try:
        return [finish_process(process, TIMEOUT, started) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                kill_process(process)
                process.communicate(timeout=60)
