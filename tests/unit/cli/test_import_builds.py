"""From a mergekit configuration to the merged checkpoint, and what that must hold, computed from the configuration."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.checkpoints import as_dtype, random_tensors, read_checkpoint, write_checkpoint
from support.projects import quicken
from unit.cli.fakes import clean_variables
from unit.mergefile.mergekit_lookup import looked_up, position

from mergepipe.cli.main import run
from mergepipe.mergefile.mergekit.methods import METHODS

EXAMPLES = Path(__file__).parents[2] / "golden" / "mergekit"
LAYERS = 4
INSIDE = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}
OUTSIDE = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
SHAPES = OUTSIDE | {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in INSIDE.items()}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}
# The largest relative error of one rounding, and of float32 arithmetic.
ROUNDING = {"F32": 1e-5, "F16": 2.0**-10, "BF16": 2.0**-7}

Tensors = Mapping[str, np.ndarray]


@pytest.fixture
def family(tmp_path, monkeypatch):
    """A folder with a small family of models under `models`, as the current one."""
    base = random_tensors(1, SHAPES)
    for seed, name in enumerate(("base", "math", "code", "chat")):
        change = random_tensors(10 + seed, SHAPES, scale=0.1 if seed else 0.0)
        tensors = {key: base[key] + change[key] for key in base}
        write_checkpoint(tmp_path / "models" / name, tensors, config=CONFIG | {"vocab_size": 16})
    clean_variables(monkeypatch)
    quicken(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(family: Path, name: str) -> None:
    """Import an example and build it, in this process."""
    shutil.copy(EXAMPLES / f"{name}.yml", family)
    assert run(["import", f"{name}.yml"]) == 0
    assert run(["build"]) == 0


# --- what mergekit's configuration means, on numbers ------------------------------------------------------------------


def read_models(family: Path) -> dict[str, Tensors]:
    return {
        f"models/{path.name}": {key: value.astype(np.float64) for key, value in read_checkpoint(path).items()}
        for path in (family / "models").iterdir()
    }


def expected(config: dict[str, Any], models: Mapping[str, Tensors]) -> dict[str, np.ndarray]:
    """Return the tensors that a configuration stands for."""
    slices = config.get("slices") or [{"sources": whole(config)}]
    result = {}
    first = 0
    for number, part in enumerate(slices):
        start, stop = part["sources"][0]["layer_range"]
        for layer in range(stop - start):
            for inner in INSIDE:
                names = [f"model.layers.{s['layer_range'][0] + layer}.{inner}.weight" for s in part["sources"]]
                name = f"model.layers.{first + layer}.{inner}.weight"
                result[name] = merged(config, part, name, names, position(layer, stop - start), models)
        outside = [*(["model.embed_tokens.weight"] if number == 0 else [])]
        outside += ["model.norm.weight", "lm_head.weight"] if number == len(slices) - 1 else []
        for name in outside:
            result[name] = merged(config, part, name, [name] * len(part["sources"]), 0.0, models)
        first += stop - start
    return result


def whole(config: dict[str, Any]) -> list[dict[str, Any]]:
    sources = [model | {"layer_range": [0, LAYERS]} for model in config["models"]]
    base = config.get("base_model")
    if base is not None and all(source["model"] != base for source in sources):
        sources.append({"model": base, "layer_range": [0, LAYERS]})
    return sources


def merged(config, part, tensor, names, t, models) -> np.ndarray:
    """Return one tensor."""
    method = METHODS[config["merge_method"]]
    shared = {
        p.name: looked_up(p, (part.get("parameters"), config.get("parameters")), tensor, t)
        for p in method.parameters
        if not p.per_model
    }
    base, experts, beside = None, [], []
    for source, name in zip(part["sources"], names, strict=True):
        value = models[source["model"]][name]
        if source["model"] == config.get("base_model") and method.name != "linear":
            base = value
            continue
        experts.append(value)
        scopes = (source.get("parameters"), part.get("parameters"), config.get("parameters"))
        beside.append({p.name: looked_up(p, scopes, name, t) for p in method.parameters if p.per_model})
    return FORMULAS[method.name](base, experts, beside, shared)


def linear(base, experts, beside, shared):
    weights = [own["weight"] for own in beside]
    return sum(w * x for w, x in zip(weights, experts, strict=True)) / sum(weights)


def passthrough(base, experts, beside, shared):
    return experts[0] * beside[0]["scale"]


def slerp(base, experts, beside, shared):
    (other,), t = experts, shared["t"]
    cosine = np.sum(base * other) / (np.linalg.norm(base) * np.linalg.norm(other))
    if abs(cosine) > 0.9995:
        return (1 - t) * base + t * other
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * base + np.sin(t * angle) * other) / np.sin(angle)


def task_arithmetic(base, experts, beside, shared):
    return base + shared["lambda"] * sum(own["weight"] * (x - base) for own, x in zip(beside, experts, strict=True))


def ties(base, experts, beside, shared):
    deltas = []
    for own, x in zip(beside, experts, strict=True):
        # The differences as float32 has them, so that the same elements are the largest.
        delta = (x.astype(np.float32) - base.astype(np.float32)).astype(np.float64)
        kept = max(1, int(own["density"] * delta.size))
        smallest = np.sort(np.abs(delta), axis=None)[delta.size - kept]
        deltas.append(np.where(np.abs(delta) >= smallest, delta, 0) * own["weight"])
    sign = np.where(sum(deltas) >= 0, 1, -1)
    agree = [np.sign(delta) == sign for delta in deltas]
    weight = sum(own["weight"] * there for own, there in zip(beside, agree, strict=True))
    total = sum(delta * there for delta, there in zip(deltas, agree, strict=True))
    return base + total / np.where(weight == 0, 1, weight)


FORMULAS = {
    "linear": linear,
    "passthrough": passthrough,
    "slerp": slerp,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
}


# --- the examples -----------------------------------------------------------------------------------------------------


def assert_close(found: Tensors, wanted: Tensors, dtype: str) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == as_dtype(dtype), name
        limit = ROUNDING[dtype]
        np.testing.assert_allclose(found[name].astype(np.float64), value, rtol=limit, atol=limit / 50, err_msg=name)


@pytest.mark.parametrize(
    ("name", "dtype", "layers"),
    [
        ("linear", "BF16", 4),
        ("ties", "F16", 4),
        ("slerp", "F32", 4),
        ("stack", "F16", 6),
        ("expand", "F32", 6),
        ("filters", "F32", 4),
    ],
)
def test_the_build_holds_what_the_configuration_means(family, name, dtype, layers):
    build(family, name)
    config = yaml.safe_load((EXAMPLES / f"{name}.yml").read_text(encoding="utf-8"))
    assert_close(read_checkpoint(family / "build" / name), expected(config, read_models(family)), dtype)
    written = json.loads((family / "build" / name / "config.json").read_text(encoding="utf-8"))
    assert written["num_hidden_layers"] == layers


def test_documents_are_built_one_after_the_other(family):
    build(family, "multi")
    documents = list(yaml.safe_load_all((EXAMPLES / "multi.yml").read_text(encoding="utf-8")))
    models = read_models(family)
    for document in documents:
        models[document.get("name", "multi")] = expected(document, models)
    assert_close(read_checkpoint(family / "build" / "multi"), models["multi"], "BF16")
    assert [path.name for path in (family / "build").iterdir()] == ["multi"]


def test_random_masks_keep_the_share_that_is_asked_for(family):
    build(family, "dare-ties")
    base, found = read_checkpoint(family / "models" / "base"), read_checkpoint(family / "build" / "dare-ties")
    changed = [np.mean(found[name] != base[name].astype(as_dtype("BF16"))) for name in SHAPES if len(SHAPES[name]) > 1]
    # An element is changed where one of two masks of 0.53 keeps it.
    assert 0.6 < np.mean(changed) < 0.9


def test_every_example_that_needs_no_hub_is_built_here():
    tested = {"linear", "ties", "slerp", "stack", "expand", "filters", "multi", "dare-ties"}
    examples = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.yml")}
    local = {name for name, text in examples.items() if not re.search(r"\borg/", text)}
    assert local == tested
