"""The order of mergekit's float32 operations, in numpy: which of its roundings differ from ours, and nothing else.

Where an emulation gives mergekit's bits at an element that differs, the difference is explained by this order alone.
Methods that sum over a whole tensor are left out: the order of those sums is not known.

Two facts of torch 2.13 on the CPU are behind it. `addcmul_` is a fused multiply-add. And a sum over five or more
stacked tensors is from left to right except for the last (elements mod 32) elements, which four interleaved partial
sums make (a tensor of fewer than 8 elements is summed in yet another way, which is not emulated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.parity.exact_deltas import sparsified
from benchmarks.parity.values import Inputs

Array = np.ndarray
_LANES, _PARTIALS = 32, 4
_RAMPLUS = {"epsilon": 1e-5, "alpha": 0.2, "r": 0.1}


def emulate(inputs: Inputs) -> Array | None:
    """Return what mergekit computes, in float32, or None where its order is not known."""
    method = _METHODS.get(inputs.method)
    with np.errstate(all="ignore"):
        return None if method is None else method(inputs)


def sum_of(arrays: Sequence[Array]) -> Array:
    """Return the float32 sum over a stack, as torch orders it."""
    flat = [array.reshape(-1) for array in arrays]
    total = _left_to_right(flat)
    begin = total.size - total.size % _LANES
    if len(flat) > _PARTIALS and begin < total.size:
        tails = [array[begin:] for array in flat]
        full = len(tails) // _PARTIALS * _PARTIALS
        partials = [_left_to_right(tails[first:full:_PARTIALS]) for first in range(_PARTIALS)]
        partials[0] = _left_to_right([partials[0], *tails[full:]])
        total[begin:] = _left_to_right(partials)
    return total.reshape(arrays[0].shape)


def _left_to_right(arrays: Sequence[Array]) -> Array:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def _float32(values: Sequence[float]) -> list[np.float32]:
    return [np.float32(value) for value in values]


def _linear(inputs: Inputs) -> Array:
    weights = _float32(inputs.column("weight", 1.0))
    total = np.zeros(inputs.experts[0].shape, np.float32)
    for weight, x in zip(weights, inputs.experts, strict=True):
        total = (x.astype(np.float64) * float(weight) + total).astype(np.float32)  # one rounding: fused
    if inputs.params.get("normalize", True):
        total /= sum_of([np.reshape(weight, 1) for weight in weights])[0]
    return total


def _nearswap(inputs: Inputs) -> Array:
    a, b = inputs.base, inputs.experts[0]
    assert a is not None
    reciprocal = np.float32(1) / np.maximum(np.abs(a - b), np.float32(1e-6))
    weight = np.clip(reciprocal * np.float32(inputs.params["t"]), np.float32(0), np.float32(1))
    return weight * b + (np.float32(1) - weight) * a


def _ram(inputs: Inputs) -> Array | None:
    deltas = [x - inputs.base for x in inputs.experts]
    changed = [np.abs(delta) > np.float32(inputs.params.get("epsilon", 1e-5)) for delta in deltas]
    count, zero = np.sum(changed, axis=0), np.float32(0)
    factors = [np.float32(1)] * len(deltas)
    if inputs.method == "ramplus_tl":
        shared = [np.float32((yes & (count > 1)).sum()) for yes in changed]
        alone = [np.float32((yes & (count == 1)).sum()) for yes in changed]
        epsilon, alpha, r = (np.float32(inputs.params.get(name, default)) for name, default in _RAMPLUS.items())
        factors = [
            np.float32(1) + r * np.clip(s / np.maximum(u, epsilon), zero, alpha)
            for s, u in zip(shared, alone, strict=True)
        ]
    divisor = np.maximum(count, 1).astype(np.float32)
    terms = [
        np.where(yes & (count == 1), delta * factor, zero) + np.where(yes & (count > 1), delta / divisor, zero)
        for delta, yes, factor in zip(deltas, changed, factors, strict=True)
    ]
    return inputs.base + sum_of(terms)


def _task_vectors(*, elect: bool, normalize: bool, rescale: bool) -> Callable[[Inputs], Array | None]:
    def method(inputs: Inputs) -> Array | None:
        if inputs.params.get("rescale", rescale) and any(d < 1 for d in inputs.column("density", 1.0)):
            return None
        weights = _float32(inputs.column("weight", 1.0))
        terms = []
        for index, (x, weight) in enumerate(zip(inputs.experts, weights, strict=True)):
            kept, _ = sparsified(x - inputs.base, index, inputs)
            terms.append(kept.astype(np.float32) * weight)
        if elect:
            majority = np.where(sum_of(terms) >= 0, 1, -1)
            agree = [np.sign(term) == majority for term in terms]
            total = sum_of([np.where(yes, term, np.float32(0)) for yes, term in zip(agree, terms, strict=True)])
            divisor = sum_of([yes * weight for yes, weight in zip(agree, weights, strict=True)])
            divisor = np.where(divisor == 0, np.float32(1), divisor)
        else:
            total, divisor = sum_of(terms), sum_of([np.reshape(weight, 1) for weight in weights])[0]
        if inputs.params.get("normalize", normalize):
            total = total / divisor
        scale = np.float32(inputs.params.get("lambda", 1.0))
        return inputs.base + (total if scale == 1 else total * scale)

    return method


_METHODS: Mapping[str, Callable[[Inputs], Array | None]] = {
    "linear": _linear,
    "nearswap": _nearswap,
    "ram": _ram,
    "ramplus_tl": _ram,
    "task_arithmetic": _task_vectors(elect=False, normalize=False, rescale=False),
    "ties": _task_vectors(elect=True, normalize=True, rescale=False),
    "dare_linear": _task_vectors(elect=False, normalize=False, rescale=True),
    "dare_ties": _task_vectors(elect=True, normalize=False, rescale=True),
    "breadcrumbs": _task_vectors(elect=False, normalize=False, rescale=False),
    "breadcrumbs_ties": _task_vectors(elect=True, normalize=False, rescale=False),
    "della": _task_vectors(elect=True, normalize=True, rescale=True),
    "della_linear": _task_vectors(elect=False, normalize=False, rescale=True),
}
