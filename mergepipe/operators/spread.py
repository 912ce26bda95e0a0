"""How much the experts' deltas differ, element by element, and sums of squares of what was selected by it: for sce.

The variance of an element is the biased one over all experts, zero deltas among them: the mean and the mean of the
squared distances from it in float64, in expert order, rounded once to the work dtype. So it does not depend on the
order of the experts but for the last bits of float64, and equal deltas have a variance of exactly zero.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from mergepipe.operators.contract import Array, BlockInputs, Statistic
from mergepipe.operators.magnitudes import Magnitudes, above, patterns
from mergepipe.operators.ranks import Edge
from mergepipe.values import dataclass

ALL = -1
"""In place of a count of equal elements that are taken: none is left out."""

# Elements that are widened to float64 together: what the arithmetic needs of them stays in the cache of a core.
_TOGETHER = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Magnitudes):
    """The table of the variances of a block's elements.

    Attributes
    ----------
    experts
        How many deltas the variance is over: those of `slots`, and zero deltas for the rest.
    """

    name: ClassVar[str] = "sce.variances"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    experts: int

    def settings(self) -> tuple[Any, ...]:
        """Return the number of experts and the known digits; see `Statistic.settings`."""
        return (self.experts, self.digits)

    def magnitudes(self, inputs: BlockInputs) -> Array | None:
        """Return the variances of a tile; see `Magnitudes.magnitudes`."""
        return variance(inputs, [slot - 1 for slot in self.slots if slot], self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Which elements of a tensor vary most: those above a variance, and some of those that have it.

    Attributes
    ----------
    edge
        The variance, and where the equal ones end that are taken.
    taken
        Per block how many of the equal ones are taken, `ALL` where none of the block's is left out.
    """

    edge: Edge
    taken: tuple[int, ...]

    def mask(self, inputs: BlockInputs, variances: Array) -> Array:
        """Return where a tile's elements are selected; to be called once for each tile of a block, in order."""
        return above(patterns(variances), self.edge, inputs, "sce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares(Statistic):
    """The sum of the squares of each expert's selected deltas in a block: float64, in the order of `slots`.

    Attributes
    ----------
    experts
        As in `Spread`.
    selected
        Which elements count; None for all.
    """

    name: ClassVar[str] = "sce.squares"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    slots: tuple[int, ...]
    experts: int = 0
    selected: Selected | None = None

    def settings(self) -> tuple[Any, ...]:
        """Return the variance at the edge; see `Statistic.settings`."""
        return () if self.selected is None else (self.experts, self.selected.edge.pattern)

    def block_settings(self, block: int) -> tuple[Any, ...]:
        """Return how many elements of the block with that variance count; see `Statistic.block_settings`."""
        return () if self.selected is None else (self.selected.taken[block],)

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the sums; see `Statistic.measure`."""
        experts = [slot - 1 for slot in self.slots if slot]
        sums = [0.0] * len(experts)
        wide = np.empty(_TOGETHER)
        for inputs in tiles:
            mask = None
            if self.selected is not None:
                variances = variance(inputs, experts, self.experts)
                if variances is None:
                    continue
                mask = self.selected.mask(inputs, variances)
            for place, expert in enumerate(experts):
                if inputs.has(expert):
                    delta = inputs.delta(expert, 0)
                    if mask is not None:
                        delta *= mask
                    sums[place] = _add_squares(sums[place], delta, wide)
        return struct.pack(f"<{len(sums)}d", *sums)


def total_squares(blocks: Iterable[bytes], count: int) -> list[float]:
    """Return the sums over all blocks, in block order, from what `Squares` measured for this many experts."""
    totals = [0.0] * count
    for block in blocks:
        totals = [total + part for total, part in zip(totals, struct.unpack(f"<{count}d", block), strict=True)]
    return totals


def _add_squares(total: float, values: Array, wide: Array) -> float:
    """Return the total plus the squares of the values: of pieces of fixed length, each summed on its own.

    What is not finite (or has no finite square) does not count: it would spoil the weights of the whole tensor.
    """
    for start in range(0, values.size, _TOGETHER):
        piece = wide[: min(_TOGETHER, values.size - start)]
        np.copyto(piece, values[start : start + _TOGETHER])
        np.multiply(piece, piece, out=piece)
        part = float(np.add.reduce(piece))  # pairwise, in an order that only the size decides
        if not math.isfinite(part):
            piece[~np.isfinite(piece)] = 0
            part = float(np.add.reduce(piece))
        total += part
    return total


def variance(inputs: BlockInputs, experts: Sequence[int], count: int) -> Array | None:
    """Return the variance over ``count`` deltas, those of `experts` and zeros: scratch array 1; None if all are zero.

    Scratch arrays from 2 on, one for each expert with a delta, are used besides.
    """
    present = [expert for expert in experts if inputs.has(expert)]
    if not present:
        return None
    deltas = {expert: np.asarray(inputs.delta(expert, 2 + place)) for place, expert in enumerate(present)}
    out: Array = inputs.scratch(1)
    mean, distance, total = np.empty((3, min(_TOGETHER, out.size)))
    for start in range(0, out.size, _TOGETHER):
        piece = slice(start, start + _TOGETHER)
        size = out[piece].size
        parts = [deltas[expert][piece] if expert in deltas else None for expert in experts]
        parts += [None] * (count - len(experts))
        _variance(parts, (mean[:size], distance[:size], total[:size]))
        out[piece] = total[:size]
    return out


def _variance(parts: Sequence[Array | None], arrays: tuple[Array, Array, Array]) -> None:
    """Write the variance of deltas (None for zeros) into the last of three float64 arrays."""
    mean, distance, total = arrays
    there = [part for part in parts if part is not None]
    np.copyto(mean, there[0])
    for part in there[1:]:
        np.copyto(distance, part)
        mean += distance
    mean /= len(parts)
    for place, part in enumerate(parts):
        if part is None:
            np.multiply(mean, mean, out=distance)
        else:
            np.copyto(distance, part)
            distance -= mean
            distance *= distance
        if place:
            total += distance
        else:
            np.copyto(total, distance)
    total /= len(parts)
