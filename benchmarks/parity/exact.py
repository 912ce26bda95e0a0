"""The formulas of mergekit 0.1.5 in float64: what both sides round, and where rounding may decide.

Nothing here is shared with either side. Besides the values, an evaluation returns which elements are *undecided*: those
where the formula leaves a choice (equal magnitudes at a threshold) or where a difference of rounding may flip a
comparison (an elected sign, a threshold), so that both answers are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.parity import exact_checkpoints as checkpoints
from benchmarks.parity import exact_deltas as deltas
from benchmarks.parity.values import Exact, Inputs


def evaluate(inputs: Inputs) -> Exact:
    """Return the exact values of one tensor."""
    with np.errstate(all="ignore"):
        return _METHODS[inputs.method](inputs)


def by_design(inputs: Inputs) -> bool:
    """Return whether our definition differs from mergekit's for this tensor.

    slerp with a vector of length zero: a chord here, an arc of a right angle there. breadcrumbs where density times
    elements is below 1: one element is kept here, none there.
    """
    if inputs.method.startswith("breadcrumbs"):
        size = inputs.experts[0].size if inputs.experts else 1
        return any(int(density * size) == 0 for density in inputs.column("density", 1.0))
    if inputs.method != "slerp":
        return False
    return any(np.linalg.norm(np.asarray(x, np.float64)) <= 1e-8 for x in (inputs.base, inputs.experts[0]))


_METHODS: Mapping[str, Callable[[Inputs], Exact]] = {
    "linear": checkpoints.linear,
    "slerp": checkpoints.slerp,
    "nuslerp": checkpoints.nuslerp,
    "multislerp": checkpoints.multislerp,
    "karcher": checkpoints.karcher,
    "passthrough": checkpoints.passthrough,
    "task_arithmetic": deltas.task_vectors(elect=False, normalize=False, rescale=False),
    "ties": deltas.task_vectors(elect=True, normalize=True, rescale=False),
    "dare_linear": deltas.task_vectors(elect=False, normalize=False, rescale=True),
    "dare_ties": deltas.task_vectors(elect=True, normalize=False, rescale=True),
    "breadcrumbs": deltas.task_vectors(elect=False, normalize=False, rescale=False),
    "breadcrumbs_ties": deltas.task_vectors(elect=True, normalize=False, rescale=False),
    "della": deltas.task_vectors(elect=True, normalize=True, rescale=True),
    "della_linear": deltas.task_vectors(elect=False, normalize=False, rescale=True),
    "sce": deltas.sce,
    "model_stock": deltas.model_stock,
    "nearswap": deltas.nearswap,
    "arcee_fusion": deltas.arcee_fusion,
    "ram": deltas.ram,
    "ramplus_tl": deltas.ramplus_tl,
}
