"""The Gram matrix of a tensor's inputs: one pass of statistics, from which all spherical operators have what they need.

Norms, angles, weighted sums and projections of vectors are functions of the vectors' inner products alone; so every
operator of this family is a linear combination whose coefficients follow from one small matrix, however many
dependent passes the published formula takes. Inner products are float64: products of float32 numbers are exact in it,
sums are taken by chunks of a block and folded in block order. Squares of float64 inputs beyond 1e154 overflow it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mergepipe.operators.contract import Array, BlockInputs, Statistic, StatisticValues
from mergepipe.operators.numerics import weighted_sum
from mergepipe.values import dataclass

NO_ANGLE = (
    "Where inner products are not finite (infinite or NaN values that `non_finite` allows, or float64 values beyond "
    "1e154) there are no angles, and the result is linear: "
)
"""What the references of these operators say of such inputs."""

# How many chunks are worked on together: over all vectors up to 2 MiB of float64, and as much for their products.
_CHUNKS_AT_ONCE, _ROW_CHUNKS = 2, 16

GramSteps = Generator[Sequence[Statistic], StatisticValues, Array]
"""Asks for the statistics of a Gram matrix and returns it, float64 ``(vectors, vectors)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GramOfValues(Statistic):
    """The inner products of the inputs' values, packed float64: the first slot with itself, with the second, ..."""

    name: ClassVar = "gram_of_values"
    version: ClassVar = 1
    widens: ClassVar = True
    widens_base: ClassVar = True
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: the numbers follow from the inputs."""
        return ()

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the inner products of a block; see `Statistic.measure`."""
        from mergepipe.operators.vectors import fill_values

        return packed_products(tiles, len(self.slots), fill_values(self.slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class GramOfDeltas(Statistic):
    """The inner products of the deltas of all experts in `slots`, which begin with the base; packed as the values'."""

    name: ClassVar = "gram_of_deltas"
    version: ClassVar = 1
    deltas_only: ClassVar = True
    widens: ClassVar = True
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: the numbers follow from the inputs."""
        return ()

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the inner products of a block; see `Statistic.measure`."""
        from mergepipe.operators.vectors import fill_deltas

        experts = [slot - 1 for slot in self.slots if slot]
        return packed_products(tiles, len(experts), fill_deltas(experts))


def packed_products(tiles: Iterator[BlockInputs], count: int, fill: Any) -> bytes:
    """Return the inner products of a block's vectors, packed float64: the first with itself, with the second, ..."""
    import numpy as np

    from mergepipe.operators.vectors import CHUNK_ELEMENTS, chunks, inner_products

    # Several chunks at a time, of which each has its own sums: fewer calls, and all of it stays in the cache.
    several = max(1, min(_CHUNKS_AT_ONCE, _ROW_CHUNKS // max(1, count)))
    total, scratch = np.zeros(count * (count + 1) // 2), np.empty((count, several * CHUNK_ELEMENTS))
    for _, rows in chunks(tiles, count, fill, several * CHUNK_ELEMENTS):
        whole, left = divmod(rows.shape[1], CHUNK_ELEMENTS)
        at = whole * CHUNK_ELEMENTS
        if whole:
            cut = rows[:, :at].reshape(count, whole, CHUNK_ELEMENTS)
            room = scratch[:, :at].reshape(count, whole, CHUNK_ELEMENTS)
            for products in inner_products(cut, room).T:
                total += products
        if left:
            total += inner_products(rows[:, at:], scratch[:, :left])
    return total.astype("<f8").tobytes()


def folded(blocks: Iterable[bytes], count: int) -> Array:
    """Return the Gram matrix of a whole tensor from its blocks' packed products, added in block order.

    Returns
    -------
    array
        float64 ``(count, count)``.
    """
    import numpy as np

    from mergepipe.operators.vectors import symmetric

    total = np.zeros(count * (count + 1) // 2)
    with np.errstate(all="ignore"):  # what is not finite is looked for in the sums
        for block in blocks:
            total += np.frombuffer(block, "<f8")
    return symmetric(total, count)


def gram_of_values(slots: Sequence[int]) -> GramSteps:
    """Ask for the Gram matrix of the values of these slots."""
    statistic = GramOfValues(slots=tuple(slots))
    values = yield (statistic,)
    return folded(values[statistic], len(statistic.slots))


def gram_of_experts(experts: Sequence[int], slots: Sequence[bool]) -> GramSteps:
    """Ask for the Gram matrix of experts: of their deltas where there is a base, otherwise of their values.

    Parameters
    ----------
    slots
        As in `Operator.reduce`. An expert that is no input of the tensor has a delta of zero.
    """
    import numpy as np

    there = [number for number, expert in enumerate(experts) if slots[expert + 1]]
    matrix = np.zeros((len(experts), len(experts)))
    read = tuple(experts[number] + 1 for number in there)
    statistic: Statistic = GramOfDeltas(slots=(0, *read)) if slots[0] else GramOfValues(slots=read)
    values = yield ((statistic,) if there else ())
    if there:
        matrix[np.ix_(there, there)] = folded(values[statistic], len(there))
    return matrix


def combination(inputs: BlockInputs, coefficients: Sequence[float]) -> Array:
    """Return ``base + sum(c_i delta_i)``, or ``sum(c_i x_i)`` without a base: products added from left to right."""
    total = weighted_sum(inputs, coefficients, deltas=True)
    if total is None:
        return copied(inputs, inputs.base)
    if inputs.base is not None:
        total += inputs.base
    return total


def copied(inputs: BlockInputs, values: Array | None) -> Array:
    """Return values in an array that may be written to; zeros for None."""
    out = inputs.scratch(0)
    out[...] = 0.0 if values is None else values
    return out
