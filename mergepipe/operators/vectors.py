"""Vectors of a tensor's tiles in float64, their inner products, and sums of vectors with coefficients per part.

Everything is cut into chunks at places that depend on the block alone, and sums within a chunk are numpy's pairwise
ones over contiguous elements (no BLAS, no fused multiply-add): the bits depend neither on the tiles nor on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs

CHUNK_ELEMENTS = 1 << 14
"""Elements that are widened to float64 together: 128 KiB for each vector, so that a few vectors stay in the cache."""

Fill = Callable[[BlockInputs, Array], bool]
"""Writes the vectors of a tile, float64 ``(vectors, n)``; returns whether any may differ from zero."""


def cut(inputs: BlockInputs, start: int, stop: int) -> BlockInputs:
    """Return a part of a tile, from one element of it up to another; what it shares with the tile is not copied."""
    if start == 0 and stop == inputs.shape[0]:
        return inputs

    def part(array: Array | None) -> Array | None:
        return None if array is None else array[start:stop]

    whole = inputs.scratch
    return BlockInputs(  # `dataclasses.replace` takes several times as long
        xp=inputs.xp,
        base=part(inputs.base),
        experts=tuple(map(part, inputs.experts)),
        deltas=tuple(map(part, inputs.deltas)),
        shape=(stop - start,),
        dtype=inputs.dtype,
        non_finite=inputs.non_finite,
        scratch=lambda number: whole(number)[: stop - start],
        start=inputs.start + start,
        block=inputs.block,
        row_elements=inputs.row_elements,
        memo=inputs.memo,
    )


def fill_deltas(experts: Sequence[int]) -> Fill:
    """Return what writes the experts' deltas: zeros where an expert has none."""

    def fill(inputs: BlockInputs, rows: Array) -> bool:
        present = [inputs.has(expert) for expert in experts]
        if any(present):
            for row, expert, there in zip(rows, experts, present, strict=True):
                row[...] = inputs.delta(expert, 0) if there else 0.0
        return any(present)

    return fill


def fill_values(slots: Sequence[int]) -> Fill:
    """Return what writes the values of slots (0: the base, i + 1: expert i)."""

    def fill(inputs: BlockInputs, rows: Array) -> bool:
        for row, slot in zip(rows, slots, strict=True):
            stored = inputs.experts[slot - 1] if slot else inputs.base
            row[...] = inputs.value(slot - 1, 0) if stored is None else stored  # widened at once where it is narrow
        return True

    return fill


def chunks(tiles: Iterable[BlockInputs], count: int, fill: Fill, size: int) -> Iterator[tuple[int, Array]]:
    """Cut the vectors of a block into chunks of ``size`` elements, wherever its tiles begin.

    Yields
    ------
    (int, array)
        The flat index of the first element and the vectors, float64 ``(count, n)``, each contiguous, and valid until
        the next are asked for; ``n`` is less than ``size`` at the end of a block. Chunks of zeros may be left out.
    """
    rows, held, first, nonzero = np.empty((count, size)), 0, 0, False
    for tile in tiles:
        length, at = tile.shape[0], 0
        while at < length:
            stop = min(length, at + size - held)
            if not held:
                first, nonzero = tile.start + at, False
            part = rows[:, held : held + stop - at]
            if fill(cut(tile, at, stop), part):
                nonzero = True
            else:
                part[...] = 0.0
            held += stop - at
            at = stop
            if held == size:
                if nonzero:
                    yield first, rows
                held = 0
    if held and nonzero:
        yield first, rows[:, :held]


def inner_products(rows: Array, scratch: Array | None = None) -> Array:
    """Return the inner products of vectors along the last axis.

    Parameters
    ----------
    rows
        float64 ``(count, ..., n)``, contiguous along the last axis.
    scratch
        Room for as many numbers, or None.

    Returns
    -------
    array
        float64 ``(count * (count + 1) / 2, ...)``: vectors 0 and 0, 0 and 1, ..., 1 and 1, ...
    """
    count = rows.shape[0]
    products = np.empty_like(rows) if scratch is None else scratch
    found = []
    for first in range(count):
        part = np.multiply(rows[first], rows[first:], out=products[: count - first])
        found.append(np.add.reduce(part, axis=-1))
    return np.concatenate(found)


def symmetric(packed: Array, count: int) -> Array:
    """Return packed inner products, ``(count * (count + 1) / 2, ...)``, as the matrix ``(count, count, ...)``."""
    matrix = np.empty((count, count, *packed.shape[1:]))
    at = 0
    for first in range(count):
        row = packed[at : at + count - first]
        matrix[first, first:] = row
        matrix[first:, first] = row
        at += count - first
    return matrix


def gram_of_rows(inputs: BlockInputs, experts: Sequence[int]) -> Array:
    """Return the Gram matrices of the experts' deltas (values without a base), one for each row of a tile.

    Returns
    -------
    array
        float64 ``(experts, experts, rows)``.
    """
    count, length = len(experts), inputs.row_elements
    rows = inputs.shape[0] // length
    packed = np.zeros((count * (count + 1) // 2, rows))
    size = max(1, CHUNK_ELEMENTS // length) * length
    for first, vectors in chunks([inputs], count, fill_deltas(experts), min(size, inputs.shape[0])):
        row = (first - inputs.start) // length
        number = vectors.shape[1] // length
        packed[:, row : row + number] = inner_products(vectors.reshape(count, number, length))
    return symmetric(packed, count)


def add_periods(total: Array, values: Array, start: int) -> None:
    """Add values to sums per column, in order: the element at flat index i belongs to column ``i % columns``.

    Parameters
    ----------
    total
        float64 ``(..., columns)``.
    values
        float64 ``(..., n)``; the first has the flat index ``start``.
    """
    columns = total.shape[-1]
    for begin, stop, offset in periods(start, values.shape[-1], columns):
        part = values[..., begin:stop]
        if stop - begin < columns:
            total[..., offset : offset + stop - begin] += part
        else:
            total += np.add.reduce(part.reshape(*part.shape[:-1], -1, columns), axis=-2)


def scale_periods(values: Array, factors: Array, start: int) -> None:
    """Multiply values ``(n,)``, of which the first has the flat index ``start``, by their columns' ``(columns,)``."""
    columns = factors.shape[0]
    for begin, stop, offset in periods(start, values.shape[0], columns):
        if stop - begin < columns:
            values[begin:stop] *= factors[offset : offset + stop - begin]
        else:
            values[begin:stop].reshape(-1, columns)[...] *= factors


def periods(start: int, length: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of flat indices into the end of a period, whole periods at once, and the beginning of one.

    Yields
    ------
    (int, int, int)
        Where the part begins and stops within the range, and its first column.
    """
    offset = start % columns
    head = min(length, (columns - offset) % columns)
    whole = (length - head) // columns * columns
    for begin, stop, column in ((0, head, offset), (head, head + whole, 0), (head + whole, length, 0)):
        if begin < stop:
            yield begin, stop, column
