"""Giving a file a second place: shared extents, a link, or a copy, whichever the file systems allow."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from mergepipe.fsio import links
from mergepipe.fsio.links import copy_file, place_file

SHM = Path("/dev/shm")  # usually another file system than the temporary folder's


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(os.urandom(100_000))
    path.chmod(0o444)
    return path


@pytest.fixture
def elsewhere(tmp_path):
    """Return a folder on another file system."""
    if not SHM.is_dir() or SHM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=SHM))
    yield folder
    shutil.rmtree(folder)


def test_on_one_file_system_no_byte_is_copied(source, tmp_path):
    how = place_file(source, tmp_path / "target")
    assert how in ("link", "reflink")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert (source.stat().st_ino == (tmp_path / "target").stat().st_ino) == (how == "link")


def test_across_file_systems_the_bytes_are_copied(source, elsewhere):
    assert place_file(source, elsewhere / "target") == "copy"
    assert (elsewhere / "target").read_bytes() == source.read_bytes()
    assert (elsewhere / "target").stat().st_mode & 0o777 == 0o444
    assert (elsewhere / "target").stat().st_nlink == 1


def test_an_existing_target_is_an_error_and_stays(source, tmp_path):
    (tmp_path / "target").write_text("mine")
    for function in (place_file, copy_file):
        with pytest.raises(FileExistsError):
            function(source, tmp_path / "target")
        assert (tmp_path / "target").read_text() == "mine"


def test_a_source_that_is_not_there_leaves_no_target(tmp_path):
    with pytest.raises(FileNotFoundError):
        place_file(tmp_path / "missing", tmp_path / "target")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES])
def test_where_links_are_not_allowed_the_bytes_are_copied(source, tmp_path, monkeypatch, number):
    monkeypatch.setattr(links, "_reflink", lambda *_: False)
    monkeypatch.setattr(os, "link", refusing(number))
    assert place_file(source, tmp_path / "target") == "copy"
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_a_copy_would_not_cure_is_an_error(source, tmp_path, monkeypatch, number):
    monkeypatch.setattr(links, "_reflink", lambda *_: False)
    monkeypatch.setattr(os, "link", refusing(number))
    with pytest.raises(OSError, match="refused") as caught:
        place_file(source, tmp_path / "target")
    assert caught.value.errno == number
    assert not (tmp_path / "target").exists()


def refusing(number):
    def call(*_args, **_options):
        raise OSError(number, "refused")

    return call


@pytest.mark.parametrize("name", ["sendfile", "fsync"])
def test_a_copy_that_fails_leaves_no_target(source, tmp_path, monkeypatch, name):
    monkeypatch.setattr(os, name, refusing(errno.ENOSPC))
    with pytest.raises(OSError, match="refused"):
        copy_file(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_where_the_kernel_cannot_copy_the_bytes_are_read_and_written(source, tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "sendfile", refusing(number))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7_777]))
    copy_file(source, tmp_path / "target", mode=0o640)
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640


def test_the_kernel_may_copy_little_at_a_time(source, tmp_path, monkeypatch):
    sendfile = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda out, fd, offset, count: sendfile(out, fd, offset, min(count, 5_000)))
    copy_file(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()


def test_a_source_that_becomes_shorter_is_an_error(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="became shorter"):
        copy_file(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_empty_file_is_copied(tmp_path):
    (tmp_path / "empty").touch()
    copy_file(tmp_path / "empty", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b""
