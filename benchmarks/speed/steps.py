"""What each participant of a row does in a round."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.speed import rows
from benchmarks.speed.ground import Figures, Ground, weight_files
from benchmarks.speed.merges import Merge
from benchmarks.speed.rows import ROWS, Row

EDITED = "model.layers.1.mlp.down_proj.weight"
SHARE = "10%"

Step = Callable[[str], Figures]


def steps(row: Row, ground: Ground) -> Mapping[str, Step]:
    """Return what runs in each round of a row, by who does it and in this order; each takes the mode.

    mergekit is left out where the ground has none.
    """
    made = {"full": _full, "second": _second, "changes": _changes, "parameter": _parameter, "memory": _memory}
    found = made[row.kind](row, ground)
    return {who: found[who] for who in rows.participants(row) if who in found}


def _full(row: Row, ground: Ground) -> dict[str, Step]:
    wanted = row.merge
    files = weight_files(ground.sources(wanted.inputs).values())
    measured = ground.work / "measured"

    def with_budget(mode: str) -> Figures:
        budgeted = dataclasses.replace(wanted, budget=SHARE)
        if not measured.exists():  # the deltas are measured once, ever; there are no results in this cache
            shutil.rmtree(ground.project, ignore_errors=True)
            ground.write_mergefile({"merged": budgeted})
            ground.mergepipe("plan")
            shutil.copytree(ground.project / ".mergecache", measured)
        return ground.fresh({"merged": budgeted}, mode, cache=measured)

    found: dict[str, Step] = {
        rows.FLOOR: lambda mode: ground.floor(files, mode),
        rows.OURS: lambda mode: ground.fresh({"merged": wanted}, mode),
        rows.BUDGET: with_budget,
        rows.L1: lambda mode: ground.fresh({"merged": dataclasses.replace(wanted, ours={"rescale": "l1"})}, mode),
    }
    if ground.python is not None:
        found[rows.BEST] = lambda mode: ground.mergekit(wanted, mode, ground.flags)
        found[rows.DEFAULT] = lambda mode: ground.mergekit(wanted, mode, "")
    return found


def _second(row: Row, ground: Ground) -> dict[str, Step]:
    other = dataclasses.replace(row.merge, expert_parameters={"weight": 0.5})

    def two(mode: str) -> Figures:
        outputs = {"merged": row.merge, "second": other}
        # One output is written into memory that the two before it have just given back. So that both are of two, it is
        # the second time that counts: memory that a virtual machine's host must find first takes longer than the build.
        ground.fresh(outputs, mode)
        return ground.fresh(outputs, mode)

    return {rows.ONE: lambda mode: ground.fresh({"merged": row.merge}, mode), rows.TWO: two}


def _changes(row: Row, ground: Ground) -> dict[str, Step]:
    own = {"e1": ground.work / "e1"}
    weights = own["e1"] / "model.safetensors"
    edited: list[bool] = []

    def full(mode: str) -> Figures:
        if not weights.exists():  # a copy, so that the family stays as it was generated
            shutil.copytree(ground.family / "e1", own["e1"])
        if edited:
            edit(weights, EDITED)  # back to what it was
            edited.clear()
        return ground.fresh({"merged": row.merge}, mode, sources=own)

    def one_tensor(mode: str) -> Figures:
        edited.append(True)
        return {"expected_bytes": edit(weights, EDITED) * row.experts} | ground.build()

    return {
        rows.FULL: full,
        rows.NOTHING: lambda mode: ground.build(),
        rows.TENSOR: one_tensor,
        rows.TENSOR_FLOOR: lambda mode: ground.floor(weight_files(own.values()), mode),
    }


def _parameter(row: Row, ground: Ground) -> dict[str, Step]:
    def change(name: str) -> Step:
        def run(mode: str) -> Figures:
            ground.write_mergefile({"merged": changed(row.merge, name)})
            return ground.build()

        return run

    first: dict[str, Step] = {rows.BEFORE: lambda mode: ground.fresh({"merged": row.merge}, mode)}
    return first | {f"{name} changed": change(name) for name in rows.parameters(row)}


def changed(wanted: Merge, name: str) -> Merge:
    """Return a merge with another value of one parameter."""
    if name in wanted.expert_parameters:
        return dataclasses.replace(wanted, expert_parameters={**wanted.expert_parameters, name: 0.6})
    return dataclasses.replace(wanted, ours={name: 0.7})


def _memory(row: Row, ground: Ground) -> dict[str, Step]:
    larger = dataclasses.replace(ground, shape=rows.LARGER[ground.shape])

    def run(name: str) -> Step:
        def build(mode: str) -> Figures:
            larger.prepare(row.experts)
            return larger.fresh({"merged": ROWS[name].merge}, mode)

        return build

    return {name: run(name) for name in rows.participants(row)}


def edit(path: Path, tensor: str) -> int:
    """Change every element of a tensor in a file by its last bit; return how many bytes it has."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, stop = json.loads(file.read(length))[tensor]["data_offsets"]
        file.seek(8 + length + begin)
        values = np.frombuffer(file.read(stop - begin), np.uint16) ^ np.uint16(1)
        file.seek(8 + length + begin)
        file.write(values.tobytes())
    return int(stop - begin)
