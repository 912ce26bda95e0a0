"""The blocks of all experts of all tensors in one row: place by place in (tensor, block, expert) order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

Array = Any


class Shaped(Protocol):
    """What has blocks of experts: an array ``(experts, blocks)`` of norms."""

    @property
    def norms(self) -> Array:
        """The array."""


def joined(arrays: Sequence[Array], dtype: Any) -> Array:
    """Return arrays one after the other; an empty one of no arrays."""
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def row_of(arrays: Sequence[Array], dtype: Any) -> Array:
    """Return arrays ``(experts, blocks)`` of all tensors in one row."""
    row = np.empty(sum(array.size for array in arrays), dtype)
    start = 0
    for array in arrays:
        row[start : start + array.size] = array.T.ravel()
        start += array.size
    return row


def full_row(tensors: Iterable[Shaped], value: int, dtype: Any) -> Array:
    """Return a row of one value."""
    return np.full(sum(tensor.norms.size for tensor in tensors), value, dtype)


def parts(tensors: Iterable[Shaped], row: Array, width: int = 1) -> list[Array]:
    """Return the parts ``(blocks, experts)`` of a row, one for each tensor; they share its memory.

    With ``width`` values for each place, a part is ``(blocks, experts * width)``.
    """
    found, start = [], 0
    for tensor in tensors:
        experts, blocks = tensor.norms.shape
        size = experts * blocks * width
        found.append(row[start : start + size].reshape(blocks, experts * width))
        start += size
    return found


def spread_out(values: Sequence[Any], tensors: Sequence[Shaped], dtype: Any) -> Array:
    """Return a row that has a value of each tensor at all of its places."""
    return np.repeat(np.asarray(values, dtype), [tensor.norms.size for tensor in tensors])


def copied_places(sames: Iterable[Array | None], tensors: Iterable[Shaped]) -> tuple[Array, Array]:
    """Return the places whose content is another's, and these others; int64.

    Parameters
    ----------
    sames
        Per tensor the first expert with the same content at the same place, ``(experts, blocks)``; None: itself.
    """
    copies, originals, start = [], [], 0
    for same, tensor in zip(sames, tensors, strict=True):
        experts, blocks = tensor.norms.shape
        if same is not None:
            first = np.asarray(same, np.int64).T
            at = np.flatnonzero(first != np.arange(experts))
            copies.append(start + at)
            originals.append(start + at // experts * experts + first.ravel()[at])
        start += experts * blocks
    return joined(copies, np.int64), joined(originals, np.int64)
