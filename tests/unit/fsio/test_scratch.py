"""Scratch folders: gone in the end, removed by the next process if a killed one left them, never while in use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mergepipe.errors import StorageError
from mergepipe.fsio.scratch import scratch_folder

PREFIX = ".scratch-"


def test_it_is_there_while_it_is_used_and_gone_afterwards(tmp_path):
    with scratch_folder(tmp_path / "deep" / "er", PREFIX) as folder:
        assert folder.parent == tmp_path / "deep" / "er"
        assert folder.name.startswith(PREFIX)
        (folder / "file").write_text("x")
    assert os.listdir(tmp_path / "deep" / "er") == []


def test_it_is_gone_after_an_error_too(tmp_path):
    with pytest.raises(ValueError, match="inside"), scratch_folder(tmp_path, PREFIX):
        raise ValueError("inside")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from mergepipe.fsio.scratch import scratch_folder\n"
        f"with scratch_folder(Path(sys.argv[1]), {PREFIX!r}) as folder:\n"
        "    (folder / 'file').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    (left,) = os.listdir(tmp_path)
    with scratch_folder(tmp_path, PREFIX) as folder:
        assert os.listdir(tmp_path) == [folder.name]
        assert folder.name != left


def test_one_that_is_in_use_is_left_alone(tmp_path):
    with scratch_folder(tmp_path, PREFIX) as first, scratch_folder(tmp_path, PREFIX) as second:
        assert first.is_dir()
        assert second.is_dir()
    assert os.listdir(tmp_path) == []


def test_files_and_links_of_that_name_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"{PREFIX}file").write_text("mine")
    (tmp_path / f"{PREFIX}link").symlink_to("mine")
    with scratch_folder(tmp_path, PREFIX):
        pass
    assert sorted(os.listdir(tmp_path)) == [f"{PREFIX}file", f"{PREFIX}link", "mine"]


def test_where_none_can_be_made_it_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"), scratch_folder(tmp_path / "file", PREFIX):
        pass
