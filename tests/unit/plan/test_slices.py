"""Slices at plan time: ranges against the models, names and layers of the output, and what does not fit together."""

import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan, problems, tensor

from mergepipe.plan.values import Decision

OUTSIDE = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,), "lm_head.weight": (10, 4)}
DEPTHS = {"a": 4, "b": 6}


def shapes(depth, stack="model.layers", width=4):
    return {f"{stack}.{n}.mlp.weight": (width, width) for n in range(depth)}


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, (name, depth) in enumerate(DEPTHS.items()):
        project.add_source(name, random_tensors(seed, OUTSIDE | shapes(depth)))
    return project


def slices(project, *parts, **recipe):
    recipe = {"operator": "passthrough"} | recipe
    project.set_output("m", recipe | {"slices": [dict(part) for part in parts]})


def mlp(layer):
    return f"model.layers.{layer}.mlp.weight"


def slots(found):
    return [None if slot is None else (slot.source, slot.info.name) for slot in found.slots]


# --- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ("0..5", "reach beyond the model; the model has 4 layers"),
        ("4..5", "reach beyond the model; the model has 4 layers"),
        ("2..2", "are empty: the end is excluded; the model has 4 layers"),
        ("3..1", "run backwards; the model has 4 layers"),
        ("-1..2", "begin below 0; the model has 4 layers"),
    ],
)
def test_a_range_that_the_model_does_not_have_is_an_error_with_its_number_of_layers(project, layers, what):
    slices(project, {"source": "a", "layers": layers})
    (error,) = problems(project)
    assert error.message == f"outputs.m.slices[0]: layers {layers} of `a` {what}"
    assert (error.facts["source"], error.facts["layers"], error.exit_status) == ("a", 4, 2)


def test_all_wrong_ranges_are_told_together_those_of_experts_and_bases_too(project):
    slices(
        project,
        {"source": "a", "layers": "2..2"},
        {"experts": ["b", {"source": "a", "layers": "1..5"}], "layers": "0..4", "operator": "linear"},
        {"source": "b", "layers": "0..1", "base": "a", "base_layers": "7..8", "operator": "task_arithmetic"},
    )
    assert [error.message.partition(";")[0] for error in problems(project)] == [
        "outputs.m.slices[0]: layers 2..2 of `a` are empty: the end is excluded",
        "outputs.m.slices[1]: layers 1..5 of `a` reach beyond the model",
        "outputs.m.slices[2]: layers 7..8 of `a` reach beyond the model",
    ]


def test_a_base_that_the_operator_ignores_needs_no_layers(project):
    slices(project, {"source": "b", "layers": "4..6"}, base="a")
    assert problems(project) == []
    assert list(plan(project).sources) == ["b"]


def test_a_model_without_layers_cannot_be_sliced(project):
    project.add_source("a", random_tensors(0, OUTSIDE))
    slices(project, {"source": "a", "layers": "0..1"})
    (error,) = problems(project)
    assert error.message.endswith("the model has no layers")


# --- names and layers ---------------------------------------------------------------------------------------------


def test_layers_are_numbered_over_the_slices_in_natural_order(project):
    slices(project, *({"source": "b", "layers": "0..6"} for _ in range(2)))
    found = plan(project)
    assert [t.name for t in found.tensors] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        *(mlp(layer) for layer in range(12)),
        "model.norm.weight",
    ]
    assert [(origin.source, origin.layer) for origin in found.stack] == [("b", n % 6) for n in range(12)]
    assert [(t.part, t.layer) for t in found.tensors if t.layer is not None] == [(n // 6, n) for n in range(12)]


def test_each_expert_and_the_base_is_read_at_layers_of_its_own(project):
    part = {"experts": ["a", {"source": "b", "layers": "4..6"}], "layers": "1..3", "base": "b", "base_layers": "0..2"}
    slices(project, {"source": "a", "layers": "0..1"}, part | {"operator": "task_arithmetic"})
    assert slots(tensor(project, mlp(0))) == [None, ("a", mlp(0))]
    assert slots(tensor(project, mlp(1))) == [("b", mlp(0)), ("a", mlp(1)), ("b", mlp(4))]
    assert slots(tensor(project, mlp(2))) == [("b", mlp(1)), ("a", mlp(2)), ("b", mlp(5))]
    assert tensor(project, mlp(1)).params.base_expert is None
    assert tensor(project, "model.norm.weight").params.base_expert == 1
    found = plan(project)
    assert (found.definer, list(found.sources)) == ("a", ["b", "a"])


def test_embeddings_come_from_the_first_slice_and_all_else_outside_the_layers_from_the_last(project):
    extra = {"model.embed_layernorm.weight": (4,), "wpe.weight": (3, 4), "visual.patch_embed.weight": (2, 4)}
    for seed, name in enumerate(DEPTHS):
        project.add_source(name, random_tensors(seed, OUTSIDE | extra | shapes(4)))
    slices(project, {"source": "a", "layers": "0..1"}, {"source": "b", "layers": "1..2"})
    origin = {t.name: t.experts[0].source for t in plan(project).tensors if t.layer is None}
    assert origin == {
        "model.embed_tokens.weight": "a",
        "model.embed_layernorm.weight": "a",
        "wpe.weight": "a",
        "model.norm.weight": "b",
        "lm_head.weight": "b",
        "visual.patch_embed.weight": "b",
    }
    assert plan(project).decisions[:3] == (
        "layers 0..1: passthrough of `a` 0..1",
        "layers 1..2: passthrough of `b` 1..2",
        "outside the layers: embeddings from `a`, all other tensors from `b`",
    )


def test_tensors_outside_the_layers_take_the_first_anchor_of_a_gradient(project):
    slices(
        project,
        {"source": "a", "layers": "0..3", "params": {"scale": [1.0, 2.0]}},
        {"source": "a", "layers": "0..1", "params": {"scale": [3.0, 4.0]}},
    )
    scale = {t.name: t.params.experts[0]["scale"] for t in plan(project).tensors}
    assert scale["model.embed_tokens.weight"] == 1.0
    assert scale["model.norm.weight"] == scale["lm_head.weight"] == 3.0
    assert [scale[mlp(layer)] for layer in range(4)] == [1.0, 1.5, 2.0, 4.0]


def test_an_encoder_and_its_decoder_are_sliced_alike(project):
    halves = shapes(4, "encoder.block") | shapes(6, "decoder.block")
    project.add_source("a", random_tensors(0, {"shared.weight": (10, 4), "decoder.final.weight": (4,)} | halves))
    slices(project, {"source": "a", "layers": "2..4"}, {"source": "a", "layers": "0..1"})
    assert slots(tensor(project, "encoder.block.1.mlp.weight")) == [None, ("a", "encoder.block.3.mlp.weight")]
    assert slots(tensor(project, "decoder.block.2.mlp.weight")) == [None, ("a", "decoder.block.0.mlp.weight")]
    slices(project, {"source": "a", "layers": "2..6"})
    (error,) = problems(project)
    assert error.message == "outputs.m.slices[0]: `a` has no layer 4 in `encoder.block`, which has 4 layers"
    assert "encoder" in error.hint


def test_equal_work_of_two_slices_has_one_recipe_and_names_enter_no_digest(project):
    slices(project, {"source": "a", "layers": "0..2"}, {"source": "a", "layers": "1..3"})
    recipes = {t.recipe for t in plan(project).tensors}
    assert len(recipes) == 1


# --- policies per slice -------------------------------------------------------------------------------------------


def merged(project, **params):
    part = {"experts": ["a", {"source": "b", "layers": "2..4"}], "layers": "0..2", "operator": "linear"}
    slices(project, {"source": "a", "layers": "0..1"}, part | {"params": params})


def test_a_missing_tensor_is_told_by_the_name_that_the_expert_would_have_it_under(project):
    tensors = random_tensors(1, OUTSIDE | shapes(6) | {"model.layers.3.x": (4,)})
    project.add_source("b", {name: array for name, array in tensors.items() if name != mlp(3)})
    merged(project)
    (error,) = problems(project)
    assert error.message == f"expert `b` lacks 1 tensor (`{mlp(3)}`) of `a`"
    merged(project, missing="base")
    assert slots(tensor(project, mlp(2))) == [None, ("a", mlp(1)), ("a", mlp(1))]
    assert plan(project).decisions[-2:] == (
        "b: 1 extra tensor that `a` lacks, dropped (`model.layers.3.x`)",
        f'b: 1 tensor (`{mlp(3)}`) missing, taken from `a` (`missing = "base"`)',
    )


def test_tensors_of_layers_that_no_slice_takes_are_neither_extra_nor_compared(project):
    odd = {"model.layers.0.x": (4,), "model.layers.5.x": (4,)}
    project.add_source("b", random_tensors(1, OUTSIDE | shapes(6) | odd))
    merged(project)
    assert problems(project) == []
    assert not [note for note in plan(project).decisions if "extra" in note]


def test_another_shape_in_a_layer_is_an_error_and_a_buffer_is_copied(project):
    buffers = {f"model.layers.{n}.ids": np.arange(3) for n in range(6)}
    for seed, name in enumerate(DEPTHS):
        project.add_source(name, random_tensors(seed, OUTSIDE | shapes(DEPTHS[name])) | buffers)
    merged(project)
    found = tensor(project, "model.layers.2.ids")
    assert (found.decision, slots(found)) == (
        Decision.EQUAL,
        [("a", "model.layers.1.ids"), None, ("b", "model.layers.3.ids")],
    )
    wide = random_tensors(1, OUTSIDE | shapes(6) | {mlp(3): (5, 4)})
    project.add_source("b", wide)
    project.add_source("a", random_tensors(0, OUTSIDE | shapes(4)))
    (error,) = problems(project)
    assert error.message == f"tensor `{mlp(1)}` has shape [5, 4] in expert `b` and [4, 4] in `a`"


def test_other_names_of_layers_and_other_widths_cannot_be_stacked(project):
    project.add_source("b", random_tensors(1, OUTSIDE | shapes(6, "transformer.h")))
    slices(project, {"source": "a", "layers": "0..1"}, {"source": "b", "layers": "0..1"})
    (error,) = problems(project)
    assert "layers of `b` are under `transformer.h`, those of `a` under `model.layers`" in error.message
    project.add_source("b", random_tensors(1, {n: tuple(2 * s for s in v) for n, v in (OUTSIDE | shapes(6)).items()}))
    (error,) = problems(project)
    assert error.message.endswith("`lm_head.weight` has shape [20, 8] in `b` and [10, 4] in `a`")


def test_another_vocabulary_of_a_model_that_gives_layers_alone_does_not_matter(project):
    project.add_source("b", random_tensors(1, OUTSIDE | {"lm_head.weight": (12, 4)} | shapes(6)))
    ends = {"source": "a", "layers": "0..1"}
    slices(project, ends, {"source": "b", "layers": "0..6"}, ends)
    assert problems(project) == []


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True)])
def test_ends_that_tie_their_heads_in_different_ways_are_refused(project, first, last):
    for name, tied in (("a", first), ("b", last)):
        tensors = random_tensors(0, OUTSIDE | shapes(4))
        if tied:
            del tensors["lm_head.weight"]
        project.add_source(name, tensors, config={"tie_word_embeddings": tied})
    slices(project, {"source": "a", "layers": "0..1"}, {"source": "b", "layers": "0..1"})
    (error,) = problems(project)
    assert error.message.startswith("outputs.m.slices[1]: `b`, which the head comes from, has ")
    slices(
        project, {"source": "a", "layers": "0..1"}, {"source": "b", "layers": "0..1"}, {"source": "a", "layers": "0..1"}
    )
    assert problems(project) == []


@pytest.mark.parametrize(("first", "last", "fits"), [("a", "c", False), ("c", "a", False), ("c", "c", True)])
def test_ends_with_other_vocabularies_are_refused(project, first, last, fits):
    larger = {name: (12, 4) if shape == (10, 4) else shape for name, shape in OUTSIDE.items()}
    project.add_source("c", random_tensors(2, larger | shapes(4)))
    ends = [{"source": first, "layers": "0..2"}, {"source": "a", "layers": "1..2"}, {"source": last, "layers": "2..4"}]
    slices(project, *ends)
    if fits:
        assert tensor(project, "lm_head.weight").shape == (12, 4)
    else:
        (problem,) = problems(project)
        assert "`lm_head.weight` has" in problem.message
        assert "`model.embed_tokens.weight` has" in problem.message


def test_rules_count_layers_of_the_output_and_one_for_no_tensor_is_an_error(project):
    part = {"source": "a", "layers": "0..4"}
    rule = {"match": "*.mlp.*", "params": {"scale": 2.0}}
    slices(project, part, part, rules=[rule | {"layers": "7..8"}])
    scale = {t.layer: t.params.experts[0]["scale"] for t in plan(project).tensors if t.layer is not None}
    assert scale == dict.fromkeys(range(7), 1.0) | {7: 2.0}
    slices(
        project,
        part,
        part | {"rules": [rule | {"layers": "2..4"}, rule | {"match": "*.norm.*"}]},
        rules=[rule | {"layers": "7..9"}],
    )
    lines = [line.partition(" = ")[0] for line in project.mergefile.read_text().splitlines()]
    rules, parts = (lines.index(key) + 1 for key in ("rules", "slices"))
    assert [error.message for error in problems(project)] == [
        f"outputs.m.rules[0] (line {rules}): layers 7..9 reach beyond the model, which has 8 layers",
        f"outputs.m.slices[1].rules[0] (line {parts}) matches no tensor: `match` `*.mlp.*` and `layers` 2..4",
    ]


def test_parameters_of_a_slice_without_a_usable_result_are_told_with_the_slice(project):
    merged(project, weight=0.0)
    (error,) = problems(project)
    assert error.message.startswith("`outputs.m.slices[1]`: ")


def test_the_costs_of_a_stack_count_every_use(project):
    slices(project, {"source": "a", "layers": "0..2"}, {"source": "a", "layers": "0..2"}, base="a", operator="linear")
    assert plan(project).expert_bytes == 0  # the base listed as an expert
    slices(project, {"source": "a", "layers": "0..2"}, {"source": "a", "layers": "0..2"})
    assert plan(project).expert_bytes == 4 * (4 * 16 + 84)
