"""Damaging files: bits, cuts, pieces of other files, and for JSON and TOML also values in the wrong places.

Everything is drawn from the `random.Random` that is passed in, so that a seed (or hypothesis) finds a case again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

TOKENS: tuple[bytes, ...] = (
    b"", b"\0", b"\xff", b"\x1b[2J", b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[", b"]", b"[[", b"=", b":", b",", b"#",
    b"../", b"/etc/passwd", b"/", b"..", b"C:\\", b"~", b"\\u0000", b"\\ud800", b"\xed\xa0\x80", b"\xe2\x80\xae",
    b"nan", b"NaN", b"Infinity", b"-1", b"-0", b"0", b"1e999", b"9" * 30, b"9" * 5000, b"18446744073709551616",
    b"1.5", b"null",
    b"true", b"false", b"[" * 300, b'{"a":' * 300, b"a." * 300, b"(a+)+$", b"(.*)*", b"<!---->" * 40, b"version",
    b"b3:" + b"0" * 64, b"sample:", b"F32", b"BF16", b"F4", b"model.safetensors", b"*" * 40, b"0..9999999999",
    b"1979-05-27T07:32:00Z", b"'''", b'"""', b"inf", b"0x7fffffffffffffff",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "..", "../x", "/etc/passwd", "a\0b", "\x1b[31m", "\u202e", "\ud800", "x" * 5000, [], {}, [[]], [0, 0], [1, 2, 3],
    {"": ""}, [None], "LORA", "(a+)+", "(.*)*.*x", "F32", "b3:" + "0" * 64, "linear", "base", "full", "50%",
)  # fmt: skip


def mutated(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds after one to four damages."""
    data = draw.choice(seeds)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        data = draw.choice(_DAMAGES)(draw, data, seeds)
    return data


def mutated_json(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a JSON text with values in the wrong places, or one damaged as bytes."""
    if draw.random() < 0.4:
        return mutated(draw, seeds)
    try:
        value = json.loads(draw.choice(seeds))
    except ValueError:  # a case of the corpus
        return mutated(draw, seeds)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        value = _changed(draw, value)
    return json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def mutated_lines(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a text with lines moved, doubled, dropped and mixed with those of others, or one damaged as bytes."""
    if draw.random() < 0.4:
        return mutated(draw, seeds)
    lines = draw.choice(seeds).split(b"\n")
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(len(lines) + 1)
        match draw.randrange(5):
            case 0:
                del lines[at : at + draw.randint(1, 3)]
            case 1:
                lines.insert(at, draw.choice(draw.choice(seeds).split(b"\n")))
            case 2:
                key, _, _ = lines[at % max(1, len(lines))].partition(b"=") if lines else (b"x", b"", b"")
                lines[at : at + 1] = [key + b"= " + json.dumps(draw.choice(VALUES)).encode()]
            case 3:
                lines[at:at] = lines[at : at + draw.randint(1, 4)]
            case _:
                key, _, value = lines[at % max(1, len(lines))].partition(b"=") if lines else (b"x", b"", b"1")
                lines[at : at + 1] = [draw.choice(TOKENS) + key + b"=" + value + draw.choice(TOKENS)]
        lines = lines or [b""]
    return b"\n".join(lines)


def mutated_header(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return a safetensors file whose header has values in the wrong places, or that is damaged as bytes."""
    if draw.random() < 0.4:
        return mutated(draw, seeds)
    data = draw.choice(seeds)
    size = int.from_bytes(data[:8], "little")
    header = mutated_json(draw, [data[8 : 8 + size]])
    stated = len(header) if draw.random() < 0.9 else draw.choice([0, 1, len(header) + 1, 2**32, 2**63, 2**64 - 1])
    return stated.to_bytes(8, "little") + header + data[8 + size :]


def _flip(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _cut(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _drop(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + data[at + draw.choice([1, 2, 8, 64]) :]


def _splice(draw: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = draw.choice(seeds)
    start = draw.randrange(len(other) + 1)
    piece = other[start : start + draw.choice([1, 8, 64, 1024])]
    at = draw.randrange(len(data) + 1)
    return data[:at] + piece + data[at + draw.choice([0, len(piece)]) :]


def _insert(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    token = draw.choice(TOKENS)
    return data[:at] + token + data[at + draw.choice([0, len(token)]) :]


_DAMAGES: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (_flip, _cut, _drop, _splice, _insert)


def _changed(draw: random.Random, value: Any) -> Any:
    """Return a value with one node of its tree replaced, dropped or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        match draw.randrange(6):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {str(draw.choice(VALUES)): value[key]}
            case _:
                return value | {key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        match draw.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at : at + 1] * draw.choice([2, 3, 1000]) + value[at + 1 :]
            case _:
                return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and draw.random() < 0.4:
        at = draw.randrange(len(value) + 1)
        return value[:at] + draw.choice(TOKENS).decode("utf-8", "replace") + value[at:]
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 2**31, -(2**63), 2**64])
    return draw.choice(VALUES)
