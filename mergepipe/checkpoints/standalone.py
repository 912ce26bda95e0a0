"""Progressive checkpoints (`mergepipe pack`): an expert as codes of its deltas, with the digests of what they code.

Opening one reads `progressive.json` and the headers of the tensors that lie there exactly; what codes hold stays where
it is. The folder may come from anybody: every number is checked against the others, and no name leads out of it.
`docs/formats/progressive-checkpoint.md` has it byte by byte.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.layers import natural_key
from mergepipe.checkpoints.place import GET_AGAIN, Place, opened
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.strictjson import is_encodable
from mergepipe.checkpoints.wording import quote
from mergepipe.digest import DIGEST_SIZE, content_digest, format_digest, parse_digest, source_digest, tensor_digest
from mergepipe.dtypes import DTYPES, is_mergeable
from mergepipe.errors import LockError, SourceError
from mergepipe.values import dataclass

RECORD = "progressive.json"
FOLDER = "tensors"
"""The folder of the files with weights: loaders that take every file of a model's folder find none."""
FORMAT = 1
_LARGEST = 1 << 30
_LONGEST = 300  # of what somebody else's record says in a message
_RANK = 64
_LIMIT = 2**63
_PACK = re.compile(r"[0-9]{5,9}\.planes", re.ASCII)
_EXACT = re.compile(r"exact(-[0-9]{5}-of-[0-9]{5})?\.safetensors", re.ASCII)
_SEAL_START = '\n"seal":"'
_SEAL_BYTES = len(_SEAL_START) + len(format_digest(bytes(DIGEST_SIZE))) + len('"}\n')


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneTensor:
    """What is told of one tensor of the expert.

    Attributes
    ----------
    digest, blocks
        Its tensor digest, and its packed block digests.
    pack
        The name of the file with its code; None for a tensor that lies there exactly.
    seal
        The digest of the header of that file.
    squares
        The square of the norm of each block's delta, as a survey measures it; of a coded tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes
    blocks: bytes
    pack: str | None = None
    seal: bytes = b""
    squares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standalone:
    """What makes a checkpoint a progressive one.

    Attributes
    ----------
    code
        The version of the code of its packs.
    block_elements
        Of the block geometry.
    base, expert
        The content digests of the checkpoint that it was packed against, and of the one that it was made from.
    tensors
        By name, in natural order.
    exact
        The names of the files with exact tensors.
    files
        The names of all other files that were put into the folder, with the digests of their bytes.
    """

    code: int
    block_elements: int
    base: bytes
    expert: bytes
    tensors: Mapping[str, StandaloneTensor]
    exact: tuple[str, ...]
    files: Mapping[str, bytes]

    @property
    def own_files(self) -> tuple[str, ...]:
        """The names of all files of the folder that belong to it, in it."""
        weights = [*self.exact, *(tensor.pack for tensor in self.tensors.values() if tensor.pack is not None)]
        return (RECORD, *self.files, *(f"{FOLDER}/{name}" for name in weights))

    def is_coded(self, name: str) -> bool:
        """Return whether a tensor is there as a code alone."""
        return name in self.tensors and self.tensors[name].pack is not None


# --- the record -------------------------------------------------------------------------------------------------------


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    dtype: str
    shape: list[int]
    digest: str
    blocks: str
    pack: str | None = None
    seal: str | None = None
    squares: list[float] | None = None


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    progressive: int
    code: int
    block_elements: int
    base: str
    expert: str
    exact: list[str]
    files: dict[str, str]
    tensors: list[_Tensor]
    seal: str = ""


class _Version(msgspec.Struct):
    progressive: int


def dump_record(value: Standalone) -> bytes:
    """Return the bytes of `progressive.json`: one form for one content, its seal at the end."""
    head = {
        "progressive": FORMAT,
        "code": value.code,
        "block_elements": value.block_elements,
        "base": format_digest(value.base),
        "expert": format_digest(value.expert),
        "exact": list(value.exact),
        "files": {name: format_digest(value.files[name]) for name in sorted(value.files)},
    }
    lines = ",\n".join(_json(_tensor_record(tensor)) for tensor in value.tensors.values())
    body = f'{_json(head)[:-1]},\n"tensors":[\n{lines}\n],'.encode()
    return body + f'{_SEAL_START}{format_digest(content_digest(body))}"}}\n'.encode()


def _tensor_record(tensor: StandaloneTensor) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "digest": format_digest(tensor.digest),
        "blocks": tensor.blocks.hex(),
    }
    if tensor.pack is not None:
        record |= {"pack": tensor.pack, "seal": format_digest(tensor.seal), "squares": list(tensor.squares)}
    return record


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def read_record(place: Place) -> Standalone:
    """Read `progressive.json` of a folder and check it; no other file is looked at.

    Raises
    ------
    SourceError
        If it cannot be read, is damaged, contradicts itself or is of another version.
    """
    with opened(place, RECORD) as (fd, status):
        if status.st_size > _LARGEST:
            raise place.error(f"is too large: {status.st_size:,} bytes", name=RECORD)
        with open(fd, "rb", closefd=False) as file:
            data = file.read()
    return parse_record(data, place)


def parse_record(data: bytes, place: Place) -> Standalone:
    """Return what the bytes of `progressive.json` say; ``place`` is for messages.

    Raises
    ------
    SourceError
        As `read_record`.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).progressive
        if version != FORMAT:
            hint = "a newer mergepipe wrote it: upgrade" if version > FORMAT else GET_AGAIN
            raise place.error(f"has format {version}, expected {FORMAT}", name=RECORD, hint=hint)
        body, tail = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if tail != f'{_SEAL_START}{format_digest(content_digest(body))}"}}\n'.encode():
            raise _bad(place, "is damaged: its seal is not the digest of what stands before it")
        record = msgspec.json.decode(data, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(place, f"is no record of a progressive checkpoint: {error}") from None
    try:
        return _checked(record, place)
    except LockError as error:  # from the digests
        raise _bad(place, f"is wrong: {error.message[:_LONGEST]}") from None


def _bad(place: Place, what: str) -> SourceError:
    return place.error(what, name=RECORD, hint=GET_AGAIN)


def _checked(record: _Record, place: Place) -> Standalone:
    if record.block_elements < 1 or record.block_elements >= _LIMIT:
        raise _bad(place, f"says that a block has {record.block_elements:,} elements")
    geometry = Geometry(block_elements=record.block_elements)
    tensors: dict[str, StandaloneTensor] = {}
    packs: set[str] = set()
    for wired in record.tensors:
        tensor = _checked_tensor(wired, geometry, place)
        if tensor.name in tensors:
            raise _bad(place, f"has the tensor {quote(tensor.name)} twice")
        if tensor.pack is not None and tensor.pack in packs:
            raise _bad(place, f"has the file {quote(tensor.pack)} for two tensors")
        tensors[tensor.name] = tensor
        packs |= {tensor.pack} if tensor.pack is not None else set()
    if list(tensors) != sorted(tensors, key=natural_key) or not tensors:
        raise _bad(place, "has no tensors, or not in their order")
    for name in record.exact:
        if not _EXACT.fullmatch(name):
            raise _bad(place, f"names a file {quote(name)}, expected a name such as `exact.safetensors`")
    if len(set(record.exact)) != len(record.exact):
        raise _bad(place, "names a file twice")
    for name in record.files:
        parts = name.split("/")
        if "\0" in name or not is_encodable(name) or any(part in ("", ".", "..") for part in parts):
            raise _bad(place, f"names a file {quote(name[:_LONGEST])}, which is none of its folder")
    expert = parse_digest(record.expert)
    if source_digest((name, tensor.digest) for name, tensor in tensors.items()) != expert:
        raise _bad(place, "is wrong: the digest of the expert does not follow from those of its tensors")
    return Standalone(
        code=record.code,
        block_elements=record.block_elements,
        base=parse_digest(record.base),
        expert=expert,
        tensors=tensors,
        exact=tuple(record.exact),
        files={name: parse_digest(digest) for name, digest in record.files.items()},
    )


def _checked_tensor(wired: _Tensor, geometry: Geometry, place: Place) -> StandaloneTensor:
    named = f"tensor {quote(wired.name)}"
    shape = tuple(wired.shape)
    if not is_encodable(wired.name) or wired.dtype not in DTYPES:
        raise _bad(place, f"has a {named} of dtype {quote(wired.dtype)}, which is none")
    if len(shape) > _RANK or any(not 0 <= size < _LIMIT for size in shape) or math.prod(shape) >= _LIMIT // 64:
        raise _bad(place, f"has a {named} of a shape that no tensor has")
    layout = grid(wired.dtype, shape, geometry)
    if len(wired.blocks) != layout.count * 2 * DIGEST_SIZE or not re.fullmatch(r"[0-9a-f]*", wired.blocks, re.ASCII):
        raise _bad(place, f"is wrong: {named} has {layout.count:,} blocks, and not a digest for each")
    blocks, digest = bytes.fromhex(wired.blocks), parse_digest(wired.digest)
    if tensor_digest(wired.dtype, shape, blocks) != digest:
        raise _bad(place, f"is wrong: the digest of {named} does not follow from those of its blocks")
    squares, seal = tuple(wired.squares or ()), b""
    if wired.pack is not None:
        if not _PACK.fullmatch(wired.pack) or wired.seal is None or not is_mergeable(wired.dtype):
            raise _bad(place, f"is wrong: {named} cannot have the code {quote(wired.pack)}")
        if len(squares) != layout.count or any(not 0 <= square < math.inf for square in squares):
            raise _bad(place, f"is wrong: {named} has {layout.count:,} blocks, and not the norm of each")
        seal = parse_digest(wired.seal)
    elif wired.seal is not None or wired.squares is not None:
        raise _bad(place, f"is wrong: {named} has no code, and a seal or norms of one")
    return StandaloneTensor(
        name=wired.name, dtype=wired.dtype, shape=shape, digest=digest, blocks=blocks,
        pack=wired.pack, seal=seal, squares=squares,
    )  # fmt: skip


# --- what the files hold ----------------------------------------------------------------------------------------------


def coded_info(tensor: StandaloneTensor, file: int) -> TensorInfo:
    """Return a coded tensor as one of a checkpoint's; its bytes are nowhere, ``file`` has its code."""
    nbytes = DTYPES[tensor.dtype].nbytes(math.prod(tensor.shape))
    return TensorInfo(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, file=file, offset=0, nbytes=nbytes
    )


def exact_problems(value: Standalone, found: Sequence[TensorInfo]) -> Iterator[str]:
    """Yield what is wrong with the tensors that the exact files hold, in words."""
    wanted = {name: tensor for name, tensor in value.tensors.items() if tensor.pack is None}
    there: set[str] = set()
    for info in found:
        tensor = wanted.get(info.name)
        if tensor is None or info.name in there:
            yield f"holds the tensor {quote(info.name)}, which `{RECORD}` does not place there, or has twice"
        elif (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
            yield f"holds the tensor {quote(info.name)} with another dtype or shape than `{RECORD}` says"
        there.add(info.name)
    for name in wanted:
        if name not in there:
            yield f"lacks the tensor {quote(name)}"
