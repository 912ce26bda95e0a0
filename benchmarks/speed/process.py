"""Measuring a command as the kernel sees it: bytes, memory, CPU and wall time of a process and all its children."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A small process starts the command and waits for it: what a waited-for child and its waited-for children read, wrote
# and used is then in this one's own counters. It has 10 MB itself, less than any Python that is measured.
_LAUNCH = """
import json, os, sys, threading, time
out, err, *command = sys.argv[1:]
def counters():
    return {name: int(value) for name, value in (line.split(": ") for line in open("/proc/self/io"))}
def family(pid):
    found = [pid]
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in open(f"/proc/{pid}/task/{task}/children").read().split():
            found += family(int(child))
    return found
def share(pid):
    return next(int(line.split()[1]) for line in open(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:"))
shared = 0
def watch(pid, ended):
    global shared
    while not ended.wait(0.2):
        try:
            pids = family(pid)
            shared = max(shared, sum(map(share, pids)) if len(pids) > 1 else 0)
        except (OSError, StopIteration):
            pass  # one of them has ended
flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
actions = [(os.POSIX_SPAWN_OPEN, 1, out, flags, 0o600), (os.POSIX_SPAWN_OPEN, 2, err, flags, 0o600)]
before = counters()
begin = time.perf_counter()
pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
ended = threading.Event()
watching = threading.Thread(target=watch, args=(pid, ended))
watching.start()
_, status, usage = os.wait4(pid, 0)
wall = time.perf_counter() - begin
ended.set()
watching.join()
io = {name: value - before[name] for name, value in counters().items()}
print(json.dumps({
    "code": os.waitstatus_to_exitcode(status), "wall": wall, "cpu": usage.ru_utime + usage.ru_stime,
    "rss": max(usage.ru_maxrss, shared) * 1024, "read": io["rchar"], "written": io["wchar"],
    "disk_read": io["read_bytes"], "disk_written": io["write_bytes"] - io["cancelled_write_bytes"],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a command did.

    Attributes
    ----------
    wall, cpu
        Seconds; those of the CPU are of all processes and threads, in the kernel and outside.
    rss
        The largest resident memory of a process among them, or of all of them together, seen five times a second with
        what several share counted once; whichever is more, in bytes. Pages of files that are mapped count.
    read, written
        Bytes that passed through calls to read and write, from the page cache or not. Mapped files are not in it.
    disk_read, disk_written
        Bytes that the disk was asked for, for mapped files too.
    output
        What it printed.
    """

    wall: float
    cpu: float
    rss: int
    read: int
    written: int
    disk_read: int
    disk_written: int
    output: str


class CommandError(RuntimeError):
    """A command that was to be measured failed; says which, and the end of what it printed."""


def measure(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command in a folder and measure it.

    Raises
    ------
    CommandError
        If it does not exist, or fails.
    """
    program = shutil.which(command[0])
    if program is None:
        raise CommandError(f"there is no `{command[0]}`")
    with tempfile.TemporaryDirectory(prefix="mergepipe-measured-") as temporary:
        out, err = Path(temporary, "out"), Path(temporary, "err")
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(out), str(err), program, *command[1:]]
        variables = {**os.environ, **(environment or {})}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles all modules anew
        facts = json.loads(_run(launcher, folder, variables))
        if code := facts.pop("code"):
            tail = (out.read_text(errors="replace") + err.read_text(errors="replace"))[-3000:]
            raise CommandError(f"`{' '.join(command)}` failed with {code}:\n{tail}")
        return Measured(**facts, output=out.read_text(errors="replace"))


def _run(launcher: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    """Run the launcher and return what it prints; whatever interrupts this ends what it started."""
    with subprocess.Popen(
        launcher, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise CommandError(f"the process that measures failed with {process.returncode}")
    return printed


def empty_page_cache(files: Iterable[Path]) -> str:
    """Empty the page cache, or, where only the administrator may, drop some files from it; return which it was.

    Returns
    -------
    str
        ``all``, or ``files``.
    """
    os.sync()  # what is not on the disk yet cannot be dropped
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        return "files"
    return "all"
