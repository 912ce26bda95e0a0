"""Embeddings and heads by name, and ties by config."""

from __future__ import annotations

import pytest

from mergepipe.checkpoints.heads import head_names, is_head, is_vocabulary, ties_embeddings


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight",
        "transformer.wte.weight",
        "wte.weight",
        "gpt_neox.embed_in.weight",
        "bert.embeddings.word_embeddings.weight",
        "transformer.word_embeddings.weight",
        "shared.weight",
        "backbone.embeddings.weight",
        "tok_embeddings.weight",
        "decoder.embed_tokens.0.weight",
    ],
)
def test_embeddings_are_vocabulary_and_no_heads(name):
    assert is_vocabulary(name)
    assert not is_head(name)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "lm_head.bias",
        "language_model.lm_head.weight",
        "embed_out.weight",
        "output.weight",
        "cls.predictions.decoder.weight",
    ],
)
def test_heads_are_vocabulary(name):
    assert is_head(name)
    assert is_vocabulary(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "transformer.wpe.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "transformer.word_embeddings_layernorm.weight",
        "encoder.layer.0.attention.output.weight",
        "encoder.layer.0.attention.output.dense.weight",
        "model.layers.0.mlp.shared.weight",
        "score.weight",
        "lm_head",
        "weight",
        "",
    ],
)
def test_other_tensors_are_not_vocabulary(name):
    assert not is_vocabulary(name)
    assert not is_head(name)


def test_head_names_keep_their_order():
    names = ["b.lm_head.weight", "model.embed_tokens.weight", "a.lm_head.weight"]
    assert head_names(names) == ("b.lm_head.weight", "a.lm_head.weight")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"text_config": {}, "tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False}, True),
        ({"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}, False),
        ({"text_config": None, "tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": "yes"}, False),
    ],
)
def test_the_config_says_whether_the_head_is_tied(config, tied):
    assert ties_embeddings(config) is tied
