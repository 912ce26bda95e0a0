"""Headers of safetensors files: each rule of the format refuses under its own name, naming file and tensor."""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from safetensors import SafetensorError, deserialize
from support.checkpoints import random_tensors, raw_file_bytes, safetensors_bytes

from mergepipe.checkpoints import safetensors as module
from mergepipe.checkpoints.safetensors import Header, read_header
from mergepipe.digest import content_digest
from mergepipe.dtypes import DTYPES
from mergepipe.errors import FormatError

W = '"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def entry(dtype="U8", shape=(2,), offsets=(0, 2), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def header_of(content: bytes, *, size: int | None = None) -> Header:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return read_header(file.fileno(), "expert_a/m.safetensors", size or len(content), label="math")


def refusal(content: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        header_of(content)
    return caught.value


def text_file(header: str, data: bytes = b"\0\0") -> bytes:
    return raw_file_bytes(header.encode(), data)


def json_file(header: object, data: bytes = b"\0\0") -> bytes:
    return raw_file_bytes(header, data)


def test_a_header_gives_the_tensors_in_file_order_with_absolute_offsets():
    tensors = random_tensors(0, {"b": (3, 4), "a": (), "empty": (0, 7), "c": (5,)}, "BF16")
    content = safetensors_bytes(tensors, {"format": "pt"})
    header = header_of(content)
    assert [info.name for info in header.tensors] == ["b", "a", "empty", "c"]
    for info in header.tensors:
        array = tensors[info.name]
        assert (info.dtype, info.shape, info.file) == ("BF16", array.shape, 0)
        assert content[info.offset : info.offset + info.nbytes] == array.tobytes()
    assert header.metadata == {"format": "pt"}
    assert header.size == 8 + struct.unpack("<Q", content[:8])[0]
    assert header.digest == content_digest(content[: header.size])


def test_a_header_longer_than_the_first_read_is_read_whole():
    content = safetensors_bytes(random_tensors(0, {f"layers.{i}.weight": (2,) for i in range(300)}))
    header = header_of(content)
    assert header.size > 4096
    assert len(header.tensors) == 300
    assert header.digest == content_digest(content[: header.size])


def test_the_dtypes_are_those_of_the_safetensors_library():
    with pytest.raises(SafetensorError) as caught:
        deserialize(json_file({"w": entry("no such dtype")}))
    assert set(DTYPES) == set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value)))
    for name, dtype in DTYPES.items():
        content = json_file({"w": entry(name, (8,), (0, dtype.bits))}, bytes(dtype.bits))
        assert header_of(content).tensors[0].nbytes == dtype.bits
        assert dict(deserialize(content))["w"]["dtype"] == name


@pytest.mark.parametrize(
    "content",
    [
        text_file("{" + W + "}"),
        text_file("{" + W + "}       "),
        text_file('{"w":{"dtype":"U8","shape":[1,2,1],"data_offsets":[0,2],"later":{"x":[1,-2.5e3,null]}}}'),
        text_file('{"__metadata__":null,' + W + "}"),
        text_file('{"__metadata__":{"format":"pt"},' + W + "}"),
        text_file('{"\\ud83d\\ude00":' + W[4:] + "}"),
        json_file({"z": entry(shape=(0,), offsets=(0, 0)), "w": entry(), "y": entry(shape=(0,), offsets=(2, 2))}),
        json_file({"w": entry("F4", (4,))}),
        json_file({}, b""),
    ],
)
def test_valid_headers_are_accepted_as_the_library_does(content):
    names = {info.name for info in header_of(content).tensors}
    assert names == set(dict(deserialize(content)))


BROKEN = [
    ("empty-file", None, b""),
    ("too-short", None, b"\x10\0\0\0"),
    ("header-size", None, struct.pack("<Q", 2**63) + b"\xff" * 100),
    ("header-size", None, struct.pack("<Q", 100_000_001) + b"{}"),
    ("header-truncated", None, struct.pack("<Q", 99_999_999) + b'{"w":'),
    ("header-truncated", None, struct.pack("<Q", 1)),
    ("header-start", None, raw_file_bytes(b"[]")),
    ("header-start", None, struct.pack("<Q", 0) + b"\xff"),
    ("header-utf8", None, raw_file_bytes(b'{"w\xff":1}')),
    ("header-json", None, text_file("{" + W)),
    ("header-json", None, text_file("{" + W + ",}")),
    ("header-json", None, text_file("{" + W + "}\0")),
    ("header-json", None, text_file('{"w":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}')),
    ("nesting", None, text_file('{"w":' + "[" * 100_000 + "]" * 100_000 + "}")),
    ("nesting", "w", text_file("{" + W[:-1] + ',"x":' + "[" * 126 + "]" * 126 + "}}")),
    ("duplicate-name", "w", text_file("{" + W + "," + W + "}")),
    ("duplicate-name", "w", text_file("{" + W[:-1] + ',"dtype":"U8"}}')),
    ("duplicate-name", "w", text_file("{" + W[:-1] + ',"x":[{"y":1,"y":2}]}}')),
    ("duplicate-name", None, text_file('{"__metadata__":{"a":"1","a":"2"},' + W + "}")),
    ("duplicate-name", None, text_file('{"__metadata__":{},"__metadata__":{},' + W + "}")),
    ("metadata", None, json_file({"__metadata__": {"a": 1}, "w": entry()})),
    ("metadata", None, json_file({"__metadata__": [], "w": entry()})),
    ("entry", "w", json_file({"w": None})),
    ("entry", "w", json_file({"w": ["U8", [2], [0, 2]]})),
    ("entry", "w", json_file({"w": {"dtype": "U8", "shape": [2]}})),
    ("entry", "w", json_file({"w": {"dtype": "U8", "shape": [2], "offsets": [0, 2]}})),
    ("dtype", "w", json_file({"w": entry("Q4_K")})),
    ("dtype", "w", json_file({"w": entry({"U8": None})})),
    ("shape", "w", json_file({"w": entry() | {"shape": 2}})),
    ("shape", "w", json_file({"w": entry(shape=(-2,))})),
    ("shape", "w", json_file({"w": entry(shape=(2.0,))})),
    ("shape", "w", json_file({"w": entry(shape=(True, 2))})),
    ("shape", "w", json_file({"w": entry(shape=("2",))})),
    ("shape", "w", text_file('{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"")),
    ("shape", "w", text_file('{"w":{"dtype":"U8","shape":[' + "9" * 5000 + '],"data_offsets":[0,2]}}')),
    ("overflow", "w", json_file({"w": entry("F64", (2**60,))})),
    ("overflow", "w", json_file({"w": entry(shape=(2**32, 2**32, 2**32, 0), offsets=(0, 0))}, b"")),
    ("offsets", "w", json_file({"w": entry(offsets=(0,))})),
    ("offsets", "w", json_file({"w": entry() | {"data_offsets": {"0": 0}}})),
    ("offsets", "w", json_file({"w": entry(offsets=(-1, 1))})),
    ("offsets", "w", json_file({"w": entry(offsets=(0, 2.0))})),
    ("offsets", "w", json_file({"w": entry(offsets=(False, 2))})),
    ("offset-order", "w", json_file({"w": entry(offsets=(2, 0))})),
    ("sub-byte", "w", json_file({"w": entry("F4", (3,))})),
    ("size", "w", json_file({"w": entry(shape=(3,))})),
    ("size", "w", json_file({"w": entry("F32", (1000, 1000))})),
    ("first-offset", "w", json_file({"w": entry(offsets=(1, 3))}, b"\0\0\0")),
    ("overlap", "x", json_file({"w": entry(), "x": entry()})),
    ("overlap", "x", json_file({"w": entry(), "x": entry(shape=(0,), offsets=(1, 1))})),
    ("gap", "x", json_file({"w": entry(), "x": entry(offsets=(3, 5))}, b"\0" * 5)),
    ("truncated", "x", json_file({"w": entry(), "x": entry(offsets=(2, 4))}, b"\0\0\0")),
    ("trailing-bytes", None, json_file({"w": entry()}, b"\0\0\0")),
    ("trailing-bytes", None, json_file({}, b"\0")),
    ("number", "w", text_file("{" + W[:-1] + ',"x":NaN}}')),
    ("number", "w", text_file("{" + W[:-1] + ',"x":[-Infinity]}}')),
    ("number", "w", text_file("{" + W[:-1] + ',"x":1e999}}')),
    ("number", "w", text_file("{" + W[:-1] + ',"x":' + "9" * 5000 + "}}")),
    ("number", "w", text_file("{" + W[:-1] + ',"x":0.' + "0" * 5000 + "}}")),
    ("surrogate", "\ud800", text_file('{"\\ud800":' + W[4:] + "}")),
    ("surrogate", "w", text_file("{" + W[:-1] + ',"x":{"\\udfff":1}}}')),
    ("surrogate", None, text_file('{"__metadata__":{"a":"\\ud800"},' + W + "}")),
]


@pytest.mark.parametrize(("rule", "tensor", "content"), BROKEN, ids=[f"{i}-{row[0]}" for i, row in enumerate(BROKEN)])
def test_a_broken_rule_is_named_with_file_and_tensor(rule, tensor, content):
    error = refusal(content)
    assert error.rule == rule
    first = error.message.split("\n")[0]
    assert first.startswith("source `math`: `expert_a/m.safetensors`")
    assert not first.endswith(".")
    assert error.hint
    assert error.facts.get("tensor") == tensor
    if tensor == "\ud800":
        assert r"tensor `\ud800`" in first
    elif tensor is not None:
        assert f"tensor `{tensor}`" in first
    json.dumps(error.as_json())
    error.message.encode()


def test_every_rule_that_can_be_raised_is_tested():
    folder = Path(module.__file__).parent
    found: set[str] = set()
    for name in ("safetensors.py", "strictjson.py"):
        text = (folder / name).read_text(encoding="utf-8")
        found |= set(re.findall(r'(?:error|Flaw|JsonError)\(\s*"([a-z0-9-]+)"', text))
    # Two rules are chosen by an expression.
    found |= {"gap", "overlap"}
    assert {"size", "number", "header-utf8"} <= found
    assert found - {"not-safetensors"} <= {row[0] for row in BROKEN}


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_a_truncated_file_is_told_with_expected_and_real_size(missing):
    content = safetensors_bytes(random_tensors(0, {"a": (3, 4), "b": (7,)}))
    error = refusal(content[:-missing])
    assert "truncated or incomplete download" in error.message
    assert f"expected: {len(content)} bytes" in error.message
    assert f"got: {len(content) - missing} bytes" in error.message
    assert (error.facts["expected"], error.facts["got"]) == (len(content), len(content) - missing)


def test_a_file_cut_anywhere_is_refused():
    content = safetensors_bytes(random_tensors(0, {"a": (3, 4), "b": (7,)}))
    for stop in range(len(content)):
        assert re.search("truncated|incomplete", refusal(content[:stop]).message)


def test_a_file_that_shrinks_after_its_size_was_taken_is_refused():
    content = safetensors_bytes(random_tensors(0, {f"layers.{i}": (2,) for i in range(200)}))
    with pytest.raises(FormatError) as caught:
        header_of(content[:5000], size=len(content))
    assert caught.value.rule == "header-truncated"
    with pytest.raises(FormatError) as caught:
        header_of(content[:5], size=len(content))
    assert caught.value.rule == "too-short"


@pytest.mark.parametrize("claim", [2**64 - 1, 2**63, 2**40, 100_000_001, 100_000_000, 50_000_000])
def test_a_claimed_size_is_never_allocated(claim, monkeypatch):
    content = struct.pack("<Q", claim) + b'{"w":' + b" " * 5000
    asked: list[int] = []
    pread = os.pread

    def recording(fd: int, count: int, offset: int) -> bytes:
        asked.append(count)
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", recording)
    tracemalloc.start()
    try:
        refusal(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(asked) <= len(content)
    assert peak < 2_000_000


def test_names_with_control_characters_are_escaped_in_messages():
    error = refusal(text_file('{"a\\u001b[31m\\nb":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}'))
    assert r"tensor `a\x1b[31m\nb`" in error.message
