"""The distance of two tensors, streamed: relative L2, largest difference, cosine."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.digest import tensor_digest
from mergepipe.dtypes import DTYPES
from mergepipe.errors import MergepipeError
from mergepipe.values import dataclass

Json = dict[str, Any]
CHUNK_ELEMENTS = 2**18
"""Elements that are in memory at a time, for each of the two tensors."""
NOT_THERE = "the weights are not in the files"
_BYTE_BITS = 8


class WeightsError(MergepipeError):
    """Weights are not available, not those of the record, or not comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two tensors of one shape lie apart; all in float64.

    Attributes
    ----------
    relative_l2
        ||new - old|| / ||old||, Frobenius norms; None where old is zero and new is not.
    max_abs
        The largest absolute difference of an element.
    cosine
        Of the angle between old and new; None where either is zero.
    norm_old, norm_new
        Their Frobenius norms.
    dtypes
        Their dtypes by header name.
    """

    relative_l2: float | None
    max_abs: float
    cosine: float | None
    norm_old: float
    norm_new: float
    dtypes: tuple[str, str]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {key: getattr(self, key) for key in _KEYS}

    @staticmethod
    def nothing() -> Json:
        """Return the JSON form of a tensor that has none."""
        return dict.fromkeys(_KEYS)


_KEYS = ("relative_l2", "max_abs", "cosine", "norm_old", "norm_new")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStream:
    """A tensor in an open file, and the digest that it must have."""

    fd: int
    path: Path
    info: TensorInfo
    digest: bytes
    geometry: Geometry

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes in pieces of at most `CHUNK_ELEMENTS` elements, from the first byte to the last.

        Raises
        ------
        WeightsError
            When all were read, and they are not those of the digest; or if they cannot be read.
        """
        layout = grid(self.info.dtype, self.info.shape, self.geometry)
        ends = iter([layout.byte_range(block)[1] for block in range(layout.count)])
        size = CHUNK_ELEMENTS * DTYPES[self.info.dtype].bits // _BYTE_BITS
        hasher, end, blocks = blake3(), next(ends, 0), []
        for start in range(0, self.info.nbytes, size):
            data = self._read(start, min(size, self.info.nbytes - start))
            at = 0
            while at < len(data):
                stop = min(len(data), end - start)
                hasher.update(data[at:stop])
                at = stop
                if start + at == end:
                    blocks.append(hasher.digest())
                    hasher, end = blake3(), next(ends, 0)
            yield data
        if tensor_digest(self.info.dtype, self.info.shape, b"".join(blocks)) != self.digest:
            raise WeightsError(f"`{self.path}` holds other weights than the record says")

    def _read(self, start: int, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = os.pread(self.fd, count, self.info.offset + start)
            except OSError as error:
                raise WeightsError(f"cannot read `{self.path}`: {error.strerror}") from None
            if not part:
                raise WeightsError(f"`{self.path}` ends too early")
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)


def distance(old: Sequence[TensorStream], new: Sequence[TensorStream], advance: Callable[[int], None]) -> Distance:
    """Return the distance of two tensors, each of which may lie in one of several files.

    Raises
    ------
    WeightsError
        If there is none: other shapes, a dtype without numbers, or no file has the weights of the record.
    """
    last = WeightsError(NOT_THERE)
    for before, after in itertools.product(old, new):
        _check(before.info, after.info)
        try:
            return _distance(before, after, advance)
        except WeightsError as error:
            last = error
    raise last


def _check(old: TensorInfo, new: TensorInfo) -> None:
    if old.shape != new.shape:
        raise WeightsError(f"the shapes differ: {_shape(old)} and {_shape(new)}")
    for info in (old, new):
        if _numpy_dtype(info.dtype) is None:
            raise WeightsError(f"there are no numbers for the dtype {info.dtype}")


def _shape(info: TensorInfo) -> str:
    return " x ".join(map(str, info.shape)) or "one element"


def _distance(old: TensorStream, new: TensorStream, advance: Callable[[int], None]) -> Distance:
    squares = np.zeros(3)  # of old, of new, of their difference
    product, largest = 0.0, 0.0
    with np.errstate(all="ignore"):  # what is not finite shows in the result
        for before, after in zip(old.chunks(), new.chunks(), strict=True):
            x, y = _numbers(before, old.info.dtype), _numbers(after, new.info.dtype)
            delta = y - x
            squares += [_square(x), _square(y), _square(delta)]
            product += float(np.sum((x * np.conj(y)).real))
            largest = float(np.maximum(largest, np.max(np.abs(delta), initial=0.0)))  # NaN stays
            advance(len(before) + len(after))
    norms = [math.sqrt(square) for square in squares]
    both = norms[0] * norms[1]
    return Distance(
        relative_l2=norms[2] / norms[0] if norms[0] else None if norms[2] else 0.0,
        max_abs=largest,
        cosine=(max(-1.0, min(1.0, product / both)) if math.isfinite(both) else math.nan) if both else None,
        norm_old=norms[0],
        norm_new=norms[1],
        dtypes=(old.info.dtype, new.info.dtype),
    )


def _square(values: NDArray[Any]) -> float:
    return float(np.sum(np.square(np.abs(values))))


def _numbers(data: bytes, dtype: str) -> NDArray[Any]:
    """Return the values of a tensor's bytes as float64, complex ones as complex128."""
    found = _numpy_dtype(dtype)
    assert found is not None
    values = np.frombuffer(data, dtype=found)
    return values.astype(np.complex128 if found.kind == "c" else np.float64)


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return the numpy dtype of a header dtype, little-endian; None where numpy and ml_dtypes have none."""
    import ml_dtypes

    plain = {
        "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
    }  # fmt: skip
    if name in plain:
        return np.dtype(plain[name])
    extended = {
        "BF16": "bfloat16",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
    found = getattr(ml_dtypes, extended.get(name, ""), None)
    return None if found is None else np.dtype(found)
