"""A recipe as a Mergefile."""

from __future__ import annotations

import math
import tomllib

import pytest
from support.cases.errors import CaseError
from support.cases.recipe import check_recipe, mergefile_text, source_names, spell_weight, with_settings
from support.cases.samples import RECIPE


def parsed(**changes):
    return tomllib.loads(mergefile_text({**RECIPE, **changes}))


def test_a_plain_recipe_becomes_sources_and_one_output():
    assert parsed() == {
        "version": 1,
        "sources": {"base": {"path": "base"}, "expert": {"path": "expert"}},
        "outputs": {
            "out": {
                "operator": "linear",
                "base": "base",
                "experts": [{"source": "base", "weight": 0.75}, {"source": "expert", "weight": 0.25}],
                "path": "out",
                "params": {"normalize": False},
                "write": {"dtype": "float32"},
            }
        },
    }


def test_output_folder_and_shard_size():
    output = parsed(output={"dir": "build/x", "max_shard_size_bytes": 1024})["outputs"]["out"]
    assert output["path"] == "build/x"
    assert output["write"]["shard_size"] == "1024 B"


def test_what_is_null_is_left_out():
    output = parsed(base=None, dtype=None, params={"seed": None}, output={"max_shard_size_bytes": None})
    assert set(output["outputs"]["out"]) == {"operator", "experts", "path"}


def test_no_experts_stay_an_empty_list():
    assert parsed(experts=[])["outputs"]["out"]["experts"] == []


def test_an_expert_without_parameters_is_just_its_name():
    assert parsed(experts=[{"path": "expert"}])["outputs"]["out"]["experts"] == ["expert"]


def test_source_names_are_plain_and_unique():
    names = source_names({**RECIPE, "experts": [{"path": "a b/ü"}, {"path": "a b/ö"}, {"path": "base"}]})
    assert names == {"base": "base", "a b/ü": "a_b", "a b/ö": "a_b_2"}


def test_paths_keep_spaces_quotes_and_other_alphabets():
    path = 'mo"dels\\новая'
    assert parsed(experts=[{"path": path}])["sources"]["mo_dels"]["path"] == path


def test_wrong_keys_and_values_of_an_expert_reach_the_tool_as_they_are():
    experts = parsed(experts=[{"path": "expert", "wieght": 0.5, "weight": "abc"}])["outputs"]["out"]["experts"]
    assert experts == [{"source": "expert", "wieght": 0.5, "weight": "abc"}]


@pytest.mark.parametrize("spelled", ["nan (a float)", math.nan])
def test_nan_is_a_float(spelled):
    weight = parsed(experts=[{"path": "expert", "weight": spelled}])["outputs"]["out"]["experts"][0]["weight"]
    assert math.isnan(weight)


def test_gradients_and_tables_are_kept():
    params = parsed(params={"t": [0, 0.5, 1], "deep": {"a b": [True]}})["outputs"]["out"]["params"]
    assert params == {"t": [0, 0.5, 1], "deep": {"a b": [True]}}


def test_dare_is_dare_linear_and_rescale_true_is_by_density():
    output = parsed(method="dare", params={"rescale": True, "seed": 7})["outputs"]["out"]
    assert output["operator"] == "dare_linear"
    assert output["params"] == {"rescale": "density", "seed": 7}
    assert parsed(params={"rescale": False})["outputs"]["out"]["params"] == {"rescale": False}


def test_an_unknown_method_reaches_the_tool():
    assert parsed(method="dare-ties")["outputs"]["out"]["operator"] == "dare-ties"


def test_an_adapter_applies_to_the_base():
    sources = parsed(experts=[{"path": "adapter", "kind": "lora", "weight": 1.0}])["sources"]
    assert sources["adapter"] == {"path": "adapter", "on": "base"}


def test_parameters_by_tensor_become_rules_beside_the_expert_that_has_the_parameter():
    experts = [{"path": "expert", "density": 0.25}]
    output = parsed(experts=experts, params={"density_by_tensor": {"d1": 0.5}, "lambda": 1.0})["outputs"]["out"]
    assert output["rules"] == [{"match": "d1", "experts": {"expert": {"density": 0.5}}}]
    assert output["params"] == {"lambda": 1.0}


def test_parameters_by_tensor_become_params_of_rules_otherwise():
    output = parsed(params={"t_by_tensor": {"a[0]": 0.5}})["outputs"]["out"]
    assert output["rules"] == [{"match": "a[[]0]", "params": {"t": 0.5}}]


def test_slices_are_layer_ranges_in_place_of_experts():
    output = parsed(experts=[{"path": "m"}], params={"slices": [["m", 0, 3], ["m", -1, 2]]})["outputs"]["out"]
    assert output["slices"] == [{"source": "m", "layers": "0..3"}, {"source": "m", "layers": "-1..2"}]
    assert "experts" not in output
    assert "params" not in output


def test_settings_replace_values_and_leave_the_recipe_alone():
    changed = with_settings(RECIPE, {"weights": [0.6, 0.4], "output.max_shard_size_bytes": 9, "experts.1.path": "x"})
    assert changed["experts"] == [{"path": "base", "weight": 0.6}, {"path": "x", "weight": 0.4}]
    assert changed["output"] == {"max_shard_size_bytes": 9}
    assert RECIPE["experts"][1] == {"path": "expert", "weight": 0.25}
    assert "output" not in RECIPE


@pytest.mark.parametrize("settings", [{"weights": [1.0]}, {"method.x": 1}, {"seed": 1}, {"output.name": "x"}])
def test_settings_that_lead_nowhere_are_refused(settings):
    with pytest.raises(CaseError):
        with_settings(RECIPE, settings)


@pytest.mark.parametrize("text", ["0.250", "25e-2"])
def test_a_weight_may_be_spelled_in_other_characters(text):
    assert f"weight = {text} }}" in mergefile_text(spell_weight(RECIPE, text))


def test_a_spelling_of_no_weight_is_refused():
    with pytest.raises(CaseError, match=r"0\.3"):
        spell_weight(RECIPE, "0.3")


def test_comments_change_nothing():
    text = mergefile_text(RECIPE, "a remark")
    assert text.count("# a remark") == 2
    assert tomllib.loads(text) == parsed()


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "base"},
        {"output": {"name": "x"}},
        {"experts": [{"weight": 1}]},
        {"experts": [{"path": "a", "kind": "ia3"}]},
        {"params": {"slices": [["m", 1]]}},
        {"params": {"density_by_tensor": 0.5}},
    ],
)
def test_unknown_keys_of_a_recipe_are_refused(change):
    with pytest.raises(CaseError):
        check_recipe({**RECIPE, **change}, "recipe")
