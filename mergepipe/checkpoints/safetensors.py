"""Headers of safetensors files, read by the published rules of the format.

A file is: 8 bytes with the length of the header (little endian), the header (a JSON object that maps tensor names to
dtype, shape and a byte range; padded with spaces), and the data. The byte ranges are relative to the data and cover it
without overlap, gap or rest.

Whatever the safetensors library refuses is refused here, each broken rule under its own name (`FormatError.rule`).
Stricter than the library (0.8) are:

- a name or key that appears twice (the library lets the last one win): ``duplicate-name``;
- white space before the ``{``: ``header-start``;
- a tensor given as an array (``entry``), or its dtype as an object (``dtype``): accidents of the library's parser;
- sizes of 2**63 and more, which only a tensor without elements can have: ``overflow``;
- in keys that the format does not know: integers beyond 64 bits, and numbers of more than 400 characters: ``number``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.sniff import SNIFF_BYTES, sniff
from mergepipe.checkpoints.strictjson import Flaw, JsonError, decode, flaw_in, is_encodable
from mergepipe.checkpoints.wording import quote
from mergepipe.digest import content_digest
from mergepipe.dtypes import DTYPES
from mergepipe.errors import FormatError
from mergepipe.values import dataclass

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"

_FIELDS = ("dtype", "shape", "data_offsets")
_BIT_LIMIT = 8 * 2**63
_SHOWN_DIMS = 8
_DAMAGED = "the file was damaged or written by a faulty program: download or convert it again"
_INCOMPLETE = "truncated or incomplete download: download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    Attributes
    ----------
    name, dtype, shape
        As the header has them.
    file
        Index into `Checkpoint.files`.
    offset
        First byte, counted from the beginning of the file.
    nbytes
        Size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header.

    Attributes
    ----------
    tensors
        In the order of their bytes, with ``file`` 0.
    size
        Bytes before the data, the length field included.
    digest
        Content digest of those bytes.
    metadata
        The free text of ``__metadata__``.
    """

    tensors: tuple[TensorInfo, ...]
    size: int
    digest: bytes
    metadata: Mapping[str, str]


_Entry = tuple[str, str, tuple[int, ...], int, int]  # name, dtype, shape, offset, nbytes
_Parsed = tuple[Sequence[_Entry], Mapping[str, str]]
# What headers hold, by their digest: those of experts are often the same bytes as the base's.
_KNOWN: dict[bytes, _Parsed] = {}
_KNOWN_HEADERS = 64
_KNOWN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """The file that messages are about."""

    label: str
    path: str
    size: int

    def error(
        self, rule: str, what: str, *lines: str, tensor: str | None = None, hint: str = _DAMAGED, **facts: Any
    ) -> FormatError:
        """Return the error for a broken rule; ``what`` follows the name of the tensor or the file."""
        if tensor is not None:
            facts["tensor"] = tensor
            what = f": tensor {quote(tensor)} {what}"
        else:
            what = f" {what}"
        first = f"source {quote(self.label)}: {quote(self.path)}{what}"
        return FormatError("\n".join((first, *lines)), rule=rule, hint=hint, source=self.label, file=self.path, **facts)


def read_header(fd: int, path: Path | str, size: int, *, label: str) -> Header:
    """Read and check the header of an open safetensors file.

    Parameters
    ----------
    fd
        Open for reading; its position is neither used nor moved.
    path
        What messages call the file.
    size
        Of the whole file, in bytes.
    label
        Name of the source, for messages.

    Raises
    ------
    FormatError
        If the file breaks a rule of the format, or is something else altogether.
    OSError
        If it cannot be read.
    """
    file = _File(label, str(path), size)
    # One byte more than the length: a header begins with a brace. No weight byte is read, whatever the file is like.
    start = _pread(fd, min(size, LENGTH_BYTES + 1), 0)
    if not _is_plausible(start, size):
        start = _pread(fd, min(size, SNIFF_BYTES), 0)
    stop = LENGTH_BYTES + _header_length(start, file)
    data = start + _pread(fd, stop - len(start), len(start))
    if len(data) < stop:
        raise _header_cut(file, stop, len(data))
    digest = content_digest(data)
    known = _KNOWN.get(digest)
    if known is None:
        known = _parsed(data, file)
        if stop <= _KNOWN_BYTES:
            _KNOWN[digest] = known
            if len(_KNOWN) > _KNOWN_HEADERS:
                del _KNOWN[next(iter(_KNOWN))]
    entries, metadata = known
    tensors = [
        TensorInfo(name=name, dtype=dtype, shape=shape, file=0, offset=offset, nbytes=nbytes)
        for name, dtype, shape, offset, nbytes in entries
    ]
    _check_cover(tensors, stop, file)
    return Header(tensors=tuple(tensors), size=stop, digest=digest, metadata=metadata)


def _parsed(data: bytes, file: _File) -> _Parsed:
    """Return the checked entries of a header in the order of their bytes, and its metadata."""
    root = _decode_header(data[LENGTH_BYTES:], file)
    metadata = _metadata(root.pop(METADATA_KEY, None), file)
    entries = [_entry(name, value, len(data), file) for name, value in root.items()]
    return sorted(entries, key=lambda entry: entry[3:]), metadata


def _pread(fd: int, count: int, offset: int) -> bytes:
    """Read ``count`` bytes, or as many as there are before the end of the file."""
    chunks: list[bytes] = []
    while count:
        chunk = os.pread(fd, count, offset)
        if not chunk:
            break
        chunks.append(chunk)
        count -= len(chunk)
        offset += len(chunk)
    return b"".join(chunks)


def _is_plausible(start: bytes, size: int) -> bool:
    """Return whether the first bytes of a file look like those of a safetensors file of this size."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    return start[LENGTH_BYTES:] == b"{" and 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES)


def _header_length(head: bytes, file: _File) -> int:
    """Return the length of the header in bytes, checked against the limit and the file before anything is allocated."""
    if file.size == 0:
        raise file.error("empty-file", "is empty: an interrupted or incomplete download", hint=_INCOMPLETE)
    if file.size < LENGTH_BYTES or len(head) < LENGTH_BYTES:
        raise file.error(
            "too-short", f"has {file.size} bytes: too short to be a safetensors file, truncated", hint=_INCOMPLETE
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise _something_else(head, file) or file.error(
            "header-size",
            f"is not a safetensors file: its header would have {length:,} bytes",
            f"limit: {MAX_HEADER_BYTES:,} bytes",
        )
    if LENGTH_BYTES + length > file.size:
        raise _something_else(head, file) or _header_cut(file, LENGTH_BYTES + length, file.size)
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{" or length == 0:
        raise _something_else(head, file) or file.error(
            "header-start", "is not a safetensors file: its header does not begin with `{`"
        )
    return length


def _something_else(head: bytes, file: _File) -> FormatError | None:
    """Return the error that says what the file is instead of safetensors, if that can be seen."""
    finding = sniff(head)
    if finding is None:
        return None
    return file.error(
        "not-safetensors", f"is not a safetensors file: it is {finding.what}", hint=finding.hint, found=finding.kind
    )


def _header_cut(file: _File, expected: int, got: int) -> FormatError:
    return file.error(
        "header-truncated",
        "ends inside its header: truncated or incomplete download",
        f"expected: more than {expected:,} bytes",
        f"got: {got:,} bytes",
        hint=_INCOMPLETE,
        expected=expected,
        got=got,
    )


def _decode_header(data: bytes, file: _File) -> dict[str, Any]:
    """Return the header's object; flaws may stand at any place inside it."""
    try:
        root = decode(data)
    except JsonError as error:
        raise file.error(error.rule, f"has a header that is not valid JSON: {error.what}") from None
    if isinstance(root, Flaw):
        if root.subject == METADATA_KEY:
            raise file.error(root.rule, f"has two `{METADATA_KEY}` entries")
        raise file.error(root.rule, "is in the header twice", tensor=root.subject)
    # It begins with a brace, so that it is an object.
    assert isinstance(root, dict)
    return root


def _metadata(value: Any, file: _File) -> dict[str, str]:
    """Check ``__metadata__``: absent, null, or an object of strings."""
    if value is None:
        return {}
    flaw = flaw_in(value, depth=1)
    if flaw is not None:
        raise file.error(flaw.rule, f"has a faulty `{METADATA_KEY}`: {_flaw_words(flaw)}")
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise file.error("metadata", f"has a `{METADATA_KEY}` that does not map strings to strings")
    return value


def _flaw_words(flaw: Flaw) -> str:
    return f"the key {quote(flaw.subject)} {flaw.what}" if flaw.rule == "duplicate-name" else flaw.what


def _entry(name: str, value: Any, data_start: int, file: _File) -> _Entry:
    """Check one tensor's entry on its own: fields, dtype, shape, byte range and whether they agree."""
    if not is_encodable(name):
        raise file.error("surrogate", "has a lone surrogate in its name", tensor=name)
    if not isinstance(value, dict) or len(value) != len(_FIELDS):
        _check_fields(name, value, file)
    try:
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    except KeyError:
        missing = ", ".join(f"`{field}`" for field in _FIELDS if field not in value)
        raise file.error("entry", f"lacks {missing} in the header", tensor=name) from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _dtype_error(name, dtype, file)
    begin, end = _offsets(name, offsets, file)
    _check_size(name, dtype, shape, end - begin, file)
    return name, dtype, tuple(shape), data_start + begin, end - begin


def _check_fields(name: str, value: Any, file: _File) -> None:
    """Check an entry that has not just the usual three fields; unknown ones are allowed if they are valid JSON."""
    if isinstance(value, Flaw):
        raise file.error(value.rule, f"has a faulty entry in the header: {_flaw_words(value)}", tensor=name)
    if not isinstance(value, dict):
        raise file.error("entry", "has an entry in the header that is not an object", tensor=name)
    for key, item in value.items():
        if key not in _FIELDS:
            flaw = flaw_in([key, item], depth=1)
            if flaw is not None:
                raise file.error(flaw.rule, f"has a faulty entry in the header: {_flaw_words(flaw)}", tensor=name)


def _dtype_error(name: str, dtype: Any, file: _File) -> FormatError:
    return file.error(
        "dtype",
        f"has an unknown dtype {quote(dtype)}" if isinstance(dtype, str) else "has a dtype that is not a string",
        f"known: {', '.join(DTYPES)}",
        tensor=name,
        hint="the file is damaged, or written by a newer version of the format",
    )


def _shown(value: Any) -> str:
    """Return a value of the header for a message, cut to a sane length."""
    if isinstance(value, Flaw):
        return value.what
    if isinstance(value, list):
        more = ", ..." if len(value) > _SHOWN_DIMS else ""
        return f"[{', '.join(_shown(item) for item in value[:_SHOWN_DIMS])}{more}]"
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def _offsets(name: str, offsets: Any, file: _File) -> tuple[int, int]:
    """Check a byte range: two integers, none negative, the end not before the beginning."""
    if not (isinstance(offsets, list) and len(offsets) == 2):
        raise file.error("offsets", "has `data_offsets` that are not two integers", tensor=name)
    begin, end = offsets
    for value in (begin, end):
        if type(value) is not int:
            raise file.error("offsets", f"has an offset that is not an integer: {_shown(value)}", tensor=name)
        if value < 0:
            raise file.error("offsets", f"has a negative offset: {value}", tensor=name)
    if end < begin:
        raise file.error("offset-order", f"ends before it begins: bytes {begin:,} to {end:,}", tensor=name)
    return begin, end


def _check_size(name: str, dtype: str, shape: Any, nbytes: int, file: _File) -> None:
    """Check the shape, and that its elements take exactly the bytes of the range."""
    if not isinstance(shape, list):
        raise file.error("shape", "has a shape that is not a list of integers", tensor=name)
    bits = DTYPES[dtype].bits
    for dim in shape:
        if type(dim) is not int:
            raise file.error("shape", f"has a dimension that is not an integer: {_shown(dim)}", tensor=name)
        if dim < 0:
            raise file.error("shape", f"has a negative dimension: {dim}", tensor=name)
        bits *= dim
        # Checked at every step, as the library does: a long list of large numbers must not grow without bound.
        if bits >= _BIT_LIMIT or dim >= _BIT_LIMIT // 8:
            raise file.error("overflow", f"has an absurd shape: {_shown(shape)}", tensor=name)
    if bits % 8:
        what = f"does not fill its last byte: {dtype} {_shown(shape)} takes {bits:,} bits"
        raise file.error("sub-byte", what, tensor=name)
    if bits != 8 * nbytes:
        raise file.error(
            "size",
            "has a shape and dtype that do not fit its bytes",
            f"expected: {bits // 8:,} bytes for {dtype} {_shown(shape)}",
            f"got: {nbytes:,} bytes",
            tensor=name,
            expected=bits // 8,
            got=nbytes,
        )


def _check_cover(tensors: list[TensorInfo], data_start: int, file: _File) -> None:
    """Check that the tensors, in order, cover the file from its header to its end: no gap, no overlap, no rest."""
    end = data_start
    for i, tensor in enumerate(tensors):
        if tensor.offset != end:
            raise _misplaced(tensors, i, data_start, file)
        end += tensor.nbytes
    if end == file.size:
        return
    lines = (f"expected: {end:,} bytes", f"got: {file.size:,} bytes")
    if end < file.size:
        raise file.error("trailing-bytes", "has bytes after its last tensor", *lines, expected=end, got=file.size)
    first = next(tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > file.size)
    what = "lies beyond the end of the file: truncated or incomplete download"
    raise file.error("truncated", what, *lines, tensor=first, hint=_INCOMPLETE, expected=end, got=file.size)


def _misplaced(tensors: list[TensorInfo], i: int, data_start: int, file: _File) -> FormatError:
    """Return the error for the tensor ``i``, which does not begin where the one before it ends."""
    tensor, begin = tensors[i], tensors[i].offset - data_start
    if i == 0:
        what = f"is the first, yet begins at byte {begin:,} of the data instead of 0"
        return file.error("first-offset", what, tensor=tensor.name)
    before = tensors[i - 1]
    end = before.offset + before.nbytes - data_start
    lines = (f"{quote(before.name)} ends at byte {end:,} of the data, {quote(tensor.name)} begins at byte {begin:,}",)
    rule, what = ("overlap", "overlaps") if begin < end else ("gap", "leaves a gap after")
    return file.error(rule, f"{what} tensor {quote(before.name)}", *lines, tensor=tensor.name, other=before.name)
