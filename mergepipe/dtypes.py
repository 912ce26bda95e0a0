"""The dtypes of the safetensors format: sizes, numpy equivalents, and what may be done with them.

Every dtype can be copied; the four in `MERGEABLE` can be merged. Sub-byte dtypes (F4, F6) have no numpy
equivalent here and are moved as bytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One dtype of the format.

    Attributes
    ----------
    name
        The name in a safetensors header, such as ``BF16``.
    bits
        Size of one element in bits.
    long_name
        The name in ``config.json`` and in a Mergefile, such as ``bfloat16``; None where neither uses one.
    is_float
        Whether it is a floating point type (of any size).
    """

    name: str
    bits: int
    long_name: str | None = None
    is_float: bool = False

    def nbytes(self, elements: int) -> int:
        """Return the bytes that ``elements`` elements take (rounded up to a byte)."""
        return (elements * self.bits + 7) // 8


_TABLE = (
    DType(name="BOOL", bits=8, long_name="bool"),
    DType(name="F4", bits=4, is_float=True),
    DType(name="F6_E2M3", bits=6, is_float=True),
    DType(name="F6_E3M2", bits=6, is_float=True),
    DType(name="U8", bits=8, long_name="uint8"),
    DType(name="I8", bits=8, long_name="int8"),
    DType(name="F8_E5M2", bits=8, long_name="float8_e5m2", is_float=True),
    DType(name="F8_E4M3", bits=8, long_name="float8_e4m3fn", is_float=True),
    DType(name="F8_E8M0", bits=8, long_name="float8_e8m0fnu", is_float=True),
    DType(name="F8_E4M3FNUZ", bits=8, long_name="float8_e4m3fnuz", is_float=True),
    DType(name="F8_E5M2FNUZ", bits=8, long_name="float8_e5m2fnuz", is_float=True),
    DType(name="I16", bits=16, long_name="int16"),
    DType(name="U16", bits=16, long_name="uint16"),
    DType(name="F16", bits=16, long_name="float16", is_float=True),
    DType(name="BF16", bits=16, long_name="bfloat16", is_float=True),
    DType(name="I32", bits=32, long_name="int32"),
    DType(name="U32", bits=32, long_name="uint32"),
    DType(name="F32", bits=32, long_name="float32", is_float=True),
    DType(name="C64", bits=64, long_name="complex64"),
    DType(name="F64", bits=64, long_name="float64", is_float=True),
    DType(name="I64", bits=64, long_name="int64"),
    DType(name="U64", bits=64, long_name="uint64"),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
MERGEABLE = ("F64", "F32", "F16", "BF16")
# What `write.dtype` accepts: the names of config.json, with the short forms people use.
WRITE_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "fp64": "F64",
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
}


def is_mergeable(name: str) -> bool:
    """Return whether tensors of this dtype take part in arithmetic."""
    return name in MERGEABLE


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a mergeable header dtype (bfloat16 through ml_dtypes)."""
    import ml_dtypes
    import numpy as np

    table: dict[str, np.dtype[Any]] = {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }
    return table[name]
