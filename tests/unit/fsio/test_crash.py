"""Crash points kill the process where the environment says, and cost nothing elsewhere."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mergepipe
from mergepipe.fsio import crash
from mergepipe.fsio.crash import CRASH_POINTS, RARE_CRASH_POINTS, crash_point

PACKAGE = Path(mergepipe.__file__).parent


def passes(point, *names):
    """Return how a process ends that passes these points, with the given crash point set."""
    code = "import sys; from mergepipe.fsio.crash import crash_point\nfor name in sys.argv[1:]: crash_point(name)"
    env = {"MERGEPIPE_CRASH_POINT": point, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run([sys.executable, "-c", code, *names], env=env, check=False).returncode


def test_the_process_is_killed_at_its_point_and_at_the_pass_that_was_asked_for():
    first, second = CRASH_POINTS[:2]
    assert passes(first, first) == -signal.SIGKILL
    assert passes(first, second, second) == 0
    assert passes(f"{first}:3", first, second, first) == 0
    assert passes(f"{first}:3", first, second, first, first) == -signal.SIGKILL


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv("MERGEPIPE_CRASH_POINT", raising=False)
    crash_point("whatever")


def test_a_point_that_is_not_listed_is_a_mistake(monkeypatch):
    monkeypatch.setenv("MERGEPIPE_CRASH_POINT", "engine.first-block")
    monkeypatch.setattr(crash.os, "kill", lambda *_: pytest.fail("killed at another point"))
    with pytest.raises(AssertionError, match=r"engine\.unheard-of"):
        crash_point("engine.unheard-of")


def test_every_listed_point_is_passed_somewhere():
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
    passed = set(re.findall(r'crash_point\("([^"]+)"\)', source))
    named = {"file", *re.findall(r'point="([^"]+)"', source)}  # replaced files have this one, or one of their own
    passed |= {f"{point}.{step}" for point in named for step in ("written", "renamed")}
    assert passed == {*CRASH_POINTS, *RARE_CRASH_POINTS}
