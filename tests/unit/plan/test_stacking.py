"""``config.json`` for other layers: counts, lists over the layers, and what cannot be carried over."""

import pytest

from mergepipe.plan.stacking import COUNT_KEYS, restacked
from mergepipe.plan.values import LayerOrigin

LAYERS = [0, 1, 2, 1, 2, 3]


def stacked(config, layers=LAYERS, source="m", **others):
    origins = [layer if isinstance(layer, LayerOrigin) else LayerOrigin(source=source, layer=layer) for layer in layers]
    return restacked(config, origins, {"m": config, **others})


@pytest.mark.parametrize("key", COUNT_KEYS)
def test_every_count_of_layers_is_set(key):
    found = stacked({key: 4, "hidden_size": 4, "num_attention_heads": 4})
    assert found.config == {key: 6, "hidden_size": 4, "num_attention_heads": 4}
    assert found.notes == ()


def test_nested_configs_are_carried_over_and_those_of_towers_are_not():
    layers = {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]}
    found = stacked({"text_config": layers, "vision_config": dict(layers), "num_hidden_layers": 4})
    assert found.config["text_config"] == {"num_hidden_layers": 6, "layer_types": ["a", "b", "c", "b", "c", "d"]}
    assert found.config["vision_config"] == layers


def test_lists_over_the_layers_follow_them_and_others_stay():
    config = {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "architectures": ["A", "B", "C", "D"],
        "eos_token_id": [1, 2, 3, 4],
        "rope_scaling": {"factors": [1, 2, 3, 4]},
        "some_sizes": [1, 2, 3],
        "hybrid_override_pattern": "M-M*",
        "attention_layers": ["global", "local", "global", "local"],
        "attention_types": [[["global", "local"], 2]],
    }
    assert stacked(config).config == config | {
        "num_hidden_layers": 6,
        "no_rope_layers": [1, 1, 1, 1, 1, 0],
        "hybrid_override_pattern": "M-M-M*",
        "attention_layers": ["global", "local", "global", "local", "global", "local"],
        "attention_types": [[["global", "local", "global", "local", "global", "local"], 1]],
    }


def test_a_layer_of_another_source_is_what_that_source_says():
    config, other = {"n_layer": 2, "kinds": ["a", "b"]}, {"n_layer": 3, "kinds": ["x", "y", "z"]}
    layers = [0, LayerOrigin(source="n", layer=2), LayerOrigin(source="silent", layer=1)]
    found = stacked(config, layers, n=other, silent={})
    assert found.config == {"n_layer": 3, "kinds": ["a", "z", "b"]}
    found = stacked(config, [LayerOrigin(source="silent", layer=2)], silent={})
    assert found.config == {"n_layer": 1, "kinds": ["a", "b"]}
    assert found.notes == ("config.json: `kinds` has no entry for layer 2 of `silent`; it was left as it is",)


def test_lists_of_layers_are_worked_out_anew():
    config = {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "cross_attention_layers": []}
    assert stacked(config).config == {
        "num_hidden_layers": 6,
        "mlp_only_layers": [0, 2, 4],
        "cross_attention_layers": [],
    }


@pytest.mark.parametrize(("layers", "first"), [([0, 1, 2, 3], 2), ([0, 1, 0, 1, 2], 4), ([2, 3], 0), ([0, 1, 0], 3)])
def test_a_number_of_first_layers_is_counted_where_they_are_still_the_first(layers, first):
    found = stacked({"num_hidden_layers": 4, "first_k_dense_replace": 2}, layers)
    assert found.config["first_k_dense_replace"] == first
    assert found.notes == ()


def test_a_number_of_first_layers_that_are_not_the_first_any_more_is_noted():
    found = stacked({"num_hidden_layers": 4, "first_k_dense_replace": 2})
    assert found.config["first_k_dense_replace"] == 2
    (note,) = found.notes
    assert note.startswith("config.json: `first_k_dense_replace` is 2, and the layers below it are no longer the first")
    sliding = {"num_hidden_layers": 4, "max_window_layers": 2}
    assert stacked(sliding).notes
    assert not stacked(sliding | {"use_sliding_window": False}).notes
    assert not stacked(sliding | {"layer_types": ["a", "b", "c", "d"]}).notes


@pytest.mark.parametrize(("layers", "noted"), [([0, 1, 2, 3, 1], False), ([3, 1], False), (LAYERS, True)])
def test_a_pattern_that_repeats_is_noted_where_it_no_longer_holds(layers, noted):
    config = {"num_hidden_layers": 4, "sliding_window_pattern": 3}
    assert bool(stacked(config, layers).notes) is noted
    assert not stacked(config | {"layer_types": [0, 1, 0, 1]}, layers).notes


def test_a_config_that_states_no_number_of_layers_is_noted_and_an_absent_one_is_not():
    assert "num_hidden_layers" in stacked({"hidden_size": 4}).notes[0]
    assert stacked({}).notes == ()


def test_the_config_that_is_given_stays_as_it_is():
    config = {"text_config": {"num_layers": 4, "kinds": ["a", "b", "c", "d"]}}
    stacked(config)
    assert config == {"text_config": {"num_layers": 4, "kinds": ["a", "b", "c", "d"]}}
