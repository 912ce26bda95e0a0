"""Durable writes: the old file or the new one, whatever fails in between; and removing trees."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mergepipe.errors import SourceChangedError, StorageError
from mergepipe.fsio import durable
from mergepipe.fsio.durable import (
    drop_temporary,
    pwrite_all,
    remove_tree,
    replace_file,
    take_room,
    write_all,
    write_file,
)
from mergepipe.fsio.reading import pread_into


@pytest.fixture
def path(tmp_path):
    old = tmp_path / "file.lock"
    old.write_bytes(b"old")
    return old


def test_a_file_is_replaced_whole(path):
    replace_file(path, b"new" * 1000)
    assert path.read_bytes() == b"new" * 1000
    assert os.listdir(path.parent) == ["file.lock"]


def test_a_file_that_is_not_there_is_made(tmp_path):
    replace_file(tmp_path / "new", b"")
    assert (tmp_path / "new").read_bytes() == b""


def failing(number):
    def call(*_args, **_options):
        raise OSError(number, os.strerror(number))

    return call


def half_then_full(fd, data):
    """Write one byte, then say that the disk is full."""
    if len(data) == len(b"new"):
        return os.pwrite(fd, data[:1], 0)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("where", "name", "call", "number"),
    [
        (os, "open", failing(errno.EACCES), errno.EACCES),
        (os, "write", failing(errno.ENOSPC), errno.ENOSPC),
        (os, "write", half_then_full, errno.ENOSPC),
        (os, "fsync", failing(errno.EIO), errno.EIO),
        (Path, "replace", failing(errno.EROFS), errno.EROFS),
    ],
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(path, monkeypatch, where, name, call, number):
    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        with pytest.raises(StorageError) as caught:
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file.lock"]
    assert caught.value.facts["errno"] == number
    assert str(path) in caught.value.message
    assert os.strerror(number) in caught.value.message


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"missing/file.*No such file"):
        replace_file(tmp_path / "missing" / "file", b"new")


def test_what_a_killed_replacement_left_is_overwritten_and_can_be_dropped(path):
    temporary = path.with_name(".file.lock.tmp")
    temporary.write_bytes(b"half of something longer")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    temporary.write_bytes(b"half")
    drop_temporary(path)
    drop_temporary(path)
    assert os.listdir(path.parent) == ["file.lock"]


def test_a_file_is_cut_to_what_is_written(path):
    write_file(path, b"")
    assert path.read_bytes() == b""


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_everything_is_written_however_little_the_kernel_takes(tmp_path, monkeypatch, most):
    data = bytes(range(256)) * 4
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, piece: write(fd, piece[:most]))
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, offset: pwrite(fd, piece[:most], offset))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write_all(file.fileno(), data)
        pwrite_all(file.fileno(), memoryview(data), 2000)
    assert (tmp_path / "file").read_bytes() == data + bytes(2000 - len(data)) + data


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_a_range_is_read_however_little_the_kernel_gives(tmp_path, monkeypatch, most):
    data = bytes(range(256)) * 4
    (tmp_path / "file").write_bytes(data)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:most]], offset))
    buffer = bytearray(500)
    with (tmp_path / "file").open("rb") as file:
        pread_into(file.fileno(), memoryview(buffer), 100, path="file")
    assert buffer == data[100:600]


def test_a_file_that_ends_too_early_has_changed(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    with (tmp_path / "file").open("rb") as file, pytest.raises(SourceChangedError, match="ends before byte 12"):
        pread_into(file.fileno(), memoryview(bytearray(4)), 8, path=tmp_path / "file")


# --- removing -----------------------------------------------------------------------------------------------------


def test_a_tree_is_removed_with_its_read_only_files(tmp_path):
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "file").write_text("x")
    (tree / "deep" / "file").chmod(0o444)
    remove_tree(tree)
    assert not tree.exists()


def test_links_are_removed_and_never_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "inside").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    remove_tree(tree)
    remove_tree(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["kept"]
    assert os.listdir(kept) == ["file"]


def test_a_file_or_nothing_is_removed_too(tmp_path):
    (tmp_path / "file").write_text("x")
    remove_tree(tmp_path / "file")
    remove_tree(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_removed_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Path, "unlink", failing(errno.EPERM))
    with pytest.raises(StorageError, match=r"cannot remove .*file"):
        remove_tree(tmp_path / "file")


def test_flushing_reaches_the_disk_for_a_file_and_a_folder(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not show what a descriptor is")
    replace_file(tmp_path / "file", b"new")
    durable.fsync_path(tmp_path / "file")
    assert flushed == [str(tmp_path / ".file.tmp"), str(tmp_path), str(tmp_path / "file")]


@pytest.mark.parametrize("can", [True, False])
def test_a_file_is_as_long_as_was_asked_for_whether_its_blocks_can_be_had_or_not(tmp_path, monkeypatch, can):
    if not can:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(fallocate=fallocate_in_vain))
    with (tmp_path / "shard").open("w+b") as file:
        take_room(file.fileno(), 1_000_000)
        status = os.fstat(file.fileno())
        assert status.st_size == 1_000_000
        assert status.st_blocks * 512 >= 1_000_000 if can else status.st_blocks == 0
        pwrite_all(file.fileno(), memoryview(b"end"), 999_997)
        assert os.pread(file.fileno(), 5, 999_995) == b"\0\0end"


def fallocate_in_vain(fd, mode, start, count):
    """Take half of the blocks and say that there were no more, as ext4 does on a disk that is too full."""
    os.posix_fallocate(fd, start, count // 2)
    return -1
