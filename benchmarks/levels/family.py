"""What budgets come to on a real family, in levels and in whole blocks: distance to the full merge, and perplexity.

Distances are taken from float32 outputs, so that rounding to the stored dtype is in none of them; perplexities from
models in the sources' dtype, as users build them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import safe_open

import mergepipe
from benchmarks.budgets.family import EXPERTS, RECIPES, scorer
from benchmarks.budgets.projects import write_mergefile
from benchmarks.levels.results import Json

BUDGETS = (5, 10, 25, 50, 75)
"""In percent of the experts' bytes."""
PRECISIONS = ("levels", "blocks")
SCORED = ("levels-10", "levels-25", "levels-50", "blocks-25")
"""The models whose perplexity is taken: that takes most of the time."""


def measure(family: Path, work: Path) -> Json:
    """Return the figures of a family: a folder with ``base``, ``expert-python`` and so on, and ``perplexity.py``."""
    score = scorer(family / "perplexity.py")
    sources = {"base": family / "base"} | {name: family / f"expert-{name}" for name in EXPERTS}
    found: Json = {"experts": list(EXPERTS), "operators": {}}
    for operator in RECIPES:
        folder = work / operator
        shutil.rmtree(folder, ignore_errors=True)
        write_mergefile(folder, sources, tables(operator))
        built = mergepipe.open(folder / "Mergefile.toml").build().outputs
        full, base = load(folder / "build/full-float32"), load(family / "base")
        update = norm(full, base)
        rows = {}
        for name in (f"{precision}-{percent}" for precision in PRECISIONS for percent in BUDGETS):
            report = built[f"{name}-float32"].as_json()
            rows[name] = {
                "bytes": report["expert_bytes"]["read"] + 0,
                "planned": report["expert_bytes"]["planned"],
                "full": report["expert_bytes"]["full"],
                "deviation": norm(load(folder / f"build/{name}-float32"), full) / update,
                "bound": (report["bound"]["absolute"] or float("nan")) / update,
                "perplexity": score(folder / f"build/{name}-bfloat16") if name in SCORED else None,
            }
        found["operators"][operator] = {"rows": rows, "full": score(folder / "build/full-bfloat16")}
    return found


def tables(operator: str) -> dict[str, str]:
    """Return the tables of all outputs of an operator: full and budgeted, in float32 and as models."""
    weight, more = RECIPES[operator]
    listed = ", ".join(f'{{ source = "{name}", {weight} }}' for name in EXPERTS)
    start = f'operator = "{operator}"\nbase = "base"\nexperts = [{listed}]\n{more}'
    found = {}
    for dtype in ("float32", "bfloat16"):
        end = f'write = {{ dtype = "{dtype}" }}\n'
        found[f"full-{dtype}"] = start + end
        for precision in PRECISIONS:
            for percent in BUDGETS:
                if dtype == "bfloat16" and f"{precision}-{percent}" not in SCORED:
                    continue
                limit = f'budget = {{ expert_reads = "{percent}%", precision = "{precision}" }}\n'
                found[f"{precision}-{percent}-{dtype}"] = start + limit + end
    return found


Tensors = Mapping[str, "np.ndarray"]


def load(folder: Path) -> Tensors:
    """Return the tensors of a checkpoint in float64."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).float().numpy().astype(np.float64) for name in file.keys()}  # noqa: SIM118
    return found


def norm(first: Tensors, second: Tensors) -> float:
    """Return the Frobenius norm of the difference of two checkpoints."""
    return float(np.sqrt(sum(np.square(first[name] - second[name]).sum() for name in first)))
