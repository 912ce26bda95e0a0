"""Carries out what `sparsifiers` choose: the statistics that they need, and the masks on tiles."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mergepipe.digest import content_digest
from mergepipe.operators.contract import Array, BlockInputs, Statistic, StatisticValues, TensorFacts
from mergepipe.operators.magnitudes import Magnitudes, first_equal, patterns, select
from mergepipe.operators.magnitudes import most_rounds as rounds_of_select
from mergepipe.operators.masks import last_kept, random_words
from mergepipe.operators.numerics import rounded
from mergepipe.operators.ranking import ascending
from mergepipe.operators.ranks import Edge, JoinedTables, Selection
from mergepipe.operators.sparsifiers import AtRandom, ByMagnitude, ByRank, Sparsifier
from mergepipe.operators.sums import MagnitudeSum, encode_sum, finite_sum, total_of, units
from mergepipe.values import dataclass

SPARE = 0  # a scratch array that nothing else here holds on to
# mergekit leaves a delta alone whose magnitudes sum to less, before or after.
LEAST_SUM = 1e-7
# Half of the random numbers: up to here the top bit is 0.
_HALF = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the statistics say about one expert's delta.

    Attributes
    ----------
    low, high
        The magnitudes between which elements are kept, and which of the equal ones; None for no bound.
    in_block
        By block, what differs between blocks: how many of the elements that equal `low` and `high` are kept in it
        (-1: all that there are), or the digest of its ranks.
    factor
        What the kept elements are multiplied by, rounded to the work dtype.
    ranks
        By element (uint32), from 0, where a row lies in several blocks.
    """

    low: Edge | None = None
    high: Edge | None = None
    in_block: Sequence[tuple[int, int] | bytes] = ()
    factor: float = 1.0
    ranks: Array | None = None


Reduced = Generator[Sequence[Statistic], StatisticValues, dict[int, Kept]]


def reduce_kept(sparsifiers: Mapping[int, Sparsifier], facts: TensorFacts, *, l1: bool, work: str) -> Reduced:
    """Find what is kept of the deltas of experts, by their index; all sparsifiers are of one kind.

    Parameters
    ----------
    l1
        Whether the kept elements are multiplied so that the sum of magnitudes stays what it was.
    """
    by_magnitude = {i: s for i, s in sparsifiers.items() if isinstance(s, ByMagnitude)}
    if by_magnitude:
        return (yield from _reduce_magnitudes(by_magnitude, facts, l1=l1, work=work))
    if facts.splits_row and any(isinstance(s, ByRank) for s in sparsifiers.values()):
        ranked = {i: s for i, s in sparsifiers.items() if isinstance(s, ByRank)}
        return (yield from _reduce_rows(ranked, l1=l1, work=work))
    return (yield from _reduce_sums(sparsifiers, work=work))


def most_rounds(sparsifiers: Iterable[Sparsifier], facts: TensorFacts, *, l1: bool, work: str) -> int:
    """Return in how many rounds `reduce_kept` asks for statistics at most."""
    if any(isinstance(sparsifier, ByMagnitude) for sparsifier in sparsifiers):
        return rounds_of_select(work, facts.elements) + l1  # sums that the tables do not tell
    return 1


# --- by magnitude -------------------------------------------------------------------------------------------------


def _reduce_magnitudes(sparsifiers: Mapping[int, ByMagnitude], facts: TensorFacts, *, l1: bool, work: str) -> Reduced:
    wanted = {}
    for index, sparsifier in sparsifiers.items():
        dropped, kept = sparsifier.counts(facts.elements)
        ends = {dropped, dropped + kept} - {0, facts.elements}
        wanted[Magnitudes(slots=(0, index + 1))] = tuple(sorted(ends))
    sums: dict[int, tuple[int, int]] = {}

    def look(statistic: Magnitudes, tables: JoinedTables, selections: Sequence[Selection]) -> None:
        """Take the sums from complete tables: then neither needs a pass of its own, whatever the density."""
        index = statistic.slots[-1] - 1
        inner = _Range.of(*sparsifiers[index].counts(facts.elements), selections).inner_sum(index)
        sums[index] = tables.sum_between(-1, None), tables.sum_between(inner.above, inner.below)

    found = yield from select(wanted, look if l1 else None)
    ranges = {
        index: _Range.of(*sparsifier.counts(facts.elements), found[Magnitudes(slots=(0, index + 1))])
        for index, sparsifier in sparsifiers.items()
    }
    if not l1:
        return {index: between.as_kept(facts.blocks) for index, between in ranges.items()}
    before = {index: MagnitudeSum(slots=(0, index + 1)) for index in ranges if index not in sums}
    inner = {index: ranges[index].inner_sum(index) for index in before}
    if before:
        values = yield [*before.values(), *inner.values()]
        sums |= {index: (total_of(values[before[index]]), total_of(values[inner[index]])) for index in before}
    result = {}
    for index, between in ranges.items():
        whole, within = sums[index]
        factor = _ratio(whole, within + between.equal_sum(), work)
        result[index] = replace(between.as_kept(facts.blocks), factor=factor)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """The magnitudes that are kept: those between two, and so many of those that equal them."""

    low: Selection | None
    low_kept: int
    high: Selection | None
    high_kept: int

    @classmethod
    def of(cls, dropped: int, kept: int, selections: Sequence[Selection]) -> _Range:
        """Return the range without the `dropped` largest that keeps the next `kept`."""
        by_rank = {selection.rank: selection for selection in selections}
        low, high = by_rank.get(dropped + kept), by_rank.get(dropped)
        low_kept = high_kept = 0
        if high is not None:
            high_kept = int(high.equal.sum()) - (dropped - high.above)
        if low is not None:
            low_kept = dropped + kept - low.above
            if high is not None and high.pattern == low.pattern:  # all that is kept is equal
                low_kept, high_kept = kept, -1
        return cls(low=low, low_kept=low_kept, high=high, high_kept=high_kept)

    def as_kept(self, blocks: int) -> Kept:
        """Return the bounds as they are applied. Zeros need no bound: kept or dropped, they are zero."""
        low = self.low.edge(self.low_kept) if self.low and self.low.pattern else None
        high = None
        if self.high:
            high = Edge(pattern=self.high.pattern, block=blocks, count=0)
            if self.high_kept >= 0:
                high = self.high.edge(self.high_kept)
        low_in = _in_blocks(self.low if low else None, self.low_kept, blocks)
        high_in = _in_blocks(self.high if self.high_kept >= 0 else None, self.high_kept, blocks)
        return Kept(low=low, high=high, in_block=list(zip(low_in, high_in, strict=True)))

    def inner_sum(self, index: int) -> MagnitudeSum:
        """Return the sum of the magnitudes strictly between the two."""
        low = self.low.pattern if self.low else -1
        return MagnitudeSum(slots=(0, index + 1), above=low, below=self.high.pattern if self.high else None)

    def equal_sum(self) -> int:
        """Return the sum of the kept magnitudes that equal the two, in units of 2^-1074."""
        total = 0
        for end, count in ((self.low, self.low_kept), (self.high, max(self.high_kept, 0))):
            if end is not None and math.isfinite(end.value):
                total += count * units(end.value)
        return total


def _in_blocks(end: Selection | None, count: int, blocks: int) -> list[int]:
    """Return how many of the equal elements each block keeps, -1 where it keeps all."""
    if end is None:
        return [-1] * blocks
    taken = end.taken(count)
    taken[taken == end.equal] = -1
    numbers: list[int] = taken.tolist()
    return numbers


def _ratio(before: int, after: int, work: str) -> float:
    """Return the quotient of two sums, correctly rounded; 1 where there is next to nothing."""
    if min(before, after) < units(LEAST_SUM):
        return 1.0
    return rounded((before / after,), work)[0]


# --- at random ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSum(Statistic):
    """The exact sum of the magnitudes of the elements of a delta that a random mask keeps, in a block."""

    name: ClassVar[str] = "kept_sum"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    positional: ClassVar[bool] = True
    widens: ClassVar[bool] = True
    slots: tuple[int, ...]
    sparsifier: AtRandom | ByRank

    def settings(self) -> tuple[Any, ...]:
        """Return density, key of the stream, and epsilon; see `Statistic.settings`."""
        epsilon = self.sparsifier.epsilon if isinstance(self.sparsifier, ByRank) else 0.0
        return (self.sparsifier.density, epsilon, *self.sparsifier.key)

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the sum as bytes; see `Statistic.measure`."""
        index = self.slots[-1] - 1
        total = 0
        for inputs in tiles:
            if inputs.has(index):
                delta = inputs.delta(index, 0)
                sparsify(self.sparsifier, inputs, index, delta, Kept(), by_probability=False)
                total += finite_sum(delta)
        return encode_sum(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSum(KeptSum):
    """As `KeptSum`, for masks that depend on the ranks within whole rows."""

    name: ClassVar[str] = "ranked_sum"
    rowwise: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MagnitudeBits(Statistic):
    """All magnitudes of a block as their bit patterns: for the ranks of a 1-D tensor that lies in several blocks.

    This is as large as the block, which is why such tensors may not be large (`sparsifiers.LONGEST_SPLIT_ROW`).
    """

    name: ClassVar[str] = "magnitude_bits"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    widens: ClassVar[bool] = True
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """See `Statistic.settings`."""
        return ()

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the patterns; see `Statistic.measure`."""
        index = self.slots[-1] - 1
        parts = []
        for inputs in tiles:
            size = inputs.shape[0] * np.dtype(inputs.dtype).itemsize
            parts.append(patterns(inputs.delta(index, 0)).tobytes() if inputs.has(index) else bytes(size))
        return b"".join(parts)


def _reduce_sums(sparsifiers: Mapping[int, Sparsifier], *, work: str) -> Reduced:
    before = {index: MagnitudeSum(slots=(0, index + 1)) for index in sparsifiers}
    after: dict[int, KeptSum] = {}
    for index, sparsifier in sparsifiers.items():
        assert isinstance(sparsifier, AtRandom | ByRank)
        kind = RankedSum if isinstance(sparsifier, ByRank) else KeptSum
        after[index] = kind(slots=(0, index + 1), sparsifier=sparsifier)
    values = yield [*before.values(), *after.values()]
    sums = {index: (total_of(values[before[index]]), total_of(values[after[index]])) for index in sparsifiers}
    return {index: Kept(factor=_ratio(*pair, work)) for index, pair in sums.items()}


def _reduce_rows(sparsifiers: Mapping[int, ByRank], *, l1: bool, work: str) -> Reduced:
    wanted = {index: MagnitudeBits(slots=(0, index + 1)) for index in sparsifiers}
    values = yield list(wanted.values())
    result = {}
    for index, sparsifier in sparsifiers.items():
        blocks = [np.frombuffer(data, "<u4" if work == "float32" else "<u8") for data in values[wanted[index]]]
        bits = np.concatenate(blocks)
        ranks = np.empty(bits.size, np.uint32)
        ranks[ascending(bits.reshape(1, -1)).reshape(-1)] = np.arange(bits.size, dtype=np.uint32)
        ends = np.cumsum([block.size for block in blocks])
        digests = [content_digest(part.tobytes()) for part in np.split(ranks, ends[:-1])]
        factor = 1.0
        if l1:
            magnitudes = bits.view(work).copy()
            before = finite_sum(magnitudes)
            limits = _last_kept_each(keep_probabilities(sparsifier, ranks, ranks.size))
            keep(magnitudes, random_words(sparsifier.key, 0, bits.size) <= limits)
            factor = _ratio(before, finite_sum(magnitudes), work)
        result[index] = Kept(factor=factor, ranks=ranks, in_block=digests)
    return result


# --- masks --------------------------------------------------------------------------------------------------------


def keep(values: Array, mask: Array) -> None:
    """Set to 0 what is not in a mask (bool): the bits times 0 or 1, which is fast and right for NaN and infinity."""
    bits = values.view(f"u{values.dtype.itemsize}")
    np.multiply(bits, mask.view(np.uint8), out=bits)  # bool would be widened more slowly


def sparsify(
    sparsifier: Sparsifier, inputs: BlockInputs, index: int, delta: Array, kept: Kept, *, by_probability: bool
) -> None:
    """Drop elements of an expert's delta in place.

    Parameters
    ----------
    by_probability
        Whether each element is divided by its own keep probability; for `ByRank`, whose elements differ in it.
    """
    if isinstance(sparsifier, ByMagnitude):
        _keep_between(inputs, index, delta, kept)
    elif isinstance(sparsifier, AtRandom):
        _keep_up_to(delta, random_words(sparsifier.key, inputs.start, delta.size), last_kept(sparsifier.density))
    elif isinstance(sparsifier, ByRank):
        _keep_ranked(sparsifier, inputs, delta, kept.ranks, by_probability=by_probability)


def _keep_up_to(delta: Array, words: Array, last: int) -> None:
    """Set to 0 where a random number (uint32, overwritten) is above the last one that is kept."""
    if last == _HALF and delta.itemsize == words.itemsize:
        words >>= np.uint32(31)  # the top bit says it
        words -= np.uint32(1)  # all bits where it is kept, none where not
        delta.view(np.uint32).__iand__(words)
    else:
        keep(delta, words <= np.uint32(last))


def _keep_between(inputs: BlockInputs, index: int, delta: Array, kept: Kept) -> None:
    if kept.low is None and kept.high is None:
        return
    values, bits = (array.view(f"i{delta.itemsize}") for array in (delta, inputs.scratch(SPARE)))
    for edge, largest in ((kept.low, False), (kept.high, True)):
        if edge is not None:
            np.bitwise_and(values, np.iinfo(values.dtype).max, out=bits)
            _keep_beyond(values, bits, edge, inputs, (index, largest), largest=largest)


def _keep_beyond(values: Array, bits: Array, edge: Edge, inputs: BlockInputs, name: Hashable, *, largest: bool) -> None:
    """Set to 0 what is smaller than an edge (larger, where that is the `largest` kept), and what equals it untaken.

    A difference of patterns has the top bit set where it is negative; shifted down, that is a mask of all bits or none.
    This takes half of the time of a mask of bools.

    Parameters
    ----------
    values, bits
        The numbers and their patterns, as signed integers; both are overwritten.
    name
        What the count of equal elements is kept under in ``inputs.memo``, for the later tiles of the block.
    """
    takes = inputs.block < edge.block  # all that are equal
    if largest and takes and edge.pattern == np.iinfo(bits.dtype).max:
        return
    first = first_equal(bits, edge, inputs, name)
    equal = values[first]
    if largest:
        np.subtract(bits, edge.pattern + takes, out=bits)
    else:
        np.subtract(edge.pattern - takes, bits, out=bits)
    bits >>= 8 * bits.itemsize - 1
    values &= bits
    values[first] = equal


def _keep_ranked(
    sparsifier: ByRank, inputs: BlockInputs, delta: Array, ranks: Array | None, *, by_probability: bool
) -> None:
    words = random_words(sparsifier.key, inputs.start, delta.size)
    if ranks is not None:
        own = keep_probabilities(sparsifier, ranks[inputs.start : inputs.start + delta.size], ranks.size)
        limits = _last_kept_each(own)
        factors = (1 / own).astype(delta.dtype) if by_probability else None
    else:
        size = inputs.row_elements
        order = ascending(patterns(delta.reshape(-1, size)))
        by_rank = keep_probabilities(sparsifier, np.arange(size), size)
        limits = _scattered(_last_kept_each(by_rank), order)
        factors = _scattered((1 / by_rank).astype(delta.dtype), order) if by_probability else None
    keep(delta, words <= limits)
    if factors is not None:
        delta *= factors


def keep_probabilities(sparsifier: ByRank, ranks: Array, size: int) -> Array:
    """Return the keep probabilities (float64) of ranks that count from 0, in rows of `size` elements."""
    if size == 1:
        return np.full(ranks.shape, sparsifier.density)
    return (sparsifier.density - sparsifier.epsilon) + 2 * sparsifier.epsilon * ranks / (size - 1)


def _last_kept_each(probabilities: Array) -> Array:
    """Return `masks.last_kept` of each probability (uint32)."""
    return (np.minimum(np.ceil(probabilities * 2.0**32), 2.0**32) - 1).astype(np.uint32)


def _scattered(by_rank: Array, order: Array) -> Array:
    """Return, by flat index, the value of each element's rank within its row."""
    out = np.empty(order.size, by_rank.dtype)
    out[order] = np.tile(by_rank, (order.shape[0], 1))
    return out
