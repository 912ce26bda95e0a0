"""Codes as a job reads them: from the page cache or by waiting, the same chunks, and few packs open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.progressive import normal

from mergepipe.engine import code_reader, coding
from mergepipe.engine.code_reader import CodeReader
from mergepipe.engine.coding import CodeInput, OpenPack
from mergepipe.engine.kernel import Scratch
from mergepipe.errors import PackError
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.pack import read_header
from mergepipe.progressive.writer import PackWriter

ROWS, ROW, BLOCK = 50, 40, 400
NEEDED = {0: 2, 1: 1, 2: 3, 4: 2}  # blocks and levels


def pack(path: Path) -> list[list[bytes]]:
    """Write a pack of five blocks; return their chunks."""
    writer = PackWriter(path.parent, shape=(ROWS, ROW), block_elements=BLOCK)
    made = [encode_block(block, ROW) for block in normal(0, ROWS, ROW).reshape(-1, BLOCK)]
    for number, code in enumerate(made):
        writer.put(number, code)
    writer.finish(bytes(32), bytes(range(32)), path)
    return [list(code.chunks) for code in made]


class Key:
    """Stands for an input, of which only the key is looked at."""

    def __init__(self, name: str) -> None:
        self.key = ("file", name)


def code_of(path: Path, name: str = "w", **settings: Any) -> CodeInput:
    inputs: Any = {"base": Key("base"), "expert": Key(name)}
    return CodeInput(**inputs, stored=bytes(32), open=lambda: OpenPack.open(path), **settings)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.planes"


@pytest.mark.parametrize("cached", ["all", "half", "nothing", "none of the second stage"])
def test_what_the_page_cache_lacks_is_asked_for_and_read_later(path, monkeypatch, cached):
    chunks, code, asked = pack(path), code_of(path), []
    header = read_header(path)
    second = header.run_range(1, range(5))

    def read_cached(fd, target, offset):
        part = len(target) // 2 if cached == "half" else 0
        if cached == "all" or (cached.startswith("none of") and not second[0] <= offset < second[1]):
            part = len(target)
        target[:part] = os.pread(fd, part, offset)
        return part

    monkeypatch.setattr(code_reader, "read_cached", read_cached)
    monkeypatch.setattr(code_reader, "ask_for", lambda fd, offset, count: asked.append((offset, offset + count)))
    reader, needed = CodeReader({code.key: code}, Scratch()), {code.key: dict(NEEDED)}
    reader.ask(needed)
    assert bool(asked) == (cached != "all")
    if cached == "nothing":
        wanted = [header.chunk_range(stage, block) for block, level in NEEDED.items() for stage in range(level)]
        assert sum(stop - start for start, stop in asked) == sum(stop - start for start, stop in wanted)
        assert all(any(one <= start and stop <= other for one, other in asked) for start, stop in wanted)
    assert reader.read(needed) == {}
    for block, level in NEEDED.items():
        assert reader.sizes(code.key, block) == [len(chunk) for chunk in chunks[block][:level]]
        assert [bytes(chunk) for chunk in reader._chunks[code.key][block]] == chunks[block][:level]


@pytest.mark.parametrize("asks", [True, False])
def test_a_damaged_stage_leaves_its_block_and_no_other(path, asks):
    pack(path)
    code, start = code_of(path), read_header(path).chunk_range(1, 2)[0]
    damage(path, start)
    reader, needed = CodeReader({code.key: code}, Scratch()), {code.key: dict(NEEDED)}
    if asks:
        reader.ask(needed)
    lacking = reader.read(needed)[code.key]
    assert 2 in lacking
    assert set(lacking) <= {block for block, level in NEEDED.items() if level > 1}
    assert reader.sizes(code.key, 1)


@pytest.mark.parametrize("asks", [True, False])
def test_a_damaged_code_that_was_given_is_an_error_with_its_name(path, asks):
    pack(path)
    code = code_of(path, is_given=True)
    damage(path, read_header(path).chunk_range(0, 4)[0])
    reader, needed = CodeReader({code.key: code}, Scratch()), {code.key: dict(NEEDED)}
    with pytest.raises(PackError, match=r"w\.planes.* stage 1 of block 4"):
        (reader.ask if asks else reader.read)(needed)


def damage(path: Path, at: int) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files by /proc")
def test_few_packs_stay_open_and_none_whose_codes_are_gone(path):
    pack(path)
    before = len(os.listdir("/proc/self/fd"))
    found = [code_of(path, str(number)) for number in range(40)]
    for code in found:
        with code.reading() as one, code.reading() as other:
            assert one is other
            assert one is not None
    assert before < len(os.listdir("/proc/self/fd")) <= before + coding._OPEN_PACKS
    with found[-1].reading() as again:  # it is open still
        assert again is one
        found[-1].rest()  # and stays so while somebody reads from it
        assert os.pread(again.fd, 8, 0) == b"MPPLANES"
    del found[:-2], again, one, other, code
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    for code in found:
        code.rest()
    assert len(os.listdir("/proc/self/fd")) == before
