"""Writes the fixtures of tests/parity: small inputs, recipes, and what mergekit made of them in float32.

One file holds the inputs of a family, `source/tensor` by name; one file per method holds a vector per case: all tensors
of the output, flat, in the order of `cases.json`, and packed bits that say which elements are undecided (equal
magnitudes torn apart by a threshold, or a sign that hangs on rounding).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.parity.cases import Case, cases
from benchmarks.parity.checkpoints import Arrays, make, write
from benchmarks.parity.exact import by_design, evaluate
from benchmarks.parity.runner import RANDOM, Runner, inputs_at
from benchmarks.parity.sides import SideError, masks_of
from mergepipe.operators.registry import operators

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "parity" / "fixtures"
_MINI = {"f32": "mini-f32", "bf16": "mini-bf16", "grid": "mini-grid"}
_MOST = 9


def write_fixtures(runner: Runner, methods: list[str]) -> None:
    """Write the fixtures of these methods; those of the others stay."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    listed = _listed()
    for method in methods:
        chosen = _chosen(method)
        if method in RANDOM and method not in operators():
            print(f"{method}: its masks are not there yet", file=sys.stderr)
            continue
        vectors: Arrays = {}
        entries = []
        for case in chosen:
            try:
                output, undecided = _evaluate(runner, case)
            except SideError as error:
                print(f"{case.id}: left out: {error}", file=sys.stderr)
                continue
            vectors[case.id] = output
            if undecided.any():
                vectors[f"{case.id}?"] = np.packbits(undecided)
            entries.append({"id": case.id, "family": case.family, "recipe": case.recipe()})
        save_file(vectors, FIXTURES / f"{method}.safetensors")
        (FIXTURES / f"{method}.safetensors").chmod(0o644)
        listed["methods"][method] = entries
        print(f"{method}: {len(entries)} cases")
    for family in _MINI.values():
        tensors = make(family)
        flat = {f"{source}/{name}": array for source, arrays in tensors.items() for name, array in arrays.items()}
        _save_inputs(flat, FIXTURES / f"inputs-{family}.safetensors")
        listed["tensors"] = list(tensors["base"])
    lines = [json.dumps(entry) for entries in listed["methods"].values() for entry in entries]
    head = json.dumps({"mergekit": listed["mergekit"], "tensors": listed["tensors"]})
    (FIXTURES / "cases.json").write_text("[\n" + ",\n".join([head, *lines]) + "\n]\n")


def _save_inputs(tensors: Arrays, path: Path) -> None:
    folder = path.with_suffix("")
    write(tensors, folder)
    (folder / "model.safetensors").replace(path)
    (folder / "config.json").unlink()
    folder.rmdir()


def _listed() -> dict[str, Any]:
    """Return what cases.json lists now."""
    found: dict[str, Any] = {"mergekit": "0.1.5", "tensors": [], "methods": {}}
    path = FIXTURES / "cases.json"
    for entry in json.loads(path.read_text())[1:] if path.exists() else []:
        found["methods"].setdefault(entry["recipe"]["operator"], []).append(entry)
    return found


def _chosen(method: str) -> list[Case]:
    """Return some cases, spread over all that a small family has."""
    found = [replace(case, family=_MINI[case.family]) for case in cases(method, real=False) if case.family in _MINI]
    return [found[number * len(found) // _MOST] for number in range(_MOST)] if len(found) > _MOST else found


def _evaluate(runner: Runner, case: Case) -> tuple[np.ndarray, np.ndarray]:
    folders, sources = runner.folders(case.family), runner.tensors(case.family)
    masks = masks_of(case, folders, runner.work / "fixture-masks", sources["base"]) if case.method in RANDOM else None
    output = runner.mergekit.merge(case.mergekit(folders), masks)
    undecided = []
    for name in sources["base"]:
        inputs = inputs_at(case, name, 2, sources, masks)
        unsure = evaluate(inputs).undecided | by_design(inputs)
        # A choice among equal variances moves the weights of sce, and so the whole tensor.
        unsure |= case.method == "sce" and unsure.any()
        undecided.append(unsure.reshape(-1))
    return np.concatenate([output[name].reshape(-1) for name in sources["base"]]), np.concatenate(undecided)
