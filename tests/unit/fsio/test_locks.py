"""Locks between processes: one at a time, said once, and gone with their holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from mergepipe.errors import CacheError, StorageError
from mergepipe.fsio.locks import directory_lock, exclusive

HOLDER = """
import sys, time
from pathlib import Path
from mergepipe.fsio.locks import exclusive
with exclusive(Path(sys.argv[1]), on_wait=lambda: None):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def held(tmp_path):
    """Return a lock file that another process holds, and that process; a line to it lets go."""
    path = tmp_path / "build.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.communicate()


def unexpected():
    pytest.fail("nobody holds the lock")


def test_a_free_lock_is_taken_without_a_word_and_again(tmp_path):
    for _ in range(3):
        with exclusive(tmp_path / "lock", on_wait=unexpected):
            pass


def test_a_lock_is_let_go_when_its_block_fails(tmp_path):
    with pytest.raises(ValueError, match="inside"), exclusive(tmp_path / "lock", on_wait=unexpected):
        raise ValueError("inside")
    with exclusive(tmp_path / "lock", on_wait=unexpected):
        pass


def test_a_held_lock_is_said_once_and_refused_after_the_time_that_was_given(held):
    path, _ = held
    said = []
    lock = exclusive(path, on_wait=lambda: said.append(1), timeout=0.2)
    with pytest.raises(CacheError, match="another mergepipe process holds") as caught, lock:
        pytest.fail("two hold the lock")
    assert said == [1]
    assert str(path.parent) in caught.value.message
    assert "--cache-dir" in caught.value.hint


def test_a_held_lock_is_waited_for(held):
    path, process = held

    def let_go():
        process.stdin.write("\n")
        process.stdin.flush()

    with exclusive(path, on_wait=let_go, timeout=60):
        pass
    assert process.wait(60) == 0


def test_a_killed_holder_leaves_no_lock(held):
    path, process = held
    process.kill()
    process.wait()
    with exclusive(path, on_wait=unexpected):
        pass


@pytest.mark.parametrize("kind", ["missing folder", "directory"])
def test_a_lock_file_that_cannot_be_made_is_named(tmp_path, kind):
    path = tmp_path / "folder" / "lock"
    if kind == "directory":
        path.mkdir(parents=True)
    elif kind == "missing folder":
        (tmp_path / "folder").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot lock .*lock"), exclusive(path, on_wait=unexpected):
        pytest.fail("there is no such lock")


# --- directories --------------------------------------------------------------------------------------------------


def is_locked(directory):
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_directory_is_locked_while_its_block_runs_and_no_file_is_left(tmp_path):
    with directory_lock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    assert os.listdir(tmp_path) == []
    with contextlib.suppress(ValueError), directory_lock(tmp_path):
        raise ValueError
    assert not is_locked(tmp_path)


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with directory_lock(tmp_path):
        pass


def test_a_second_process_waits_for_the_directory(tmp_path):
    code = (
        "import sys; from pathlib import Path; from mergepipe.fsio.locks import directory_lock\n"
        "print('ready', flush=True)\n"
        "with directory_lock(Path(sys.argv[1])): Path(sys.argv[1], 'entered').touch()"
    )
    with directory_lock(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        assert not (tmp_path / "entered").exists()
    process.communicate(timeout=60)
    assert (tmp_path / "entered").exists()


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_where_there_are_no_locks_a_marker_stands_in_and_is_gone_afterwards(tmp_path, monkeypatch, error):
    def refuse(*_):
        raise OSError(error, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = []
    with exclusive(tmp_path / "lock", on_wait=unexpected, warn=said.append):
        assert os.listdir(tmp_path) == ["lock.held"]
        waited = []
        with (
            pytest.raises(CacheError, match="another mergepipe process"),
            exclusive(tmp_path / "lock", on_wait=lambda: waited.append(1), timeout=0.1),
        ):
            pass
        assert waited == [1]
    assert os.listdir(tmp_path) == []
    assert len(said) == 1
    assert "lock.held" in said[0]
