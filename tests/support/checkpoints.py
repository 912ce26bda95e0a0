"""Checkpoints for tests: written and read by code of their own, independent of mergepipe.

Arrays are numpy arrays; bfloat16 and float8 come from ml_dtypes. A tensor may also be given raw, as
``(dtype name, shape, bytes)``, for dtypes that numpy lacks.
"""

from __future__ import annotations

import itertools
import json
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

RawTensor: TypeAlias = tuple[str, tuple[int, ...], bytes]
Tensor: TypeAlias = NDArray[Any] | RawTensor

_NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
_HEADER_NAMES = {np.dtype(dtype): name for name, dtype in _NUMPY.items()}


def as_dtype(name: DTypeLike) -> np.dtype[Any]:
    """Return a numpy dtype from a header name (``BF16``), ``bfloat16``, or whatever numpy takes."""
    found: Any = name
    if isinstance(name, str):
        # ml_dtypes registers its types with numpy, not their names.
        found = _NUMPY.get(name) or getattr(ml_dtypes, name, name)
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype


def header_name(dtype: DTypeLike) -> str:
    """Return the header name of a dtype, such as ``BF16``."""
    return _HEADER_NAMES[as_dtype(dtype)]


def raw_tensor(tensor: Tensor) -> RawTensor:
    """Return (dtype name, shape, little-endian bytes) of an array; a raw tensor passes through."""
    if isinstance(tensor, tuple):
        return tensor
    # tobytes() is C order whatever the array's layout.
    return header_name(tensor.dtype), tuple(tensor.shape), tensor.tobytes()


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a safetensors file with the tensors in the order of the mapping."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    chunks: list[bytes] = []
    at = 0
    for name, tensor in tensors.items():
        dtype, shape, data = raw_tensor(tensor)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *chunks])


def raw_file_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a file with any header (bytes as they are, else as JSON) and any data: for broken files."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> Path:
    """Write one safetensors file (in place, parents made); return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def _split(names: Sequence[str], shards: int) -> list[list[str]]:
    """Split names into ``shards`` runs of nearly equal length, none empty while there are names enough."""
    bounds = [len(names) * i // shards for i in range(shards + 1)]
    return [list(names[a:b]) for a, b in itertools.pairwise(bounds)]


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    side_files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write a checkpoint folder; return it.

    Parameters
    ----------
    shards
        1: ``model.safetensors``. More: ``model-0000i-of-0000n.safetensors`` and an index.
    config
        Content of ``config.json``; None writes none.
    side_files
        Further files by name, text or bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        total = 0
        for i, names in enumerate(_split(list(tensors), shards), 1):
            file = f"model-{i:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names}
            write_safetensors(directory / file, part, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
            total += sum(len(raw_tensor(tensor)[2]) for tensor in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name, content in (side_files or {}).items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def random_tensors(
    seed: int, shapes: Mapping[str, Sequence[int]], dtype: DTypeLike = "float32", *, scale: float = 1.0
) -> dict[str, NDArray[Any]]:
    """Return normal tensors (deviation ``scale``) of the given shapes, the same for the same seed."""
    generator = np.random.default_rng(seed)
    target = as_dtype(dtype)
    return {
        # A number drawn for an empty shape is not an array yet.
        name: np.asarray(generator.standard_normal(tuple(shape)) * scale).astype(np.float32).astype(target)
        for name, shape in shapes.items()
    }


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return all tensors of one file, as fresh arrays."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    start = 8 + size
    arrays: dict[str, NDArray[Any]] = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        flat = np.frombuffer(data[start + begin : start + end], dtype=as_dtype(info["dtype"]))
        arrays[name] = flat.reshape(info["shape"]).copy()
    return arrays


def _weight_files(directory: Path) -> Iterable[tuple[Path, set[str] | None]]:
    """Yield each weight file with the names to take from it (None: all)."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        for path in sorted(directory.glob("*.safetensors")):
            yield path, None
        return
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for file in sorted(set(weight_map.values())):
        yield directory / file, {name for name, where in weight_map.items() if where == file}


def read_checkpoint(directory: Path) -> dict[str, NDArray[Any]]:
    """Return all tensors of a checkpoint folder, sharded or not, in name order."""
    arrays: dict[str, NDArray[Any]] = {}
    for path, names in _weight_files(directory):
        tensors = read_safetensors(path)
        arrays |= {name: array for name, array in tensors.items() if names is None or name in names}
    return dict(sorted(arrays.items()))
