"""What mergekit is asked for: a configuration per merge, flags, and which of these are its best."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.merges import Merge

VERSION = "0.1.5"
DTYPE = "bfloat16"

# Leaves out what a merge does not need, and writes beside the arithmetic. What `python -m benchmarks flags` finds
# quickest on a machine is taken in its place.
SPARING = "--lazy-unpickle --async-write --no-copy-tokenizer --no-write-model-card --quiet"

# What is tried; variables come first, as in a shell. --cuda, --multi-gpu and --gpu-rich are for graphics cards.
TRIED = (
    "",
    "--lazy-unpickle",
    "--low-cpu-memory",
    "--no-copy-tokenizer --no-write-model-card --quiet",
    "--async-write",
    "--out-shard-size 100M",
    "--async-write --write-threads 2 --out-shard-size 100M",
    "-j 1",
    "OMP_NUM_THREADS=1",
    SPARING,
    f"{SPARING} --write-threads 2 --out-shard-size 100M",
)


def best(found: Mapping[str, Any], shape: str) -> str:
    """Return the flags with the smallest sum of median wall times over the merges they were tried with.

    Parameters
    ----------
    found
        All figures of the benchmark; without any of flags, or with those of another shape, it is ``SPARING``.
    """
    tried = found.get("flags", {})
    if tried.get("shape") != shape:
        return SPARING
    walls: dict[str, dict[str, list[float]]] = {}
    for run in tried["runs"]:
        if run["dtype"] == DTYPE:
            walls.setdefault(run["flags"], {}).setdefault(run["row"], []).append(run["wall"])
    most = max(len(by_row) for by_row in walls.values())
    sums = {
        flags: sum(statistics.median(times) for times in by_row.values())
        for flags, by_row in walls.items()
        if len(by_row) == most
    }
    return min(sums, key=lambda flags: sums[flags])


def config(merge: Merge, sources: Mapping[str, Path], dtype: str = DTYPE) -> dict[str, Any]:
    """Return mergekit's configuration of a merge; JSON is YAML, so it can be written as it is."""
    models: list[dict[str, Any]] = [
        {"model": str(sources[name]), "parameters": dict(merge.expert_parameters)} for name in merge.experts
    ]
    if merge.operator == "slerp":
        models = [{"model": str(sources[name])} for name in merge.inputs]
    found: dict[str, Any] = {"merge_method": merge.operator, "models": models, "dtype": dtype}
    if dtype != DTYPE:
        found["out_dtype"] = DTYPE
    if merge.base is not None:
        found["base_model"] = str(sources[merge.base])
    if merge.parameters:
        found["parameters"] = dict(merge.parameters)
    return found


def write_config(merge: Merge, sources: Mapping[str, Path], path: Path, dtype: str = DTYPE) -> None:
    """Write the configuration of a merge."""
    path.write_text(json.dumps(config(merge, sources, dtype), indent=1))


def command(python: str, configuration: Path, output: Path, flags: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that merges, and its environment.

    Parameters
    ----------
    python
        The Python of an environment with mergekit; its programs are beside it.
    flags
        As in a shell: variables (``NAME=value``), then flags.
    """
    words = shlex.split(flags)
    variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    program = str(Path(python).parent / "mergekit-yaml")
    options: Sequence[str] = [word for word in words if word.split("=", 1)[0] not in variables]
    return [program, str(configuration), str(output), *options], {"HF_HUB_OFFLINE": "1", **variables}
