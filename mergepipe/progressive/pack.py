"""Reading and checking progressive packs."""

from __future__ import annotations

import os
from pathlib import Path

from mergepipe.digest import content_digest, digest_at
from mergepipe.errors import PackError, SourceChangedError, fail_storage
from mergepipe.fsio.reading import pread_into
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.header import FIXED_BYTES, PackHeader, fail, parse_header, stated_header_bytes
from mergepipe.progressive.levels import LEVELS


def read_header(path: Path, fd: int | None = None) -> PackHeader:
    """Read and check a pack's header; no chunk is read.

    Parameters
    ----------
    fd
        The pack, if it is open already.

    Raises
    ------
    PackError
        If it is damaged.
    StorageError
        If it cannot be read, or is not there.
    """
    if fd is None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            fail_storage(error, path, "read")
        try:
            return read_header(path, fd)
        finally:
            os.close(fd)
    try:
        size = os.fstat(fd).st_size
        fixed = _pread(fd, min(FIXED_BYTES, size), 0, path)
        rest = stated_header_bytes(fixed, size, str(path)) - len(fixed)
        data = fixed + _pread(fd, rest, len(fixed), path)
    except OSError as error:
        fail_storage(error, path, "read")
    return parse_header(data, size, str(path))


def read_chunks(
    fd: int, header: PackHeader, stage: int, blocks: range, buffer: memoryview | bytearray
) -> list[memoryview]:
    """Read the chunks of adjacent blocks of one stage with one read, and check them.

    Parameters
    ----------
    fd
        The open pack.
    stage
        From 0.
    blocks
        With a step of 1.
    buffer
        Of at least as many bytes as `PackHeader.run_range` spans.

    Returns
    -------
    list of memoryview
        The chunk of each block, in ``buffer``.

    Raises
    ------
    PackError
        If a chunk is damaged, or the file too short.
    StorageError
        If it cannot be read.
    """
    start, stop = header.run_range(stage, blocks)
    view = memoryview(buffer)[: stop - start]
    read_run(fd, header, view, start)
    return checked_chunks(header, stage, blocks, view)


def read_run(fd: int, header: PackHeader, target: memoryview, start: int) -> None:
    """Fill ``target`` from an open pack, from byte ``start`` on; nothing is checked. Raises as `read_chunks`."""
    try:
        pread_into(fd, target, start, path=header.path)
    except SourceChangedError:
        fail(header.path, f"ends before byte {start + len(target):,}: it was cut short")
    except OSError as error:
        fail_storage(error, header.path, "read")


def checked_chunks(header: PackHeader, stage: int, blocks: range, data: memoryview) -> list[memoryview]:
    """Return the chunk of each of adjacent blocks, from what was read of them.

    Raises
    ------
    PackError
        If a chunk is damaged.
    """
    chunks, at = [], 0
    there = slice(blocks.start, blocks.stop)
    digests = header.digests[stage, there].tobytes()
    for number, size in enumerate(header.sizes[stage, there].tolist()):
        chunk = data[at : at + size]
        if content_digest(chunk) != digest_at(digests, number):
            block = blocks[number]
            fail(header.path, f"is damaged: stage {stage + 1} of block {block} has another digest than its header says")
        chunks.append(chunk)
        at += size
    return chunks


def check_pack(path: Path) -> PackHeader:
    """Read a whole pack and check every digest, and that every chunk can be decoded; return its header.

    Raises
    ------
    PackError
        If anything is wrong.
    StorageError
        If it cannot be read, or is not there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        fail_storage(error, path, "read")
    try:
        header = read_header(path, fd)
        grid = header.grid
        for block in range(header.blocks):
            chunks = []
            for stage in range(LEVELS):
                start, stop = header.chunk_range(stage, block)
                chunks += read_chunks(fd, header, stage, range(block, block + 1), bytearray(stop - start))
            try:
                BlockDecoder(chunks, grid.elements_of(block), grid.row_elements)
            except PackError as error:
                fail(str(path), f"has a block {block} that cannot be decoded: {error.message}")
        return header
    finally:
        os.close(fd)


def _pread(fd: int, count: int, offset: int, path: Path) -> bytes:
    buffer = bytearray(count)
    try:
        pread_into(fd, memoryview(buffer), offset, path=path)
    except SourceChangedError:
        fail(str(path), f"ends before byte {offset + count:,}: it was cut short")
    return bytes(buffer)
