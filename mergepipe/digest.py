"""Content digests: blake3-256 over tagged, length-delimited fields.

Every pre-image starts with a record type (the tag), and every field carries its type and length, so that no two
different records share a pre-image. Nothing is hashed through ``repr``, JSON or the order of a dict: floats go in as
their IEEE bits, mappings in key order.

A digest is 32 raw bytes inside the program (`bytes`), so that the digests of many blocks pack into one array, and
``b3:<hex>`` wherever people or files see it.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blake3 import blake3

from mergepipe.errors import InternalError, LockError

DIGEST_SIZE = 32
PREFIX = "b3:"
SAMPLED_PREFIX = "sample:"
_SAMPLED = b"\1"


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the blake3-256 digest (32 bytes) of raw bytes, without any tag."""
    return blake3(data).digest()


def sampled_pin(fingerprint: bytes) -> bytes:
    """Return the pin of a source that is known by its fingerprint: by samples of its blocks, not by all of them.

    A *pin* says which content a result follows from: the digest of all of it, or this.
    """
    return _SAMPLED + fingerprint


def is_sampled_pin(pin: bytes) -> bool:
    """Return whether a pin is a fingerprint."""
    return len(pin) == len(_SAMPLED) + DIGEST_SIZE and pin.startswith(_SAMPLED)


def pinned_fingerprint(pin: bytes) -> bytes:
    """Return the fingerprint of a pin that is one."""
    return pin[len(_SAMPLED) :]


def parse_pin(text: str) -> bytes:
    """Return the digest or the pin of what `format_digest` writes.

    Raises
    ------
    LockError
        If the text is neither.
    """
    if text.startswith(SAMPLED_PREFIX):
        return sampled_pin(parse_digest(text.removeprefix(SAMPLED_PREFIX)))
    return parse_digest(text)


def format_digest(digest: bytes) -> str:
    """Return ``b3:<hex>`` for a raw digest, and ``sample:b3:<hex>`` for a pin that is a fingerprint."""
    if is_sampled_pin(digest):
        return SAMPLED_PREFIX + format_digest(pinned_fingerprint(digest))
    if len(digest) != DIGEST_SIZE:
        raise InternalError(f"a digest has {DIGEST_SIZE} bytes, this has {len(digest)}")
    return PREFIX + digest.hex()


def parse_digest(text: str) -> bytes:
    """Return the raw digest of ``b3:<hex>``.

    Raises
    ------
    LockError
        If the text is not a digest.
    """
    if text.startswith(PREFIX) and len(text) == len(PREFIX) + 2 * DIGEST_SIZE:
        digits = text[len(PREFIX) :]
        with contextlib.suppress(ValueError):
            digest = bytes.fromhex(digits)
            if len(digest) == DIGEST_SIZE:  # white space between digits is skipped by `fromhex`
                return digest
    raise LockError(f"`{text}` is not a digest (expected `b3:` and {2 * DIGEST_SIZE} hexadecimal digits)")


def _field(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(8, "little") + payload


_NONE = _field(b"n", b"")


@functools.lru_cache(maxsize=1 << 12)  # tags and names: the same ones again and again
def _text(value: str) -> bytes:
    return _field(b"s", value.encode("utf-8", "surrogateescape"))


def _number(value: int) -> bytes:
    return _field(b"i", b"%d" % value)


def _encoded(value: Any) -> bytes:
    """Return the fields of plain data: None, bool, int, float, str, bytes, sequences and mappings of them.

    Strings are UTF-8, unchanged; integers decimal digits; floats their 64 IEEE bits.

    Raises
    ------
    InternalError
        For any other type: a digest must never depend on a representation.
    """
    kind = type(value)  # tried first, for there are millions of them
    if kind is bytes:
        data: bytes = value
        return b"b" + len(data).to_bytes(8, "little") + data
    if kind is str:
        return _text(value)
    if kind is int:
        return _number(value)
    if value is None:
        return _NONE
    if kind is tuple or kind is list:
        return _sequence(value)
    match value:
        case bool():
            return _field(b"t", b"1" if value else b"0")
        case int():
            return _number(value)
        case float():
            return _field(b"f", struct.pack("<d", value))
        case str():
            return _encoded(str(value))
        case bytes():
            return _encoded(bytes(value))
        case Mapping():
            items = [_encoded(key) + _encoded(value[key]) for key in sorted(value)]
            return b"".join((_field(b"m", b"%d" % len(value)), *items))
        case Sequence():
            return _sequence(value)
    raise InternalError(f"a {type(value).__name__} cannot be part of a digest")


def _sequence(values: Sequence[Any]) -> bytes:
    return b"".join((_field(b"l", b"%d" % len(values)), *map(_encoded, values)))


def record_digest(tag: str, *fields: Any) -> bytes:
    """Return the digest of a record: its tag and its fields in order, which cannot run into each other.

    Raises
    ------
    InternalError
        For a field that is no plain data (None, bool, int, float, str, bytes, sequences and mappings of them).
    """
    return blake3(b"".join((_encoded("mergepipe." + tag), *map(_encoded, fields)))).digest()


def tensor_digest(dtype: str, shape: Sequence[int], block_digests: bytes) -> bytes:
    """Return the Merkle digest of a tensor from its dtype, shape and packed block digests (32 bytes each)."""
    return blake3(_tensor_fields(dtype, tuple(shape)) + _encoded(block_digests)).digest()


@functools.lru_cache(maxsize=1 << 12)  # the same for every layer
def _tensor_fields(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what comes before the block digests: a record of tag, dtype, shape and those."""
    return b"".join(map(_encoded, ("mergepipe.tensor", dtype, shape)))


def sampled_tensor_digest(dtype: str, shape: Sequence[int], samples: bytes) -> bytes:
    """Return the fingerprint of a tensor: its dtype, its shape, and the packed digests of its blocks' samples."""
    return record_digest("sampled-tensor", dtype, tuple(shape), samples)


def partial_tensor_digest(dtype: str, shape: Sequence[int], levels: bytes, pins: bytes) -> bytes:
    """Return the digest of what is known of a tensor of which some blocks are read.

    Parameters
    ----------
    levels
        A byte for each block, 0 where it is not read.
    pins
        Packed, 32 bytes for each block: its digest, or that of its sample where it is not read.
    """
    return record_digest("partial-tensor", dtype, tuple(shape), levels, pins)


def digest_at(packed: bytes | None, block: int) -> bytes | None:
    """Return the digest of a block from a tensor's packed ones; None if they are not known, or it has no such block."""
    return None if packed is None else packed[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE] or None


def source_digest(tensors: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the digest of a checkpoint from its (name, tensor digest) pairs, whatever their order.

    It does not depend on sharding, file names or header metadata.
    """
    return record_digest("source", *(part for pair in sorted(tensors) for part in pair))
