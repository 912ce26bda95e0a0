"""Budgets in tests: declaring them, and what an output's manifest says was read."""

from __future__ import annotations

from typing import Any

from support.projects import SmallProject

Budget = dict[str, Any]
EXACT = 255


def percent(share: float) -> Budget:
    """Return a budget of a share of the full read, in whole blocks."""
    return {"expert_reads": f"{share}%", "precision": "blocks"}


def limit(count: int) -> Budget:
    """Return a budget of so many bytes."""
    return {"expert_reads": count, "precision": "blocks"}


def with_budget(project: SmallProject, budget: Budget, output: str = "m") -> SmallProject:
    """Give an output a budget, or another one."""
    project.set_output(output, project.outputs[output] | {"budget": budget})
    return project


def levels(project: SmallProject, output: str = "m") -> dict[str, list[bytes]]:
    """Return, by tensor and expert, the level of every block; `EXACT` for all where nothing is left out."""
    manifest = project.manifest(output)
    experts = len(project.outputs[output]["experts"])
    found = {}
    for tensor in manifest.tensors:
        blocks = len(tensor.blocks) // 32
        given = tensor.levels if tensor.levels is not None else bytes([EXACT]) * blocks * experts
        found[tensor.name] = [given[expert * blocks : (expert + 1) * blocks] for expert in range(experts)]
    return found


def selected(project: SmallProject, output: str = "m") -> set[tuple[str, int, int]]:
    """Return the (tensor, expert, block) that are not left out."""
    return {
        (tensor, expert, block)
        for tensor, rows in levels(project, output).items()
        for expert, row in enumerate(rows)
        for block, level in enumerate(row)
        if level
    }
