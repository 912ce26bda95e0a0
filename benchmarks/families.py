"""Synthetic checkpoint families of real shapes, written by numpy alone and the same on every machine."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

_CHUNK = 1 << 22
_SMALL = 1 << 28  # bytes that are written sooner than other processes begin
_ROW_SHARE, _ROW_FACTOR = 0.1, 5.0  # a tenth of the rows have deltas five times as large: blocks differ in importance


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a model family (the tensor names and sizes of a published architecture).

    Attributes
    ----------
    biases
        Whether queries, keys and values have biases.
    model_type, architecture
        What ``config.json`` says, so that other tools know the names of the tensors.
    """

    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    biases: bool
    model_type: str = "llama"
    architecture: str = "LlamaForCausalLM"

    @property
    def weight_bytes(self) -> int:
        """Return how many bytes the tensors of one checkpoint have."""
        return sum(2 * math.prod(size) for _, size in self.tensors())

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
    "small": Shape(layers=4, hidden=384, mlp=1536, vocabulary=16384, heads=6, kv_heads=2, head_size=64, biases=False),
    "qwen2.5-0.5b": Shape(
        layers=24,
        hidden=896,
        mlp=4864,
        vocabulary=151936,
        heads=14,
        kv_heads=2,
        head_size=64,
        biases=True,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
    ),
    "llama3.2-1b": Shape(
        layers=16, hidden=2048, mlp=8192, vocabulary=128256, heads=32, kv_heads=8, head_size=64, biases=False
    ),
}


def write_family(shape: Shape, folder: Path, experts: int) -> None:
    """Write ``base`` and ``e1`` to ``eN`` into a folder, one per processor at a time; what is there already is kept."""
    targets = [folder / ("base" if number == 0 else f"e{number}") for number in range(experts + 1)]
    missing = [number for number, target in enumerate(targets) if not (target / "config.json").exists()]
    if shape.weight_bytes * len(missing) < _SMALL:
        for number in missing:
            _write_checkpoint(shape, targets[number], number)
    else:
        workers = min(len(missing), len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            waiting = [pool.submit(_write_checkpoint, shape, targets[number], number) for number in missing]
            for one in waiting:
                one.result()
    for target in targets:
        _write_side_files(shape, target)


def _write_checkpoint(shape: Shape, target: Path, number: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
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
    (target / "config.json").touch()  # written last: without it the weights are not complete


def _write_side_files(shape: Shape, target: Path) -> None:
    """Write what tools that load models ask for beside the weights; the tokenizer is a token one."""
    config = {
        "architectures": [shape.architecture],
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": 32768,
        "model_type": shape.model_type,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
    }
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": names}
    for name, content in files.items():
        text = json.dumps(content, indent=1) + "\n"
        if not (target / name).exists() or (target / name).read_text() != text:
            (target / name).write_text(text)


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
