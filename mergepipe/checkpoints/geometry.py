"""Block geometry: how a tensor is cut into blocks, from its dtype and shape alone.

A block is a contiguous range of whole rows. The same rows of every source make the same block, whatever the dtypes.
"""

from __future__ import annotations

import functools
import math

from mergepipe.dtypes import DTYPES
from mergepipe.values import dataclass

_BYTE_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A way to cut tensors into blocks.

    Attributes
    ----------
    block_elements
        How many elements a block has at most; a row longer than that is a block of its own.
    id
        The number under which the lock names this geometry.
    """

    block_elements: int = 2**18
    id: int = 1

    def __post_init__(self) -> None:
        if self.block_elements < 1:
            raise ValueError(f"a block needs at least one element, not {self.block_elements}")


GEOMETRY_1 = Geometry()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGrid:
    """The blocks of one tensor.

    Attributes
    ----------
    rows
        Rows of the tensor, 0 where it has no elements.
    row_elements
        Elements in a row. A sub-byte dtype has no addressable elements: there a row is one byte and counts as one.
    row_bytes
        Bytes in a row.
    block_rows
        Rows in every block but the last, which may have fewer.
    count
        Number of blocks.
    nbytes
        Bytes of the whole tensor.
    block_bytes
        Bytes of a full block.
    """

    rows: int
    row_elements: int
    row_bytes: int
    block_rows: int
    count: int
    nbytes: int
    block_bytes: int

    def rows_of(self, block: int) -> tuple[int, int]:
        """Return the first row of a block and the row after its last.

        Raises
        ------
        IndexError
            If the tensor has no such block.
        """
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} of a tensor with {self.count} blocks")
        first = block * self.block_rows
        return first, min(first + self.block_rows, self.rows)

    def byte_range(self, block: int) -> tuple[int, int]:
        """Return where a block starts and stops, in bytes from the tensor's first byte.

        Raises
        ------
        IndexError
            If the tensor has no such block.
        """
        first, stop = self.rows_of(block)
        return first * self.row_bytes, stop * self.row_bytes


def grid(dtype: str, shape: tuple[int, ...], geometry: Geometry) -> BlockGrid:
    """Return the blocks of a tensor.

    Parameters
    ----------
    dtype
        Its header name, such as ``BF16``.
    shape
        Its dimensions. The last one is the row; 0-D and 1-D tensors have one row per element.
    geometry
        The block size.
    """
    return _grid(dtype, shape, geometry.block_elements)


@functools.lru_cache(maxsize=1 << 14)  # asked for again and again, and the same for every layer
def _grid(dtype: str, shape: tuple[int, ...], block_elements: int) -> BlockGrid:
    bits = DTYPES[dtype].bits
    elements = math.prod(shape)
    if bits % _BYTE_BITS:
        row_elements, row_bytes, rows = 1, 1, DTYPES[dtype].nbytes(elements)
    else:
        row_elements = shape[-1] if len(shape) > 1 and elements else 1
        row_bytes = row_elements * (bits // _BYTE_BITS)
        rows = elements // row_elements
    block_rows = max(1, block_elements // row_elements)
    return BlockGrid(
        rows=rows,
        row_elements=row_elements,
        row_bytes=row_bytes,
        block_rows=block_rows,
        count=-(-rows // block_rows),
        nbytes=rows * row_bytes,
        block_bytes=block_rows * row_bytes,
    )
