"""Which blocks of the experts a budget buys: one order of all of them, cut where the budget ends. Pure, over arrays.

A *place* is a block of an expert that costs something to read; blocks of several experts with the same content at the
same place count as one. Its *effect* is the operator's factor times the norm of its delta (the sum of both experts' for
a shared one: equal deltas are parallel). An *item* is a step of a place: from nothing to the exact block, or, where the
experts' progressive codes may be read, from one level of precision to a better one (`hull`). Its *gain* is by how much
the square of the place's missing effect falls. Items are ordered by gain per byte, equal ones by tensor, block, expert
and level; a budget reads the longest prefix that fits. So

- a larger budget reads a superset, no level falls, and bounds never grow with the budget;
- no prefix costs more than its budget, and what costs nothing is always read;
- a budget of all bytes reads everything.

The order is made once (`reading_order`) and knows bytes, bound and estimate of every prefix: a cut is a binary search.

How the bound of every prefix comes about in one pass: each item has a *step*, by how much the square of its block's
bound falls once the item is read too (`bounds.additive_steps`, `bounds.whole_block_steps`). An approximation counts as
an omission with the residual's norm where deltas enter linearly; where not, the block has the bound of all of its
deltas, twice (`bounds.coarse_squares`), until all of it is exact. Steps are not negative and
add up, from any item of the order to the end, to the square of the bound of leaving out all of these. Sums of numbers
that are not negative, added from the end of the order, never fall from one item to the one before, whatever the
rounding; so the computed bound is monotone along the order, and the shortest prefix within an error is found by
bisection. It is made larger by `bounds.margin`, which is more than all rounding.

Squares of norms below 1e-154 are 0 in float64: such deltas count as zero.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mergepipe.mergefile.schema import Budget
from mergepipe.operators.influence import Influence
from mergepipe.plan.bounds import (
    BoundKind,
    ErrorBound,
    additive_steps,
    coarse_squares,
    margin,
    scaled,
    whole_block_steps,
)
from mergepipe.plan.hull import LevelPrices, Steps, hull_steps, in_order, joined_steps, whole_steps
from mergepipe.plan.places import copied_places, parts, row_of, spread_out
from mergepipe.plan.selection import Selection, root_error, share
from mergepipe.progressive.levels import LEVELS
from mergepipe.values import dataclass

Array = Any

_TOGETHER = 1 << 14
"""Places of which the hulls are made at once, about."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BudgetTensor:
    """What the planner knows of one merged tensor.

    Attributes
    ----------
    norms
        The Frobenius norms of the deltas, float64 ``(experts, blocks)``: 0 for experts that are no input and for blocks
        that they lack, NaN where it is unknown. Those of adapters count too where the influence is not additive.
    costs
        The bytes that reading each block takes, int64 ``(experts, blocks)``; 0 for what costs nothing and is always
        read.
    influence
        How the deltas move the result (`Operator.influence`).
    same
        The first expert that has the same content at the same place, itself where none before it has: integers
        ``(experts, blocks)``. None: all differ.
    update, base
        The norms of the full read's result less the base (`bounds.update_norm`) and of the base, None if unknown.
    errors
        The standard errors of the squares of the norms where these are estimates, float64 ``(experts, blocks)``; None
        for exact ones.
    prices
        What levels between nothing and the exact block come to; None: there are none.
    exact
        Of which experts blocks can be read exactly, bool ``(experts,)``; None: of all. How the deltas of the others lie
        to one another is not known, and there is no `update`.
    """

    norms: Array
    costs: Array
    influence: Influence
    same: Array | None = None
    update: float | None = None
    base: float | None = None
    errors: Array | None = None
    prices: LevelPrices | None = None
    exact: Array | None = None

    @property
    def bounds_whole_blocks(self) -> bool:
        """Whether the bound of a block stays until the last of its deltas is read exactly."""
        coarse = self.prices is not None and not self.influence.linear
        return self.influence.kind in ("mean", "sum") or coarse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The items of an output in the order in which budgets buy them, and what every prefix comes to.

    Attributes
    ----------
    tensors
        What it was made from.
    items
        The place of each, counted in (tensor, block, expert) order, int64 ``(n,)``.
    levels
        The level that its place has with it, uint8 ``(n,)``.
    copies, originals
        Places that have the content of another, and these others; int64.
    bytes, blocks
        What the first k items cost, and of how many blocks of experts they read anything; int64 ``(n + 1,)``.
    bounds, expected, masses
        With the first k items read: the absolute bound, the expected error, the sum of the squares of all norms that
        are left out; float64 ``(n + 1,)``, none of them ever growing. Without `unbounded` items there is no bound.
    steps, gains, squares
        Of each item: its steps of the squares of the bound, of the expected error, and of the mass; float64 ``(n,)``.
    variances
        Of the square of the expected error with the first k items read, float64 ``(n + 1,)``; 0 where norms are exact.
    mass
        The sum of the squares of all norms that are finite.
    update, base
        Lower bounds of the norms of the full read less the base and of the base, over all tensors; None if unknown.
    sampled
        Whether norms are estimates.
    reach
        How many items a budget may take: behind them are the exact blocks of experts that are there as codes alone.
    """

    tensors: tuple[BudgetTensor, ...]
    items: Array
    levels: Array
    copies: Array
    originals: Array
    bytes: Array
    blocks: Array
    bounds: Array
    expected: Array
    masses: Array
    steps: Array
    gains: Array
    squares: Array
    variances: Array
    unbounded: int
    mass: float
    update: float | None
    base: float | None
    sampled: bool
    reach: int

    def count(self, budget: Budget, expert_bytes: int | None = None) -> int:
        """Return how many items a budget buys.

        Parameters
        ----------
        expert_bytes
            What a share of it is a share of; by default what all items cost.
        """
        if budget.is_full_read:
            return self.reach
        if budget.max_error is not None:
            return self.within(budget.max_error)
        if budget.expert_reads is not None:
            return self.fitting(budget.expert_reads)
        whole = int(self.bytes[-1]) if expert_bytes is None else expert_bytes
        # The share as it was written: 0.3 is three tenths, though the float is a little less.
        return self.fitting(math.floor(Fraction(repr(budget.share)) * whole))

    def fitting(self, limit: int) -> int:
        """Return the length of the longest prefix that costs at most so many bytes."""
        found = int(np.searchsorted(self.bytes, min(limit, int(self.bytes[-1])), side="right")) - 1
        return min(found, self.reach)

    def within(self, max_error: float) -> int:
        """Return the length of the shortest prefix whose bound relative to the update is at most this.

        Everything where no such bound is known. The bound never grows along the order, so bisection finds it.
        """
        lengths = range(min(self.unbounded, self.reach), self.reach + 1)
        found = bisect.bisect_left(lengths, True, key=lambda k: self._relative(k, self.update) <= max_error)
        return lengths[min(found, len(lengths) - 1)]

    def _relative(self, count: int, norm: float | None) -> float:
        bound = float(self.bounds[count])
        if bound == 0:
            return 0.0
        return bound / norm if norm else math.inf

    def cut(self, count: int) -> Selection:
        """Return the selection of the first so many items."""
        left_out = float(self.masses[count])
        return Selection(
            order=self,
            items=count,
            planned_bytes=int(self.bytes[count]),
            full_bytes=int(self.bytes[-1]),
            blocks=int(self.blocks[count]),
            full_blocks=int(self.blocks[-1]),
            bound=self._bound(count),
            expected=float(self.expected[count]),
            uncertainty=root_error(float(self.expected[count]), float(self.variances[count])),
            omitted_mass=share(left_out, self.mass),
        )

    def _bound(self, count: int) -> ErrorBound:
        absolute = float(self.bounds[count])
        if count < self.unbounded or not math.isfinite(absolute):
            return ErrorBound(kind="none", absolute=None, relative_to_update=None, relative_to_base=None)
        to_update, to_base = (self._relative(count, norm) for norm in (self.update, self.base))
        kind: BoundKind = "estimated" if self.sampled else "certified"
        return ErrorBound(
            kind="exact" if count == len(self.items) else kind,
            absolute=absolute,
            relative_to_update=to_update if math.isfinite(to_update) else None,
            relative_to_base=to_base if math.isfinite(to_base) else None,
        )


# --- the order ----------------------------------------------------------------------------------------------------


def reading_order(tensors: Sequence[BudgetTensor], *, sampled: bool = False) -> Order:
    """Order all blocks of the experts of an output by gain per byte.

    Parameters
    ----------
    tensors
        In plan order.
    sampled
        Whether the norms are estimates, and bounds with them.
    """
    tensors = tuple(tensors)
    costs = row_of([tensor.costs for tensor in tensors], np.int64)
    effects = row_of([scaled(tensor.norms, tensor.influence.factors) for tensor in tensors], np.float64)
    masses = row_of([scaled(tensor.norms, [1.0] * len(tensor.norms)) for tensor in tensors], np.float64)
    masses *= masses
    mass = float(np.add.reduce(masses[np.isfinite(masses)]))
    copies, originals = copied_places([tensor.same for tensor in tensors], tensors)
    paid = (costs > 0).astype(np.int64)
    for values in (effects, masses, paid):
        np.add.at(values, originals, values[copies])
    costs[copies], effects[costs == 0], masses[costs == 0] = 0, 0.0, 0.0
    steps = _steps(tensors, costs, effects)
    order = np.argsort(-steps.rates, kind="stable")
    items, numbers, before, after = (row[order] for row in (steps.places, steps.numbers, steps.before, steps.after))
    falls = bound_steps(tensors, items, numbers, before - after, masses)
    squares = masses[items] * (_share(before, effects[items], 1.0) - _share(after, effects[items], 0.0))
    gains = before**2 - after**2
    doubt = row_of([_doubts(tensor) for tensor in tensors], np.float64)[items]
    blind = spread_out([tensor.influence.kind == "none" for tensor in tensors], tensors, np.bool_)
    is_partly_coded = any(tensor.exact is not None for tensor in tensors)
    unknown = np.flatnonzero(blind[items] & (masses[items] > 0) & (before > 0))
    grown = 1.0 + margin(len(items))
    return Order(
        tensors=tensors,
        items=items,
        levels=steps.levels[order],
        copies=copies,
        originals=originals,
        bytes=_from_the_start(steps.costs[order]),
        blocks=_from_the_start(np.where(numbers == 0, paid[items], 0)),
        bounds=np.sqrt(to_the_end(falls)) * grown,
        expected=np.sqrt(to_the_end(gains)),
        masses=to_the_end(squares),
        steps=falls,
        gains=gains,
        squares=squares,
        variances=to_the_end(doubt * doubt),
        unbounded=int(unknown[-1]) + 1 if unknown.size else 0,
        mass=mass,
        update=None if is_partly_coded else _whole_norm([tensor.update for tensor in tensors]),
        base=_whole_norm([tensor.base for tensor in tensors]),
        sampled=sampled,
        reach=int(np.count_nonzero(steps.rates >= 0)),
    )


def _steps(tensors: Sequence[BudgetTensor], costs: Array, effects: Array) -> Steps:
    """Return the steps of all places that cost something, in the order of places."""
    if all(tensor.prices is None for tensor in tensors):
        places = np.flatnonzero(costs)
        return whole_steps(places, costs[places], effects[places])
    found: list[Steps] = []
    coded: list[tuple[Array, ...]] = []  # places of tensors with levels, which are gone through together
    start = 0
    for tensor, cost, effect in zip(tensors, parts(tensors, costs), parts(tensors, effects), strict=True):
        places = np.flatnonzero(cost)
        paid, weight = cost.ravel()[places], effect.ravel()[places]
        if tensor.prices is None:
            found.append(whole_steps(places + start, paid, weight))
        else:
            sizes = tensor.prices.sizes.transpose(0, 2, 1).reshape(LEVELS, -1)[:, places]
            left = tensor.prices.residuals.transpose(0, 2, 1).reshape(LEVELS, -1)[:, places]
            ratio = _ratio_of(weight, tensor.norms.T.ravel()[places])
            exact = np.ones(len(tensor.norms), np.bool_) if tensor.exact is None else tensor.exact
            exact = np.tile(exact, tensor.norms.shape[1])[places]
            coded.append((places + start, paid, weight, sizes, ratio * left, exact))
            if sum(len(one[0]) for one in coded) >= _TOGETHER:
                found += _hulls(coded)
        start += cost.size
    return in_order(joined_steps([*found, *_hulls(coded)]))


def _hulls(coded: list[tuple[Array, ...]]) -> list[Steps]:
    """Return the steps of places of some tensors, if there are any, and empty the list of them."""
    columns = [np.concatenate(column, axis=-1) for column in zip(*coded, strict=True)]
    coded.clear()
    return [hull_steps(*columns)] if columns else []


def _share(missing: Array, effects: Array, otherwise: float) -> Array:
    """Return the share of a place's mass that is missing; where its effect says nothing, of all or nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = (missing / effects) ** 2
    return np.where(np.isnan(shares), otherwise, shares)


def _ratio_of(effects: Array, norms: Array) -> Array:
    """Return how much of a norm is an effect: the factors of all experts that share a place."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norms > 0, effects / norms, 0.0) * (1.0 + 2.0**-51)


def _doubts(tensor: BudgetTensor) -> Array:
    """Return the standard errors of the squares of a tensor's effects, float64 ``(experts, blocks)``."""
    if tensor.errors is None:
        return np.zeros(tensor.norms.shape)
    return scaled(tensor.errors, [factor * factor for factor in tensor.influence.factors])


def bound_steps(tensors: Sequence[BudgetTensor], items: Array, numbers: Array, falls: Array, masses: Array) -> Array:
    """Return by how much each item, in their order, lowers the square of its block's bound (`Order.steps`).

    Parameters
    ----------
    items, numbers, falls
        Per item its place, its number among the steps of that, and by how much the missing effect falls.
    masses
        At each place, the square of the norm.
    """
    width = int(numbers.max()) + 1 if numbers.size else 1
    cells = items * width + numbers
    ranks = np.full(masses.size * width, -1, np.int64)  # what is no item is read first
    ranks[cells] = np.arange(items.size)
    effects, steps = np.zeros(ranks.size), np.zeros(ranks.size)
    effects[cells] = falls
    arrays = (parts(tensors, array, width) for array in (ranks, effects, np.repeat(masses, width), steps))
    for tensor, rank, effect, mass, step in zip(tensors, *arrays, strict=True):
        if tensor.influence.kind == "none" or not rank.size:
            continue
        read = np.argsort(rank, axis=1, kind="stable")
        if tensor.bounds_whole_blocks:
            matters = np.take_along_axis((mass > 0) & (rank >= 0), read, axis=1)
            coarse = tensor.prices is not None
            found = whole_block_steps(matters, coarse_squares(tensor.norms, tensor.influence, coarse=coarse))
        else:
            found = additive_steps(np.take_along_axis(effect, read, axis=1))
        np.put_along_axis(step, read, found, axis=1)
    return steps[cells]


def _from_the_start(values: Array) -> Array:
    return np.concatenate([[0], np.cumsum(values)])


def to_the_end(values: Array) -> Array:
    """Return the sums from each place to the end, and 0 behind it; added from the end: none is below a later one."""
    sums = np.zeros(values.size + 1)
    np.cumsum(values[::-1], out=sums[-2::-1])
    return sums


def _whole_norm(norms: Sequence[float | None]) -> float | None:
    """Return a lower bound of the norm of all from the norms of some."""
    known = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    return math.sqrt(math.fsum(norm * norm for norm in known)) * (1.0 - margin(0)) if known else None
