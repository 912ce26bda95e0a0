"""Tensors as they lie in a file: a small reader of its own, so that the tool is not judged by its own reader."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support.cases.errors import CheckError

INDEX = "model.safetensors.index.json"
_NUMPY: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One stored tensor: its header dtype, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def is_float(self) -> bool:
        """Whether it holds floating point numbers."""
        return self.dtype.startswith(("F", "BF"))

    def array(self) -> np.ndarray[Any, Any]:
        """Return the elements: float64 for floating point, the stored integers otherwise."""
        flat = np.frombuffer(self.data, dtype=np.dtype(_NUMPY[self.dtype]))
        return (flat.astype(np.float64) if self.is_float else flat).reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name.

    Raises
    ------
    CheckError
        If the file is not one, or a tensor's bytes do not fit its shape.
    """
    data = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length].decode())
    except (struct.error, ValueError) as error:
        raise CheckError(f"{path.name} is not a safetensors file: {error}") from error
    body = data[8 + length :]
    return {name: _tensor(path, name, entry, body) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: Mapping[str, Any], body: bytes) -> Tensor:
    start, stop = entry["data_offsets"]
    tensor = Tensor(dtype=entry["dtype"], shape=tuple(entry["shape"]), data=body[start:stop])
    size = np.dtype(_NUMPY[tensor.dtype]).itemsize if tensor.dtype in _NUMPY else 1
    if tensor.dtype in _NUMPY and len(tensor.data) != math.prod(tensor.shape) * size:
        raise CheckError(f"{path.name}: {name} has {len(tensor.data)} bytes, its shape is {tensor.shape}")
    return tensor


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, in the order given."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values()))


def checkpoint_problems(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a folder as a whole checkpoint: what does not open, what is absent or left over."""
    shards = sorted(path for path in folder.rglob("*.safetensors"))
    yield from (f"{shard.relative_to(folder)} does not open: {e}" for shard in shards if (e := _opening_error(shard)))
    if not shards:
        yield "there is no safetensors file in the output"
    names = {str(shard.relative_to(folder)) for shard in shards}
    named = _indexed_files(folder)
    if named is None:
        if len(names) > 1:
            yield f"several weight files and no index: {sorted(names)}"
        return
    if absent := sorted(named - names):
        yield f"{INDEX} names absent files: {absent}"
    if extra := sorted(names - named):
        yield f"weight files that {INDEX} does not name: {extra}"


def _opening_error(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except (SafetensorError, OSError, ValueError) as error:
        return str(error)
    return None


def _indexed_files(folder: Path) -> set[str] | None:
    index = folder / INDEX
    if not index.exists():
        return None
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of an output folder, each from the file that the index says.

    Raises
    ------
    CheckError
        If the folder, the index and the files do not agree.
    """
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_safetensors(shard).items():
            if name in found:
                raise CheckError(f"{name} is stored twice")
            found[name] = (shard.name, tensor)
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        stored = {name: file for name, (file, _) in found.items()}
        if weight_map != stored:
            raise CheckError(f"{INDEX} and the files disagree: {sorted(weight_map.items() ^ stored.items())}")
    return {name: tensor for name, (_, tensor) in found.items()}
