"""Opening adapters: what PEFT's names and settings mean, and what is refused in which words."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.adapters import CONFIG, PREFIX, embedding_factors, factors, write_adapter
from support.checkpoints import random_tensors, write_checkpoint

from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import Adapter, Checkpoint, open_checkpoint
from mergepipe.errors import CollectedErrors, MergepipeError, SourceError

Q0, Q1 = "model.layers.0.attn.q", "model.layers.1.attn.q"
SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    f"{Q0}.weight": (4, 6),
    f"{Q0}.bias": (4,),
    f"{Q1}.weight": (4, 6),
    f"{Q1}.bias": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
PLAIN = factors(1, Q0, 4, 6) | factors(2, Q1, 4, 6)


@pytest.fixture
def base(tmp_path) -> Checkpoint:
    write_checkpoint(tmp_path / "base", random_tensors(0, SHAPES, "BF16"), config={"model_type": "tiny"})
    return open_checkpoint(tmp_path / "base", label="base")


def opened(tmp_path, base, tensors=PLAIN, **config) -> Checkpoint:
    return open_adapter(write_adapter(tmp_path / "code", tensors, **config), label="code", on=base)


def adapter_of(checkpoint: Checkpoint) -> Adapter:
    assert checkpoint.adapter is not None
    return checkpoint.adapter


def refusals(tmp_path, base, tensors=PLAIN, **config) -> tuple[MergepipeError, ...]:
    folder = write_adapter(tmp_path / "code", tensors, **config)
    with pytest.raises((SourceError, CollectedErrors)) as caught:
        open_adapter(folder, label="code", on=base, shown="code")
    assert caught.value.exit_status == 2
    return caught.value.errors if isinstance(caught.value, CollectedErrors) else (caught.value,)


def refusal(tmp_path, base, tensors=PLAIN, **config) -> MergepipeError:
    (error,) = refusals(tmp_path, base, tensors, **config)
    assert error.message.startswith("source `code`: `code")
    return error


# --- the virtual checkpoint ---------------------------------------------------------------------------------------


def test_an_adapter_has_the_tensors_of_what_it_applies_to(tmp_path, base):
    checkpoint = opened(tmp_path, base)
    assert list(checkpoint.tensors) == list(base.tensors)
    assert {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in base.tensors.items()
    }
    assert checkpoint.config == {"model_type": "tiny"}
    assert checkpoint.layers().count == 2


def test_what_is_stored_is_the_factors(tmp_path, base):
    checkpoint = opened(tmp_path, base)
    assert sorted(checkpoint.stored) == sorted(PLAIN)
    assert checkpoint.nbytes == sum(array.nbytes for array in PLAIN.values())
    assert [file.name for file in checkpoint.files] == ["adapter_model.safetensors"]
    assert base.stored is base.tensors
    assert (base.facts, base.adapter) == ((), None)


def test_factors_are_found_by_module(tmp_path, base):
    adapter = adapter_of(opened(tmp_path, base))
    assert list(adapter.low_rank) == [f"{Q0}.weight", f"{Q1}.weight"]
    pair = adapter.low_rank[f"{Q0}.weight"]
    assert (pair.a.name, pair.b.name) == (f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight")
    assert (pair.scaling, pair.transposed) == (1.5, False)
    assert adapter.on is base


def renamed(tensors, old, new):
    return {name.replace(old, new): array for name, array in tensors.items()}


@pytest.mark.parametrize(
    "tensors",
    [
        renamed(PLAIN, PREFIX, ""),
        renamed(renamed(PLAIN, "lora_A.", "lora_A.default."), "lora_B.", "lora_B.default."),
        renamed(renamed(PLAIN, "lora_A.weight", "lora_A.code-2"), "lora_B.weight", "lora_B.code-2"),
    ],
    ids=["no prefix", "named", "named without weight"],
)
def test_prefix_and_name_of_the_adapter_may_be_there_or_not(tmp_path, base, tensors):
    assert list(adapter_of(opened(tmp_path, base, tensors)).low_rank) == [f"{Q0}.weight", f"{Q1}.weight"]


def test_an_embeddings_delta_is_transposed(tmp_path, base):
    tensors = embedding_factors(1, "model.embed_tokens", 10, 4)
    (pair,) = adapter_of(opened(tmp_path, base, tensors)).low_rank.values()
    assert pair.transposed
    named = {f"{name}.default": array for name, array in tensors.items()}
    assert adapter_of(opened(tmp_path, base, named)).low_rank.keys() == {"model.embed_tokens.weight"}


def test_fan_in_fan_out_is_transposed(tmp_path, base):
    pairs = adapter_of(opened(tmp_path, base, factors(1, Q0, 6, 4), fan_in_fan_out=True)).low_rank
    assert pairs[f"{Q0}.weight"].transposed


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}lm_head.weight",
        "lm_head.weight",
        f"{PREFIX}lm_head.modules_to_save.weight",
        f"{PREFIX}lm_head.modules_to_save.default.weight",
        f"{PREFIX}lm_head.base_layer.weight",
    ],
)
def test_a_whole_tensor_replaces_the_one_below(tmp_path, base, name):
    tensors = PLAIN | {name: random_tensors(3, {"x": (10, 4)})["x"]}
    checkpoint = opened(tmp_path, base, tensors, modules_to_save=["lm_head"])
    replaced = adapter_of(checkpoint).replaced
    assert list(replaced) == ["lm_head.weight"]
    assert replaced["lm_head.weight"].name == name
    assert checkpoint.tensors["lm_head.weight"].dtype == "BF16", "what is made has the dtype that was there before"


def test_trained_biases_are_whole_tensors(tmp_path, base):
    tensors = PLAIN | random_tensors(3, {f"{PREFIX}{Q0}.base_layer.bias": (4,), f"{PREFIX}{Q1}.bias": (4,)})
    assert list(adapter_of(opened(tmp_path, base, tensors, bias="all")).replaced) == [f"{Q0}.bias", f"{Q1}.bias"]


def test_a_tensor_may_be_replaced_and_added_to(tmp_path, base):
    """PEFT saves the embedding itself beside its factors."""
    whole = random_tensors(3, {f"{PREFIX}model.embed_tokens.base_layer.weight": (12, 4)})
    adapter = adapter_of(opened(tmp_path, base, embedding_factors(1, "model.embed_tokens", 12, 4) | whole))
    assert adapter.low_rank.keys() == adapter.replaced.keys() == {"model.embed_tokens.weight"}


def test_originals_of_replaced_modules_are_ignored_with_a_note(tmp_path, base):
    tensors = PLAIN | random_tensors(3, {f"{PREFIX}lm_head.original_module.weight": (10, 4)})
    checkpoint = opened(tmp_path, base, tensors)
    assert not adapter_of(checkpoint).replaced
    assert "lm_head.original_module.weight`" in checkpoint.notes[0]


# --- scalings -----------------------------------------------------------------------------------------------------


def scalings(tmp_path, base, tensors=PLAIN, **config):
    pairs = adapter_of(opened(tmp_path, base, tensors, **config)).low_rank
    return tuple(pairs[f"{module}.weight"].scaling for module in (Q0, Q1))


def test_the_scaling_is_alpha_by_r(tmp_path, base):
    assert scalings(tmp_path, base, lora_alpha=5) == (2.5, 2.5)
    assert scalings(tmp_path, base, lora_alpha=0.5) == (0.25, 0.25)


def test_with_rslora_it_is_alpha_by_the_root_of_r(tmp_path, base):
    assert scalings(tmp_path, base, use_rslora=True) == (3 / math.sqrt(2),) * 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ({"q": 8}, (4.0, 4.0)),
        ({"layers.1.attn.q": 8}, (1.5, 4.0)),
        ({Q0: 8}, (4.0, 1.5)),
        ({r"^model\.layers\.0\..*": 8}, (4.0, 1.5)),
        ({r".*\.1\.attn\.q": 8, "q": 4}, (2.0, 4.0)),
        ({"q": 4, r".*\.1\.attn\.q": 8}, (2.0, 2.0)),
        ({"attn": 8, "tn.q": 8, "lay": 8}, (1.5, 1.5)),
    ],
)
def test_the_first_pattern_that_matches_the_end_of_the_name_gives_alpha(tmp_path, base, pattern, expected):
    assert scalings(tmp_path, base, alpha_pattern=pattern) == expected


def test_patterns_give_ranks_too(tmp_path, base):
    tensors = factors(1, Q0, 4, 6) | factors(2, Q1, 4, 6, rank=3)
    assert scalings(tmp_path, base, tensors, rank_pattern={"layers.1.attn.q": 3}) == (1.5, 1.0)


def test_what_changes_the_numbers_changes_the_facts(tmp_path, base):
    (plain,) = opened(tmp_path, base).facts
    for config in ({"lora_alpha": 4}, {"use_rslora": True}, {"alpha_pattern": {"q": 9}}):
        assert opened(tmp_path, base, **config).facts != (plain,)
    same = opened(tmp_path, base, lora_dropout=0.7, alpha_pattern={"nothing": 9}, base_model_name_or_path="x")
    assert same.facts == (plain,)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("use_dora", True, "DoRA"),
        ("lora_bias", True, "`lora_bias`"),
        ("layer_replication", [[0, 2]], "`layer_replication`"),
        ("trainable_token_indices", [1], "`trainable_token_indices`"),
        ("alora_invocation_tokens", [1], "`alora_invocation_tokens`"),
        ("use_qalora", True, "`use_qalora`"),
        ("megatron_config", {"x": 1}, "`megatron_config`"),
        ("target_parameters", ["experts.up"], "`target_parameters`"),
        ("init_lora_weights", "pissa_niter_4", "`pissa_niter_4`"),
        ("init_lora_weights", "loftq", "`loftq`"),
        ("init_lora_weights", "corda", "`corda`"),
        ("init_lora_weights", "something", "`something`"),
        ("use_new_trick", True, "`use_new_trick`, which is not known"),
    ],
)
def test_what_changes_the_numbers_is_refused_by_name(tmp_path, base, setting, value, words):
    error = refusal(tmp_path, base, **{setting: value})
    assert words in error.message
    assert "adapter_config.json" in error.message
    assert error.facts["setting"] == setting
    assert error.hint


def test_several_such_settings_are_told_at_once(tmp_path, base):
    assert len(refusals(tmp_path, base, use_dora=True, lora_bias=True)) == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", False),
        ("loftq_config", {"loftq_bits": 4}),
        ("eva_config", {"rho": 2}),
        ("qalora_group_size", 32),
        ("layers_to_transform", [0]),
        ("use_new_trick", False),
        ("new_config", None),
        ("inference_mode", True),
    ],
)
def test_what_matters_in_training_alone_is_ignored(tmp_path, base, setting, value):
    assert adapter_of(opened(tmp_path, base, **{setting: value})).low_rank


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "ADALORA", "PREFIX_TUNING", None])
def test_other_adapters_are_refused_by_name(tmp_path, base, kind):
    error = refusal(tmp_path, base, peft_type=kind)
    assert (f"`{kind}`" if kind else "no `peft_type`") in error.message
    assert "merge it into its base model first" in error.hint


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("r", 0, "a whole number of at least 1"),
        ("r", True, "a whole number of at least 1"),
        ("lora_alpha", "16", "a number"),
        ("lora_alpha", 10**400, "a number"),
        ("use_rslora", "yes", "true or false"),
        ("rank_pattern", [1], "an object"),
        ("alpha_pattern", {"q(": 1}, "regular expressions"),
        ("alpha_pattern", {"q": None}, "a number"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(tmp_path, base, setting, value, expected):
    error = refusal(tmp_path, base, **{setting: value})
    assert f"`{setting}" in error.message
    assert f"expected {expected}" in error.message


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("lora_magnitude_vector", "DoRA"),
        ("lora_magnitude_vector.default.weight", "DoRA"),
        ("lora_B.bias", "`lora_bias`"),
        ("lora_B.default.bias", "`lora_bias`"),
        ("lora_E", "AdaLoRA"),
        ("lora_kasa", "not known"),
        ("token_adapter.trainable_tokens_delta", "`trainable_token_indices`"),
    ],
)
def test_tensors_of_other_methods_are_refused_by_name(tmp_path, base, suffix, words):
    """Whatever the config says of them."""
    error = refusal(tmp_path, base, PLAIN | random_tensors(3, {f"{PREFIX}{Q0}.{suffix}": (4,)}))
    assert words in error.message
    assert error.facts["tensor"] == f"{PREFIX}{Q0}.{suffix}"


def test_one_error_stands_for_many_tensors_of_a_kind(tmp_path, base):
    vectors = {f"{PREFIX}{module}.lora_magnitude_vector": (4,) for module in (Q0, Q1)}
    assert "(1 more like it)" in refusal(tmp_path, base, PLAIN | random_tensors(3, vectors)).message


@pytest.mark.parametrize("factor", ["A", "B"])
def test_half_a_pair_is_an_error(tmp_path, base, factor):
    name = f"{PREFIX}{Q0}.lora_{factor}.weight"
    error = refusal(tmp_path, base, {n: array for n, array in PLAIN.items() if n != name})
    other = "A" if factor == "B" else "B"
    assert f"`{PREFIX}{Q0}.lora_{other}.weight` has no counterpart `lora_{factor}`" in error.message


def test_two_adapters_in_a_file_are_an_error(tmp_path, base):
    error = refusal(tmp_path, base, PLAIN | renamed(factors(3, Q0, 4, 6), ".weight", ".other.weight"))
    assert "means the same as" in error.message
    assert "several adapters" in error.hint


def test_a_rank_that_the_config_does_not_know_is_an_error(tmp_path, base):
    error = refusal(tmp_path, base, PLAIN | factors(1, Q0, 4, 6, rank=3), r=2)
    assert f"`{PREFIX}{Q0}.lora_A.weight` has rank 3, but `adapter_config.json` says 2" in error.message


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3"])
def test_factors_that_cannot_be_multiplied_are_an_error(tmp_path, base, dtype):
    error = refusal(tmp_path, base, PLAIN | factors(1, Q0, 4, 6, dtype=dtype))
    assert f"is {dtype}" in error.message


def test_convolutions_are_refused(tmp_path, base):
    names = {f"{PREFIX}{Q0}.lora_A.weight": (2, 6, 3, 3), f"{PREFIX}{Q0}.lora_B.weight": (4, 2, 1, 1)}
    assert "2-D" in refusal(tmp_path, base, random_tensors(3, names)).message


def test_a_delta_of_another_shape_names_tensor_and_shapes(tmp_path, base):
    error = refusal(tmp_path, base, factors(1, Q0, 8, 6))
    assert "shape [8, 6]" in error.message
    assert f"`{Q0}.weight`, which has shape [4, 6] in `base`" in error.message
    assert (error.facts["expected"], error.facts["got"]) == ([4, 6], [8, 6])


def test_a_wrong_fan_in_fan_out_is_guessed(tmp_path, base):
    assert "fan_in_fan_out" in refusal(tmp_path, base, factors(1, Q0, 6, 4)).hint


def test_nothing_is_added_to_what_cannot_be_merged(tmp_path):
    write_checkpoint(tmp_path / "base", random_tensors(0, {f"{Q0}.weight": (4, 6)}, "I8"))
    base = open_checkpoint(tmp_path / "base", label="base")
    assert "which is I8 in `base`" in refusal(tmp_path, base, factors(1, Q0, 4, 6)).message


def test_a_module_that_is_not_there_is_an_error_with_count_key_and_a_similar_name(tmp_path, base):
    tensors = renamed(PLAIN, "model.layers.1", "model.language_model.layers.1")
    error = refusal(tmp_path, base, tensors)
    key = f"{PREFIX}model.language_model.layers.1.attn.q.lora_A.weight"
    assert "fits `base` in 1 of 2 tensors" in error.message
    assert f"`{key}`" in error.message
    assert (error.facts["count"], error.facts["tensor"]) == (1, key)
    assert f"`base` has `{Q1}.weight`" in error.hint


def test_a_head_that_the_base_ties_is_explained(tmp_path):
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    write_checkpoint(tmp_path / "base", random_tensors(0, tied), config={"tie_word_embeddings": True})
    base = open_checkpoint(tmp_path / "base", label="base")
    assert "ties its head" in refusal(tmp_path, base, factors(1, "lm_head", 10, 4)).hint
    assert adapter_of(opened(tmp_path, base, embedding_factors(1, "model.embed_tokens", 10, 4))).low_rank


def test_a_file_without_tensors_of_an_adapter_is_an_error(tmp_path, base):
    tensors = random_tensors(3, {f"{PREFIX}lm_head.original_module.weight": (10, 4)})
    assert "holds no tensor of an adapter" in refusal(tmp_path, base, tensors).message


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_with_on_is_an_error(tmp_path, base):
    with pytest.raises(SourceError, match="is no LoRA adapter") as caught:
        open_adapter(tmp_path / "base", label="code", on=base)
    assert "remove `on`" in (caught.value.hint or "")


def test_an_adapter_without_its_config_is_told_apart(tmp_path, base):
    (write_adapter(tmp_path / "code", PLAIN) / "adapter_config.json").unlink()
    with pytest.raises(SourceError, match=r"lacks `adapter_config\.json`"):
        open_adapter(tmp_path / "code", label="code", on=base)


def test_an_adapter_in_a_pickle_comes_with_a_way_to_convert_it(tmp_path, base):
    folder = write_adapter(tmp_path / "code", PLAIN)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(SourceError, match=r"only `adapter_model\.bin`") as caught:
        open_adapter(folder, label="code", on=base)
    assert '"adapter_model.safetensors"' in (caught.value.hint or "")


def test_an_adapter_without_weights_is_an_error(tmp_path, base):
    (write_adapter(tmp_path / "code", PLAIN) / "adapter_model.safetensors").unlink()
    with pytest.raises(SourceError, match="lacks the adapter's weights"):
        open_adapter(tmp_path / "code", label="code", on=base)


def test_an_adapter_on_an_adapter_is_refused(tmp_path, base):
    first = opened(tmp_path, base)
    with pytest.raises(SourceError, match="an adapter itself") as caught:
        open_adapter(write_adapter(tmp_path / "second", PLAIN), label="second", on=first)
    assert "passthrough" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "[1]", '{"peft_type": "LORA"', "<!DOCTYPE html>"])
def test_a_config_that_is_none_is_an_error(tmp_path, base, text):
    (write_adapter(tmp_path / "code", PLAIN) / "adapter_config.json").write_text(text)
    with pytest.raises(SourceError, match=r"adapter_config\.json"):
        open_adapter(tmp_path / "code", label="code", on=base)


def test_a_config_as_an_old_release_wrote_it_is_read(tmp_path, base):
    folder = write_adapter(tmp_path / "code", PLAIN)
    kept = ("peft_type", "r", "lora_alpha", "fan_in_fan_out", "bias")
    (folder / "adapter_config.json").write_text(json.dumps({key: CONFIG[key] for key in kept}))
    checkpoint = open_adapter(folder, label="code", on=base)
    assert adapter_of(checkpoint).low_rank[f"{Q0}.weight"].scaling == 1.5


def test_the_damage_of_a_file_is_reported_as_of_any(tmp_path, base):
    folder = write_adapter(tmp_path / "code", PLAIN)
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:-1])
    with pytest.raises(MergepipeError, match="truncated"):
        open_adapter(folder, label="code", on=base)


def test_nothing_but_headers_is_read(tmp_path, base, monkeypatch):
    from support.projects import Reads

    folder = write_adapter(tmp_path / "code", {name: np.asarray(array) for name, array in PLAIN.items()})
    reads = Reads(monkeypatch)
    open_adapter(folder, label="code", on=base)
    assert reads.data_ranges(folder / "adapter_model.safetensors") == []
