"""What single steps of precision cost and gain: the lower convex hull of bytes and error of every (expert, block).

A block of an expert can be left out, read exactly, or read as the first stages of a progressive code
(`mergepipe.progressive`). Each of these is a point: the bytes that it takes, and the square of what is then missing of
its effect. Only the points of the lower convex hull are worth buying: along it the error removed per byte falls from
step to step, so that a budget that takes all steps in one order by that rate takes those of a block one after the
other, and a larger budget never lowers a level. The hull ends in the exact block, or, where an expert is there as codes
alone, in the best level.

Source: Lagrangian bit allocation over convex hulls (Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary
set of quantizers").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mergepipe.plan.access import EXACT
from mergepipe.values import dataclass

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelPrices:
    """What the levels between nothing and the exact block come to, for one tensor.

    Attributes
    ----------
    sizes
        The bytes that reading a block at each level takes, int64 ``(levels, experts, blocks)``; 0 where it has no code.
    residuals
        Upper limits of the norms of what is then missing of the deltas, float64 ``(levels, experts, blocks)``.
    """

    sizes: Array
    residuals: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps of precision, those of one place in the order in which they are bought, places in order; arrays ``(n,)``.

    Attributes
    ----------
    places
        Which block of which expert, int64.
    numbers
        Counted from 0 within a place, int64.
    levels
        What the place is read at after the step, uint8.
    costs
        Bytes beyond those of the step before, int64.
    rates
        The square of the effect that each removes per byte, float64; they never grow within a place.
    before, after
        What is missing of the place's effect before and after the step, float64.
    """

    places: Array
    numbers: Array
    levels: Array
    costs: Array
    rates: Array
    before: Array
    after: Array


def joined_steps(found: Sequence[Steps]) -> Steps:
    """Return steps one after the other."""
    columns = (np.concatenate([getattr(steps, name) for steps in found]) for name in Steps.__slots__)
    return Steps(**dict(zip(Steps.__slots__, columns, strict=True)))


def in_order(steps: Steps) -> Steps:
    """Return steps in the order of their places; those of one place are in order already."""
    order = np.argsort(steps.places, kind="stable")
    return Steps(**{name: getattr(steps, name)[order] for name in Steps.__slots__})


def whole_steps(places: Array, costs: Array, effects: Array) -> Steps:
    """Return one step for each place, from nothing to the exact block."""
    with np.errstate(over="ignore"):
        rates = effects**2 / costs
    count = len(places)
    return Steps(
        places=places,
        numbers=np.zeros(count, np.int64),
        levels=np.full(count, EXACT, np.uint8),
        costs=costs,
        rates=rates,
        before=effects,
        after=np.zeros(count),
    )


OUT_OF_REACH = -1.0
"""The rate of a step that no budget takes: to the exact block of what is there as a code alone. It comes last."""


def hull_steps(
    places: Array, costs: Array, effects: Array, sizes: Array, residuals: Array, exact: Array | None = None
) -> Steps:
    """Return the steps along the lower convex hull of each place.

    Parameters
    ----------
    places
        int64 ``(n,)``.
    costs, effects
        Of the exact block, and of leaving it out: bytes and effect, ``(n,)``.
    sizes, residuals
        Bytes and remaining effect of each level, ``(levels, n)``; a size of 0 is a level that is not there.
    exact
        Whether the exact block can be read, bool ``(n,)``; None: all can. The hull of one that cannot ends at its best
        level, and a step from there to the exact block, which is `OUT_OF_REACH`, has what then remains.
    """
    levels = len(sizes)
    exact = np.ones(len(places), np.bool_) if exact is None else exact
    squares = _squares(effects, residuals)
    at, last = np.zeros(len(places), np.int64), np.full(len(places), np.inf)
    bytes_there = np.concatenate([np.zeros((1, len(places)), np.int64), sizes, costs[None]])
    usable = (sizes > 0) & (sizes < costs) & np.isfinite(squares[1:-1]) & np.isfinite(effects)
    found: list[tuple[Array, ...]] = []
    open_, number = np.arange(len(places)), 0
    while open_.size:
        here = at[open_]
        spent, missing = bytes_there[here, open_], squares[here, open_]
        best, rate = np.full(open_.size, levels + 1), _rate(missing, 0.0, costs[open_] - spent)
        rate = np.where(exact[open_], rate, OUT_OF_REACH)
        for level in range(levels, 0, -1):
            more = bytes_there[level, open_] - spent
            able = usable[level - 1, open_] & (level > here) & (more > 0)
            other = np.where(able, _rate(missing, squares[level, open_], np.maximum(more, 1)), -1.0)
            better = (other > rate) & (other >= 0)
            best[better], rate[better] = level, other[better]
        rate = np.minimum(rate, last[open_])  # what rounding may make of nearly equal rates
        cost = bytes_there[best, open_] - spent
        found.append((open_, np.full(open_.size, number), best, cost, rate, here))
        at[open_], last[open_] = best, rate
        open_, number = open_[best <= levels], number + 1
    return _gathered(places, effects, residuals, found)


def _squares(effects: Array, residuals: Array) -> Array:
    with np.errstate(over="ignore"):
        exact = np.zeros((1, len(effects)))
        return np.concatenate([effects[None] ** 2, residuals**2, exact])


def _rate(before: Array, after: Array | float, cost: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        rate = (before - after) / cost
    return np.where(np.isnan(rate), np.inf, rate)


def _gathered(places: Array, effects: Array, residuals: Array, found: list[tuple[Array, ...]]) -> Steps:
    """Put the steps of all rounds into the order of places."""
    if not found:
        return whole_steps(places, np.zeros(0, np.int64), np.zeros(0))
    rows = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(rows[0], kind="stable")
    at, numbers, best, costs, rates, here = (row[order] for row in rows)
    remaining = np.concatenate([effects[None], residuals, np.zeros((1, len(effects)))])
    return Steps(
        places=places[at],
        numbers=numbers,
        levels=np.where(best > len(residuals), EXACT, best).astype(np.uint8),
        costs=costs,
        rates=rates,
        before=remaining[here, at],
        after=remaining[best, at],
    )
