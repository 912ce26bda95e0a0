"""The two sides of a comparison: mergekit in its own environment, and mergepipe through its Python API."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mergepipe
from benchmarks.parity.cases import Case
from benchmarks.parity.checkpoints import Arrays, read, write
from mergepipe.errors import MergepipeError

_SERVER = Path(__file__).parent / "mergekit_side.py"


class SideError(Exception):
    """A side refused to merge."""


class Mergekit:
    """A process of mergekit's environment that stays alive: importing it takes seconds."""

    def __init__(self, python: str, work: Path) -> None:
        self._work = work
        self._log = (work / "mergekit.log").open("w")
        self._process = subprocess.Popen(
            [python, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(work), "HF_HUB_OFFLINE": "1"},
        )

    def merge(self, config: Mapping[str, Any], masks: Arrays | None = None, **extra: Any) -> Arrays:
        """Merge, with these masks in place of random draws; return the tensors.

        Raises
        ------
        SideError
            If mergekit raises.
        """
        request: dict[str, Any] = {"config": config, "out": str(self._work / "mergekit-out"), **extra}
        if masks is not None:
            write(masks, self._work / "masks")
            request["masks"] = str(self._work / "masks" / "model.safetensors")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"mergekit's process ended:\n{(self._work / 'mergekit.log').read_text()[-2000:]}")
        answer = json.loads(line)
        if not answer["ok"]:
            raise SideError(answer["error"])
        return read(Path(request["out"]))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def build(recipes: Mapping[str, Mapping[str, Any]], folders: Mapping[str, str], work: Path) -> dict[str, Arrays | str]:
    """Build outputs with mergepipe; return the tensors of each, or the message of its error.

    All are one project. Where that is refused, each is built on its own, to know which one it was.
    """
    try:
        return dict(_build(recipes, folders, work))
    except MergepipeError as error:
        if len(recipes) == 1:
            return dict.fromkeys(recipes, f"{type(error).__name__}: {error}")
    found: dict[str, Arrays | str] = {}
    for name, recipe in recipes.items():
        found |= build({name: recipe}, folders, work)
    return found


def _build(recipes: Mapping[str, Mapping[str, Any]], folders: Mapping[str, str], work: Path) -> dict[str, Arrays]:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    lines = ["version = 1"]
    for name, folder in folders.items():
        lines += [f"[sources.{name}]", f"path = {json.dumps(folder)}"]
    for name, recipe in recipes.items():
        lines += [f"[outputs.{name}]", *(f"{key} = {toml(value)}" for key, value in recipe.items())]
    (work / "Mergefile.toml").write_text("\n".join(lines) + "\n")
    mergepipe.open(work / "Mergefile.toml").build()
    return {name: read(work / "build" / name) for name in recipes}


def toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    match value:
        case dict():
            return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case float():
            return repr(value)
        case _:
            return json.dumps(value)


def masks_of(case: Case, folders: Mapping[str, str], work: Path, base: Arrays) -> Arrays:
    """Return which elements mergepipe keeps, for each tensor and expert (its place among those that are not the base).

    A merge of one expert with weight 1 and without rescaling differs from the base where an element is kept. Where the
    delta is zero nobody can tell, and it does not matter.
    """
    experts = [(source, own) for source, own in case.experts if source != "base"]
    recipes = {}
    for number, (source, own) in enumerate(experts):
        one = Case(method="della_linear" if case.method.startswith("della") else "dare_linear", family=case.family,
                   experts=((source, {**own, "weight": 1.0}),), params={"rescale": False}, seed=case.seed)  # fmt: skip
        recipes[f"m{number}"] = one.recipe()
    built = build(recipes, folders, work)
    masks: Arrays = {}
    for number in range(len(experts)):
        output = built[f"m{number}"]
        if isinstance(output, str):
            raise SideError(output)
        for name, array in output.items():
            masks[f"{name}|{number}"] = (array != base[name].astype(np.float32)).astype(np.float32)
    return masks


def merge_all(cases: Sequence[Case], folders: Mapping[str, str], work: Path) -> dict[str, Arrays | str]:
    """Build all cases of one family with mergepipe."""
    return build({case.id: case.recipe() for case in cases}, folders, work)
