"""What of a configuration is imported, what is refused and why, and what is said about the rest."""

from __future__ import annotations

import pytest
from unit.mergefile.mergekit import SIGNATURES, check, imported, output, problems

from mergepipe.mergefile.mergekit.methods import KNOWN_PARAMETERS, METHODS, our_value
from mergepipe.signatures import Scope

MODELS = "models:\n  - {model: org/a, parameters: {weight: 0.5}}\n  - {model: org/b, parameters: {weight: 1}}\n"
LINEAR = "merge_method: linear\n" + MODELS
TIES = "merge_method: ties\nbase_model: org/base\n" + MODELS


def notes(text: str) -> str:
    return "\n".join(imported(text).notes)


# --- methods ----------------------------------------------------------------------------------------------------------


def test_every_method_has_an_operator_with_its_parameters():
    for method in METHODS.values():
        specs = SIGNATURES[method.name].all_params()
        for parameter in method.parameters:
            assert parameter.name in specs, (method.name, parameter.name)
            assert (specs[parameter.name].scope is Scope.EXPERT) == parameter.per_model
        signature = SIGNATURES[method.name]
        assert signature.min_experts <= method.experts[0]
        assert signature.max_experts is None or signature.max_experts >= (method.experts[1] or 0)


def test_every_operator_of_a_published_method_can_be_imported():
    assert set(METHODS) == set(SIGNATURES)


@pytest.mark.parametrize("name", METHODS)
def test_a_default_that_differs_from_ours_is_written(name):
    method = METHODS[name]
    base = "" if name in ("linear", "karcher", "passthrough") else "base_model: org/base\n"
    models = ["org/a", "org/b"][: method.experts[1]]
    text = (
        f"merge_method: {name}\n{base}models: [{', '.join(f'{{model: {m}}}' for m in models)}]\nparameters:\n  x: 1\n"
    )
    required = [parameter.name for parameter in method.parameters if parameter.default is None]
    text = text.replace("  x: 1\n", "".join(f"  {name}: 0.5\n" for name in required) or "  {}\n")
    found = output(text)
    specs = SIGNATURES[name].all_params()
    for parameter in method.parameters:
        if parameter.default is not None:
            value = found.params.get(parameter.name, specs[parameter.name].default)
            assert value == our_value(parameter.name, parameter.default), parameter.name
    assert set(found.params) - set(required) == ({"rescale"} if name in ("dare_linear", "dare_ties") else set())


def test_rescale_is_that_of_mergekit():
    text = "merge_method: {}\nbase_model: org/base\nmodels: [{{model: org/a}}]\nparameters: {{weight: 1{}}}\n"
    assert output(text.format("dare_ties", "")).params["rescale"] == "l1"
    assert output(text.format("dare_ties", ", rescale: true")).params["rescale"] == "l1"
    assert output(text.format("dare_ties", ", rescale: false")).params["rescale"] is False
    assert output(text.format("ties", ", rescale: true")).params["rescale"] == "l1"
    assert "rescale" not in output(text.format("ties", "")).params
    filtered = output(text.format("ties", ", rescale: [{filter: mlp, value: true}]"))
    assert [rule.params for rule in filtered.rules] == [{"rescale": "l1"}]


def test_random_masks_are_pointed_out():
    text = TIES.replace("ties", "dare_ties")
    assert "random masks" in notes(text)
    assert "random masks" not in notes(TIES)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("merge_method: tise@@\n" + MODELS, "no counterpart of the method `tise`", "did you mean `ties`?"),
        ("merge_method: dare-ties@@\nbase_model: org/base\n" + MODELS, "no counterpart", "did you mean `dare_ties`?"),
        ("merge_method: 3@@\n" + MODELS, "merge_method: invalid value", ""),
        ("merge_method:@@\n" + MODELS, "missing: `merge_method`", ""),
        ("models: [{model: org/a}]@@\n", "missing: `merge_method`", "a merge has `merge_method`"),
    ],
)
def test_methods_that_are_none(text, message, hint):
    check(text, message, hint)


# --- base and experts -------------------------------------------------------------------------------------------------


def roles(text: str) -> tuple[str | None, list[str]]:
    found = output(text)
    return found.base, [expert.source for expert in found.experts]


def test_the_base_is_no_expert_where_experts_are_compared_with_it():
    assert roles(TIES) == ("base", ["a", "b"])
    assert roles(TIES.replace("models:\n", "models:\n  - model: org/base\n")) == ("base", ["a", "b"])
    assert roles(TIES + "  - model: org/base\n") == ("base", ["a", "b"])


def test_the_base_is_averaged_where_mergekit_adds_it():
    text = LINEAR + "base_model: org/base\nparameters: {weight: 2}\n"
    assert roles(text) == ("base", ["a", "b", "base"])
    assert "listed as the last expert" in notes(text)
    karcher = "merge_method: karcher\nbase_model: org/base\nmodels: [{model: org/a}, {model: org/b}]\n"
    assert roles(karcher) == ("base", ["a", "b", "base"])


def test_the_base_keeps_its_place_and_its_weight_where_it_is_an_input():
    found = output(LINEAR + "base_model: org/a\n")
    assert found.base == "a"
    assert [(expert.source, expert.params) for expert in found.experts] == [
        ("a", {"weight": 0.5}),
        ("b", {"weight": 1}),
    ]


def test_slerp_goes_from_the_base_to_the_other():
    for models in ("[{model: org/a}, {model: org/b}]", "[{model: org/b}, {model: org/a}]", "[{model: org/b}]"):
        text = f"merge_method: slerp\nbase_model: org/a\nmodels: {models}\nparameters: {{t: 0.3}}\n"
        assert roles(text) == ("a", ["b"])


def test_nuslerp_and_multislerp_take_a_base_or_none():
    text = "merge_method: nuslerp\n" + MODELS
    assert roles(text) == (None, ["a", "b"])
    assert roles(text + "base_model: org/c\n") == ("c", ["a", "b"])
    text = "merge_method: multislerp\n" + MODELS
    assert roles(text + "base_model: org/a\n") == ("a", ["b"])


def test_parameters_beside_a_base_mean_nothing_and_that_is_said():
    text = TIES + "  - {model: org/base, parameters: {weight: 3, density: 0.1}}\n"
    assert output(text) == output(TIES)
    assert "line 6: `weight`, `density` beside the base model has no effect" in notes(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: ties\nmodels:@@\n  - {model: a/b, parameters: {weight: 1}}\n", "`ties` needs `base_model`"),
        ("merge_method: ties\nbase_model: a/b\nmodels:@@\n  - model: a/b\n", "at least 1 model beside the base"),
        ("merge_method: model_stock\nbase_model: a/b\nmodels:@@\n  - model: a/c\n", "takes at least 2 models beside"),
        (
            "merge_method: slerp\nbase_model: a/b\nparameters: {t: 1}\nmodels:@@\n  - model: a/c\n  - model: a/d\n",
            "`slerp` takes 1 model beside the base, and there are 2",
        ),
        (
            "merge_method: nuslerp\nbase_model: a/c\nmodels: # @@\n  [{model: a/c}, {model: a/d}]\n",
            "`nuslerp` takes 2 models beside the base, and there is 1",
        ),
        ("merge_method: passthrough\nmodels:@@\n  - model: a/c\n  - model: a/d\n", "takes 1 model, and there are 2"),
        (
            "merge_method: passthrough\nbase_model: a/b@@\nmodels:\n  - model: a/c\n",
            "mergekit adds `base_model` to the models, and `passthrough` takes one",
        ),
        ("merge_method: karcher\nmodels:\n  - model: a/b\n  - model: a/b@@\n", "`a/b` is listed twice"),
    ],
)
def test_models_that_a_method_cannot_merge(text, message):
    check(text, message)


# --- slices -----------------------------------------------------------------------------------------------------------

SLICED = """\
merge_method: ties
base_model: org/base
slices:
  - sources:
      - {model: org/base, layer_range: [0, 4]}
      - {model: org/a, layer_range: [2, 6]}
      - {model: org/b, layer_range: [2, 6]}
  - base_model: org/c
    sources:
      - {model: org/a, layer_range: [6, 8]}
      - {model: org/c, layer_range: [6, 8]}
    parameters: {density: 0.4}
parameters: {weight: 1, density: 0.5}
"""


def test_slices_keep_the_range_of_each_source():
    found = output(SLICED)
    assert (found.base, found.experts) == ("base", ())
    first, second = found.slices
    assert (first.layers, first.base, first.base_layers) == ((2, 6), None, (0, 4))
    assert [(expert.source, expert.layers) for expert in first.experts] == [("a", None), ("b", None)]
    assert (second.layers, second.base, second.base_layers, second.params) == ((6, 8), "c", None, {"density": 0.4})


def test_an_expert_with_a_range_of_its_own():
    found = output(SLICED.replace("{model: org/b, layer_range: [2, 6]}", "{model: org/b, layer_range: [3, 7]}"))
    assert [expert.layers for expert in found.slices[0].experts] == [None, (3, 7)]


def test_the_base_of_copied_slices_gives_the_tokenizer_alone():
    text = "merge_method: passthrough\nbase_model: org/b\nslices:\n  - sources: [{model: org/a, layer_range: [0, 2]}]\n"
    found = output(text)
    assert (found.base, found.write.tokenizer) == (None, "b")


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ("  - sources:\n    - {model: a/b, layer_range: [2, 2]}@@", "a slice without layers"),
        ("  - sources:\n    - {model: a/b, layer_range: [4, 2]}@@", "a range from 4 down to 2"),
        ("  - sources:\n    - {model: a/b, layer_range: [-1, 2]}@@", "a range from -1 to 2"),
        ("  - sources:\n    - {model: a/b, layer_range: [0, 2, 4]}@@", "invalid range of layers"),
        ("  - sources:\n    - {model: a/b, layer_range: [0, 2.5]}@@", "invalid range of layers"),
        ("  - sources:\n    - {model: a/b, layer_range: 3}@@", "invalid range of layers"),
        ("  - sources:\n    - {model: a/b}@@", "missing: which layers"),
        ("  - sources: [{model: a/b, layer_range: [0, 2]}]\n    merge_method: slerp@@", "a merge has one method"),
        ("  - sources: [{model: a/b, layer_range: [0, 2]}]\n    residual_weight: 0.1@@", "no effect in mergekit"),
        ("  - parameters: {scale: 1}@@", "missing: what the slice is made of"),
        (
            "  - sources:@@\n    - {model: a/b, layer_range: [0, 2]}\n    - {model: a/c, layer_range: [0, 3]}",
            "the sources of a slice have 2, 3 layers",
        ),
        ("  - sources:\n    - a/b@@", "one of the models, a mapping"),
        ("  - a/b@@", "one of the slices"),
    ],
)
def test_slices_that_are_refused(slices, message):
    method = "karcher" if "a/c" in slices else "passthrough"
    check(f"merge_method: {method}\nslices:\n{slices}\n", message)


def test_the_base_of_a_slice_must_be_among_its_sources():
    text = SLICED.replace("      - {model: org/c, layer_range: [6, 8]}\n", "").replace(
        "    sources:\n      - {model: org/a, layer_range: [6", "    sources:@@\n      - {model: org/a, layer_range: [6"
    )
    check(text, "the base `org/c` is not among the sources")


# --- dtype and tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", None),
        ("dtype: bfloat16", "BF16"),
        ("dtype: float32\nout_dtype: torch.float16", "F16"),
        ("out_dtype: float64", "F64"),
        ("dtype:", None),
    ],
)
def test_the_dtype_that_is_written(lines, expected):
    assert output(LINEAR + lines).write.dtype == expected


def test_that_mergekit_computes_in_another_dtype_is_said():
    assert "`dtype: bfloat16`: mergekit computes in it" in notes(LINEAR + "dtype: bfloat16")
    assert "dtype" not in notes(LINEAR + "dtype: float32\nout_dtype: bfloat16")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("tokenizer_source: base", "base"),
        ("tokenizer_source: org/a", "a"),
        ("tokenizer: {source: base}", "base"),
        ("tokenizer: {source: org/t, tokens: {}, pad_to_multiple_of: }", "t"),
        ("tokenizer_source:", None),
        ("", None),
    ],
)
def test_whose_tokenizer_is_written(lines, expected):
    found = imported(TIES + lines)
    (result,) = found.mergefile.outputs.values()
    assert result.write.tokenizer == expected
    assert any("rows of embeddings" in note for note in found.notes) == (expected is not None)


def test_a_base_tokenizer_without_a_base_is_that_of_the_first_model():
    text = LINEAR + "tokenizer_source: base"
    assert output(text).write.tokenizer is None
    assert "it is that of the first model" in notes(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("tokenizer_source: union@@", "a union of the models' vocabularies has no counterpart"),
        ("tokenizer: {}@@", "a union"),
        ("tokenizer: {source: union}@@", "a union"),
        ("tokenizer:\n  source: base\n  tokens: {x: {source: org/a}}@@", "rows of single tokens"),
        ("tokenizer:\n  source: base\n  pad_to_multiple_of: 64@@", "no rows are added"),
        ("tokenizer:\n  source: base\n  tokenz: 3@@", "unknown key: mergekit ignores it"),
        ("tokenizer: base@@", "a mapping with `source`"),
        ("tokenizer_source: base\ntokenizer: {source: base}@@", "not both"),
        ("dtype: int8@@", "invalid dtype"),
        ("dtype: 16@@", "invalid dtype"),
    ],
)
def test_tokenizers_and_dtypes_that_are_refused(lines, message):
    check(TIES + lines, message)


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ("chat_template: auto@@", "chat_template: cannot be imported: a chat template is copied", ""),
        ("allow_crimes: true@@", "merges across architectures", ""),
        ("lazy_unpickle: true@@", "an option of mergekit's command line", ""),
        ("random_seed: 3@@", "`seed` in the output's `params`", ""),
        ("gate_mode: hidden@@", "mergekit-moe", ""),
        ("genome: {}@@", "mergekit-evolve", ""),
        ("dtyp: float16@@", "unknown key: mergekit ignores it", "did you mean `dtype`?"),
        ("zzz: 1@@", "unknown key: mergekit ignores it", "remove it"),
        ("slices: [{sources: [{model: a/b, layer_range: [0, 1]}]}]@@", "`models` or `slices`, not both", ""),
        ("name: 3@@", "invalid name", "put it in quotes"),
        ("parameters: 3@@", "a mapping of parameters", ""),
    ],
)
def test_keys_that_are_refused(lines, message, hint):
    check(LINEAR + lines, message, hint)


def test_modules_are_refused():
    check("merge_method: linear\nmodules: {default: {models: [{model: a/b}]}}@@\n", "modules: cannot be imported")


def test_keys_without_a_value_are_as_if_they_were_absent():
    assert output(LINEAR + "chat_template:\ntokenizer:\nmodules: null\nslices:\nparameters:\n") == output(LINEAR)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("  - {model: a/b, wieght: 1}@@", "unknown key: mergekit ignores it", "remove it"),
        ("  - {model: a/b, parameter: {}}@@", "unknown key", "did you mean `parameters`?"),
        ("  - {model: a/b, layer_range: [0, 1]}@@", "ranges of layers stand in `slices`", ""),
        ("  - {parameters: {}}@@", "missing: which model", ""),
        ("  - a/b@@", "one of the models, a mapping", "write `- model: ...`"),
    ],
)
def test_models_with_other_keys(text, message, hint):
    check(LINEAR + text + "\nparameters: {weight: 1}\n", message, hint)


def test_everything_that_is_wrong_is_reported_in_one_go():
    text = """\
merge_method: linear
chat_template: auto
tokenizer_source: union
models:
  - model: a+b+c
    parameters: {weight: x, wieght: 1}
  - model: org/b
    parameters: {weight: [1, {value: 1}]}
"""
    assert [error.facts["line"] for error in problems(text)] == [2, 3, 5, 6, 6, 8]


# --- parameters -------------------------------------------------------------------------------------------------------


def test_int8_mask_changes_nothing_and_is_mentioned():
    text = TIES + "parameters: {int8_mask: true}\n"
    assert output(text) == output(TIES)
    assert "line 6: `int8_mask` changes no value" in notes(text)


def test_parameters_without_effect_are_left_out_and_said():
    text = LINEAR.replace("weight: 1", "weight: 1, density: 0.4, normalize: false")
    assert output(text) == output(LINEAR)
    assert "line 4: `density` has no effect on `linear` in mergekit" in notes(text)
    assert "line 4: `normalize` is a parameter of the whole merge" in notes(text)
    task = TIES.replace("ties", "task_arithmetic")
    assert output(task + "parameters: {density: 0.5, rescale: true}") == output(task)


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("[]", "an empty list says nothing", ""),
        ("", "has no value", ""),
        ("true", "true and false are no numbers", ""),
        ("[0.1, true]", "true and false are no numbers", ""),
        ("[0.1, null]", "a list with nothing in one of its places", ""),
        ("many", "expected a finite number", ""),
        (".inf", "expected a finite number", ""),
        ("[[0.1], 0.2]", "got a list", ""),
        ("{filter: mlp}", "missing: the value", ""),
        ("{filter: mlp, valeu: 3, value: 1}", "unknown key: mergekit ignores it", "did you mean `value`?"),
        ("[{filter: 3, value: 1}]", "invalid filter", ""),
        ("[{filter: a, value: {value: 1}}]", "a filter within a filter", ""),
        ("[{filter: a, value: [{value: 1}]}]", "a filter within a filter", ""),
        ("[{filter: a, value: 1}, 0.5]", "not both", "`- value: ...`"),
    ],
)
def test_values_that_are_refused(value, message, hint):
    text = f"merge_method: linear\nmodels: [{{model: a/b}}]\nparameters:\n  weight: {value}@@\n"
    check(text, message, hint)


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1"])
def test_a_density_that_ours_does_not_take_is_refused(value):
    check(TIES + f"parameters: {{density: {value}}}@@\n", "out of range")


@pytest.mark.parametrize(
    ("value", "expected"), [("0", False), ("1", True), ("1.0", True), ("true", True), ("off", False)]
)
def test_flags_are_true_and_false_or_one_and_zero(value, expected):
    assert output(TIES + f"parameters: {{normalize: {value}}}").params["normalize"] is expected


@pytest.mark.parametrize("value", ["[true, false]", "'yes'", "2"])
def test_flags_that_are_refused(value):
    check(TIES + f"parameters: {{normalize: {value}}}@@\n", "normalize", "")
    check(TIES + f"parameters: {{rescale: {value}}}@@\n", "rescale", "")


def test_an_integer_may_be_written_as_a_number():
    text = "merge_method: karcher\nmodels: [{model: a/b}, {model: a/c}]\nparameters: {max_iter: 20.0, tol: 1e-7}\n"
    assert output(text).params == {"max_iter": 20, "tol": 1e-7}


def test_a_parameter_that_no_method_has_is_a_mistake():
    text = "parameters: {normalise: false}@@\n"
    check(LINEAR + text, "mergekit ignores it", "did you mean `normalize`?")
    assert "normalise" not in KNOWN_PARAMETERS
