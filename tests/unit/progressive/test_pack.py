"""Packs as files: whole or not there, read in runs, and every damage found."""

from __future__ import annotations

import os
import stat
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.progressive import normal
from support.quick import examples

from mergepipe.digest import content_digest
from mergepipe.errors import InternalError, MergepipeError, PackError, StorageError
from mergepipe.progressive.encode import EncodedBlock, encode_block, encode_zero
from mergepipe.progressive.header import FIXED_BYTES, PackGrid, PackHeader, parse_header
from mergepipe.progressive.levels import LEVELS, pack_key
from mergepipe.progressive.pack import check_pack, read_chunks, read_header
from mergepipe.progressive.writer import TEMPORARY_SUFFIX, PackWriter

BASE, EXPERT = bytes(range(32)), bytes(range(32, 64))
SHAPE, BLOCK = (50, 40), 400  # five blocks of ten rows


def codes() -> list[EncodedBlock]:
    """Return five blocks: ordinary ones, one of zeros, and one that is not coded."""
    delta = normal(0, 50, 40).reshape(5, 400)
    delta[1] = 0
    delta[3, 7] = np.inf
    delta[4, 80:] = 0
    return [encode_block(block, 40) for block in delta]


def write(folder: Path, order=(0, 1, 2, 3, 4), path: Path | None = None, durable: bool = False) -> PackHeader:
    writer = PackWriter(folder, shape=SHAPE, block_elements=BLOCK)
    made = codes()
    for block in order:
        writer.put(block, made[block])
    return writer.finish(BASE, EXPERT, path, durable=durable)


def test_a_pack_has_the_name_of_its_key_and_what_was_put_in(tmp_path):
    header = write(tmp_path)
    path = tmp_path / f"{pack_key(BASE, EXPERT, BLOCK).hex()}.planes"
    assert [path] == list(tmp_path.iterdir())
    found = check_pack(path)
    assert found.seal == header.seal
    assert (found.base_digest, found.expert_digest, found.shape) == (BASE, EXPERT, SHAPE)
    assert found.block_elements == BLOCK
    sizes, residuals = found.prices()
    for block, code in enumerate(codes()):
        assert tuple(sizes[:, block]) == code.sizes
        assert np.array_equal(residuals[:, block], code.residuals)
        assert found.is_coded(block) == (block != 3)
    assert found.file_bytes == path.stat().st_size


def test_the_order_of_blocks_does_not_change_a_byte(tmp_path):
    write(tmp_path, path=tmp_path / "a")
    write(tmp_path, (4, 2, 0, 1, 3), tmp_path / "b", durable=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_blocks_may_come_from_any_thread(tmp_path):
    writer, made = PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK), codes()
    threads = [threading.Thread(target=writer.put, args=pair) for pair in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.finish(BASE, EXPERT, tmp_path / "a").seal == write(tmp_path, path=tmp_path / "b").seal


def test_a_stage_of_adjacent_blocks_is_one_range_and_comes_back_checked(tmp_path):
    header = write(tmp_path, path=tmp_path / "a")
    made = codes()
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        for stage in range(LEVELS):
            for blocks in (range(5), range(2, 4), range(4, 5), range(1, 1)):
                start, stop = header.run_range(stage, blocks)
                assert stop - start == sum(made[block].sizes[stage] for block in blocks)
                chunks = read_chunks(fd, header, stage, blocks, bytearray(stop - start + 5))
                assert [bytes(chunk) for chunk in chunks] == [made[block].chunks[stage] for block in blocks]
        assert header.chunk_range(0, 0)[0] == header.nbytes
    finally:
        os.close(fd)


def test_a_pack_is_read_only_as_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path, path=tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o440


def test_an_older_pack_of_the_name_is_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    write(tmp_path, path=tmp_path / "a")
    check_pack(tmp_path / "a")


def test_an_abandoned_pack_leaves_nothing(tmp_path):
    writer = PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK)
    writer.put(0, codes()[0])
    writer.abandon()
    writer.abandon()
    writer.put(1, codes()[1])
    assert list(tmp_path.iterdir()) == []


def test_a_pack_may_be_abandoned_while_blocks_are_written(tmp_path, monkeypatch):
    """Whoever writes to it goes on doing so, and leaves nothing behind."""
    from mergepipe.progressive import writer as module

    def slow(fd, data, offset):
        begun.set()
        go_on.wait(10)
        os.pwrite(fd, data, offset)  # an error if it were closed

    begun, go_on, failed = threading.Event(), threading.Event(), []
    monkeypatch.setattr(module, "pwrite_all", slow)
    writer = PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK)

    def put():
        try:
            writer.put(0, codes()[0])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    begun.wait(10)
    writer.abandon()
    go_on.set()
    thread.join()
    assert failed == []
    assert list(tmp_path.iterdir()) == []


def test_many_packs_in_the_making_hold_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    writers = [PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK) for _ in range(20)]
    for writer in writers:
        writer.put(0, codes()[0])
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before
    for writer in writers:
        writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_chunks_after_short_ones_are_moved_together(tmp_path):
    """A pack of which some blocks have rows of zeros is as one that was written in order."""
    shape, draw = (4000, 64), np.random.default_rng(0)
    delta = normal(1, *shape).reshape(shape)
    delta[draw.random(4000) < 0.3] = 0
    delta[1000:1100] = 0
    writer = PackWriter(tmp_path, shape=shape, block_elements=6400)
    made = [encode_block(block.reshape(-1), 64) for block in delta.reshape(40, 100, 64)]
    for block in draw.permutation(40):
        writer.put(int(block), made[block])
    header = writer.finish(BASE, EXPERT, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    assert data[header.nbytes :] == b"".join(code.chunks[stage] for stage in range(LEVELS) for code in made)
    check_pack(tmp_path / "a")


def test_a_chunk_that_is_larger_than_any_code_is_a_bug_of_ours(tmp_path):
    writer = PackWriter(tmp_path, shape=(10, 40))
    with pytest.raises(InternalError, match="at most"):
        writer.put(0, EncodedBlock(chunks=(bytes(10_000),) * LEVELS, residuals=np.ones(LEVELS)))
    writer.abandon()


def test_a_write_that_fails_leaves_nothing_and_names_the_path(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    writer = PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK)
    for block, code in enumerate(codes()):
        writer.put(block, code)
    monkeypatch.setattr("mergepipe.progressive.writer.pwrite_all", fail)
    with pytest.raises(StorageError, match="No space left") as error:
        writer.finish(BASE, EXPERT, tmp_path / "a")
    assert error.value.hint is not None
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_writers_are_in_nobodys_way(tmp_path):
    (tmp_path / f".{os.getpid()}-0{TEMPORARY_SUFFIX}").write_bytes(b"left")
    write(tmp_path, path=tmp_path / "a")
    check_pack(tmp_path / "a")


def test_a_missing_or_doubled_block_is_a_bug_of_ours(tmp_path):
    writer = PackWriter(tmp_path, shape=SHAPE, block_elements=BLOCK)
    writer.put(0, encode_zero())
    with pytest.raises(InternalError, match="twice"):
        writer.put(0, encode_zero())
    with pytest.raises(InternalError, match="block 1 "):
        writer.finish(BASE, EXPERT)
    writer.abandon()


def test_a_tensor_without_elements_has_a_pack_of_no_blocks(tmp_path):
    header = PackWriter(tmp_path, shape=(0, 7)).finish(BASE, EXPERT, tmp_path / "a")
    assert check_pack(tmp_path / "a").blocks == header.blocks == 0


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (2, 3, 4), (1, 5000), (0,), (3, 0)])
@pytest.mark.parametrize("block_elements", [1, 10, 2**18])
def test_blocks_are_those_of_the_geometry(shape, block_elements):
    from mergepipe.checkpoints.geometry import Geometry, grid

    want = grid("F32", shape, Geometry(block_elements=block_elements))
    found = PackGrid.of(shape, block_elements)
    assert (found.blocks, found.block_rows, found.row_elements) == (want.count, want.block_rows, want.row_elements)
    for block in range(want.count):
        first, stop = want.rows_of(block)
        assert found.elements_of(block) == (stop - first) * want.row_elements


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("pack") / "a"
    write(path.parent, path=path)
    return path.read_bytes()


def sealed(data: bytes, header_bytes: int) -> bytes:
    """Return a pack whose seal is right for what its header says."""
    return data[: header_bytes - 32] + content_digest(data[: header_bytes - 32]) + data[header_bytes:]


def check(tmp_path: Path, data: bytes) -> PackError:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(PackError) as error:
        check_pack(tmp_path / "a")
    assert str(tmp_path / "a") in error.value.message
    assert error.value.hint
    return error.value


def test_every_flipped_bit_is_found(tmp_path, whole):
    for at in sorted({*range(0, len(whole), 37), *range(0, FIXED_BYTES + 16, 3)}):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        check(tmp_path, bytes(data))


def test_every_cut_is_found(tmp_path, whole):
    for size in [0, 1, 8, FIXED_BYTES - 1, FIXED_BYTES, FIXED_BYTES + 9, 500, len(whole) // 2, len(whole) - 1]:
        check(tmp_path, whole[:size])
    check(tmp_path, whole + b"\0")


# Where a header is damaged so that its seal is right: (offset, format, value, what the message says).
SIZES = FIXED_BYTES + 16 + 8 * LEVELS * 5
HOSTILE = [
    (0, "<8s", b"MPPLANET", "no progressive pack"),
    (8, "<I", 2, "version 2"),
    (12, "<I", 8, "8 stages"),
    (16, "<Q", 0, "blocks of 0"),
    (16, "<Q", 1, "expected 50"),
    (16, "<Q", 2**64 - 1, "which no tensor has"),
    (24, "<Q", 2**64 - 1, "its header alone"),
    (24, "<Q", 2**40, "its header alone"),
    (24, "<Q", 4, "damaged header"),
    (32, "<I", 2**32 - 1, "dimensions"),
    (32, "<I", 65, "dimensions"),
    (36, "<I", 1, "dimensions"),
    (104, "<Q", 2**62, "which no tensor has"),
    (104, "<Q", 2**50, "blocks, expected"),
    (112, "<Q", 0, "blocks, expected 0"),
    (120, "<d", -1.0, "negative"),
    (120, "<d", float("nan"), "not a number"),
    (120 + 40, "<d", 1e9, "grow"),
    (120, "<d", float("inf"), "said to have none"),
    (SIZES, "<I", 0, "some stages only"),
    (SIZES, "<I", 2**32 - 1, "its header speaks of"),
    (SIZES + 4, "<I", 1, "some stages only"),
]


@pytest.mark.parametrize(("offset", "kind", "value", "words"), HOSTILE)
def test_hostile_headers_are_refused(tmp_path, whole, offset, kind, value, words):
    data = bytearray(whole)
    struct.pack_into(kind, data, offset, value)
    assert words in check(tmp_path, sealed(bytes(data), 136 + 16 + 308 * 5)).message


def test_sizes_that_only_add_up_are_found_by_the_chunks(tmp_path, whole):
    """Chunks that overlap cannot be said; chunks of other lengths have other digests, or cannot be decoded."""
    data = bytearray(whole)
    first, third = struct.unpack_from("<I", data, SIZES)[0], struct.unpack_from("<I", data, SIZES + 8)[0]
    struct.pack_into("<I", data, SIZES, first + 1)
    struct.pack_into("<I", data, SIZES + 8, third - 1)
    assert "stage 1 of block 0" in check(tmp_path, sealed(bytes(data), 136 + 16 + 308 * 5)).message


def test_a_chunk_that_cannot_be_decoded_is_found_though_its_digest_is_right(tmp_path):
    writer = PackWriter(tmp_path, shape=(10, 40))
    writer.put(0, EncodedBlock(chunks=(b"nonsense",) * LEVELS, residuals=np.ones(LEVELS)))
    writer.finish(BASE, EXPERT, tmp_path / "a")
    with pytest.raises(PackError, match="block 0 that cannot be decoded"):
        check_pack(tmp_path / "a")


def test_reading_refuses_what_was_cut_or_changed_after_the_header_was_read(tmp_path, whole):
    path = tmp_path / "a"
    path.write_bytes(whole)
    header = read_header(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PackError, match="stage 7 of block 4"):
            read_chunks(fd, header, LEVELS - 1, range(4, 5), bytearray(5000))
        path.write_bytes(whole[:-1])
        with pytest.raises(PackError, match="cut short"):
            read_chunks(fd, header, LEVELS - 1, range(4, 5), bytearray(5000))
    finally:
        os.close(fd)


def test_a_pack_that_is_not_there_is_no_damaged_pack(tmp_path):
    with pytest.raises(StorageError):
        read_header(tmp_path / "none")
    with pytest.raises(StorageError):
        check_pack(tmp_path / "none")
    with pytest.raises(StorageError):
        check_pack(tmp_path)


@given(st.binary(max_size=300), st.integers(0, 2**63))
@settings(max_examples=examples(200), deadline=None)
def test_no_bytes_are_more_than_refused(data, size):
    for text in (data, b"MPPLANES" + struct.pack("<II", 1, LEVELS) + data):
        with pytest.raises(MergepipeError):
            parse_header(text, size, "a")
