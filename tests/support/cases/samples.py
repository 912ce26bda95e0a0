"""Small cases made by hand, for the tests of the harness itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from support.cases.tensors import Tensor, write_safetensors

TOY = (sys.executable, str(Path(__file__).with_name("fake_tool.py")))
RECIPE = {
    "method": "linear",
    "base": "base",
    "experts": [{"path": "base", "weight": 0.75}, {"path": "expert", "weight": 0.25}],
    "params": {"normalize": False},
    "dtype": "float32",
}
# base 1.0, expert 3.0: what the recipe gives, and what it gives once the expert is 5.0.
MERGED = {"outcome": "success", "tensors": "expected.safetensors"}
MERGED_V2 = {"outcome": "success", "tensors": "expected_v2.safetensors"}
FAILS = {"outcome": "error", "exit_code": "nonzero", "no_partial_output": True}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}


def toy_with(fault: str) -> tuple[str, ...]:
    """Return the toy's command line with a fault."""
    return (*TOY, "--fault", fault)


def tensor(values: Any, dtype: str = "F32") -> Tensor:
    """Return a tensor that holds the values."""
    array = np.asarray(values).astype(_NUMPY[dtype])
    return Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def write_model(folder: Path, **tensors: Tensor) -> Path:
    """Write a checkpoint of one file and a config, and return its folder."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {"hidden_size": 4, "tie_word_embeddings": False, "torch_dtype": "float32", "rope": {"theta": 10000}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_case(folder: Path, *, name: str = "Z01-sample", elements: int = 64, **entries: Any) -> Path:
    """Write a case with a base of ones and an expert of threes (fives in ``_alt``), and return its folder.

    ``entries`` are those of ``case.json``; the recipe is `RECIPE` and the expectation `MERGED` where not given.
    """
    values = {"base": 1.0, "expert": 3.0}
    for model, value in values.items():
        write_model(folder / model, w=tensor(np.full(elements, value)))
    (folder / "_alt").mkdir()
    for file, value in {"expected": 1.5, "expected_v2": 2.0, "_alt/expert_v2": 5.0}.items():
        write_safetensors(folder / f"{file}.safetensors", {"w": tensor(np.full(elements, value))})
    data = {"id": name, "recipe": RECIPE, "expected": MERGED, **entries}
    (folder / "case.json").write_text(json.dumps(data), encoding="utf-8")
    return folder
