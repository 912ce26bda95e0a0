"""The methods that combine deltas element by element, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.parity.values import NEAR, Array, Exact, Inputs, decided

Kept = tuple[Array, Array]
"""What is kept of a delta, and which of its elements are undecided."""


def _no_sparsifier(delta: Array, index: int, inputs: Inputs) -> Kept:
    return delta, np.zeros(delta.shape, bool)


def cut(magnitudes: Array, low: int, high: int) -> Kept:
    """Keep the ranks [low, high) of an ascending order; what equals a threshold without being in or out as a whole
    is undecided."""
    flat = magnitudes.reshape(-1)
    order = np.argsort(flat, kind="stable")
    kept = np.zeros(flat.shape, bool)
    kept[order[low:high]] = True
    torn = np.zeros(flat.shape, bool)
    for edge in (low, high):
        if 0 < edge < flat.size and flat[order[edge - 1]] == flat[order[edge]]:
            torn |= flat == flat[order[edge]]
    return kept.reshape(magnitudes.shape), torn.reshape(magnitudes.shape)


def _largest(delta: Array, index: int, inputs: Inputs) -> Kept:
    density = inputs.column("density", 1.0)[index]
    if density >= 1:
        return _no_sparsifier(delta, index, inputs)
    count = max(1, int(density * delta.size))
    kept, torn = cut(np.abs(delta), delta.size - count, delta.size)
    return delta * kept, torn


def _without_outliers(delta: Array, index: int, inputs: Inputs) -> Kept:
    density = inputs.column("density", 1.0)[index]
    if density >= 1:
        return _no_sparsifier(delta, index, inputs)
    count = int(density * delta.size)
    low = max(0, delta.size - count - int(inputs.column("gamma", 0.01)[index] * delta.size))
    kept, torn = cut(np.abs(delta), low, low + count)
    return delta * kept, torn


def _masked(delta: Array, index: int, inputs: Inputs) -> Kept:
    if inputs.column("density", 1.0)[index] >= 1:
        return _no_sparsifier(delta, index, inputs)
    assert inputs.masks is not None
    return delta * inputs.masks[index], np.zeros(delta.shape, bool)


def task_vectors(*, elect: bool, normalize: bool, rescale: bool) -> Callable[[Inputs], Exact]:
    """Return the evaluation of a method that sums deltas, with its defaults."""

    def method(inputs: Inputs) -> Exact:
        weights = inputs.weights()
        terms, undecided = [], np.zeros(inputs.experts[0].shape, bool)
        for index, delta in enumerate(inputs.deltas()):
            kept, torn = sparsified(delta, index, inputs)
            before, after = np.abs(delta).sum(), np.abs(kept).sum()
            if inputs.params.get("rescale", rescale) and before >= 1e-7 and after >= 1e-7:
                kept = kept * (before / after)
            terms.append(kept * weights[index])
            undecided |= torn
        total, divisor, unsure = _elected(terms, weights) if elect else _added(terms, weights)
        if inputs.params.get("normalize", normalize):
            total = total / divisor
        value = inputs.base + total * inputs.number("lambda", 1.0)
        size = np.abs(value) + sum((np.abs(term) for term in terms), np.zeros(undecided.shape))
        return Exact(value=value, undecided=undecided | unsure, size=size)

    return method


def _added(terms: Sequence[Array], weights: Sequence[float]) -> tuple[Array, Any, Array]:
    divisor = sum(weights)
    return sum(terms, np.zeros_like(terms[0])), divisor if abs(divisor) >= 1e-8 else 1.0, np.zeros(terms[0].shape, bool)


def _elected(terms: Sequence[Array], weights: Sequence[float]) -> tuple[Array, Any, Array]:
    ballot = sum(terms, np.zeros_like(terms[0]))
    sign = np.where(ballot >= 0, 1.0, -1.0)
    agree = [np.sign(term) == sign for term in terms]
    total = sum((term * yes for term, yes in zip(terms, agree, strict=True)), np.zeros_like(terms[0]))
    divisor = sum((weight * yes for weight, yes in zip(weights, agree, strict=True)), np.zeros_like(terms[0]))
    size = sum((np.abs(term) for term in terms), np.zeros_like(terms[0]))
    unsure = (np.abs(ballot) < NEAR * size) | (np.abs(divisor) < NEAR * sum(map(abs, weights))) & (divisor != 0)
    return total, np.where(divisor == 0, 1.0, divisor), unsure & (size > 0)


_SPARSIFIERS = {
    "task_arithmetic": _no_sparsifier,
    "ties": _largest,
    "dare_linear": _masked,
    "dare_ties": _masked,
    "breadcrumbs": _without_outliers,
    "breadcrumbs_ties": _without_outliers,
    "della": _masked,
    "della_linear": _masked,
}


def sparsified(delta: Array, index: int, inputs: Inputs) -> Kept:
    """Return what a method keeps of an expert's delta, and which elements are undecided."""
    return _SPARSIFIERS[inputs.method](delta, index, inputs)


def sce(inputs: Inputs) -> Exact:
    """Evaluate sce."""
    deltas = np.stack(inputs.deltas())
    topk, torn = inputs.number("select_topk", 1.0), np.zeros(deltas.shape[1:], bool)
    if topk < 1 and inputs.selected is not None:
        deltas = deltas * inputs.selected
    elif topk < 1:
        variance = deltas.var(axis=0).astype(np.float32)
        count = int(np.float32(np.count_nonzero(variance)) * np.float32(topk))
        kept, torn = cut(variance, variance.size - count, variance.size)
        deltas = deltas * kept
    ballot = deltas.sum(axis=0)
    agree = np.sign(deltas) == np.where(ballot >= 0, 1.0, -1.0)
    weights = (deltas**2).reshape(len(deltas), -1).mean(axis=1)
    near = abs(weights.sum() - 1e-6) < 1e-10
    weights = np.full(len(deltas), 1 / len(deltas)) if weights.sum() < 1e-6 else weights / weights.sum()
    factors = agree * weights.reshape(-1, *[1] * (deltas.ndim - 1))
    value = inputs.base + (deltas * factors).sum(axis=0) / np.maximum(factors.sum(axis=0), 1e-6)
    size = np.abs(deltas).sum(axis=0)
    return Exact(value=value, undecided=torn | ((np.abs(ballot) < NEAR * size) & (size > 0)) | near)


def model_stock(inputs: Inputs) -> Exact:
    """Evaluate model_stock."""
    rows = inputs.params.get("filter_wise", False)
    shape = inputs.experts[0].shape
    as_rows = (-1, shape[-1]) if rows and len(shape) > 1 else (1, -1)
    base = np.asarray(inputs.base, np.float64).reshape(as_rows)
    deltas = [delta.reshape(as_rows) for delta in inputs.deltas()]
    cosines = []
    for i, one in enumerate(deltas):
        for two in deltas[i + 1 :]:
            size = np.maximum(np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1), 1e-6)
            cosines.append(np.clip((one * two).sum(axis=1) / size, -1, 1))
    cosine = np.mean(cosines, axis=0)[:, None]
    count = len(deltas)
    denominator = 1 + (count - 1) * cosine
    t = np.where(np.abs(denominator) < 1e-6, 0.0, count * cosine / denominator)
    mean = sum(x.astype(np.float64).reshape(as_rows) for x in inputs.experts) / count
    near = np.broadcast_to(np.abs(denominator) < 1e-3, base.shape)
    return Exact(value=(t * mean + (1 - t) * base).reshape(shape), undecided=near.reshape(shape))


def nearswap(inputs: Inputs) -> Exact:
    """Evaluate nearswap."""
    a, b = (np.asarray(x, np.float64) for x in (inputs.base, inputs.experts[0]))
    distance = np.abs((inputs.base - inputs.experts[0]).astype(np.float64))
    weight = np.clip(inputs.number("t", 0.0) / np.maximum(distance, float(np.float32(1e-6))), 0, 1)
    return decided(weight * b + (1 - weight) * a)


def arcee_fusion(inputs: Inputs) -> Exact:
    """Evaluate arcee_fusion."""
    x, b = (np.asarray(v, np.float64) for v in (inputs.experts[0], inputs.base))

    def probabilities(values: Array) -> Array:
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True) + 1e-8

    p, q = probabilities(x), probabilities(b)
    divergence = (p * np.log(p / q)).sum(axis=-1, keepdims=True)
    importance = np.abs(x - b) * divergence
    ranked = np.sort(importance, axis=None)
    q1, median, q3 = (ranked[int(share * (ranked.size - 1))] for share in (0.25, 0.5, 0.75))
    threshold = median + 1.5 * (q3 - q1)
    # Measured: mergekit's float32 divergences are off by up to 4e-7, whatever their size; so is its threshold.
    change = np.abs(x - b)
    near = np.abs(importance - threshold) <= 4e-7 * (change + np.quantile(change, 0.75))
    if x.size > 1_000_000:  # mergekit takes a random sample
        near |= np.abs(importance - threshold) <= 0.02 * threshold
    value = b + (inputs.experts[0] - inputs.base).astype(np.float64) * (importance >= threshold)
    return Exact(value=value, undecided=near)


def ram(inputs: Inputs, *, stronger: bool = False) -> Exact:
    """Evaluate ram, or ramplus_tl, which makes what one expert alone changed stronger."""
    deltas = np.stack(inputs.deltas())
    epsilon = inputs.number("epsilon", 1e-5)
    changed = np.abs(deltas) > epsilon
    count = changed.sum(axis=0)
    factors = np.ones(len(deltas))
    if stronger:
        axes = tuple(range(1, deltas.ndim))
        shared, unique = (changed & (count > 1)).sum(axis=axes), (changed & (count == 1)).sum(axis=axes)
        ratio = np.clip(shared / np.maximum(unique, epsilon), 0, inputs.number("alpha", 0.2))
        factors = 1 + inputs.number("r", 0.1) * ratio
    alone = deltas * (changed & (count == 1)) * factors.reshape(-1, *[1] * (deltas.ndim - 1))
    together = deltas * (changed & (count > 1)) / np.maximum(count, 1)
    return decided(inputs.base + (alone + together).sum(axis=0))


def ramplus_tl(inputs: Inputs) -> Exact:
    """Evaluate ramplus_tl."""
    return ram(inputs, stronger=True)
