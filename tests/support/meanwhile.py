"""Something that happens in the middle of a build, in the process that builds; and builds that stay in the middle."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.crash import Site
    from support.forked import Result

_SCRIPT = """
import os, shutil, subprocess
import mergepipe.engine.run as run
import mergepipe.engine.schedule as schedule

path, moment = {path!r}, {moment}

def act():
    {action}

jobs = finished = 0

def job(task, scratch):
    global jobs
    if jobs == moment:
        act()
    jobs += 1
    return original(task, scratch)

def finish(self, *rest):
    global finished
    if moment < 0 and not finished:
        act()
    finished += 1
    return original_finish(self, *rest)

original, schedule.run_job = schedule.run_job, job
original_finish, run.ShardFinisher.finish = run.ShardFinisher.finish, finish
"""


def build_meanwhile(site: Site, action: str, moment: int, path: Path | None = None) -> Result:
    """Build with one worker, and do something before the n-th job of the engine, or (-1) after the last one.

    Parameters
    ----------
    action
        Python, which may use ``path``, ``os``, ``shutil`` and ``subprocess``.
    """
    where = None if path is None else str(path)
    return site.run("build", "-j", "1", prelude=_SCRIPT.format(path=where, moment=moment, action=action))


# Holds the cache until the file `go` appears in the project, and says so with the file `holding`. Not for ever: a test
# that fails, or is killed, lets nobody go.
HOLD = """
import pathlib, time
import mergepipe.project.locking as steps

def write_lock(*args, **options):
    pathlib.Path("holding").touch()
    deadline = time.monotonic() + 120
    while not pathlib.Path("go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let the build go on")
        time.sleep(0.005)
    return original(*args, **options)

original, steps.write_lock = steps.write_lock, write_lock
"""


def wait_for_holder(site: Site) -> None:
    """Wait until a build that was started with `HOLD` holds the cache."""
    deadline = time.monotonic() + 60
    while not (site.root / "holding").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no build holds the cache after 60 s")
        time.sleep(0.005)


def let_go(site: Site) -> None:
    """Let a build that holds the cache go on."""
    (site.root / "go").touch()


def tidy(site: Site) -> None:
    """Remove what `HOLD` and `let_go` left."""
    for name in ("go", "holding"):
        with contextlib.suppress(FileNotFoundError):
            (site.root / name).unlink()
