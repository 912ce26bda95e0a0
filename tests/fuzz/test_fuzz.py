"""Damaged files of every kind end a command with an error of ours, or are read: no traceback, no hang.

A few cases of each target; `python -m tests.fuzz` runs for as long as one likes, and limits the memory.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, MergefileTarget, ProjectTarget
from fuzz.watch import BrokenPromiseError, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.projects import quicken

from mergepipe.errors import SourceError

ROOT = Path(__file__).parents[2]
QUICK = [target for target in TARGETS if not issubclass(target, ProjectTarget)]
SLOW = [target for target in TARGETS if issubclass(target, ProjectTarget)]
VALID = {"header": 2, "mergefile": 1, "mergekit": 5, "manifest": 2}
"""How many of a target's first seeds are valid, where not all of them are."""


@pytest.fixture(scope="module", params=QUICK, ids=lambda target: target.name)
def target(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp(request.param.name).resolve())


def test_what_the_damage_begins_with_is_valid(target):
    assert [target.judge(seed) for seed in target.seeds[: VALID.get(target.name)]] == ["read"] * len(
        target.seeds[: VALID.get(target.name)]
    )


def test_damaged_files_end_well(target):
    @settings(max_examples=40, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def check(draw):
        target.execute(draw)

    check()


@pytest.mark.parametrize("kind", SLOW, ids=lambda target: target.name)
def test_a_damaged_cache_costs_time_and_nothing_else(kind, tmp_path, monkeypatch):
    quicken(monkeypatch)
    target = kind(tmp_path.resolve())
    target.thorough = 5

    @settings(max_examples=10, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def check(draw):
        target.execute(draw)

    check()


def test_what_is_watched_for_is_noticed(tmp_path):
    (tmp_path / "box").mkdir()
    (tmp_path / "y").write_text("")
    box = (tmp_path / "box").resolve()

    def fails():
        raise SourceError("  ")

    assert outcome(lambda: (box / "x").write_text(""), box) == "read"
    for action in (
        lambda: (tmp_path / "y").write_text(""),
        lambda: Path("../y").read_bytes(),
        lambda: (tmp_path / "z").mkdir(),
        lambda: (box / "x").rename(tmp_path / "x"),
        lambda: subprocess.run(["true"], check=False),
        lambda: json.loads("{"),
        lambda: bytearray(1 << 60),
        fails,
    ):
        with pytest.raises(BrokenPromiseError):
            outcome(action, box)


def test_a_hang_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.watch.SECONDS", 0.05)

    def hangs():
        while True:
            pass

    with pytest.raises(BrokenPromiseError, match=r"took more than 0\.05 s"):
        outcome(hangs, tmp_path)


def run_script(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_script_limits_the_memory_and_counts(tmp_path):
    done = run_script("header", "--executions", "150", "--seed", "1", "--found", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["header", "150"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", TARGETS, ids=lambda target: target.name)
def test_damaged_files_end_well_for_longer(kind, tmp_path):
    done = run_script(kind.name, "--seconds", "20", "--seed", "7", "--found", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_case_that_was_found_is_tried_again():
    known = {target.name for target in TARGETS}
    assert {path.name for path in (ROOT / "tests" / "fuzz" / "corpus").iterdir()} <= known
    assert MergefileTarget.name in known
