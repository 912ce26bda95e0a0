"""Recipes that together use every operator, with parameters that make each do all that it can."""

from __future__ import annotations

from typing import Any

Recipe = dict[str, Any]


def _experts(*names: str, **columns: list[Any]) -> list[dict[str, Any]]:
    return [{"source": name} | {key: values[i] for key, values in columns.items()} for i, name in enumerate(names)]


THREE = ("e1", "e2", "e3")

RECIPES: dict[str, Recipe] = {
    "linear": {"operator": "linear", "experts": _experts(*THREE, weight=[0.5, -0.2, 1.1])},
    "task_arithmetic": {
        "operator": "task_arithmetic",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, -0.2, [0.1, 0.9]]),
        "params": {"lambda": 0.8},
    },
    "passthrough": {"operator": "passthrough", "experts": _experts("e1", scale=[0.7])},
    "slerp": {"operator": "slerp", "base": "base", "experts": ["e1"], "params": {"t": [0.2, 0.7]}},
    "nuslerp": {"operator": "nuslerp", "experts": _experts("e1", "e2", weight=[0.3, 0.7])},
    "nuslerp-base-rows": {
        "operator": "nuslerp",
        "base": "base",
        "experts": _experts("e1", "e2", weight=[0.6, 0.7]),
        "params": {"nuslerp_flatten": False},
    },
    "nuslerp-columns": {
        "operator": "nuslerp",
        "experts": _experts("e1", "e2", weight=[0.6, 0.7]),
        "params": {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    },
    "multislerp": {"operator": "multislerp", "base": "base", "experts": _experts(*THREE, weight=[0.5, 0.3, 0.25])},
    "karcher": {"operator": "karcher", "experts": list(THREE)},
    "ties": {
        "operator": "ties",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, -0.3, 0.2], density=[0.3, 0.55, [0.2, 0.9]]),
        "params": {"normalize": False, "rescale": "l1"},
    },
    "dare_linear": {
        "operator": "dare_linear",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 0.9]),
        "params": {"seed": 3},
    },
    "dare_ties": {
        "operator": "dare_ties",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 1.0]),
        "params": {"rescale": "l1", "normalize": True},
    },
    "della": {
        "operator": "della",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 0.7], epsilon=[0.1, 0.2, 0.05]),
    },
    "della_linear": {
        "operator": "della_linear",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 0.7], epsilon=[0.1, 0.2, 0.05]),
        "params": {"rescale": "density"},
    },
    "breadcrumbs": {
        "operator": "breadcrumbs",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 0.9], gamma=[0.05, 0.01, 0.0]),
    },
    "breadcrumbs_ties": {
        "operator": "breadcrumbs_ties",
        "base": "base",
        "experts": _experts(*THREE, weight=[0.5, 0.3, 0.2], density=[0.3, 0.55, 0.9], gamma=[0.05, 0.01, 0.0]),
        "params": {"rescale": "l1"},
    },
    "sce": {"operator": "sce", "base": "base", "experts": list(THREE), "params": {"select_topk": 0.4}},
    "model_stock": {"operator": "model_stock", "base": "base", "experts": list(THREE)},
    "model_stock-rows": {
        "operator": "model_stock",
        "base": "base",
        "experts": list(THREE),
        "params": {"filter_wise": True},
    },
    "nearswap": {"operator": "nearswap", "base": "base", "experts": ["e1"], "params": {"t": 0.5}},
    "arcee_fusion": {"operator": "arcee_fusion", "base": "base", "experts": ["e1"]},
    "ram": {"operator": "ram", "base": "base", "experts": list(THREE)},
    "ramplus_tl": {"operator": "ramplus_tl", "base": "base", "experts": list(THREE), "params": {"epsilon": 0.2}},
}

# One recipe of each family: values, deltas, copies, arcs of tensors and of columns, means on the sphere, magnitudes,
# masks by rank, variances, angles, counts, divergences. The slow suite has the others.
QUICK = frozenset(
    {
        *("linear", "task_arithmetic", "passthrough", "slerp", "nuslerp-columns", "karcher", "ties", "della", "sce"),
        *("model_stock", "ramplus_tl", "arcee_fusion"),
    }
)
