"""LoRA adapters for tests: written as PEFT writes them, and their formula evaluated by code of its own."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from support.checkpoints import random_tensors, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from support.checkpoints import Tensor
    from support.projects import SmallProject

Array = NDArray[Any]
PREFIX = "base_model.model."
# What PEFT 0.21 writes for a plain LoRA, as far as it is not about the training alone.
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "base",
    "r": 2,
    "lora_alpha": 3,
    "lora_dropout": 0.1,
    "target_modules": ["q"],
    "fan_in_fan_out": False,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write an adapter's folder anew; ``config`` replaces settings of `CONFIG`."""
    shutil.rmtree(folder, ignore_errors=True)
    write_safetensors(folder / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    return folder


def factors(seed: int, module: str, out: int, into: int, *, rank: int = 2, dtype: str = "F32") -> dict[str, Array]:
    """Return the two stored factors of a linear layer."""
    names = f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
    return random_tensors(seed, {names[0]: (rank, into), names[1]: (out, rank)}, dtype, scale=0.3)


def embedding_factors(seed: int, module: str, rows: int, width: int, *, rank: int = 2) -> dict[str, Array]:
    """Return the two stored factors of an embedding."""
    names = f"{PREFIX}{module}.lora_embedding_A", f"{PREFIX}{module}.lora_embedding_B"
    return random_tensors(seed, {names[0]: (rank, rows), names[1]: (width, rank)}, scale=0.3)


def exact_delta(a: Array, b: Array, scaling: float) -> Array:
    """Return ``scaling * (b @ a)`` in float64: every element's exact sum, rounded, times the scaling."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sums = [[math.fsum(b[i, k] * a[k, j] for k in range(a.shape[0])) for j in range(a.shape[1])] for i in range(len(b))]
    return np.asarray(sums).reshape(b.shape[0], a.shape[1]) * scaling


def delta_of(tensors: Mapping[str, Array], module: str, scaling: float) -> Array:
    """Return the delta of a linear layer's stored factors, rounded once to float32."""
    a, b = tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"]
    return exact_delta(a, b, scaling).astype(np.float32)


def add_adapter(
    project: SmallProject, name: str, tensors: Mapping[str, Tensor], on: str = "base", **config: Any
) -> Path:
    """Write an adapter (anew) into a project and declare it."""
    project.sources[name] = f"models/{name}"
    project.adapters[name] = on
    folder = write_adapter(project.root / project.sources[name], tensors, **config)
    project.save()
    return folder
