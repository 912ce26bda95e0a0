"""Random checkpoints with the tensor names of a 2-layer Llama, made by numpy alone and the same on every machine.

Every family has `base` and `e1` to `e8`. What differs between families is what a merge method may trip over: equal
magnitudes, zero deltas, small deltas, odd shapes, parallel and opposite directions, mixed dtypes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]
EXPERTS = 8
DTYPES: Mapping[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
}
_HEADER = {np.dtype(value): key for key, value in DTYPES.items()}
_LAYER = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "post_attention_layernorm", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")  # fmt: skip

Shape = tuple[int, ...]


def _shapes(embedding: Shape, first: tuple[Shape, ...], second: tuple[Shape, ...], norm: Shape) -> dict[str, Shape]:
    named = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer, shapes in enumerate((first, second))
        for name, shape in zip(_LAYER, shapes, strict=True)
    }
    return {"model.embed_tokens.weight": embedding} | named | {"model.norm.weight": norm, "lm_head.weight": embedding}


PLAIN = _shapes(
    (31, 24),
    ((53,), (37, 53), (17, 53), (8, 53), (53, 37), (53,), (61, 29), (61, 29), (29, 61)),
    ((7,), (1, 40), (2, 2), (3, 5), (40, 64), (64,), (64, 128), (128, 64), (97, 101)),
    (129,),
)
ODD = _shapes(
    (7, 1),
    ((1,), (5, 1), (1, 1), (1, 9), (5, 7, 11), (3,), (11, 2, 3), (2, 3, 4, 5), (33, 2)),
    ((2,), (64, 2), (2, 64), (16, 16), (17, 31), (31,), (1, 1, 5), (4, 1, 6), (101, 3)),
    (257,),
)
LARGE = _shapes(
    (9, 8),
    ((8,), (1100, 1000), (8, 8), (8, 8), (8, 8), (8,), (16, 8), (16, 8), (8, 16)),
    ((8,), (8, 8), (8, 8), (8, 8), (8, 8), (8,), (16, 8), (16, 8), (8, 16)),
    (8,),
)
MINI = _shapes(
    (7, 5),
    ((13,), (7, 13), (3, 13), (4, 9), (13, 7), (13,), (11, 6), (6, 11), (9, 8)),
    ((5,), (1, 8), (2, 2), (3, 5), (8, 9), (9,), (5, 12), (12, 5), (10, 11)),
    (29,),
)


def _random(*key: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(zlib.crc32(repr(key).encode())))


def _base(name: str, shape: Shape) -> np.ndarray:
    return (_random("base", name).standard_normal(shape) * 0.05 + ("norm" in name)).astype(np.float32)


def _normal(name: str, shape: Shape, number: int) -> np.ndarray:
    """Deltas of deviation 0.001 to 0.02; e3 has half of them zero, e4 is the base in some tensors, e5 is far away."""
    base = _base(name, shape)
    if number == 0 or (number == 4 and ("o_proj" in name or "embed" in name)):
        return base
    random = _random("expert", name, number)
    scale = 0.1 if number == 5 else 0.001 * 20 ** random.random()
    delta = random.standard_normal(shape) * scale
    if number == 3:
        delta *= random.random(shape) < 0.5
    return (base + delta).astype(np.float32)


def _grid(name: str, shape: Shape, number: int) -> np.ndarray:
    """Small multiples of 2^-9: many equal magnitudes and zero deltas, and every difference is exact."""
    base = _random("grid", name).integers(-64, 65, shape) + 512 * ("norm" in name)
    if number:
        base = base + np.rint(_random("grid", name, number).standard_normal(shape) * 1.5).astype(np.int64)
    return (base * 2.0**-9).astype(np.float32)


def _small(name: str, shape: Shape, number: int) -> np.ndarray:
    """Deltas as a light fine-tune leaves them: deviations from 1e-6 to 1e-4."""
    base = _base(name, shape)
    if number == 0:
        return base
    random = _random("small", name, number)
    return (base + random.standard_normal(shape) * 1e-6 * 100 ** random.random()).astype(np.float32)


def _directions(name: str, shape: Shape, number: int) -> np.ndarray:
    """Experts that are parallel, opposite, nearly either, zero, or at right angles to the base; one base is zero."""
    base = _base(name, shape) * (0.0 if "v_proj" in name else 1.0)
    noise = _random("directions", name, number).standard_normal(shape) * 0.05
    length = float(np.linalg.norm(_base(name, shape)) / np.linalg.norm(noise))
    made = {
        0: base,
        1: 1.5 * base,  # parallel
        2: -base,  # opposite
        3: base + 0.0316 * length * noise,  # a cosine around 0.9995
        4: 0.0 * base,
        5: -base + 0.0316 * length * noise,
        6: noise,
        7: base + 1e-4 * noise,
        8: base,
    }
    return np.asarray(made[number], np.float32)


def _opposite(name: str, shape: Shape, number: int) -> np.ndarray:
    """Experts with the same delta, on a grid, of either sign."""
    base, delta = _grid(name, shape, 0), _grid(name, shape, 1) - _grid(name, shape, 0)
    return base + delta * np.float32((0, 1, -1)[number % 3])


def _special(name: str, shape: Shape, number: int) -> np.ndarray:
    """An infinity in e1 and a NaN in e2, in one tensor."""
    values = _normal(name, shape, number)
    if number in (1, 2) and "norm" in name:
        values[0] = (np.inf, np.nan)[number - 1]
    return values


def _dtype(number: int, dtypes: str) -> Any:
    listed = dtypes.split(",")
    return DTYPES[listed[number % len(listed)]]


Maker = Callable[[str, Shape, int], np.ndarray]
FAMILIES: Mapping[str, tuple[Mapping[str, Shape], Maker, str]] = {
    "f32": (PLAIN, _normal, "F32"),
    "bf16": (PLAIN, _normal, "BF16"),
    "mixed": (PLAIN, _normal, "BF16,F16,F32"),
    "grid": (PLAIN, _grid, "F32"),
    "small": (PLAIN, _small, "F32"),
    "directions": (PLAIN, _directions, "F32"),
    "odd": (ODD, _normal, "F32"),
    "opposite": (PLAIN, _opposite, "F32"),
    "special": (PLAIN, _special, "F32"),
    "large": (LARGE, _normal, "BF16"),
    "mini-f32": (MINI, _normal, "F32"),
    "mini-bf16": (MINI, _normal, "BF16"),
    "mini-grid": (MINI, _grid, "F32"),
}


def make(family: str) -> dict[str, Arrays]:
    """Return the tensors of every source of a family, as they are stored."""
    shapes, maker, dtypes = FAMILIES[family]
    sources = ("base", *(f"e{number}" for number in range(1, EXPERTS + 1)))
    return {
        source: {name: maker(name, shape, number).astype(_dtype(number, dtypes)) for name, shape in shapes.items()}
        for number, source in enumerate(sources)
    }


def write(tensors: Arrays, folder: Path) -> None:
    """Write a checkpoint that mergekit takes for a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _HEADER[array.dtype],
            "shape": array.shape,
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(
        b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in tensors.values())])
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "vocab_size": 32}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def read(folder: Path) -> Arrays:
    """Return all tensors of a checkpoint folder."""
    found: Arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, info in header.items():
            if name != "__metadata__":
                begin, stop = info["data_offsets"]
                flat = np.frombuffer(data[start + begin : start + stop], DTYPES[info["dtype"]])
                found[name] = flat.reshape(info["shape"])
    return found
