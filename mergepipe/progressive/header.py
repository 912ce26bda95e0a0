"""The header of a progressive pack: whose delta it codes, and size, digest and residual of every chunk.

`docs/formats/progressive.md` has it byte by byte.
"""

from __future__ import annotations

import math
import struct
from dataclasses import field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mergepipe.digest import DIGEST_SIZE, content_digest
from mergepipe.errors import PackError
from mergepipe.progressive.levels import CODE_VERSION, LEVELS
from mergepipe.values import dataclass

Array = npt.NDArray[Any]

MAGIC = b"MPPLANES"
_FIXED = struct.Struct("<8sIIQQII32s32s")  # magic, version, stages, block elements, blocks, rank, zero, two digests
FIXED_BYTES = _FIXED.size
_CHUNK_BYTES = 8 + 4 + DIGEST_SIZE  # residual, size, digest
_MAX_RANK = 64
_LIMIT = 2**63
DAMAGED = "remove it: one in the cache is made again from its sources; get it again if it came from elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackGrid:
    """How a tensor is cut into blocks of whole rows.

    Attributes
    ----------
    row_elements
        Elements of a row: of the last dimension, or one in tensors of fewer than two dimensions.
    rows
        Of the tensor.
    block_rows
        Rows of every block but the last.
    blocks
        How many there are.
    """

    row_elements: int
    rows: int
    block_rows: int
    blocks: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block_elements: int) -> PackGrid:
        """Return the grid of a shape."""
        elements = math.prod(shape)
        row_elements = shape[-1] if len(shape) > 1 and elements else 1
        rows = elements // row_elements
        block_rows = max(1, block_elements // row_elements)
        return cls(row_elements=row_elements, rows=rows, block_rows=block_rows, blocks=-(-rows // block_rows))

    def elements_of(self, block: int) -> int:
        """Return how many elements a block has."""
        return (min((block + 1) * self.block_rows, self.rows) - block * self.block_rows) * self.row_elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackHeader:
    """A checked header.

    Attributes
    ----------
    base_digest, expert_digest
        Tensor digests (32 bytes) of the two tensors.
    version
        `CODE_VERSION` of the code.
    shape
        Of both tensors.
    block_elements
        Of the block geometry.
    sizes
        (LEVELS, blocks) uint32: bytes of every chunk.
    digests
        (LEVELS, blocks, 32) uint8: blake3 of every chunk.
    residuals
        (LEVELS, blocks) float64: upper bounds of the norm of what a level lacks; infinite for a block without a code.
    path
        What messages call the file.
    parsed_seal
        The seal as it was read; empty where the header was not.
    """

    base_digest: bytes
    expert_digest: bytes
    shape: tuple[int, ...]
    block_elements: int
    sizes: Array
    digests: Array
    residuals: Array
    version: int = CODE_VERSION
    path: str = ""
    parsed_seal: bytes = b""
    grid: PackGrid = field(init=False)
    _starts: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", PackGrid.of(self.shape, self.block_elements))
        starts = np.zeros(self.sizes.size + 1, np.int64)
        np.cumsum(self.sizes.reshape(-1), out=starts[1:])
        object.__setattr__(self, "_starts", starts + self.nbytes)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return int(self.sizes.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the header, which are those before the first chunk."""
        return header_bytes(len(self.shape), self.blocks)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole pack."""
        return int(self._starts[-1])

    def chunk_range(self, stage: int, block: int) -> tuple[int, int]:
        """Return where in the file the chunk of a block lies; ``stage`` counts from 0, as rows of `sizes` do."""
        at = stage * self.blocks + block
        return int(self._starts[at]), int(self._starts[at + 1])

    def run_range(self, stage: int, blocks: range) -> tuple[int, int]:
        """Return where the chunks of adjacent blocks lie, which is one range."""
        at = stage * self.blocks
        return int(self._starts[at + blocks.start]), int(self._starts[at + blocks.stop])

    def prices(self) -> tuple[Array, Array]:
        """Return (LEVELS, blocks): bytes of every stage's chunks (int64), residuals of every level (float64)."""
        return self.sizes.astype(np.int64), self.residuals

    def is_coded(self, block: int) -> bool:
        """Return whether a block has levels between omitted and exact."""
        return bool(np.isfinite(self.residuals[0, block]))

    def dump(self) -> bytes:
        """Return the header as it is written, its seal included."""
        fixed = _FIXED.pack(
            MAGIC, self.version, LEVELS, self.block_elements, self.blocks, len(self.shape), 0,
            self.base_digest, self.expert_digest,
        )  # fmt: skip
        body = b"".join((
            fixed,
            struct.pack(f"<{len(self.shape)}Q", *self.shape),
            self.residuals.astype("<f8").tobytes(),
            self.sizes.astype("<u4").tobytes(),
            self.digests.tobytes(),
        ))  # fmt: skip
        return body + content_digest(body)

    @property
    def seal(self) -> bytes:
        """The digest of the header, and through it of every chunk (32 bytes)."""
        return self.parsed_seal or self.dump()[-DIGEST_SIZE:]


def header_bytes(rank: int, blocks: int) -> int:
    """Return the size of a header."""
    return FIXED_BYTES + 8 * rank + LEVELS * blocks * _CHUNK_BYTES + DIGEST_SIZE


def stated_header_bytes(fixed: bytes, file_bytes: int, path: str) -> int:
    """Return how long a header is from its first `FIXED_BYTES` bytes.

    Raises
    ------
    PackError
        If it cannot be one, or is longer than the file.
    """
    if len(fixed) < FIXED_BYTES:
        fail(path, f"has {len(fixed)} bytes, and a pack's header at least {FIXED_BYTES}")
    magic, version, stages, _, blocks, rank, zero, _, _ = _FIXED.unpack(fixed[:FIXED_BYTES])
    if magic != MAGIC:
        fail(path, f"is no progressive pack: it begins with {magic!r}, expected {MAGIC!r}")
    if version != CODE_VERSION or stages != LEVELS:
        fail(
            path,
            f"has version {version} with {stages} stages, expected version {CODE_VERSION} with {LEVELS}",
            hint="it was made by another version of mergepipe: make it again with this one",
        )
    if rank > _MAX_RANK or zero != 0:
        fail(path, f"says that its tensor has {rank:,} dimensions, expected at most {_MAX_RANK}")
    size = header_bytes(rank, blocks)
    if size > file_bytes:
        fail(path, f"has {file_bytes:,} bytes, and its header alone should have {size:,}")
    return size


def parse_header(data: bytes, file_bytes: int, path: str) -> PackHeader:
    """Check a header and return it.

    Parameters
    ----------
    data
        The file's first bytes: the header whole. What follows is not looked at.
    file_bytes
        Size of the file.
    path
        What messages call the file.

    Raises
    ------
    PackError
        If it is damaged, or does not fit the file.
    """
    size = stated_header_bytes(data, file_bytes, path)
    if len(data) < size:
        fail(path, f"ends within its header, after {len(data):,} of {size:,} bytes")
    body = size - DIGEST_SIZE
    if content_digest(data[:body]) != data[body:size]:
        fail(path, "has a damaged header: its digest is another one than the header's last 32 bytes")
    _, version, _, block_elements, blocks, rank, _, base, expert = _FIXED.unpack(data[:FIXED_BYTES])
    shape = struct.unpack_from(f"<{rank}Q", data, FIXED_BYTES)
    _check_shape(path, shape, block_elements, blocks)
    at, count = FIXED_BYTES + 8 * rank, LEVELS * blocks
    sizes = np.frombuffer(data, "<u4", count, at + 8 * count).reshape(LEVELS, blocks)
    residuals = np.frombuffer(data, "<f8", count, at).reshape(LEVELS, blocks)
    digests = np.frombuffer(data, np.uint8, DIGEST_SIZE * count, at + 12 * count).reshape(LEVELS, blocks, DIGEST_SIZE)
    _check_chunks(path, sizes, residuals)
    header = PackHeader(
        base_digest=base,
        expert_digest=expert,
        version=version,
        shape=shape,
        block_elements=block_elements,
        sizes=sizes.astype(np.uint32),
        digests=digests,
        residuals=residuals.astype(np.float64),
        path=path,
        parsed_seal=data[body:size],
    )
    if header.file_bytes != file_bytes:
        fail(path, f"has {file_bytes:,} bytes, its header speaks of {header.file_bytes:,}")
    return header


def _check_shape(path: str, shape: tuple[int, ...], block_elements: int, blocks: int) -> None:
    elements = math.prod(shape)
    if elements >= _LIMIT or not 0 < block_elements < _LIMIT:
        fail(path, f"has a shape of {elements:,} elements in blocks of {block_elements:,}, which no tensor has")
    expected = PackGrid.of(shape, block_elements).blocks
    if expected != blocks:
        fail(path, f"has {blocks:,} blocks, expected {expected:,} of the shape {' x '.join(map(str, shape))}")


def _check_chunks(path: str, sizes: Array, residuals: Array) -> None:
    if not residuals.size:
        return
    if not np.minimum.reduce(residuals, axis=None) >= 0:  # NaN is not
        fail(path, "has a residual norm that is negative or not a number")
    if (residuals[1:] > residuals[:-1]).any():
        fail(path, "has residual norms that grow with the level")
    is_finite = np.maximum.reduce(residuals[0]) < np.inf  # and so are those of deeper levels
    if is_finite and sizes.all():
        return
    if (np.isinf(residuals).any(axis=0) & (sizes.any(axis=0) | ~np.isinf(residuals[-1]))).any():
        fail(path, "has chunks of blocks that are said to have none")
    if (sizes.any(axis=0) != sizes.all(axis=0)).any():
        fail(path, "has a block with chunks of some stages only")


def fail(path: str, what: str, *, hint: str = DAMAGED, **facts: Any) -> NoReturn:
    """Raise the error for a pack that cannot be used; ``what`` follows the name of the file."""
    raise PackError(f"`{path}` {what}", hint=hint, path=path, **facts)
