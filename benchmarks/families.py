"""Synthetic checkpoint families of real shapes, written by numpy alone and the same on every machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

_CHUNK = 1 << 22
_ROW_SHARE, _ROW_FACTOR = 0.1, 5.0  # a tenth of the rows have deltas five times as large: blocks differ in importance


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a model family (the tensor names and sizes of a published architecture)."""

    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    biases: bool

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of every tensor."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            yield from self._layer(f"model.layers.{layer}.")
        yield "model.norm.weight", (self.hidden,)

    def _layer(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide, narrow = self.heads * self.head_size, self.kv_heads * self.head_size
        for name, rows in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):
            yield f"{prefix}self_attn.{name}.weight", (rows, self.hidden)
            if self.biases:
                yield f"{prefix}self_attn.{name}.bias", (rows,)
        yield f"{prefix}self_attn.o_proj.weight", (self.hidden, wide)
        yield f"{prefix}mlp.gate_proj.weight", (self.mlp, self.hidden)
        yield f"{prefix}mlp.up_proj.weight", (self.mlp, self.hidden)
        yield f"{prefix}mlp.down_proj.weight", (self.hidden, self.mlp)
        yield f"{prefix}input_layernorm.weight", (self.hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (self.hidden,)


SHAPES = {
    "tiny": Shape(layers=2, hidden=256, mlp=1024, vocabulary=8192, heads=4, kv_heads=2, head_size=64, biases=False),
    "qwen2.5-0.5b": Shape(
        layers=24, hidden=896, mlp=4864, vocabulary=151936, heads=14, kv_heads=2, head_size=64, biases=True
    ),
    "llama3.2-1b": Shape(
        layers=16, hidden=2048, mlp=8192, vocabulary=128256, heads=32, kv_heads=8, head_size=64, biases=False
    ),
}


def write_family(shape: Shape, folder: Path, experts: int) -> None:
    """Write ``base`` and ``e1`` to ``eN`` into a folder; what is there already is kept."""
    for number in range(experts + 1):
        target = folder / ("base" if number == 0 else f"e{number}")
        if not (target / "config.json").exists():
            target.mkdir(parents=True, exist_ok=True)
            _write_checkpoint(shape, target, number)


def _write_checkpoint(shape: Shape, target: Path, number: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, size in shape.tensors():
        stop = position + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (target / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, (name, size) in enumerate(shape.tensors()):
            for values in _values(index, name, size, number):
                file.write(values.tobytes())
    config = {"model_type": "llama", "num_hidden_layers": shape.layers, "torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))


def _values(index: int, name: str, size: tuple[int, ...], number: int) -> Iterator[np.ndarray]:
    columns = size[1] if len(size) > 1 else 1
    step = max(1, _CHUNK // columns)
    scale = np.random.Generator(np.random.Philox([7, number, index])).lognormal(math.log(3.4e-5), 0.5)
    for chunk, row in enumerate(range(0, size[0], step)):
        shape = (min(step, size[0] - row), columns)
        base = np.random.Generator(np.random.Philox([1, index, chunk]))
        values = base.standard_normal(shape, dtype=np.float32) * np.float32(0.02) + np.float32("norm" in name)
        values = values.astype(ml_dtypes.bfloat16)
        if number:
            own = np.random.Generator(np.random.Philox([2, number, index, chunk]))
            delta = own.standard_normal(shape, dtype=np.float32) * np.float32(scale)
            delta[own.random(shape[0]) < _ROW_SHARE] *= np.float32(_ROW_FACTOR)
            values = (values.astype(np.float32) + delta).astype(ml_dtypes.bfloat16)
        yield values
