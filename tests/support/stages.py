"""A project of two stages for the tests of outputs that are made from outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergepipe.lockfile.reader import read_lock
from mergepipe.project.reports import BuildReport, OutputReport
from support.checkpoints import random_tensors
from support.projects import SmallProject

# Blocks of 64 elements: `a` and `b` have four each, `v` one.
BLOCK = 64
SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
ELEMENTS, BLOCKS = 576, 9
CONFIG = {"architectures": ["M"], "torch_dtype": "float32", "num_hidden_layers": 2}


def merged(*experts: Any, base: str = "base", operator: str = "task_arithmetic", **entries: Any) -> dict[str, Any]:
    """Return the recipe of an output."""
    return {"operator": operator, "base": base, "experts": list(experts), **entries}


def declare(
    root: Path,
    *,
    publish: bool = True,
    order: tuple[str, ...] = ("stage", "final"),
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> SmallProject:
    """Return a project of two stages: `final` merges `stage` and a third expert onto the base."""
    project = SmallProject(root)
    for seed, name in enumerate(("base", "e1", "e2", "e3")):
        side = {"tokenizer.json": f'{{"of": "{name}"}}', "generation_config.json": "{}"}
        project.add_source(name, random_tensors(seed, shapes), config=CONFIG, side_files=side)
    recipes = {
        "stage": merged({"source": "e1", "weight": 0.5}, "e2") | ({} if publish else {"publish": False}),
        "final": merged({"source": "stage", "weight": [0.2, 0.7]}, {"source": "e3", "weight": 0.4}),
    }
    for name in order:
        project.set_output(name, recipes[name])
    return project


def counts(report: OutputReport) -> tuple[int, int, int, int]:
    """Return computed blocks; expert, base and index bytes read."""
    return (report.blocks["computed"], report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read)


def states(report: BuildReport) -> Mapping[str, str]:
    """Return the state of each output after a build."""
    return {name: output.state for name, output in report.outputs.items()}


def packs(project: SmallProject) -> list[Path]:
    """Return the packs in the cache."""
    return sorted((project.cache / "packs").iterdir())


def stage_pack(project: SmallProject) -> Path:
    """Return where the pack of the stage lies, or lay."""
    stage = read_lock(project.lock).output("stage")
    return project.cache / "packs" / f"{stage.shards[0].digest.hex()}.safetensors"


def drop_pack_of_stage(project: SmallProject) -> None:
    """Prune the pack of the stage alone."""
    with project.open()._writing() as (catalog, _):
        catalog.drop_pack(stage_pack(project).stem)
    stage_pack(project).unlink()
