"""docs/formats/progressive.md says enough: a decoder made from it alone, with loops, agrees bit for bit."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from support.progressive import decoded, normal

from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.pack import check_pack
from mergepipe.progressive.writer import PackWriter

DOCUMENT = Path(__file__).parents[3] / "docs" / "formats" / "progressive.md"
EXAMPLE = np.array([[0.5, -0.25, 0.125, 0.0], [0, 0, 0, 0], [-2, 1, 0.75, -0.5]], np.float32)
ROOTS = [float.fromhex(text) for text in ("0x1p0", "0x1.306fep0", "0x1.6a09e6p0", "0x1.ae89fap0")]
STAGES = (1, 1, 1, 1, 1, 1, 2)


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def by_the_document(data: bytes, level: int) -> list[float]:
    """Return the decoded tensor of a pack, at one level of all blocks."""
    assert data[:8] == b"MPPLANES"
    version, stages, block_elements, blocks, rank, zero = struct.unpack_from("<IIQQII", data, 8)
    assert (version, stages, zero) == (1, 7, 0)
    shape = struct.unpack_from(f"<{rank}Q", data, 104)
    at = 104 + 8 * rank + 56 * blocks
    sizes = struct.unpack_from(f"<{7 * blocks}I", data, at)
    digests = at + 28 * blocks
    seal = digests + 224 * blocks
    assert blake3(data[:seal]).digest() == data[seal : seal + 32]
    chunks, at = [], seal + 32
    for number, size in enumerate(sizes):
        chunks.append(data[at : at + size])
        assert blake3(chunks[-1]).digest() == data[digests + 32 * number : digests + 32 * number + 32]
        at += size
    assert at == len(data)
    row = shape[-1] if rank > 1 else 1
    rows = math.prod(shape) // row
    block_rows = max(1, block_elements // row)
    values = []
    for block in range(blocks):
        elements = min(block_rows, rows - block * block_rows) * row
        values += decode_block(chunks[block::blocks][:level], elements, row)
    return values


def decode_block(chunks: list[bytes], elements: int, row: int) -> list[float]:
    if not chunks[0]:
        return [0.0] * elements
    unit = row * -(-256 // row) if row < 256 else row if row <= 8192 else 4096
    units = -(-elements // unit)
    (base,) = struct.unpack_from("<h", chunks[0])
    codes = chunks[0][2 : 2 + units]
    members = [min(unit, elements - number * unit) for number in range(units)]
    cells = [[0] * count for count in members]
    points, bits = (), 0
    for stage, chunk in enumerate(chunks):
        at = 2 + units if stage == 0 else 0
        bits += STAGES[stage]
        points = struct.unpack_from(f"<{1 << bits}e", chunk, at)
        at += 2 << bits
        for _ in range(STAGES[stage]):
            for number in range(units):
                if codes[number]:
                    for element in range(members[number]):
                        bit = chunk[at + element // 8] >> (7 - element % 8) & 1
                        cells[number][element] = cells[number][element] * 2 + bit
                    at += -(-members[number] // 8)
        assert at == len(chunk)
    values = []
    for number in range(units):
        steps = base + codes[number]
        scale = ROOTS[steps % 4] * 2.0 ** (steps // 4)
        for cell in cells[number]:
            value = f32(points[cell] * scale) if codes[number] else 0.0
            values.append(value if abs(value) >= 2.0**-126 else 0.0)
    return values


def packed(folder: Path, delta: np.ndarray, block_elements: int = 2**18) -> bytes:
    """Return the pack of a delta (of its shape), as a file."""
    writer = PackWriter(folder, shape=delta.shape, block_elements=block_elements)
    row = delta.shape[-1] if delta.ndim > 1 else 1
    step = max(1, block_elements // row) * row
    for block, start in enumerate(range(0, delta.size, step)):
        writer.put(block, encode_block(delta.reshape(-1)[start : start + step], row))
    writer.finish(bytes(range(32)), bytes(range(32, 64)), folder / "a.planes")
    check_pack(folder / "a.planes")
    return (folder / "a.planes").read_bytes()


@pytest.mark.parametrize(
    ("shape", "block_elements"),
    [((12, 300), 2000), ((3, 5, 61), 600), ((2500,), 1000), ((3, 8200), 2**14), ((40, 7), 2**18), ((6, 257), 2**18)],
)
def test_a_decoder_from_the_document_alone_gives_the_same_bits(tmp_path, shape, block_elements):
    row = shape[-1] if len(shape) > 1 else 1
    delta = normal(5, math.prod(shape) // row, row, spread=2.0)
    delta[len(delta) // 3 : len(delta) // 2] = 0
    data = packed(tmp_path, delta.reshape(shape), block_elements)
    step = max(1, block_elements // row) * row
    for level in range(1, 8):
        ours = []
        for start in range(0, delta.size, step):
            part = delta[start : start + step]
            ours.append(decoded(encode_block(part, row), level, part.size, row))
        theirs = np.array(by_the_document(data, level), np.float32)
        assert np.array_equal(theirs.view(np.uint32), np.concatenate(ours).view(np.uint32))


def test_the_example_of_the_document_is_what_is_written(tmp_path):
    data = packed(tmp_path, EXAMPLE)
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)$", text, re.MULTILINE)
    shown = b"".join(bytes.fromhex(line) for _, line in lines)
    assert [int(offset, 16) for offset, _ in lines] == list(range(0, len(shown), 16))
    assert shown == data[: len(shown)]
    assert len(shown) > 460
    assert f"It has {len(data):,} bytes" in text
    assert by_the_document(data, 2)[8:11] == pytest.approx([-2.0, 0.875, 0.875], abs=1e-3)
