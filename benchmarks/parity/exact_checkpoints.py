"""The methods that combine checkpoints, or whole deltas by their directions, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.parity.values import BLUR, NEAR, Array, Exact, Inputs, decided


def linear(inputs: Inputs) -> Exact:
    """Evaluate linear."""
    weights = inputs.weights()
    total = sum(weight * x.astype(np.float64) for weight, x in zip(weights, inputs.experts, strict=True))
    return decided(total / (sum(weights) if inputs.params.get("normalize", True) else 1.0))


def passthrough(inputs: Inputs) -> Exact:
    """Evaluate passthrough."""
    (scale,) = inputs.column("scale", 1.0)
    return decided(inputs.experts[0].astype(np.float64) * float(np.float32(scale)))


def slerp(inputs: Inputs) -> Exact:
    """Evaluate slerp."""
    v0, v1 = (np.asarray(x, np.float64) for x in (inputs.base, inputs.experts[0]))
    n0, n1 = (n if (n := float(np.linalg.norm(v))) > 1e-8 else 1.0 for v in (v0, v1))
    cosine = np.clip(np.sum(v0 / n0 * (v1 / n1)), -1, 1).reshape([1] * v0.ndim)
    near = np.full(v0.shape, abs(abs(cosine.item()) - 0.9995) < NEAR)
    return _arc(inputs.number("t", 0.5), cosine, v0, v1, np.abs(cosine) > 0.9995, near)


def _arc(t: float, cosine: Array, v0: Array, v1: Array, straight: Array, near: Array) -> Exact:
    """Return the arc between two vectors, or the chord where it says so; the cosine is broadcast to them."""

    def terms(cosine: Array) -> tuple[Array, Array]:
        angle = np.arccos(np.where(straight, 0.0, np.clip(cosine, -1, 1)))
        a, b = np.sin((1 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)
        return np.where(straight, 1 - t, a) * v0, np.where(straight, t, b) * v1

    one, two = terms(cosine)
    value = one + two
    moved = [np.abs(sum(terms(cosine + step)) - value) for step in (-BLUR, BLUR)]
    return Exact(value=value, undecided=near, size=np.abs(one) + np.abs(two), blur=np.nan_to_num(np.maximum(*moved)))


def nuslerp(inputs: Inputs) -> Exact:
    """Evaluate nuslerp."""
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


def multislerp(inputs: Inputs) -> Exact:
    """Evaluate multislerp."""
    if len(inputs.experts) == 1:
        return decided(inputs.experts[0].astype(np.float64))
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


def karcher(inputs: Inputs) -> Exact:
    """Evaluate karcher."""
    xs = [x.astype(np.float64) for x in inputs.experts]
    if len(xs) == 1:
        return decided(xs[0])
    tol = float(inputs.params.get("tol", 1e-5))
    norms = [float(np.linalg.norm(x)) for x in xs]
    valid = [i for i, n in enumerate(norms) if n > tol]
    if not valid:
        return decided(np.zeros(xs[0].shape))
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
