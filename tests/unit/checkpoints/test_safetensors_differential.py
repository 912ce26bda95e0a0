"""Our verdict on a header against that of the safetensors library, on valid files and on mutations of them.

What the library refuses is refused. What it accepts is accepted and means the same, but for the short list below.
"""

from __future__ import annotations

import json
import struct
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from support.quick import examples

from mergepipe.checkpoints.safetensors import Header, read_header
from mergepipe.dtypes import DTYPES
from mergepipe.errors import FormatError

STRICTER = {
    "duplicate-name": "a repeated key, where the library lets the last one win",
    "header-start": "white space before the brace",
    "entry": "a tensor given as an array",
    "dtype": "a dtype given as an object",
    "overflow": "a size of 2**63 or more beside a dimension of 0",
    "number": "an integer beyond 64 bits, or a number of more than 400 characters, in an unknown key",
}

Members = list[tuple[str, Any]]
"""A JSON object as its members, so that names can repeat."""


def dumps(value: Any) -> str:
    """Return JSON; a list of pairs is an object, a float or huge integer is written as Python writes it."""
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dumps(item) for item in value) + "]"
    return json.dumps(value)


def ours(content: bytes) -> Header | FormatError:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            return read_header(file.fileno(), "m.safetensors", len(content), label="s")
        except FormatError as error:
            return error


def theirs(content: bytes) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        return deserialize(content)
    except SafetensorError:
        return None


def compare(content: bytes) -> None:
    verdict, tensors = ours(content), theirs(content)
    if tensors is None:
        assert isinstance(verdict, FormatError), "accepted what the library refuses"
        return
    if isinstance(verdict, FormatError):
        assert verdict.rule in STRICTER, f"refused what the library accepts: {verdict}"
        return
    found = {info.name: info for info in verdict.tensors}
    assert set(found) == {name for name, _ in tensors}
    for name, tensor in tensors:
        info = found[name]
        assert (info.dtype, list(info.shape)) == (tensor["dtype"], tensor["shape"])
        assert content[info.offset : info.offset + info.nbytes] == bytes(tensor["data"])


NAMES = st.sampled_from(["a", "b", "model.layers.0.w", "__metadata__", "", "é", "\U0001f600", "a\n", '"', "\x00"])
ODD = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 10**310]),
    st.floats(),
    st.sampled_from([True, False, None, "", "U8", "Q4", "BF16", "x\ud800", [], [0], [0, 1, 2], {}]),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([[("U8", None)], [("a", 1), ("a", 2)], [("x", [("y", [])])]]),
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Members, int]:
    """Return a valid header as members, and how many bytes of data it describes."""
    members: Members = []
    at = 0
    names = draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True, max_size=4))
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        elements = 1
        for dim in shape:
            elements *= dim
        if elements * DTYPES[dtype].bits % 8:
            shape, elements = [*shape, 8], elements * 8
        stop = at + elements * DTYPES[dtype].bits // 8
        fields: Members = [("dtype", dtype), ("shape", shape), ("data_offsets", [at, stop])]
        if draw(st.booleans()):
            fields = draw(st.permutations(fields))
        members.append((name, fields))
        at = stop
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, len(members))), ("__metadata__", [("format", "pt")]))
    return draw(st.permutations(members)), at


def build(text: str, data: int, *, length: int = 0) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", (len(raw) + length) % 2**64) + raw + bytes(i % 251 for i in range(data))


def change_member(draw: st.DrawFn, members: Members) -> None:
    """Change one thing in a header's structure."""
    if not members:
        members.append((draw(NAMES), draw(ODD)))
        return
    where = draw(st.integers(0, len(members) - 1))
    name, fields = members[where]
    if not (isinstance(fields, list) and fields and all(isinstance(field, tuple) for field in fields)):
        members[where] = (name, draw(ODD))
        return
    match draw(st.integers(0, 7)):
        case 0:
            members.append((draw(NAMES), fields))
        case 1:
            members[where] = (draw(NAMES), draw(ODD))
        case 2:
            members[where] = (name, [*fields, (draw(st.sampled_from(["x", "dtype", "shape", "\ud800"])), draw(ODD))])
        case 3:
            members[where] = (name, fields[1:])
        case 4 if len(fields) == 3:
            field = draw(st.integers(0, 2))
            members[where] = (name, [*fields[:field], (fields[field][0], draw(ODD)), *fields[field + 1 :]])
        case _:
            for i, (field_name, value) in enumerate(fields):
                if isinstance(value, list) and value and not isinstance(value[0], tuple):
                    at = draw(st.integers(0, len(value) - 1))
                    changed = [*value[:at], draw(ODD), *value[at + 1 :]]
                    members[where] = (name, [*fields[:i], (field_name, changed), *fields[i + 1 :]])
                    break


PIECES = (b" ", b"\n", b"0", b"-", b",", b"[", b"{", b"1e5", b"NaN", b"\\ud800", b"\xff")


def change_text(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the bytes of a file: a bit, a cut, a piece taken out, put in or repeated."""
    at = draw(st.integers(0, len(content) - 1))
    stop = draw(st.integers(at, min(len(content), at + 12)))
    match draw(st.integers(0, 4)):
        case 0:
            return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        case 1:
            return content[:at]
        case 2:
            return content[:at] + content[stop:]
        case 3:
            return content[:at] + draw(st.sampled_from(PIECES)) + content[at:]
        case _:
            return content[:stop] + content[at:]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Return a file, changed in its structure, in its text, in its sizes, or in its bytes."""
    members, data = draw(headers())
    members = list(members)
    how = draw(st.sampled_from(["structure"] * 6 + ["padding", "text", "sizes", "sizes", "bytes", "bytes"]))
    for _ in range(draw(st.integers(1, 3)) if how == "structure" else draw(st.integers(0, 1))):
        change_member(draw, members)
    text, size, length = dumps(members) if members else "{}", data, 0
    if how == "padding":
        text = draw(st.sampled_from(["", " ", "\n", "\ufeff"])) + text
        text += draw(st.sampled_from(["", " ", "   ", "\n\t ", "\0", "x"]))
    elif how == "text":
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", " ", "\t", "\u00a0", "0", "}", '"'])) + text[at:]
    elif how == "sizes":
        size = max(0, data + draw(st.sampled_from([0, 0, -1, 1, 8])))
        length = draw(st.sampled_from([0, 0, 0, -1, 1, -8, 100, 2**63]))
    content = build(text, size, length=length)
    return change_text(draw, content) if how == "bytes" else content


QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(QUICK, max_examples=examples(150))
@given(headers())
def test_valid_headers_mean_the_same(described):
    members, data = described
    content = build(dumps(members) if members else "{}", data)
    assert theirs(content) is not None
    assert isinstance(ours(content), Header)
    compare(content)


@settings(QUICK, max_examples=examples(400))
@given(files())
def test_mutated_files_get_the_verdict_of_the_library(content):
    compare(content)


@pytest.mark.slow
@settings(QUICK, max_examples=4000)
@given(files())
def test_many_mutated_files_get_the_verdict_of_the_library(content):
    compare(content)


UNKNOWN = '{{"a":{{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":{}}}}}'


@settings(QUICK, max_examples=examples(300))
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
        max_leaves=6,
    ),
    st.integers(0, 130),
)
@example(1, 125)
@example(1, 126)
@example("\ud800", 3)
@example(10**400, 0)
@example(-(2**64), 0)
def test_unknown_keys_get_the_verdict_of_the_library(value, depth):
    text = "[" * depth + json.dumps(value) + "]" * depth
    compare(build(UNKNOWN.format(text), 2))


@settings(QUICK, max_examples=examples(200))
@given(st.text("0123456789eE+-.", min_size=1, max_size=12))
def test_number_literals_get_the_verdict_of_the_library(literal):
    compare(build(UNKNOWN.format(literal), 2))
    compare(build('{"a":{"dtype":"U8","shape":[' + literal + '],"data_offsets":[0,2]}}', 2))


@settings(QUICK, max_examples=examples(300))
@given(st.binary(max_size=40), st.integers(0, 45))
def test_arbitrary_bytes_get_the_verdict_of_the_library(data, length):
    compare(data)
    compare(struct.pack("<Q", length) + b"{" + data)


def test_opening_a_file_gives_the_verdict_of_deserialising_it(tmp_path):
    # The other half of this module asks `deserialize` alone, which needs no file.
    w = '"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
    for i, content in enumerate((build("{" + w + "}", 2), build("{" + w + "}", 3), build("{" + w, 2), b"", b"\0" * 9)):
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(content)
        try:
            with safe_open(path, "numpy") as opened:
                accepted = list(opened.keys()) == ["w"]
        except (SafetensorError, OSError, ValueError):
            accepted = False
        assert accepted == (theirs(content) is not None) == isinstance(ours(content), Header)


def test_each_stricter_rule_has_an_example_that_the_library_accepts():
    w = '"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
    examples = {
        "duplicate-name": "{" + w + "," + w + "}",
        "header-start": " {" + w + "}",
        "entry": '{"w":["U8",[2],[0,2]]}',
        "dtype": '{"w":{"dtype":{"U8":null},"shape":[2],"data_offsets":[0,2]}}',
        "overflow": "{" + w + ',"x":{"dtype":"U8","shape":[9223372036854775808,0],"data_offsets":[2,2]}}',
        "number": "{" + w[:-1] + ',"x":99999999999999999999999}}',
    }
    assert set(examples) == set(STRICTER)
    for rule, text in examples.items():
        content = build(text, 2)
        assert theirs(content) is not None
        verdict = ours(content)
        assert isinstance(verdict, FormatError)
        assert verdict.rule == rule
