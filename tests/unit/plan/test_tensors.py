"""Which tensors an output has and what each is made of; every problem is named before a weight is read."""

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan, problems, tensor

from mergepipe.errors import PlanError
from mergepipe.plan.values import Decision

SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.mlp.weight": (4, 4),
    "model.layers.1.mlp.weight": (4, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}
MLP = "model.layers.0.mlp.weight"


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, SHAPES))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1", "e2"]})
    return project


def without(project, source, *names, **config):
    """Write a source without some of its tensors."""
    tensors = {name: array for name, array in random_tensors(1, SHAPES).items() if name not in names}
    project.add_source(source, tensors, **config)


def with_tensor(project, source, name, array):
    project.add_source(source, random_tensors(1, SHAPES) | {name: array})


def params(project, **values):
    project.set_output("m", project.outputs["m"] | {"params": values})


# --- the set of tensors -------------------------------------------------------------------------------------------


def test_the_bases_tensors_define_the_output_in_natural_order(project):
    names = [f"model.layers.{n}.w" for n in (10, 2, 1)]
    for source in project.sources:
        project.add_source(source, random_tensors(0, dict.fromkeys(names, (2, 2))))
    assert [found.name for found in plan(project).tensors] == [f"model.layers.{n}.w" for n in (1, 2, 10)]


def test_without_a_base_the_first_expert_defines_the_output(project):
    without(project, "e2", MLP)
    project.set_output("m", {"operator": "linear", "experts": ["e2", "e1"]})
    assert MLP not in [found.name for found in plan(project).tensors]
    assert plan(project).definer == "e2"
    assert plan(project).decisions == (f"e1: 1 extra tensor that `e2` lacks, dropped (`{MLP}`)",)


def test_passthrough_takes_the_experts_tensors_whatever_the_base_is(project):
    without(project, "base", MLP)
    project.set_output("m", {"operator": "passthrough", "base": "base", "experts": ["e1"]})
    assert plan(project).definer == "e1"
    assert list(plan(project).sources) == ["e1"]
    assert len(plan(project).tensors) == len(SHAPES)


def test_a_missing_tensor_is_an_error_that_names_source_and_tensor(project):
    without(project, "e2", MLP, "model.norm.weight")
    (error,) = problems(project)
    assert "expert `e2` lacks 2 tensors" in error.message
    assert f"`{MLP}`" in error.message
    assert 'missing = "base"' in error.hint
    assert (error.facts["source"], error.facts["count"], error.exit_status) == ("e2", 2, 2)


def test_a_missing_tensor_stands_for_a_delta_of_zero_where_that_is_asked_for(project):
    without(project, "e2", MLP)
    params(project, missing="base")
    found = tensor(project, MLP)
    assert [slot.source if slot else None for slot in found.slots] == ["base", "e1", None]
    assert plan(project).decisions == (f'e2: 1 tensor (`{MLP}`) missing, taken from `base` (`missing = "base"`)',)


def test_a_missing_tensor_of_an_average_is_the_bases(project):
    without(project, "e2", MLP)
    recipe = {"operator": "linear", "base": "base", "experts": ["e1", "e2"], "params": {"missing": "base"}}
    project.set_output("m", recipe)
    assert [slot.source if slot else None for slot in tensor(project, MLP).slots] == [None, "e1", "base"]


def test_missing_can_be_allowed_for_some_tensors_by_a_rule(project):
    without(project, "e2", MLP, "model.norm.weight")
    rules = [{"match": "*.norm.*", "params": {"missing": "base"}}]
    project.set_output("m", project.outputs["m"] | {"rules": rules})
    (error,) = problems(project)
    assert MLP in error.message
    assert "norm" not in error.message


def test_other_names_altogether_are_told_with_the_prefix_that_differs(project):
    tensors = {f"language_model.{name}": array for name, array in random_tensors(1, SHAPES).items()}
    project.add_source("e2", tensors)
    (error,) = problems(project)
    assert "shares 0 of 5 tensor names" in error.message
    assert "`language_model.`" in error.hint


def test_an_expert_with_few_of_the_names_and_no_others_lacks_the_rest(project):
    project.add_source("e2", random_tensors(1, {MLP: SHAPES[MLP]}))
    (error,) = problems(project)
    assert error.message.startswith("expert `e2` lacks 4 tensors (")
    assert "the upload may be incomplete" in error.hint


def test_names_that_show_how_others_differ_are_none_that_are_shared(project):
    others = {name: shape for name, shape in SHAPES.items() if name != MLP}
    tensors = {f"language_model.{name}": array for name, array in random_tensors(1, others).items()}
    project.add_source("e2", tensors | random_tensors(1, {MLP: SHAPES[MLP]}))
    (error,) = problems(project)
    assert "shares 1 of 5 tensor names" in error.message
    assert f"`{MLP}`" not in error.message


def test_a_head_that_only_the_base_has_is_told_as_such(project):
    without(project, "e2", "lm_head.weight")
    (error,) = problems(project)
    assert "ties" in error.hint


def test_a_head_that_only_an_expert_has_is_an_error_and_not_dropped(project):
    without(project, "base", "lm_head.weight", config={"tie_word_embeddings": True})
    without(project, "e1", "lm_head.weight", config={"tie_word_embeddings": True})
    project.add_source("e2", random_tensors(2, SHAPES), config={"tie_word_embeddings": False})
    (error,) = problems(project)
    assert "`lm_head.weight`" in error.message
    assert "`e2`" in error.message


def test_many_extra_tensors_are_counted_and_some_named(project):
    extra = {f"extra.{n}": np.zeros(2, np.float32) for n in range(5)}
    project.add_source("e1", random_tensors(1, SHAPES) | extra)
    (decision,) = plan(project).decisions
    assert decision.startswith("e1: 5 extra tensors that `base` lacks, dropped")
    assert "and 2 more" in decision


# --- shapes and dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (16,), (4, 4, 1), ()])
@pytest.mark.parametrize("rows", ["equal", "common"])
def test_another_shape_is_an_error_that_names_tensor_source_and_shapes(project, shape, rows):
    params(project, rows=rows)
    with_tensor(project, "e2", MLP, np.zeros(shape, np.float32))
    (error,) = problems(project)
    assert all(text in error.message for text in (MLP, "`e2`", "`base`", str(list(shape)), "[4, 4]"))
    assert (error.facts["expected"], error.facts["got"]) == ([4, 4], list(shape))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_another_number_of_rows_of_a_vocabulary_can_be_allowed(project, name):
    with_tensor(project, "e2", name, np.zeros((7, 4), np.float32))
    (error,) = problems(project)
    assert 'rows = "common"' in error.hint
    params(project, rows="common")
    assert tensor(project, name).common_rows == 7
    assert tensor(project, MLP).common_rows is None


@pytest.mark.parametrize("shape", [(7, 5), (7,), (7, 4, 1)])
def test_only_the_rows_of_a_vocabulary_may_differ(project, shape):
    params(project, rows="common")
    with_tensor(project, "e2", "lm_head.weight", np.zeros(shape, np.float32))
    assert len(problems(project)) == 1


def test_more_rows_than_the_base_has_need_no_rows_of_the_base(project):
    with_tensor(project, "e2", "lm_head.weight", np.zeros((12, 4), np.float32))
    recipe = {"operator": "linear", "base": "base", "experts": ["e1", "e2"], "params": {"rows": "common"}}
    project.set_output("m", recipe)
    found = tensor(project, "lm_head.weight")
    assert (found.shape, found.common_rows, found.base) == ((10, 4), None, None)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.int32),
        np.zeros((4, 4), bool),
        np.zeros((4, 4), ml_dtypes.float8_e4m3fn),
        ("F4", (4, 4), bytes(8)),
    ],
)
def test_a_tensor_that_is_floating_point_in_one_source_alone_is_an_error(project, array):
    with_tensor(project, "e2", MLP, array)
    (error,) = problems(project)
    assert f"`{MLP}` cannot be merged" in error.message
    assert error.facts["source"] == "e2"


def test_a_buffer_is_taken_from_the_base_and_compared_with_every_other_source(project):
    for source in project.sources:
        with_tensor(project, source, "ids", np.arange(5))
    found = tensor(project, "ids")
    assert found.decision is Decision.EQUAL
    assert [slot.source if slot else None for slot in found.slots] == ["base", "e1", "e2"]
    assert found.dtype == "I64"


def test_a_buffer_keeps_its_dtype_whatever_is_written(project):
    for source in project.sources:
        with_tensor(project, source, "ids", np.arange(5))
    project.set_output("m", project.outputs["m"] | {"write": {"dtype": "float16"}})
    assert tensor(project, "ids").dtype == "I64"
    assert tensor(project, MLP).dtype == "F16"


@pytest.mark.parametrize(
    ("operator", "dtypes", "work"),
    [
        ("task_arithmetic", ("float32", "float32", "float32"), "float32"),
        ("task_arithmetic", ("float64", "float32", "float32"), "float64"),
        ("task_arithmetic", ("float32", "float32", "float64"), "float64"),
        ("linear", ("float64", "float32", "float32"), "float32"),
        ("linear", ("float32", "float64", "float32"), "float64"),
        ("linear", ("float16", "bfloat16", "float32"), "float32"),
    ],
)
def test_the_work_dtype_is_that_of_the_widest_input(project, operator, dtypes, work):
    for source, dtype in zip(project.sources, dtypes, strict=True):
        project.add_source(source, random_tensors(0, SHAPES, dtype))
    project.set_output("m", {"operator": operator, "base": "base", "experts": ["e1", "e2"]})
    assert tensor(project, MLP).work == work
    assert tensor(project, MLP).dtype == {"float32": "F32", "float64": "F64", "float16": "F16"}[dtypes[0]]


# --- parameters ---------------------------------------------------------------------------------------------------


def test_an_expert_of_weight_zero_is_no_input(project):
    rules = [{"match": MLP, "experts": {"e2": {"weight": 0.0}}}]
    project.set_output("m", project.outputs["m"] | {"rules": rules})
    assert [slot is not None for slot in tensor(project, MLP).slots] == [True, True, False]
    assert [slot is not None for slot in tensor(project, "model.norm.weight").slots] == [True, True, True]


def test_the_base_among_the_experts_of_a_sum_of_deltas_is_no_input(project):
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["base", "e1"]})
    assert [slot.source if slot else None for slot in tensor(project, MLP).slots] == ["base", None, "e1"]
    project.set_output("m", {"operator": "linear", "base": "base", "experts": ["base", "e1"]})
    assert [slot.source if slot else None for slot in tensor(project, MLP).slots] == [None, "base", "e1"]


def test_weights_that_cancel_are_one_error_for_all_tensors(project):
    experts = [{"source": "e1", "weight": 1.0}, {"source": "e2", "weight": -1.0}]
    project.set_output("m", {"operator": "linear", "experts": experts})
    (error,) = problems(project)
    assert "sum to 0" in error.message
    assert "5 tensors" in error.message
    assert "normalize = false" in error.hint
    assert error.exit_status == 2


def test_weights_that_cancel_in_one_layer_name_that_layers_tensor(project):
    rules = [{"layers": "1..2", "experts": {"e2": {"weight": -1.0}}}]
    project.set_output("m", {"operator": "linear", "experts": ["e1", "e2"], "rules": rules})
    (error,) = problems(project)
    assert "model.layers.1.mlp.weight" in error.message
    assert "layers.0" not in error.message


def test_a_rule_that_matches_nothing_is_an_error(project):
    project.set_output("m", project.outputs["m"] | {"rules": [{"match": "*.attn.*"}, {"layers": "2..9"}]})
    first, second = problems(project)
    assert "rules[0]" in first.message
    assert "*.attn.*" in first.message
    assert "rules[1]" in second.message
    assert "2 layers" in second.message


def test_a_quantised_source_is_refused(project):
    project.add_source("e1", random_tensors(1, SHAPES), config={"quantization_config": {"quant_method": "gptq"}})
    (error,) = problems(project)
    assert "`e1` is quantised" in error.message
    assert error.hint


def test_all_problems_of_an_output_are_reported_together(project):
    tensors = random_tensors(1, SHAPES)
    del tensors["model.norm.weight"]
    project.add_source("e1", tensors | {MLP: np.zeros((3, 3), np.float32)})
    with_tensor(project, "e2", "lm_head.weight", np.zeros((2, 2), np.int8))
    project.set_output("m", project.outputs["m"] | {"rules": [{"match": "nothing"}]})
    found = problems(project)
    assert len(found) == 4
    assert all(error.exit_status == 2 for error in found)


# --- names --------------------------------------------------------------------------------------------------------


def test_names_are_parameters_only_of_operators_that_depend_on_them(project):
    named = project.outputs["m"] | {"operator": "dare_linear", "params": {"density": 0.5}}
    project.set_output("named", named)
    found = plan(project, "named").tensors
    assert [(t.params.tensor, t.params.sources) for t in found] == [(t.name, ("e1", "e2")) for t in found]
    assert len({t.recipe for t in found}) == len(found)
    assert {(t.params.tensor, t.params.sources) for t in plan(project).tensors} == {("", ())}
    assert len({t.recipe for t in plan(project).tensors}) == 1


def test_another_name_of_a_source_is_another_recipe_only_where_names_count(project):
    recipe = project.outputs["m"]
    project.add_source("e3", random_tensors(2, SHAPES))
    for name, operator in (("dare", "dare_linear"), ("sum", "task_arithmetic")):
        for other in ("e2", "e3"):
            project.set_output(f"{name}-{other}", recipe | {"operator": operator, "experts": ["e1", other]})
    recipes = {name: tensor(project, MLP, name).recipe for name in project.outputs}
    assert recipes["sum-e2"] == recipes["sum-e3"]
    assert recipes["dare-e2"] != recipes["dare-e3"]


def test_an_expert_that_shares_no_name_is_refused_whatever_missing_says(tmp_path):
    project = SmallProject(tmp_path)
    shapes = {f"model.layers.{n}.w": (4, 4) for n in range(3)}
    project.add_source("base", random_tensors(0, shapes))
    project.add_source("e1", {f"_orig_mod.{name}": array for name, array in random_tensors(1, shapes).items()})
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1"], "params": {"missing": "base"}}
    project.set_output("m", recipe)
    with pytest.raises(PlanError, match="expert `e1` shares 0 of 3 tensor names with `base`") as caught:
        plan(project)
    assert "prefix `_orig_mod.`" in caught.value.hint


def test_many_tensors_of_one_kind_are_one_error(tmp_path):
    project = SmallProject(tmp_path)
    shapes = {f"model.layers.{n}.w": (4, 4) for n in range(30)}
    project.add_source("base", random_tensors(0, shapes))
    project.add_source("e1", random_tensors(1, dict.fromkeys(shapes, (4, 5))))
    project.set_output("m", {"operator": "linear", "base": "base", "experts": ["e1"]})
    with pytest.raises(PlanError) as caught:
        plan(project)
    first, more = caught.value.message.splitlines()
    assert first == "tensor `model.layers.0.w` has shape [4, 5] in expert `e1` and [4, 4] in `base`"
    assert more.startswith("and likewise 29 tensors (`model.layers.1.w`, ")
