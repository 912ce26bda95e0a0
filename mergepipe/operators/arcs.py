"""Arcs between two vectors: weights of a pair from its inner products, sums down columns, results row by row."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from mergepipe.operators.angles import arc_weights
from mergepipe.operators.contract import Array, BlockInputs, Statistic, StatisticValues
from mergepipe.operators.gram import copied
from mergepipe.operators.vectors import (
    CHUNK_ELEMENTS,
    add_periods,
    chunks,
    fill_deltas,
    gram_of_rows,
    scale_periods,
)
from mergepipe.values import dataclass

# Norms are taken as at least this. Source: mergekit's NuSLERP, which divides vectors by it.
LEAST_NORM = 1e-7
# 1 - c^2 up to this means that the vectors are parallel or opposite: float32 cosines, as mergekit has them, round to 1.
COLINEAR = 2.0**-24

# Bytes that precede the sums of a block: the first column.
_HEADER = 8
_SUMS = 3


def pair_weights(
    first: Array, both: Array, second: Array, t: float, work: str, colinear: float = COLINEAR
) -> tuple[Array, Array]:
    """Return the weights of pairs of vectors, rounded to the work dtype, from their inner products.

    Parameters
    ----------
    first, both, second
        ``v_0 . v_0``, ``v_0 . v_1`` and ``v_1 . v_1``; float64, of any one shape.
    colinear
        Up to which ``1 - c^2`` the weights are linear.
    """
    usable = np.isfinite(first) & np.isfinite(both) & np.isfinite(second)
    first, both, second = (np.where(usable, product, 1.0) for product in (first, both, second))
    cosines = both / (np.maximum(np.sqrt(first), LEAST_NORM) * np.maximum(np.sqrt(second), LEAST_NORM))
    cosines = np.clip(cosines, -1.0, 1.0)
    weights = arc_weights(cosines, t, 1.0 - cosines * cosines <= colinear)
    return weights[0].astype(work), weights[1].astype(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnProducts(Statistic):
    """Sums of two vectors' products down the columns of a block, ``i % columns`` for the element of flat index i.

    Packed as an int64, the first column, and float64 ``(3, n)``: the sums of n columns from that one on, cyclically.
    They are large beside a block of few rows; float32 would halve them and let results depend on the size of blocks.
    """

    name: ClassVar = "column_products"
    version: ClassVar = 1
    deltas_only: ClassVar = True
    positional: ClassVar = True
    slots: tuple[int, ...]
    columns: int

    def settings(self) -> tuple[Any, ...]:
        """Return the number of columns."""
        return (self.columns,)

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the sums of a block; see `Statistic.measure`."""
        experts = [slot - 1 for slot in self.slots if slot]
        size = max(1, CHUNK_ELEMENTS // self.columns) * min(self.columns, CHUNK_ELEMENTS)
        total = np.zeros((_SUMS, self.columns))
        begin = stop = 0
        for start, vectors in chunks(tiles, len(experts), fill_deltas(experts), size):
            first, second = vectors
            add_periods(total, np.stack((first * first, first * second, second * second)), start)
            begin, stop = (begin if stop else start), start + first.size
        offset, number = (0, self.columns) if stop - begin >= self.columns else (begin % self.columns, stop - begin)
        return _packed(
            np.concatenate([total[:, part] for part in _cyclic(offset, number, self.columns)], axis=1), offset
        )


def _cyclic(offset: int, number: int, columns: int) -> tuple[slice, slice]:
    """Return where ``number`` columns from one on lie: up to the last, and from the first."""
    end = min(offset + number, columns)
    return slice(offset, end), slice(0, offset + number - end)


def _packed(sums: Array, offset: int) -> bytes:
    return offset.to_bytes(_HEADER, "little") + bytes(sums.astype("<f8").tobytes())


def column_products(columns: int, slots: Sequence[bool]) -> Generator[Sequence[Statistic], StatisticValues, Array]:
    """Ask for the sums of the products of two experts down the columns; return them, float64 ``(3, columns)``."""
    total = np.zeros((_SUMS, columns))
    read = tuple(expert + 1 for expert in (0, 1) if slots[expert + 1])
    if len(read) < 2:  # without one of the two every product with it is zero, and the other's do not matter
        yield ()
        return total
    statistic = ColumnProducts(slots=((0, *read) if slots[0] else read), columns=columns)
    values = yield (statistic,)
    return _folded(values[statistic], total)


def _folded(blocks: Iterable[bytes], total: Array) -> Array:
    for block in blocks:
        offset = int.from_bytes(block[:_HEADER], "little")
        sums = np.frombuffer(block, "<f8", offset=_HEADER).reshape(_SUMS, -1)
        at = 0
        with np.errstate(invalid="ignore"):  # infinities of either sign, where inputs have them
            for part in _cyclic(offset, sums.shape[1], total.shape[1]):
                length = part.stop - part.start
                total[:, part] += sums[:, at : at + length]
                at += length
    return total


def blended_rows(inputs: BlockInputs, t: float, work: str) -> Array:
    """Return a tile whose rows are interpolated each on its own."""
    gram = gram_of_rows(inputs, (0, 1))
    weights = pair_weights(gram[0, 0], gram[0, 1], gram[1, 1], t, work)
    length = inputs.row_elements

    def scale(values: Array, factors: Array) -> None:
        values.reshape(-1, length)[...] *= factors[:, None]

    return _blended(inputs, weights, scale)


def blended_columns(inputs: BlockInputs, weights: tuple[Array, Array]) -> Array:
    """Return a tile whose columns are interpolated each on its own."""
    return _blended(inputs, weights, lambda values, factors: scale_periods(values, factors, inputs.start))


def _blended(inputs: BlockInputs, weights: tuple[Array, Array], scale: Any) -> Array:
    total = None
    for expert, factors in enumerate(weights):
        if not inputs.has(expert):
            continue
        term = inputs.delta(expert, 0 if total is None else 1)
        scale(term, factors)
        total = term if total is None else np.add(total, term, out=total)
    if total is None:
        return copied(inputs, inputs.base)
    return total if inputs.base is None else np.add(total, inputs.base, out=total)
