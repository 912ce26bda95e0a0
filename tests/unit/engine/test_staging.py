"""Staged shards: made on the first write, written at final offsets, resumed where they are whole."""

import json
import os
import threading

import pytest

from mergepipe.cache.layout import STAGED_FILE
from mergepipe.engine.staging import StagedShard, abandoned, staged_name
from mergepipe.errors import StorageError
from mergepipe.plan.layout import TensorSlot, lay_out


def shard_of(*sizes):
    slots = [TensorSlot(name=f"t{n}", dtype="U8", shape=(size,), nbytes=size) for n, size in enumerate(sizes)]
    (shard,) = lay_out(slots, 10**9).shards
    return shard


def staged(folder, shard, *, resumable=True, output="m"):
    return StagedShard(folder, output, shard, resumable=resumable)


def test_the_file_is_made_whole_with_the_first_write(tmp_path):
    shard = shard_of(5, 7)
    one = staged(tmp_path, shard)
    assert not one.path.exists()
    one.write("t1", 2, memoryview(b"abc"))
    data = one.path.read_bytes()
    assert len(data) == shard.size
    assert data.startswith(shard.header)
    assert data[len(shard.header) :] == bytes(5) + b"\0\0abc\0\0"
    assert one.read("t1", 2, 3) == b"abc"


def test_a_shard_of_empty_tensors_is_made_without_a_write(tmp_path):
    shard = shard_of(0, 0)
    one = staged(tmp_path, shard)
    one.ensure()
    assert one.path.read_bytes() == shard.header


def test_what_is_whole_is_resumed_and_keeps_its_bytes(tmp_path):
    shard = shard_of(5)
    staged(tmp_path, shard).write("t0", 0, memoryview(b"hello"))
    again = staged(tmp_path, shard)
    assert again.resumed
    assert again.read("t0", 0, 5) == b"hello"
    again.write("t0", 4, memoryview(b"!"))
    assert again.path.read_bytes().endswith(b"hell!")


def test_what_must_not_be_resumed_starts_from_zeros(tmp_path):
    shard = shard_of(5)
    staged(tmp_path, shard).write("t0", 0, memoryview(b"hello"))
    again = staged(tmp_path, shard, resumable=False)
    assert not again.resumed
    again.write("t0", 4, memoryview(b"!"))
    assert again.path.read_bytes().endswith(b"\0\0\0\0!")


@pytest.mark.parametrize("size", [0, 3, 10_000])
def test_a_file_of_another_size_is_not_resumed(tmp_path, size):
    shard = shard_of(5)
    staged(tmp_path, shard).write("t0", 0, memoryview(b"hello"))
    os.truncate(staged(tmp_path, shard).path, size)
    again = staged(tmp_path, shard)
    assert not again.resumed
    again.write("t0", 0, memoryview(b"x"))
    assert again.path.stat().st_size == shard.size


def test_a_read_only_file_left_by_a_killed_build_is_written_on(tmp_path):
    shard = shard_of(5)
    staged(tmp_path, shard).write("t0", 0, memoryview(b"hello"))
    staged(tmp_path, shard).path.chmod(0o444)
    again = staged(tmp_path, shard)
    again.write("t0", 0, memoryview(b"J"))
    assert again.path.read_bytes().endswith(b"Jello")


def test_a_read_beyond_what_is_there_is_short_and_no_error(tmp_path):
    shard = shard_of(5)
    one = staged(tmp_path, shard)
    one.write("t0", 0, memoryview(b"hello"))
    os.truncate(one.path, len(shard.header) + 2)
    assert one.read("t0", 0, 5) == b"he"
    one.path.unlink()
    assert one.read("t0", 0, 5) == b""


def test_a_write_that_is_refused_is_an_error_that_names_the_file(tmp_path):
    one = staged(tmp_path / "missing", shard_of(5))
    with pytest.raises(StorageError) as caught:
        one.write("t0", 0, memoryview(b"x"))
    assert str(one.path) in caught.value.message
    with pytest.raises(StorageError):
        one.ensure()


def test_many_threads_may_write_at_once(tmp_path):
    shard = shard_of(4000)
    one = staged(tmp_path, shard)
    pieces = [bytes([n % 251]) * 100 for n in range(40)]
    threads = [
        threading.Thread(target=one.write, args=("t0", n * 100, memoryview(piece))) for n, piece in enumerate(pieces)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.path.read_bytes()[len(shard.header) :] == b"".join(pieces)


def test_the_name_says_which_output_and_layout_it_is(tmp_path):
    names = {
        staged_name("m", shard_of(5)),
        staged_name("n", shard_of(5)),
        staged_name("m", shard_of(6)),
        staged_name("m", shard_of(5, 1)),
    }
    assert len(names) == 4
    assert staged_name("m", shard_of(5)) == staged_name("m", shard_of(5))


def test_pruning_knows_staged_shards_by_their_names(tmp_path):
    assert STAGED_FILE.fullmatch(staged(tmp_path, shard_of(5), output="an output").path.name)


def test_what_an_output_left_is_found_whatever_its_layout(tmp_path):
    for output, size in (("m", 5), ("m", 6), ("other", 5)):
        staged(tmp_path, shard_of(size), output=output).ensure()
    assert len(abandoned(tmp_path, "m")) == 2
    assert len(abandoned(tmp_path, "other")) == 1
    assert abandoned(tmp_path, "nothing") == []


def test_a_staged_shard_is_a_valid_file_at_any_moment(tmp_path):
    one = staged(tmp_path, shard_of(5, 0, 9))
    one.write("t2", 0, memoryview(b"abc"))
    data = one.path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == 14
    assert len(data) == 8 + length + 14
