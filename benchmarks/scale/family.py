"""Sparse checkpoint families: files of real shapes with holes for weights, so that they take no room on the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.families import SHAPES, Shape

SHARD_BYTES = 5_000_000_000
SCALE_SHAPES = {
    "0.5B": SHAPES["qwen2.5-0.5b"],
    "1B": SHAPES["llama3.2-1b"],
    "8B": Shape(
        layers=32, hidden=4096, mlp=14336, vocabulary=128256, heads=32, kv_heads=8, head_size=128, biases=False
    ),
    "70B": Shape(
        layers=80, hidden=8192, mlp=28672, vocabulary=128256, heads=64, kv_heads=8, head_size=128, biases=False
    ),
}
"""By name; the two large ones also have an output head of their own (`tensors`)."""
UNTIED = frozenset({"8B", "70B"})

Tensors = Sequence[tuple[str, tuple[int, ...]]]


def tensors(name: str) -> Tensors:
    """Return (name, shape) of every tensor of a family."""
    shape = SCALE_SHAPES[name]
    head = [("lm_head.weight", (shape.vocabulary, shape.hidden))] if name in UNTIED else []
    return [*shape.tensors(), *head]


def parameters(found: Tensors) -> int:
    """Return how many elements these tensors have."""
    return sum(math.prod(shape) for _, shape in found)


def write_family(found: Tensors, folder: Path, experts: int, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``base`` and ``e1`` to ``eN``, bfloat16, all of whose weights are holes."""
    for number in range(experts + 1):
        write_checkpoint(found, folder / (f"e{number}" if number else "base"), shard_bytes)


def write_checkpoint(found: Tensors, target: Path, shard_bytes: int) -> None:
    """Write one checkpoint in shards of at most so many bytes."""
    target.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(found, shard_bytes))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    weight_map = {}
    for name, members in zip(names, shards, strict=True):
        _write_shard(target / name, members)
        weight_map |= {tensor: name for tensor, _ in members}
    if len(shards) > 1:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))


def _shards(found: Tensors, shard_bytes: int) -> Iterable[Tensors]:
    members: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in found:
        nbytes = 2 * math.prod(shape)
        if members and size + nbytes > shard_bytes:
            yield members
            members, size = [], 0
        members.append((name, shape))
        size += nbytes
    yield members


def _write_shard(path: Path, members: Tensors) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in members:
        stop = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def mergefile(family: Path, experts: int, budget: str, *, operator: str = "task_arithmetic") -> str:
    """Return a Mergefile with one output; ``budget`` is the body of its budget table, empty for a full read."""
    names = [f"e{number}" for number in range(1, experts + 1)]
    sources = "".join(f"[sources.{name}]\npath = {json.dumps(str(family / name))}\n" for name in ("base", *names))
    table = f"[outputs.merged.budget]\n{budget}\n" if budget else ""
    return (
        f'version = 1\n{sources}[outputs.merged]\noperator = "{operator}"\nbase = "base"\n'
        f"experts = {json.dumps(names)}\n[outputs.merged.params]\nweight = 0.3\n{table}"
    )
