"""The formulas of mergekit 0.1.5 in float64: what both sides round, and where rounding may decide.

Nothing here is shared with either side. Besides the values, an evaluation returns which elements are *undecided*: those
where the formula leaves a choice (equal magnitudes at a threshold) or where a difference of rounding may flip a
comparison (an elected sign, a threshold), so that both answers are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
_NEAR = 1e-6  # relative: what float32 sums may be off
_BLUR = 2.0**-22


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One tensor of a case: float32 arrays, the settings at this tensor, and the kept elements of random masks."""

    method: str
    base: Array | None
    experts: tuple[Array, ...]
    settings: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    masks: tuple[Array, ...] | None

    def deltas(self) -> list[Array]:
        """Return what float32 makes of the differences, in float64."""
        assert self.base is not None
        return [(expert - self.base).astype(np.float64) for expert in self.experts]

    def number(self, name: str, default: float) -> float:
        """Return a setting of the whole merge, rounded to float32."""
        return float(np.float32(self.params.get(name, default)))

    def column(self, name: str, default: float) -> list[float]:
        """Return a setting of each expert, as given."""
        return [float(own.get(name, self.params.get(name, default))) for own in self.settings]

    def weights(self) -> list[float]:
        """Return the weights, rounded to float32."""
        return [float(np.float32(weight)) for weight in self.column("weight", 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact values of a tensor, element by element.

    Attributes
    ----------
    undecided
        Where there is a choice.
    size
        The magnitude of the largest numbers that are added up, where they may be larger than inputs and result.
    blur
        What the values change by where a cosine is off by 2^-22: as much as a float32 sum may be.
    """

    value: Array
    undecided: Array
    size: Array | None = None
    blur: Array | None = None


Kept = tuple[Array, Array]


def at_layer(settings: Mapping[str, Any], tensor: str, layers: int) -> dict[str, Any]:
    """Return settings at a tensor: gradients are linear in the layer; outside the layers they have their first value."""
    found = re.search(r"\.layers\.(\d+)\.", tensor)
    where = int(found[1]) / (layers - 1) if found else 0.0

    def value(setting: Any) -> Any:
        if not isinstance(setting, list):
            return setting
        place = where * (len(setting) - 1)
        low = int(place)
        high = min(len(setting) - 1, low + 1)
        return (1 - (place - low)) * setting[low] + (place - low) * setting[high]

    return {name: value(setting) for name, setting in settings.items()}


def evaluate(inputs: Inputs) -> Exact:
    """Return the exact values of one tensor."""
    with np.errstate(all="ignore"):
        return _METHODS[inputs.method](inputs)


def by_design(inputs: Inputs) -> bool:
    """Return whether our definition differs from mergekit's for this tensor.

    slerp with a vector of length zero: a chord here, an arc of a right angle there. nuslerp down the columns of a single
    row: one vector here, vectors of one element there. breadcrumbs where density times elements is below 1: one element
    is kept here, none there.
    """
    if inputs.method.startswith("breadcrumbs"):
        size = inputs.experts[0].size if inputs.experts else 1
        return any(int(density * size) == 0 for density in inputs.column("density", 1.0))
    if inputs.method == "slerp":
        return any(np.linalg.norm(np.asarray(x, np.float64)) <= 1e-8 for x in (inputs.base, inputs.experts[0]))
    down = inputs.params.get("nuslerp_row_wise", False) and not inputs.params.get("nuslerp_flatten", True)
    shape = inputs.experts[0].shape
    return inputs.method == "nuslerp" and down and len(shape) > 1 and inputs.experts[0].size == shape[-1]


def _decided(values: Array) -> Exact:
    return Exact(value=values, undecided=np.zeros(values.shape, bool))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _linear(inputs: Inputs) -> Exact:
    weights = inputs.weights()
    total = sum(weight * x.astype(np.float64) for weight, x in zip(weights, inputs.experts, strict=True))
    return _decided(total / (sum(weights) if inputs.params.get("normalize", True) else 1.0))


def _passthrough(inputs: Inputs) -> Exact:
    (scale,) = inputs.column("scale", 1.0)
    return _decided(inputs.experts[0].astype(np.float64) * float(np.float32(scale)))


def _slerp(inputs: Inputs) -> Exact:
    v0, v1 = (np.asarray(x, np.float64) for x in (inputs.base, inputs.experts[0]))
    n0, n1 = (n if (n := float(np.linalg.norm(v))) > 1e-8 else 1.0 for v in (v0, v1))
    cosine = np.clip(np.sum(v0 / n0 * (v1 / n1)), -1, 1).reshape([1] * v0.ndim)
    near = np.full(v0.shape, abs(abs(cosine.item()) - 0.9995) < _NEAR)
    return _arc(inputs.number("t", 0.5), cosine, v0, v1, np.abs(cosine) > 0.9995, near)


def _arc(t: float, cosine: Array, v0: Array, v1: Array, straight: Array, near: Array) -> Exact:
    """Return the arc between two vectors, or the chord where it says so; the cosine is broadcast to them."""

    def terms(cosine: Array) -> tuple[Array, Array]:
        angle = np.arccos(np.where(straight, 0.0, np.clip(cosine, -1, 1)))
        a, b = np.sin((1 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)
        return np.where(straight, 1 - t, a) * v0, np.where(straight, t, b) * v1

    one, two = terms(cosine)
    value = one + two
    moved = [np.abs(sum(terms(cosine + step)) - value) for step in (-_BLUR, _BLUR)]
    return Exact(value=value, undecided=near, size=np.abs(one) + np.abs(two), blur=np.nan_to_num(np.maximum(*moved)))


def _nuslerp(inputs: Inputs) -> Exact:
    w0, w1 = inputs.column("weight", 1.0)
    t = 0.5 if abs(w0 + w1) < 1e-6 else w1 / (w0 + w1)
    pair = inputs.deltas() if inputs.base is not None else [x.astype(np.float64) for x in inputs.experts]
    shape = pair[0].shape
    axis: Any = -1
    if inputs.params.get("nuslerp_flatten", True):
        pair = [v.reshape(-1) for v in pair]
    elif inputs.params.get("nuslerp_row_wise", False):
        axis = 0
    units = [v / np.maximum(np.linalg.norm(v, axis=axis, keepdims=True), 1e-7) for v in pair]
    cosine = np.clip((units[0] * units[1]).sum(axis=axis, keepdims=True), -1, 1)
    straight = 1 - cosine**2 <= 2.0**-24  # what float32 takes for parallel
    near = np.broadcast_to(np.abs(cosine) > 1 - 1e-6, pair[0].shape)
    found = _arc(t, cosine, *pair, straight, near)
    base = 0.0 if inputs.base is None else inputs.base.astype(np.float64)
    assert found.size is not None
    assert found.blur is not None
    return Exact(value=base + found.value.reshape(shape), undecided=near.reshape(shape),
                 size=np.abs(base) + found.size.reshape(shape), blur=found.blur.reshape(shape))  # fmt: skip


def _multislerp(inputs: Inputs) -> Exact:
    if len(inputs.experts) == 1:
        return _decided(inputs.experts[0].astype(np.float64))
    eps = inputs.number("eps", 1e-8)
    xs = inputs.deltas() if inputs.base is not None else [x.astype(np.float64) for x in inputs.experts]
    weights = np.array(inputs.weights())
    if inputs.params.get("normalize_weights", True):
        weights = weights / weights.sum()
    norms = np.array([np.linalg.norm(x) for x in xs])
    units = [x / (n + eps) for x, n in zip(xs, norms, strict=True)]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    length = float(np.linalg.norm(mean))
    factors = weights
    if length >= eps:
        dots = np.array([float((u * mean).sum()) / length for u in units])
        tangent = weights - weights.dot(dots) * weights / length  # in terms of the unit vectors
        size = float(np.linalg.norm(sum(f * u for f, u in zip(tangent, units, strict=True)))) + eps
        turned = weights / length * np.cos(size) + tangent * (np.sin(size) / size)
        factors = turned / (norms + eps) * weights.dot(norms)
    terms = [f * x for f, x in zip(factors, xs, strict=True)]
    base = 0.0 if inputs.base is None else inputs.base.astype(np.float64)
    near = np.full(xs[0].shape, length < 1e-5)
    return Exact(value=base + sum(terms), undecided=near, size=np.abs(base) + sum(np.abs(term) for term in terms))


def _karcher(inputs: Inputs) -> Exact:
    xs = [x.astype(np.float64) for x in inputs.experts]
    if len(xs) == 1:
        return _decided(xs[0])
    tol = float(inputs.params.get("tol", 1e-5))
    norms = [float(np.linalg.norm(x)) for x in xs]
    valid = [i for i, n in enumerate(norms) if n > tol]
    if not valid:
        return _decided(np.zeros(xs[0].shape))
    units = [xs[i] / norms[i] for i in valid]
    share = 1 / len(units)
    mean = share * sum(units)
    length = float(np.linalg.norm(mean))
    mean = units[0] if length < tol else mean / length
    for _ in range(int(inputs.params.get("max_iter", 10))):
        tangent = np.zeros_like(mean)
        for unit in units:
            cosine = float(np.clip((mean * unit).sum(), -1, 1))
            angle = float(np.arccos(cosine))
            if angle >= tol:
                tangent += share * (angle / np.sin(angle)) * (unit - cosine * mean)
        size = float(np.linalg.norm(tangent))
        if size < tol:
            break
        mean = np.cos(size) * mean + np.sin(size) * tangent / size
        mean /= np.linalg.norm(mean)
    return Exact(value=sum(norms) / len(norms) * mean, undecided=np.full(mean.shape, length < 1e-5))


# --- sums of deltas ---------------------------------------------------------------------------------------------------


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


def _task_vectors(*, elect: bool, normalize: bool, rescale: bool) -> Callable[[Inputs], Exact]:
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
    unsure = (np.abs(ballot) < _NEAR * size) | (np.abs(divisor) < _NEAR * sum(map(abs, weights))) & (divisor != 0)
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


# --- others -----------------------------------------------------------------------------------------------------------


def _sce(inputs: Inputs) -> Exact:
    deltas = np.stack(inputs.deltas())
    topk, torn = inputs.number("select_topk", 1.0), np.zeros(deltas.shape[1:], bool)
    if topk < 1:
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
    # Where equal variances are torn, the weights depend on the choice, and so does every element a little.
    return Exact(value=value, undecided=torn | ((np.abs(ballot) < _NEAR * size) & (size > 0)) | near)


def _model_stock(inputs: Inputs) -> Exact:
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


def _nearswap(inputs: Inputs) -> Exact:
    a, b = (np.asarray(x, np.float64) for x in (inputs.base, inputs.experts[0]))
    distance = np.abs((inputs.base - inputs.experts[0]).astype(np.float64))
    weight = np.clip(inputs.number("t", 0.0) / np.maximum(distance, float(np.float32(1e-6))), 0, 1)
    return _decided(weight * b + (1 - weight) * a)


def _arcee_fusion(inputs: Inputs) -> Exact:
    x, b = (np.asarray(v, np.float64) for v in (inputs.experts[0], inputs.base))

    def probabilities(values: Array) -> Array:
        powers = np.exp(values - values.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True) + 1e-8

    p, q = probabilities(x), probabilities(b)
    divergence = (p * np.log(p / q)).sum(axis=-1, keepdims=True)
    # float32 probabilities are off by some 1e-7 of themselves, so is the sum of their logarithms' differences.
    blur = np.broadcast_to(np.abs(x - b) * 1e-6, x.shape)
    importance = np.abs(x - b) * divergence
    ranked, shaky = np.sort(importance, axis=None), np.max(blur)
    q1, median, q3 = (ranked[int(share * (ranked.size - 1))] for share in (0.25, 0.5, 0.75))
    threshold = median + 1.5 * (q3 - q1)
    near = np.abs(importance - threshold) <= blur + 4 * shaky * (shaky < threshold) + 1e-6 * threshold
    if x.size > 1_000_000:  # mergekit takes a random sample
        near |= np.abs(importance - threshold) <= 0.02 * threshold
    value = b + (inputs.experts[0] - inputs.base).astype(np.float64) * (importance >= threshold)
    return Exact(value=value, undecided=near)


def _ram(inputs: Inputs, *, stronger: bool = False) -> Exact:
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
    return _decided(inputs.base + (alone + together).sum(axis=0))


def _ramplus_tl(inputs: Inputs) -> Exact:
    return _ram(inputs, stronger=True)


_METHODS: Mapping[str, Callable[[Inputs], Exact]] = {
    "linear": _linear,
    "slerp": _slerp,
    "nuslerp": _nuslerp,
    "multislerp": _multislerp,
    "karcher": _karcher,
    "passthrough": _passthrough,
    "task_arithmetic": _task_vectors(elect=False, normalize=False, rescale=False),
    "ties": _task_vectors(elect=True, normalize=True, rescale=False),
    "dare_linear": _task_vectors(elect=False, normalize=False, rescale=True),
    "dare_ties": _task_vectors(elect=True, normalize=False, rescale=True),
    "breadcrumbs": _task_vectors(elect=False, normalize=False, rescale=False),
    "breadcrumbs_ties": _task_vectors(elect=True, normalize=False, rescale=False),
    "della": _task_vectors(elect=True, normalize=True, rescale=True),
    "della_linear": _task_vectors(elect=False, normalize=False, rescale=True),
    "sce": _sce,
    "model_stock": _model_stock,
    "nearswap": _nearswap,
    "arcee_fusion": _arcee_fusion,
    "ram": _ram,
    "ramplus_tl": _ramplus_tl,
}
