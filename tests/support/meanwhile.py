"""Something that happens in the middle of a build, in the process that builds."""

from __future__ import annotations

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
