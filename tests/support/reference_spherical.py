"""The spherical operators as their formulas are published: whole tensors, float64, one dependent pass after another.

It shares no code with mergepipe: vectors are normalised, projected and turned as such, where mergepipe only ever sees
their inner products. Vectors are the last axis of arrays ``(..., n)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = Any


def length(vectors: Array) -> Array:
    return np.sqrt((vectors * vectors).sum(-1, keepdims=True))


def wide(*arrays: Array) -> list[Array]:
    return [np.asarray(array, np.float64) for array in arrays]


def arc(first: Array, second: Array, t: float, cosine: Array, linear: Array) -> Array:
    angle = np.arccos(np.clip(cosine, -1, 1))
    with np.errstate(all="ignore"):
        round_ = (np.sin((1 - t) * angle) * first + np.sin(t * angle) * second) / np.sin(angle)
    return np.where(linear, (1 - t) * first + t * second, round_)


def slerp(base: Array, other: Array, t: float) -> Array:
    base, other = wide(base, other)
    shape, base, other = base.shape, base.reshape(-1), other.reshape(-1)
    norms = length(base), length(other)
    if min(norms) <= 1e-8:
        return ((1 - t) * base + t * other).reshape(shape)
    cosine = (base / norms[0] * (other / norms[1])).sum(-1, keepdims=True)
    return arc(base, other, t, cosine, np.abs(cosine) > 0.9995).reshape(shape)


def nuslerp(
    first: Array, second: Array, weights: Sequence[float], base: Array | None = None, *, axis: int | None = None
) -> Array:
    """``axis`` None: the whole tensor is one vector; -1: along the last axis; 0: along the first."""
    first, second = wide(first, second)
    if base is not None:
        (base,) = wide(base)
        first, second = first - base, second - base
    total = weights[0] + weights[1]
    t = 0.5 if abs(total) < 1e-6 else weights[1] / total
    shape = first.shape
    if axis is None or first.ndim < 2:
        first, second = first.reshape(-1), second.reshape(-1)
    elif axis == 0:
        first, second = np.moveaxis(first, 0, -1), np.moveaxis(second, 0, -1)
    units = [vector / np.maximum(length(vector), 1e-7) for vector in (first, second)]
    cosine = np.clip((units[0] * units[1]).sum(-1, keepdims=True), -1, 1)
    merged = arc(first, second, t, cosine, 1 - cosine**2 <= (2.0**-20 if axis == 0 else 2.0**-24))
    merged = np.moveaxis(merged, -1, 0) if axis == 0 and len(shape) > 1 else merged.reshape(shape)
    return merged if base is None else base + merged


def multislerp(
    experts: Sequence[Array], weights: Sequence[float], base: Array | None = None, *, normalize: bool = True,
    eps: float = 1e-8,
) -> Array:  # fmt: skip
    if len(experts) == 1:
        return np.asarray(experts[0], np.float64)
    vectors = np.stack(wide(*experts))
    origin = np.zeros(vectors.shape[1:]) if base is None else wide(base)[0]
    flat = (vectors - origin).reshape(len(experts), -1)
    factors = np.asarray(weights, np.float64)[:, None]
    if normalize:
        factors = factors / factors.sum()
    norms = length(flat)
    units = flat / (norms + eps)
    mean = (units * factors).sum(0)
    size = length(mean)
    if size < max(eps, 1e-6 * np.abs(factors).sum()):
        assert len(experts) == 2 or not flat.any(), "the weighted sum is zero"
        return (flat * factors).sum(0).reshape(origin.shape) + origin
    mean /= size
    dots = (units * mean).sum(-1, keepdims=True)
    tangent = ((units - dots * mean) * factors).sum(0)
    turn = length(tangent) + eps
    merged = (mean * np.cos(turn) + tangent * (np.sin(turn) / turn)) * (norms * factors).sum()
    return merged.reshape(origin.shape) + origin


def karcher(experts: Sequence[Array], *, max_iter: int = 10, tol: float = 1e-5) -> Array:
    if len(experts) == 1:
        return np.asarray(experts[0], np.float64)
    vectors = np.stack([array.reshape(-1) for array in wide(*experts)])
    norms = length(vectors)[:, 0]
    units = [vector / norm for vector, norm in zip(vectors, norms, strict=True) if norm > tol]
    if not units:
        return np.zeros(experts[0].shape)
    share = 1 / len(units)
    mean = sum(share * unit for unit in units)
    mean = units[0] if length(mean) < tol else mean / length(mean)
    for _ in range(max_iter):
        tangent = np.zeros_like(mean)
        for unit in units:
            cosine = np.clip((mean * unit).sum(), -1, 1)
            angle = np.arccos(cosine)
            if tol <= angle <= np.pi - tol:
                tangent += share * angle / np.sin(angle) * (unit - cosine * mean)
        step = length(tangent)
        if step < tol:
            break
        mean = np.cos(step) * mean + np.sin(step) * tangent / step
        mean /= length(mean)
    return (norms.mean() * mean).reshape(experts[0].shape)


def model_stock(base: Array, experts: Sequence[Array], *, filter_wise: bool = False) -> Array:
    base, *experts = wide(base, *experts)
    shape = base.shape
    if not filter_wise or base.ndim < 2:
        base, *experts = [array.reshape(1, -1) for array in (base, *experts)]
    deltas = [expert - base for expert in experts]
    cosines = []
    for index, first in enumerate(deltas):
        for second in deltas[index + 1 :]:
            scale = np.maximum(length(first) * length(second), 1e-6)
            cosines.append(np.clip((first * second).sum(-1, keepdims=True) / scale, -1, 1))
    cosine, count = np.mean(cosines, axis=0), len(experts)
    below = 1 + (count - 1) * cosine
    t = np.where(np.abs(below) < 1e-6, 0, count * cosine / np.where(below == 0, 1, below))
    return (t * np.mean(experts, axis=0) + (1 - t) * base).reshape(shape)


def ulps(got: Array, want: Array, *others: Array) -> float:
    """Return the largest error in units of the last place of the largest of result and ``others``, per element."""
    got = np.asarray(got)
    size = np.abs(np.asarray(want, np.float64))
    for array in others:
        size = np.maximum(size, np.abs(np.asarray(array, np.float64)))
    unit = np.spacing(np.maximum(size.astype(got.dtype), np.finfo(got.dtype).tiny))
    return float(np.max(np.abs(got.astype(np.float64) - want) / unit, initial=0.0))
