"""Pipes and devices in the place of files: links to them come with a clone or an archive, and nobody waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.watch import outcome
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.fsio.reading import open_regular, read_regular
from mergepipe.project.git_check import check_lock
from mergepipe.project.replay_plan import read_manifest
from mergepipe.publish.owned import owned_files

ZERO = Path("/dev/zero")
MAKE = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to(ZERO),
    "too large": lambda path: (path.touch(), os.truncate(path, 5 << 30)),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path.resolve() / "p")
    project.add_sources({name: random_tensors(i, {"w": (4, 4)}) for i, name in enumerate(("base", "a"))})
    project.set_output("m", {"operator": "linear", "experts": ["base", "a"]})
    project.build()
    return project


def put(path, kind):
    path.unlink()
    MAKE[kind](path)


@pytest.mark.parametrize("kind", MAKE)
def test_only_files_are_read(tmp_path, kind):
    MAKE[kind](tmp_path / "x")
    with pytest.raises(OSError):
        read_regular(tmp_path / "x")


def test_a_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "y").symlink_to("x")
    assert read_regular(tmp_path / "y") == read_regular(tmp_path / "x", 3) == b"abc"
    with pytest.raises(OSError, match="too large: 3 bytes"):
        read_regular(tmp_path / "x", 2)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not a file"):
        open_regular(tmp_path / "../../../../../../../dev/null")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", MAKE)
def test_a_lock_that_is_no_file_is_refused_at_once(project, kind):
    put(project.lock, kind)
    for action in (
        project.build,
        lambda: project.open().status(()),
        lambda: check_lock(project.lock),
        lambda: project.open().diff(str(project.lock), str(project.folder("m"))),
    ):
        assert outcome(action, project.root, project.root.parent, ZERO) != "read"
    problems = project.open().verify(()).lock.problems
    assert [problem.kind for problem in problems] == ["lock"]


@pytest.mark.parametrize("kind", MAKE)
def test_a_manifest_that_is_no_file_is_refused_at_once(project, kind):
    path = project.folder("m") / "mergepipe.json"
    put(path, kind)
    for action in (
        lambda: read_manifest(project.folder("m")),
        lambda: project.open().diff(str(project.folder("m")), str(project.lock)),
        lambda: owned_files(project.folder("m")),
        project.build,
    ):
        assert outcome(action, project.root, project.root.parent, ZERO) != "read", action
    assert not project.open().verify(()).ok


def test_a_record_may_come_through_the_pipe_of_a_shell(project):
    command = f"{sys.executable} -m mergepipe diff <(cat Mergefile.lock) Mergefile.lock"
    done = subprocess.run(["bash", "-c", command], cwd=project.root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
