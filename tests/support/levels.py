"""Projects whose budgets buy levels: blocks that are large enough for a code to be worth it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mergepipe.checkpoints.geometry import Geometry
from support.projects import SmallProject

if TYPE_CHECKING:
    from pathlib import Path

    from support.checkpoints import Tensor

LARGE = Geometry(block_elements=2048)
"""Blocks of 2048 elements: a level of one is a good deal less than the block."""
SHAPES = {"model.layers.0.a.weight": (96, 64), "model.layers.1.a.weight": (96, 64), "model.norm.weight": (64,)}
EXPERTS = ("e1", "e2", "e3")


def near(seed: int, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an expert near a base; its deltas are larger in later blocks."""
    rng = np.random.default_rng(seed)

    def delta(shape: tuple[int, ...]) -> Any:
        return rng.standard_normal(shape) * np.linspace(0.01, 0.2, math.prod(shape)).reshape(shape)

    return {name: value + delta(value.shape).astype(np.float32) for name, value in base.items()}


def levels_project(root: Path, share: Any = "25%", operator: str = "task_arithmetic", **recipe: Any) -> SmallProject:
    """Return a project with an output ``m`` whose budget buys levels."""
    project = SmallProject(root, geometry=LARGE)
    rng = np.random.default_rng(0)
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    project.add_sources({"base": base} | {name: near(n, base) for n, name in enumerate(EXPERTS, start=1)})
    budget = (share if isinstance(share, dict) else {"expert_reads": share}) | {"precision": "levels"}
    table = {"operator": operator, "base": "base", "experts": list(EXPERTS), "params": {"weight": 0.3}}
    project.set_output("m", table | {"budget": budget} | recipe)
    return project
