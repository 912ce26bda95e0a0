"""Layers by the integers in tensor names, for the families of models that people merge."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.layers import LayerMap, layer_count, layer_of, natural_key

# A loaded machine may take any time for one example.
QUIET = settings(deadline=None)


def stack(template: str, layers: int, parts: tuple[str, ...] = ("attn.weight", "mlp.weight")) -> list[str]:
    return [f"{template.format(i)}.{part}" for i in range(layers) for part in parts]


LLAMA = ["model.embed_tokens.weight", *stack("model.layers.{}", 12), "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("names", "inside", "layer", "count"),
    [
        (LLAMA, "model.layers.11.mlp.weight", 11, 12),
        (["wte.weight", *stack("h.{}", 6)], "h.3.attn.weight", 3, 6),
        (["transformer.wte.weight", *stack("transformer.h.{}", 6)], "transformer.h.5.attn.weight", 5, 6),
        (stack("gpt_neox.layers.{}", 4), "gpt_neox.layers.2.mlp.weight", 2, 4),
        (stack("bert.encoder.layer.{}", 3), "bert.encoder.layer.1.mlp.weight", 1, 3),
        (stack("backbone.layers.{}", 3), "backbone.layers.1.mlp.weight", 1, 3),
        (stack("blocks.{}", 3), "blocks.1.attn.weight", 1, 3),
        (stack("0.auto_model.encoder.layer.{}", 3), "0.auto_model.encoder.layer.2.mlp.weight", 2, 3),
        (["model.layers.0.w"], "model.layers.0.w", 0, 1),
        (["0.weight", "2.weight"], "2.weight", 2, 3),
    ],
)
def test_the_layer_is_found_by_its_integer(names, inside, layer, count):
    layers = LayerMap(names)
    assert layers.count == layer_count(names) == count
    assert layers.index(inside) == layer


def test_tensors_outside_the_layers_have_none():
    layers = LayerMap(LLAMA)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.0.weight", ""):
        assert layers.index(name) is None


def test_the_layer_of_an_expert_tensor_is_not_the_expert():
    names = [f"model.layers.{i}.mlp.experts.{e}.w1.weight" for i in range(4) for e in range(16)]
    layers = LayerMap([*names, *stack("model.layers.{}", 4)])
    assert layers.count == 4
    assert layers.index("model.layers.3.mlp.experts.7.w1.weight") == 3
    assert layer_of("model.layers.3.mlp.experts.7.w1.weight") == 3


def test_one_layer_of_experts_is_one_layer():
    assert layer_count([f"model.layers.0.mlp.experts.{e}.w1" for e in range(16)]) == 1


def test_encoder_and_decoder_both_count():
    names = [
        "shared.weight",
        *(f"encoder.block.{i}.layer.{j}.w" for i in range(6) for j in range(2)),
        *(f"decoder.block.{i}.layer.{j}.w" for i in range(4) for j in range(3)),
    ]
    layers = LayerMap(names)
    assert layers.stacks == ("decoder.block", "encoder.block")
    assert layers.count == 6
    assert layers.index("encoder.block.5.layer.1.w") == 5
    assert layers.index("decoder.block.3.layer.2.w") == 3


@pytest.mark.parametrize(
    ("tower", "text"),
    [
        ("vision_tower.vision_model.encoder.layers.{}", "language_model.model.layers.{}"),
        ("visual.blocks.{}", "model.layers.{}"),
        ("model.visual.blocks.{}", "model.language_model.layers.{}"),
        ("audio_tower.layers.{}", "language_model.model.layers.{}"),
    ],
)
def test_a_vision_tower_does_not_confuse_the_count(tower, text):
    layers = LayerMap([*stack(tower, 32), *stack(text, 28)])
    assert layers.count == 28
    assert layers.index(text.format(7) + ".attn.weight") == 7
    assert layers.index(tower.format(7) + ".attn.weight") is None


def test_a_model_that_is_all_vision_has_layers():
    assert layer_count(stack("vision_model.encoder.layers.{}", 5)) == 5


def test_sizes_decide_over_the_number_of_tensors():
    names = [*stack("draft.layers.{}", 9), *stack("model.layers.{}", 4)]
    sizes = {name: 1 if name.startswith("draft") else 100 for name in names}
    assert LayerMap(names).count == 9
    assert LayerMap(names, sizes=sizes).count == 4


def test_a_checkpoint_without_integers_has_no_layers():
    layers = LayerMap(["a.weight", "b.weight"])
    assert (layers.count, layers.stacks, layers.index("a.weight")) == (0, (), None)


@QUIET
@given(st.randoms(use_true_random=False))
def test_the_layers_do_not_depend_on_the_order_of_names(generator: random.Random):
    names = [*stack("encoder.a.{}", 3), *stack("x.{}", 3), *stack("b.{}", 3), *stack("decoder.a.{}", 2)]
    expected = LayerMap(names)
    generator.shuffle(names)
    found = LayerMap(names)
    assert (found.count, found.stacks) == (expected.count, expected.stacks)


def test_a_list_of_modules_beside_a_stack_is_not_the_layers():
    names = [*(f"{i}.weight" for i in range(40)), *stack("model.layers.{}", 3)]
    assert LayerMap(names).stacks == ("model.layers",)


def test_renumbering_changes_the_layer_alone():
    layers = LayerMap(LLAMA)
    name = "model.layers.3.mlp.experts.3.w3.weight"
    assert layers.renumbered(name, 12) == "model.layers.12.mlp.experts.3.w3.weight"
    assert layers.renumbered("model.norm.weight", 12) == "model.norm.weight"
    assert LayerMap(["0.weight", "1.weight"]).renumbered("1.weight", 5) == "5.weight"
    assert LayerMap(["prompts.0", "prompts.1"]).renumbered("prompts.1", 4) == "prompts.4"


@pytest.mark.parametrize("index", ["99999999999999999999", "9" * 5000, "٣", "-1", ""])
def test_absurd_integers_are_not_layers(index):
    name = f"layers.{index}.w"
    assert layer_of(name) is None
    assert layer_count([name]) == 0
    natural_key(name)


def test_natural_order_counts():
    names = ["model.layers.10.w", "model.layers.2.w", "model.layers.1.w", "lm_head.weight"]
    assert sorted(names, key=natural_key) == [
        "lm_head.weight",
        "model.layers.1.w",
        "model.layers.2.w",
        "model.layers.10.w",
    ]


@QUIET
@given(st.lists(st.text("ab.019", max_size=8), max_size=20))
def test_natural_order_is_total(names):
    keys = sorted(natural_key(name) for name in names)
    assert len(set(keys)) == len(set(names))


@QUIET
@given(st.integers(0, 10**30), st.integers(0, 10**30))
def test_natural_order_of_numbers_is_theirs(a, b):
    assert (natural_key(f"x{a}") < natural_key(f"x{b}")) == (a < b)
