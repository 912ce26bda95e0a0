"""How far a merge with some deltas left out can be from the full read: bounds that are proven, in float64.

A bound is about exact arithmetic with the coefficients, masks and thresholds of the full read (`Influence`); what
rounding does to the merged elements themselves is not in it. The arithmetic of the bound is: all its terms are
non-negative, so each operation moves it by a relative 2^-53 at most, and `margin` makes up for all of them and for
those of the norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mergepipe.operators.influence import Influence
from mergepipe.values import dataclass

Array = Any
BoundKind = Literal["exact", "certified", "estimated", "none"]

# By how much a decoded delta can be longer than what it stands for: each value is a least-squares mean, rounded.
_DECODED = 1e-5
# Operations behind one norm: the squares of a block are added in pieces, and blocks are added up.
_OPERATIONS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBound:
    """What is known of the distance (Frobenius norm, over all merged tensors) to the full read.

    Attributes
    ----------
    kind
        ``exact``: nothing is left out, it is 0. ``certified``: it is at most this. ``estimated``: the same formula with
        estimated norms. ``none``: no bound is known.
    absolute
        The bound, None where none is known.
    relative_to_update, relative_to_base
        The bound divided by the norm of the full read less the base, and of the base; None where either is unknown. A
        norm that is known for some tensors alone is a lower bound of the whole, so that these are bounds too.
    """

    kind: BoundKind
    absolute: float | None
    relative_to_update: float | None
    relative_to_base: float | None


def margin(terms: int) -> float:
    """Return by how much (relative) rounding can change a root of a sum of so many squares of norms, at most."""
    return (terms + _OPERATIONS) * 2.0**-52


def update_norm(combination: Sequence[float] | None, gram: Array) -> float | None:
    """Return a lower bound of the norm of a tensor's full read less the base, exact but for rounding.

    Parameters
    ----------
    combination
        That of the tensor's `Influence`.
    gram
        The inner products of the experts' deltas, summed over the blocks, float64 ``(experts, experts)``; or of the
        base and the deltas, ``(experts + 1, experts + 1)``.

    Returns
    -------
    float or None
        ``sqrt(c^T G c)`` less what rounding may have added to it; None where the result is no combination, or the
        products with the base are needed and not there.
    """
    if combination is None:
        return None
    factors = np.asarray(combination, np.float64)
    if len(gram) == len(factors) - 1:
        if factors[0] != 0:
            return None
        factors = factors[1:]
    with np.errstate(all="ignore"):
        lengths = np.abs(factors) * np.sqrt(np.diagonal(gram))
        square = float(np.add.reduce((gram * factors[:, None] * factors).ravel()))
        doubt = margin(gram.size) * float(np.add.reduce(lengths)) ** 2  # |G_ij| <= |d_i| |d_j|
    return math.sqrt(max(square - doubt, 0.0)) if math.isfinite(square) else None


def additive_steps(effects: Array) -> Array:
    """Return by how much each delta lowers the square of its block's bound once it is read: kind ``additive``.

    Parameters
    ----------
    effects
        Factors times norms in the order in which the deltas of a block are read, float64 ``(blocks, places)``; 0 for
        what is always read.

    Returns
    -------
    array
        ``(a + e)^2 - a^2`` for an effect e and the sum a of those after it, as ``e (2 a + e)``: never negative, and
        without cancellation. From any place on they add up to the square of the sum of the effects from there on.
    """
    after = np.zeros_like(effects)
    np.cumsum(effects[:, :0:-1], axis=1, out=after[:, -2::-1])
    with np.errstate(invalid="ignore"):
        return np.where(effects > 0, effects * (2.0 * after + effects), 0.0)


def whole_block_steps(matters: Array, squares: Array) -> Array:
    """Return by how much each delta lowers the square of its block's bound once it is read: ``mean`` and ``sum``.

    Parameters
    ----------
    matters
        Whether each delta of a block, in the order in which they are read, is left out at first and not zero.
    squares
        The square of the bound as long as any of these is left out (`whole_block_squares`), float64 ``(blocks,)``.

    Returns
    -------
    array
        float64 ``(blocks, places)``: the whole square at the last delta that matters, 0 elsewhere.
    """
    steps = np.zeros(matters.shape)
    rows = np.flatnonzero(matters.any(axis=1))
    last = matters.shape[1] - 1 - np.argmax(matters[rows, ::-1], axis=1)
    steps[rows, last] = squares[rows]
    return steps


def whole_block_squares(norms: Array, influence: Influence) -> Array:
    """Return the square of the bound of each block of which anything is left out: kinds ``mean`` and ``sum``.

    Parameters
    ----------
    norms
        float64 ``(experts, blocks)``, of all experts, also of those that are read at no cost.
    """
    lengths = scaled(norms, influence.spread)
    if influence.kind == "sum":
        total = np.add.reduce(lengths, axis=0)
        return total * total
    return np.add.reduce(lengths * lengths, axis=0)


def coarse_squares(norms: Array, influence: Influence, *, coarse: bool) -> Array:
    """Return the square of the bound of each block of which anything is not exact.

    Parameters
    ----------
    norms
        As in `whole_block_squares`.
    coarse
        Whether deltas may be approximations. Where these do not enter linearly, other elements than in the full read
        may be dropped, or other signs elected; so nothing is said but that both results stay within what bounds the
        move of each from the base (`Influence`): they differ by at most the sum of both. A decoded delta is at most
        ``1 + _DECODED`` times as long as the delta.
    """
    if not coarse or influence.linear:
        return whole_block_squares(norms, influence)
    if influence.kind == "additive":
        total = np.add.reduce(scaled(norms, influence.factors), axis=0)
        squares = total * total
    else:
        squares = whole_block_squares(norms, influence)
    return 4.0 * (1.0 + _DECODED) ** 2 * squares


def scaled(norms: Array, factors: Sequence[float]) -> Array:
    """Return norms ``(experts, blocks)`` times each expert's factor, 0 where the factor is; NaN counts as infinite."""
    column = np.asarray(factors, np.float64).reshape(-1, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        result = np.where(column == 0, 0.0, norms * column)
    return np.where(np.isnan(result), np.inf, result)
