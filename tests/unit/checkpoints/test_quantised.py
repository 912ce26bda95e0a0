"""Quantised checkpoints are recognised by their config or by companion tensors; plain ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.quantised import quantisation
from mergepipe.checkpoints.safetensors import TensorInfo

L = "model.layers.0.mlp.up_proj"


def checkpoint(tensors: dict[str, str], config: dict[str, object] | None = None) -> Checkpoint:
    infos = {
        name: TensorInfo(name=name, dtype=dtype, shape=(1,), file=0, offset=0, nbytes=1)
        for name, dtype in tensors.items()
    }
    return Checkpoint(label="s", root=Path("/x"), files=(), tensors=infos, config=config or {}, notes=())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "`quantization_config` (gptq) in config.json"),
        ({"quantization_config": {"load_in_4bit": True}}, "`quantization_config` (bitsandbytes) in config.json"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config` in config.json"),
        (
            {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
            "`quantization_config` (fp8)",
        ),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "`compression_config` (compressed-tensors)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "`quantization` in config.json"),
    ],
)
def test_the_config_gives_it_away(config, words):
    found = quantisation(checkpoint({f"{L}.weight": "U8"}, config))
    assert found is not None
    assert words in found


@pytest.mark.parametrize(
    ("scheme", "sign", "tensors"),
    [
        ("GPTQ", f"{L}.qweight", {f"{L}.qweight": "I32", f"{L}.qzeros": "I32", f"{L}.scales": "F16"}),
        ("GPTQ", f"{L}.g_idx", {f"{L}.g_idx": "I32"}),
        ("bitsandbytes 4-bit", f"{L}.weight.absmax", {f"{L}.weight": "U8", f"{L}.weight.absmax": "F32"}),
        ("bitsandbytes 4-bit", f"{L}.weight.quant_map", {f"{L}.weight.quant_map": "F32"}),
        ("bitsandbytes 4-bit", f"{L}.weight.quant_state.nf4", {f"{L}.weight.quant_state.nf4": "U8"}),
        ("bitsandbytes 8-bit", f"{L}.SCB", {f"{L}.weight": "I8", f"{L}.SCB": "F32"}),
        ("float8", f"{L}.weight_scale_inv", {f"{L}.weight": "F8_E4M3", f"{L}.weight_scale_inv": "F32"}),
        ("scales", f"{L}.weight_scale", {f"{L}.weight": "F8_E4M3", f"{L}.weight_scale": "F32"}),
        ("compressed-tensors", f"{L}.weight_packed", {f"{L}.weight_packed": "I32", f"{L}.weight_scale": "BF16"}),
        ("MXFP4", f"{L}_blocks", {f"{L}_blocks": "U8", f"{L}_scales": "U8"}),
        ("MLX", f"{L}.scales", {f"{L}.scales": "F16", f"{L}.biases": "F16", f"{L}.weight": "U32"}),
    ],
)  # fmt: skip
def test_companion_tensors_give_it_away(scheme, sign, tensors):
    found = quantisation(checkpoint({"model.norm.weight": "BF16", **tensors}))
    assert found is not None
    assert scheme in found
    assert f"`{sign}`" in found


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({f"{L}.weight": "BF16", "model.position_ids": "I64"}, {}),
        ({f"{L}.weight": "BF16"}, {"quantization_config": None}),
        ({f"{L}.weight": "BF16"}, {"quantization_config": {}, "quantization": {"codebook": 8}}),
        ({f"{L}.weight": "BF16", f"{L}.weight_scale": "BF16"}, {}),
        ({f"{L}.scales": "F32"}, {}),
        ({"down_blocks": "F32", "down_scales": "F32"}, {}),
        ({f"{L}.weight": "F8_E4M3"}, {}),
    ],
)
def test_plain_checkpoints_are_not_quantised(tensors, config):
    assert quantisation(checkpoint(tensors, config)) is None
