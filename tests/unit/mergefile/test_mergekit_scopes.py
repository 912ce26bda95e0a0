"""The law of the import: every tensor gets the parameters that mergekit gives it.

mergekit's lookup is evaluated here on the configuration itself, tensor by tensor, and compared with what the Mergefile
resolves to.
"""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from unit.mergefile.mergekit import SIGNATURES, check, imported, output, outputs
from unit.mergefile.mergekit_lookup import looked_up, position

from mergepipe.mergefile.mergekit.methods import METHODS, BaseRole
from mergepipe.mergefile.mergekit.references import Place, Reference
from mergepipe.mergefile.parse import parse_mergefile
from mergepipe.mergefile.resolve import Resolver

INSIDE = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight")
BEFORE = ("model.embed_tokens.weight",)
AFTER = ("model.norm.weight", "lm_head.weight")
WORDS = ("self_attn", "mlp", "q_proj", "o_proj", "proj", "weight", "embed", "norm", "model.", "layers", ".", "head")
ODD = ("*attn*", "[q]_proj", "q?proj", "Mlp")
NUMBERED = ("layers.1", "layers.1.", "2", "0.mlp", ".3.self_attn")


def name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


# --- comparing -------------------------------------------------------------------------------------------------------


def same(parameter, ours, theirs) -> bool:
    if parameter.name == "rescale":
        return ours == ("l1" if theirs else False)
    if isinstance(theirs, bool):
        return ours is theirs
    return math.isclose(ours, theirs, rel_tol=1e-12, abs_tol=1e-15)


def check_tensor(config, part, resolved, tensor: str, own_names, t: float) -> None:
    """Compare all parameters of a tensor; ``own_names`` are what it is called in each of the part's models."""
    method = METHODS[config["merge_method"]]
    place = 0
    for index, source in enumerate(part["sources"]):
        if method.base is not BaseRole.INPUT and source["model"] == config.get("base_model"):
            continue
        for parameter in method.parameters:
            if parameter.per_model:
                scopes = (source.get("parameters"), part.get("parameters"), config.get("parameters"))
                theirs = looked_up(parameter, scopes, own_names[index], t)
                ours = resolved.experts[place][parameter.name]
                assert same(parameter, ours, theirs), (tensor, source["model"], parameter.name, ours, theirs)
        place += 1
    assert place == len(resolved.experts)
    for parameter in method.parameters:
        if not parameter.per_model:
            theirs = looked_up(parameter, (part.get("parameters"), config.get("parameters")), tensor, t)
            assert same(parameter, resolved.params[parameter.name], theirs), (tensor, parameter.name)


def check_part(config, part, resolver, first, count, outside) -> None:
    """Compare the tensors of a slice (or of all layers), which begins at layer ``first`` of the output."""
    for layer in range(count):
        t = position(layer, count)
        for inner in INSIDE:
            own = [name(source["layer_range"][0] + layer, inner) for source in part["sources"]]
            tensor = name(first + layer, inner)
            check_tensor(config, part, resolver.resolve(tensor, first + layer), tensor, own, t)
    for tensor in outside:
        names = [tensor] * len(part["sources"])
        check_tensor(config, part, resolver.resolve(tensor, None), tensor, names, 0.0)


# --- configurations ---------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-2, 2).map(lambda value: round(value, 3))
VALUES = {
    "density": st.floats(0.001, 1).map(lambda value: round(value, 3)),
    "gamma": st.floats(0, 0.9).map(lambda value: round(value, 3)),
    "epsilon": st.floats(0.01, 0.4).map(lambda value: round(value, 3)),
    "select_topk": st.floats(0.01, 1).map(lambda value: round(value, 3)),
}
LAYERS = 4


def is_number(parameter) -> bool:
    return not isinstance(parameter.default, bool)


def values(parameter):
    return VALUES.get(parameter.name, NUMBERS) if is_number(parameter) else st.booleans()


@st.composite
def settings_of(draw, parameter, words, *, complete: bool):
    """Return a setting; a complete one has a value for every tensor."""
    value = values(parameter)
    if is_number(parameter):
        value = st.one_of(value, st.lists(value, min_size=1, max_size=5))
    kind = draw(st.sampled_from(["plain", "filters", "filters", "one filter"]))
    if kind == "plain":
        return draw(value)
    case = st.fixed_dictionaries({"filter": st.sampled_from(words), "value": value})
    if kind == "one filter" and not complete:
        return draw(case)
    rest = st.one_of(
        st.fixed_dictionaries({"value": value}),
        st.fixed_dictionaries({"filter": st.sampled_from([None, "*"]), "value": value}),
    )
    cases = draw(st.lists(case, max_size=4))
    last = [draw(rest)] if complete or not cases or draw(st.booleans()) else []
    return cases + last


@st.composite
def scope(draw, method, words, *, per_model_only: bool, complete: bool = False):
    """Return the parameters of one scope: any of those that mergekit looks for there."""
    found = {}
    for parameter in method.parameters:
        needed = complete and parameter.default is None
        if (parameter.per_model or not per_model_only) and (needed or draw(st.booleans())):
            found[parameter.name] = draw(settings_of(parameter, words, complete=needed))
    return found


def models_for(method) -> int:
    return {(1, 1): 1}.get(method.experts, 2)


METHOD_NAMES = st.sampled_from(
    ["linear", "ties", "dare_ties", "della", "breadcrumbs", "slerp", "sce", "nuslerp", "task_arithmetic"]
)


@st.composite
def whole_merges(draw):
    method = METHODS[draw(METHOD_NAMES)]
    words = (*WORDS, *ODD, *NUMBERED)
    names = ["org/a", "org/b"][: models_for(method)]
    based = method.base is BaseRole.ORIGIN or draw(st.booleans())
    listed = ["org/base"] if based and draw(st.booleans()) else []
    models = []
    for model in [*names, *listed]:
        beside = draw(scope(method, words, per_model_only=True))
        models.append({"model": model, "parameters": beside} if beside else {"model": model})
    config = {"merge_method": method.name, "models": draw(st.permutations(models))}
    if based:
        config["base_model"] = "org/base"
    return config | {"parameters": draw(scope(method, words, per_model_only=False, complete=True))}


@st.composite
def sliced_merges(draw):
    method = METHODS[draw(st.one_of(METHOD_NAMES, st.just("passthrough"), st.just("passthrough")))]
    words = (*WORDS, *ODD)  # a filter with the number of a layer cannot always be imported
    with_base = method.base is not BaseRole.INPUT
    slices = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, LAYERS))
        names = draw(st.permutations(["org/a", "org/b", "org/c"]))[: models_for(method)]
        sources = []
        for model in draw(st.permutations([*names, *(["org/base"] if with_base else [])])):
            first = draw(st.integers(0, 8))
            source = {"model": model, "layer_range": [first, first + count]}
            beside = draw(scope(method, words, per_model_only=True)) if model != "org/base" else {}
            sources.append(source | ({"parameters": beside} if beside else {}))
        own = draw(scope(method, words, per_model_only=False))
        slices.append({"sources": sources} | ({"parameters": own} if own else {}))
    config = {"merge_method": method.name, "slices": slices}
    if with_base:
        config["base_model"] = "org/base"
    return config | {"parameters": draw(scope(method, words, per_model_only=False, complete=True))}


def as_written(config):
    """Import a configuration, and return the outputs as the text says them."""
    found = imported(yaml.safe_dump(config, sort_keys=False))
    parsed = parse_mergefile(found.text, found.mergefile.path, SIGNATURES)
    assert (parsed.sources, parsed.outputs) == (found.mergefile.sources, found.mergefile.outputs)
    (result,) = parsed.outputs.values()
    return result


@given(whole_merges())
def test_every_tensor_of_a_merge_has_mergekits_parameters(config):
    ours = as_written(config)
    sources = [model | {"layer_range": [0, LAYERS]} for model in config["models"]]
    if "base_model" in config and config["base_model"] not in [source["model"] for source in sources]:
        sources.append({"model": config["base_model"], "layer_range": [0, LAYERS]})
    resolver = Resolver(ours, SIGNATURES[ours.operator], LAYERS)
    check_part(config, {"sources": sources}, resolver, 0, LAYERS, (*BEFORE, *AFTER))


@given(sliced_merges())
def test_every_tensor_of_a_slice_has_mergekits_parameters(config):
    ours = as_written(config)
    first = 0
    for index, part in enumerate(config["slices"]):
        start, stop = part["sources"][0]["layer_range"]
        outside = (*(BEFORE if index == 0 else ()), *(AFTER if index == len(config["slices"]) - 1 else ()))
        resolver = Resolver(ours, SIGNATURES[ours.operator], stop - start, slice_index=index, first_layer=first)
        check_part(config, part, resolver, first, stop - start, outside)
        first += stop - start


# --- cases that went wrong in other translations, each for itself -----------------------------------------------------


def weights(text: str, tensor: str, layer: int | None = None, count: int = 4) -> list:
    found = output(text)
    resolver = Resolver(found, SIGNATURES[found.operator], count)
    return [expert["weight"] for expert in resolver.resolve(tensor, layer).experts]


def test_a_value_beside_a_model_hides_a_filter_of_the_whole_merge():
    text = """\
merge_method: linear
models:
  - {model: org/a, parameters: {weight: 0.3}}
  - {model: org/b}
parameters:
  weight: [{filter: mlp, value: 0.9}, {value: 0.1}]
"""
    assert weights(text, "model.layers.0.mlp.w", 0) == [0.3, 0.9]
    assert weights(text, "model.layers.0.attn.w", 0) == [0.3, 0.1]


def test_a_filter_beside_a_model_falls_through_to_the_whole_merge():
    text = """\
merge_method: linear
models:
  - {model: org/a, parameters: {weight: [{filter: mlp, value: 0.3}]}}
  - {model: org/b}
parameters:
  weight: [{filter: attn, value: 0.9}, {value: 0.1}]
"""
    assert weights(text, "x.mlp.w") == [0.3, 0.1]
    assert weights(text, "x.attn.w") == [0.9, 0.9]
    assert weights(text, "x.norm.w") == [0.1, 0.1]


def test_the_first_filter_that_matches_wins_whatever_the_order_of_the_others():
    text = """\
merge_method: linear
models:
  - {model: org/a, parameters: {weight: [{filter: mlp, value: 1}, {filter: up, value: 2}, {value: 0}]}}
  - {model: org/b, parameters: {weight: [{filter: up, value: 3}, {filter: mlp, value: 4}, {value: 0}]}}
"""
    assert weights(text, "x.mlp.up") == [1, 3]
    assert weights(text, "x.mlp.down") == [1, 4]
    assert weights(text, "x.up") == [2, 3]


def test_a_gradient_within_a_filter():
    text = """\
merge_method: linear
models: [{model: org/a}]
parameters:
  weight: [{filter: mlp, value: [0, 1, 0]}, {value: [1, 0]}]
"""
    assert [weights(text, "x.mlp.w", layer, 5)[0] for layer in range(5)] == [0, 0.5, 1, 0.5, 0]
    assert [weights(text, "x.attn.w", layer, 5)[0] for layer in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert weights(text, "lm_head.w") == [1]


def test_filters_for_equal_values_share_a_rule():
    text = """\
merge_method: passthrough
models: [{model: org/a}]
parameters:
  scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: 0}, {value: 1}]
"""
    (rule,) = output(text).rules
    assert rule.match == ("*o_proj*", "*down_proj*")
    assert rule.params == {"scale": 0.0}


def test_what_is_the_same_for_all_experts_is_said_once():
    text = """\
merge_method: linear
models: [{model: org/a}, {model: org/b}]
parameters: {weight: [{filter: mlp, value: 0.5}, {value: 1}]}
"""
    found = output(text)
    assert found.params == {"weight": 1.0}
    assert [(rule.params, rule.experts) for rule in found.rules] == [({"weight": 0.5}, {})]


def test_a_filter_that_comes_later_for_one_expert_waits_for_the_other():
    text = """\
merge_method: linear
models:
  - {model: org/a, parameters: {weight: [{filter: up, value: 1}, {filter: mlp, value: 2}, {value: 0}]}}
  - {model: org/b, parameters: {weight: [{filter: mlp, value: 3}, {filter: attn, value: 4}, {value: 0}]}}
"""
    assert [rule.match for rule in output(text).rules] == [("*attn*",), ("*mlp*",), ("*up*",)]


def test_filters_of_the_whole_merge_are_written_once_for_all_slices():
    text = """\
merge_method: passthrough
slices:
  - sources: [{model: org/a, layer_range: [0, 2]}]
  - sources: [{model: org/a, layer_range: [1, 3]}]
parameters: {scale: [{filter: mlp, value: 0.5}]}
"""
    found = output(text)
    assert [rule.match for rule in found.rules] == [("*mlp*",)]
    assert [part.rules for part in found.slices] == [(), ()]


@pytest.mark.parametrize("text", ["*attn*", "a[b]c", "what?", "[", "]", "a-b", "!x", "\\", "héllo"])
def test_a_filter_is_a_part_of_a_name_and_no_glob(text):
    config = {
        "merge_method": "linear",
        "models": [{"model": "org/a"}],
        "parameters": {"weight": [{"filter": text, "value": 0.5}, {"value": 1}]},
    }
    written = yaml.safe_dump(config, allow_unicode=True)
    assert weights(written, f"x.{text}.y") == [0.5]
    assert weights(written, f"x.{text[:-1]}.y") == [1.0]
    assert weights(written, "x.attn.abc.whatx.y") == [1.0]


def test_a_filter_that_looks_like_a_glob_is_pointed_out():
    text = (
        "merge_method: linear\nmodels: [{model: a/b}]\nparameters: {weight: [{filter: '*mlp*', value: 0}, {value: 1}]}"
    )
    assert any("no glob" in note and "line 3" in note for note in imported(text).notes)


def test_entries_that_no_tensor_reaches_are_left_out_and_said():
    text = """\
merge_method: linear
models: [{model: org/a}]
parameters:
  weight:
    - {filter: mlp, value: 0.5}
    - {filter: mlp.up, value: 0.6}
    - {value: 1}
    - {filter: attn, value: 0.7}
"""
    found = imported(text)
    (result,) = found.mergefile.outputs.values()
    assert [rule.match for rule in result.rules] == [("*mlp*",)]
    assert [note.partition(":")[0] for note in found.notes] == ["line 6", "line 8"]


@pytest.mark.parametrize("text", ["layers.3", "3", "3.mlp", "layers.3.", ".1"])
def test_a_filter_with_the_number_of_a_layer_in_a_moved_slice_is_refused(text):
    template = """\
merge_method: passthrough
slices:
  - sources: [{model: org/a, layer_range: [0, 2]}]
  - sources:
    - model: org/a
      layer_range: [1, 3]
      parameters:
        scale:
          - filter: "FILTER"
            value: 0.5@@
"""
    config = template.replace("FILTER", text)
    check(config, "may hold the number of a layer")
    assert outputs(config.replace("@@", "").replace("[1, 3]", "[2, 4]")), "the layers are counted alike here"
    assert outputs(template.replace("@@", "").replace("FILTER", "w3.x")), "not the number of a layer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("merge_method: linear\nmodels:\n  - model: a/b@@\n", "missing: no `weight` for `a/b`: mergekit stops there"),
        (
            "merge_method: linear\nmodels:\n  - model: a/b@@\n    parameters: {weight: [{filter: mlp, value: 1}]}\n",
            "missing: no `weight` where no filter matches for `a/b`",
        ),
        (
            "merge_method: slerp@@\nbase_model: a/base\nmodels: [{model: a/b}]\n",
            "missing: no `t`: mergekit stops there",
        ),
        (
            "merge_method: linear\nbase_model: a/base@@\nmodels: [{model: a/b, parameters: {weight: 1}}]\n",
            "missing: no `weight` for `a/base`, which mergekit adds to the models",
        ),
    ],
)
def test_a_parameter_that_mergekit_misses_is_missed_here(text, message):
    check(text, message)


def test_names_of_references_are_compared_as_mergekit_does():
    assert Reference(model=Place(path="a/b")) != Reference(model=Place(path="./a/b"))
