"""Slow references of the operators that drop elements of deltas: whole arrays, sorting, exact fractions, plain loops.

They share no code with the operators. Steps are rounded to the work dtype where the operators round.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from mergepipe.digest import record_digest

Array = Any


def descending(delta: Array) -> Array:
    """Return the flat indices by descending magnitude, equal ones by ascending index."""
    return np.lexsort((np.arange(delta.size), -np.abs(delta)))


def largest(delta: Array, density: float) -> Array:
    """Return the mask of the k largest magnitudes."""
    mask = np.zeros(delta.size, bool)
    mask[descending(delta)[: max(1, int(density * delta.size))]] = True
    return mask


def between(delta: Array, density: float, gamma: float) -> Array:
    """Return the mask without the largest and the smallest; equal magnitudes are kept from the lowest index on.

    Element by element: of each magnitude, as many are kept as the ranks say, and then the first ones of it.
    """
    count = delta.size
    kept = max(1, int(density * count))
    bottom = max(0, count - kept - int(gamma * count))
    ranked = np.sort(np.abs(delta))[bottom : bottom + kept]
    left = {value: int((ranked == value).sum()) for value in np.unique(ranked)}
    mask = np.zeros(count, bool)
    for index, value in enumerate(np.abs(delta)):
        if left.get(value, 0):
            left[value] -= 1
            mask[index] = True
    return mask


def uniform(seed: int, tensor: str, source: str, count: int) -> list[Fraction]:
    """Return the random numbers of a tensor's elements, exactly."""
    digest = record_digest("mask", seed, tensor, source)
    key = [int.from_bytes(digest[0:8], "little"), int.from_bytes(digest[8:16], "little")]
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(count // 2 + 1)
    halves = [half for word in words.tolist() for half in (word % 2**32, word // 2**32)]
    return [Fraction(half, 2**32) for half in halves[:count]]


def probabilities(delta: Array, density: float, epsilon: float) -> list[float]:
    """Return each element's keep probability, by the rank of its magnitude in its row."""
    row = delta.shape[-1] if delta.ndim > 1 else delta.size
    result = []
    for values in np.abs(delta).reshape(-1, row):
        order = sorted(range(row), key=lambda index, values=values: (values[index], index))
        ranks = {index: rank for rank, index in enumerate(order)}
        for index in range(row):
            spread = 2 * epsilon * ranks[index] / (row - 1) if row > 1 else None
            result.append(density if spread is None else (density - epsilon) + spread)
    return result


def l1_factor(delta: Array, kept: Array) -> float:
    """Return the sum of magnitudes before divided by that after."""
    before = sum(Fraction(abs(float(value))) for value in delta.reshape(-1))
    after = sum(Fraction(abs(float(value))) for value in kept.reshape(-1))
    return float(before / after) if min(before, after) >= Fraction(1e-7) else 1.0


def sparsified(kind: str, delta: Array, own: dict[str, Any], *, rescale: Any, place: tuple[Any, ...]) -> Array:
    """Return an expert's delta with elements dropped and made up for; `place` is (seed, tensor, source)."""
    work, density = delta.dtype.type, own["density"]
    if density >= 1 or not delta.size:
        return delta
    flat = delta.reshape(-1)
    chances = [density] * delta.size
    if kind == "largest":
        mask = largest(flat, density)
    elif kind == "between":
        mask = between(flat, density, own["gamma"])
    else:
        if kind == "ranked":
            chances = probabilities(delta, density, own["epsilon"])
        mask = np.array([u < Fraction(p) for u, p in zip(uniform(*place, delta.size), chances, strict=True)])
    if kind in ("largest", "between") and mask.all():
        return delta
    kept = np.where(mask, flat, work(0))
    if rescale == "density":
        kept = np.array([value * work(1 / p) for value, p in zip(kept, chances, strict=True)], work)
    elif rescale == "l1":
        kept = kept * work(l1_factor(flat, kept))
    return kept.reshape(delta.shape)


def combined(terms: list[Array], weights: list[float], *, elects: bool, normalize: bool) -> Array:
    """Return the sum of the terms, or of those that agree with the elected sign; divided by weights."""
    work = terms[0].dtype.type
    total = np.zeros_like(terms[0])
    for place in np.ndindex(total.shape):
        column = [term[place] for term in terms]
        sign = 1 if _sum(column, work) >= 0 else -1
        agree = [not elects or np.sign(value) == sign for value in column]
        value = _sum([v for v, on in zip(column, agree, strict=True) if on], work)
        own = [weight for weight, on in zip(weights, agree, strict=True) if on]
        divisor = _sum(own, work)
        if elects and abs(divisor) <= 1e-6 * math.fsum(abs(weight) for weight in own):
            divisor = work(1)
        total[place] = value / divisor if normalize else value
    return total


def _sum(values: list[Any], work: Any) -> Any:
    total = work(0)
    for value in values:
        total = work(total + work(value))
    return total


def merged(
    kind: str,
    base: Array,
    experts: list[Array],
    given: list[dict[str, Any]],
    *,
    elects: bool,
    normalize: bool,
    rescale: Any,
    scale: float = 1.0,
    seed: int = 0,
    tensor: str = "layers.0.w",
) -> Array:
    """Return ``base + scale * combined``; all arrays in the work dtype."""
    work = base.dtype.type
    terms, weights = [], []
    for index, (expert, own) in enumerate(zip(experts, given, strict=True)):
        weight = work(own["weight"])
        if weight == 0:
            continue
        place = (seed, tensor, f"expert{index}")
        delta = sparsified(kind, expert - base, own, rescale=rescale, place=place)
        terms.append(delta * weight)
        weights.append(weight)
    if not terms:
        return base
    total = combined(terms, weights, elects=elects, normalize=normalize)
    return base + total * work(scale)
