"""File identity: every way in which a file may become another one, and the moments at which one cannot tell."""

from __future__ import annotations

import errno
import os
import shutil
import time

import pytest

from mergepipe.errors import StorageError
from mergepipe.fsio import identity as module
from mergepipe.fsio.identity import COARSE_GRANULARITY_NS, FINE_GRANULARITY_NS, FileIdentity, settle

SECOND = 1_000_000_000


def made(**changes):
    """Return an identity with fine timestamps."""
    fields = {"size": 10, "mtime_ns": 5 * SECOND + 1, "ctime_ns": 7 * SECOND + 3, "inode": 42} | changes
    return FileIdentity(**fields)


def write_same_size(path):
    path.write_bytes(b"other content.")


def write_and_set_mtime_back(path):
    before = path.stat()
    write_same_size(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_copy(path):
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.parametrize("change", [write_same_size, write_and_set_mtime_back, replace_by_copy, os.utime])
def test_whatever_happens_to_a_file_its_identity_is_another(tmp_path, change):
    path = tmp_path / "file"
    path.write_bytes(b"first content.")
    before = FileIdentity.at(path)
    time.sleep(0.02)  # beyond the granularity of the timestamps: see below for what happens within it
    assert FileIdentity.at(path) == before
    change(path)
    assert FileIdentity.at(path) != before


def test_a_link_made_or_removed_changes_no_content(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    before = FileIdentity.at(path)
    time.sleep(0.02)
    os.link(path, tmp_path / "link")
    assert FileIdentity.at(path) != before
    assert FileIdentity.at(path).same_content(before)
    write_same_size(path)
    assert not FileIdentity.at(path).same_content(before)


def test_links_are_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert FileIdentity.at(tmp_path / "link") == FileIdentity.at(tmp_path / "file")


def test_what_cannot_be_looked_at_has_no_identity(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("missing", "loop", "file/below"):
        assert FileIdentity.at(tmp_path / name) is None


@pytest.mark.parametrize(
    ("ctime", "coarse"),
    [(7 * SECOND + 3, False), (7 * SECOND, True)],
    ids=["fine", "coarse"],
)
def test_a_read_is_racy_until_the_granularity_of_the_timestamps_is_over(ctime, coarse):
    mtime = 5 * SECOND if coarse else 5 * SECOND + 1
    identity = made(mtime_ns=mtime, ctime_ns=ctime)
    granularity = COARSE_GRANULARITY_NS if coarse else FINE_GRANULARITY_NS
    assert identity.granularity_ns() == granularity
    assert identity.is_racy(ctime)
    assert identity.is_racy(ctime + granularity - 1)
    assert not identity.is_racy(ctime + granularity)


def test_an_mtime_in_the_future_says_nothing():
    assert not made(mtime_ns=10**18 + 1).is_racy(8 * SECOND)


def test_a_ctime_in_the_future_is_racy_however_long_one_waits(monkeypatch):
    now = time.time_ns()
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    identity = made(ctime_ns=now + 3600 * SECOND + 1)
    assert identity.is_racy(settle(identity))
    assert slept == []


def test_settling_waits_just_as_long_as_a_fine_timestamp_needs(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    identity = FileIdentity.at(path)
    started = time.monotonic()
    read_at = settle(identity)
    assert not identity.is_racy(read_at) or identity.granularity_ns() == COARSE_GRANULARITY_NS
    assert time.monotonic() - started < 10


def test_settling_does_not_wait_for_old_files_or_coarse_timestamps(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("there is nothing to wait for"))
    assert not made().is_racy(settle(made()))
    now = time.time_ns() // SECOND * SECOND - SECOND
    coarse = made(mtime_ns=now, ctime_ns=now)
    assert coarse.is_racy(settle(coarse))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_looked_at_is_not_taken_for_another_one(tmp_path, monkeypatch, code):
    path = tmp_path / "file"
    path.write_bytes(b"1")
    assert FileIdentity.found(path) == FileIdentity.at(path)
    assert FileIdentity.found(tmp_path / "gone") is FileIdentity.found(path / "under") is None

    def refuse(path):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(module.os, "stat", refuse)
    with pytest.raises(StorageError, match=os.strerror(code)):
        FileIdentity.found(path)
