"""What an output reads of an adapter: factors, whole tensors, the tensors below, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support.adapters import PREFIX, add_adapter, embedding_factors, factors
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan, problems, tensor

Q, K = "model.layers.0.q", "model.layers.0.k"
QW, KW, HEAD, NORM = f"{Q}.weight", f"{K}.weight", "lm_head.weight", "model.norm.weight"
SHAPES = {"model.embed_tokens.weight": (10, 4), QW: (8, 6), KW: (8, 6), NORM: (4,), HEAD: (10, 4)}
WHOLE = {f"{PREFIX}lm_head.weight": random_tensors(9, {"x": (10, 4)})["x"]}


@pytest.fixture
def project(tmp_path):
    """Return a project with a base, an expert, and an adapter on the base that adds to one tensor and replaces one."""
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "other")):
        project.add_source(name, random_tensors(seed, SHAPES, "BF16"))
    add_adapter(project, "code", factors(5, Q, 8, 6) | WHOLE)
    return project


def deltas(project, **more):
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["other", "code"]} | more)


def values(project, **more):
    project.set_output("m", {"operator": "linear", "experts": ["other", "code"]} | more)


def names(ref):
    return None if ref is None else [(stored.source, stored.info.name) for stored in ref.stored]


FACTORS = [("code", f"{PREFIX}{Q}.lora_A.weight"), ("code", f"{PREFIX}{Q}.lora_B.weight")]


# --- slots --------------------------------------------------------------------------------------------------------


def test_where_deltas_are_used_the_factors_are_read_alone(project):
    deltas(project)
    ref = tensor(project, QW).experts[1]
    assert names(ref) == FACTORS
    assert (ref.lora.on, ref.lora.scaling, ref.lora.transposed) == (None, 1.5, False)
    assert (ref.info.name, ref.info.dtype, ref.info.shape) == (QW, "BF16", (8, 6))


def test_where_values_are_used_the_tensor_below_is_read_too(project):
    values(project)
    assert names(tensor(project, QW).experts[1]) == [*FACTORS, ("base", QW)]


def test_on_another_checkpoint_than_the_base_values_are_used(project):
    deltas(project, base="other", experts=["code"])
    assert names(tensor(project, QW).experts[0]) == [*FACTORS, ("base", QW)]
    assert names(tensor(project, KW).experts[0]) == [("base", KW)]


def test_a_tensor_that_is_left_alone_is_a_zero_delta_or_the_one_below(project):
    deltas(project)
    assert tensor(project, KW).experts[1] is None
    values(project)
    assert names(tensor(project, KW).experts[1]) == [("base", KW)]


def test_a_whole_tensor_is_read_as_it_is_stored(project):
    for recipe in (deltas, values):
        recipe(project)
        ref = tensor(project, HEAD).experts[1]
        assert names(ref) == [("code", f"{PREFIX}lm_head.weight")]
        assert ref.lora is None


def test_a_product_on_top_of_a_whole_tensor_is_a_value(project):
    whole = random_tensors(3, {f"{PREFIX}model.embed_tokens.base_layer.weight": (10, 4)})
    add_adapter(project, "code", embedding_factors(1, "model.embed_tokens", 10, 4) | whole)
    deltas(project)
    ref = tensor(project, "model.embed_tokens.weight").experts[1]
    assert names(ref)[2] == ("code", f"{PREFIX}model.embed_tokens.base_layer.weight")
    assert ref.lora.transposed


def test_an_adapter_as_base_is_the_merged_checkpoint(project):
    deltas(project, base="code", experts=["other"])
    assert names(tensor(project, QW).base) == [*FACTORS, ("base", QW)]
    assert names(tensor(project, KW).base) == [("base", KW)]
    assert names(tensor(project, HEAD).base) == [("code", f"{PREFIX}lm_head.weight")]


def test_two_adapters_on_one_base_are_two_experts(project):
    add_adapter(project, "math", factors(6, K, 8, 6))
    deltas(project, experts=["code", "math"])
    assert [ref is not None for ref in tensor(project, QW).experts] == [True, False]
    assert [ref is not None for ref in tensor(project, KW).experts] == [False, True]


def test_a_weight_of_zero_reads_nothing_of_it(project):
    deltas(project, experts=["other", {"source": "code", "weight": 0.0}])
    assert tensor(project, QW).experts[1] is None
    assert plan(project).expert_bytes == sum(2 * int(np.prod(shape)) for shape in SHAPES.values())


def test_what_an_adapter_leaves_alone_is_not_missing(project):
    deltas(project)
    assert problems(project) == []
    assert plan(project).decisions == ("code: an adapter on `base`: adds to 1 and replaces 1 of 5 tensors",)


def test_the_checkpoint_below_is_a_source_of_the_output(project):
    deltas(project, base="other", experts=["code"])
    assert list(plan(project).sources) == ["other", "code", "base"]


# --- dtypes -------------------------------------------------------------------------------------------------------


def test_the_output_keeps_the_dtypes_below(project):
    project.set_output("m", {"operator": "passthrough", "experts": ["code"]})
    assert {found.dtype for found in plan(project).tensors} == {"BF16"}
    assert {found.work for found in plan(project).tensors} == {"float32"}


def test_factors_of_float64_are_multiplied_and_added_in_float64(project):
    add_adapter(project, "code", factors(5, Q, 8, 6, dtype="F64"))
    deltas(project)
    assert (tensor(project, QW).work, tensor(project, KW).work) == ("float64", "float32")


# --- costs --------------------------------------------------------------------------------------------------------


def test_an_adapter_costs_its_factors(project):
    deltas(project, experts=["code"])
    stored = sum(array.nbytes for array in (factors(5, Q, 8, 6) | WHOLE).values())
    assert plan(project).expert_bytes == stored
    assert plan(project).base_bytes == sum(2 * int(np.prod(shape)) for shape in SHAPES.values())


def test_what_is_below_costs_expert_bytes_where_it_is_not_the_base(project):
    values(project, experts=["code"])
    stored = sum(array.nbytes for array in (factors(5, Q, 8, 6) | WHOLE).values())
    below = 2 * sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != HEAD)
    assert (plan(project).expert_bytes, plan(project).base_bytes) == (stored + below, 0)
    values(project, experts=["code"], base="base")
    assert (plan(project).expert_bytes, plan(project).base_bytes) == (stored, below)


def test_an_adapter_that_is_the_base_costs_no_expert_bytes(project):
    deltas(project, base="code", experts=["other"])
    stored = sum(array.nbytes for array in (factors(5, Q, 8, 6) | WHOLE).values())
    below = 2 * sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != HEAD)
    assert plan(project).base_bytes == stored + below
    assert plan(project).expert_bytes == 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())


# --- recipes ------------------------------------------------------------------------------------------------------


def recipes(project):
    return {found.name: found.recipe for found in plan(project).tensors}


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("config", [{"lora_alpha": 4}, {"use_rslora": True}, {"alpha_pattern": {"q": 9}}])
def test_another_scaling_is_another_recipe_of_the_tensors_that_it_scales(project, config):
    deltas(project)
    before = recipes(project)
    add_adapter(project, "code", factors(5, Q, 8, 6) | WHOLE, **config)
    assert changed(before, recipes(project)) == {QW}


def test_the_dtype_of_the_factors_is_part_of_the_recipe(project):
    deltas(project)
    before = recipes(project)
    add_adapter(project, "code", factors(5, Q, 8, 6, dtype="F16") | WHOLE)
    assert changed(before, recipes(project)) == {QW}


def test_a_delta_and_a_value_have_different_recipes(project):
    deltas(project, experts=["code"])
    delta = recipes(project)
    deltas(project, experts=["code"], base="other")
    assert delta[QW] != recipes(project)[QW]


def test_an_orientation_is_part_of_the_recipe(project):
    project.add_source("base", random_tensors(0, SHAPES | {QW: (6, 6)}))
    add_adapter(project, "code", factors(5, Q, 6, 6))
    deltas(project, experts=["code"])
    before = recipes(project)
    add_adapter(project, "code", factors(5, Q, 6, 6), fan_in_fan_out=True)
    assert changed(before, recipes(project)) == {QW}


# --- shapes -------------------------------------------------------------------------------------------------------


def resized(project, rows):
    add_adapter(project, "code", factors(5, Q, 8, 6) | random_tensors(9, {f"{PREFIX}lm_head.weight": (rows, 4)}))


def test_a_resized_head_is_an_error_with_both_shapes(project):
    resized(project, 12)
    deltas(project)
    (error,) = problems(project)
    assert "shape [12, 4] in expert `code`" in error.message
    assert 'rows = "common"' in error.hint


def test_a_resized_head_may_be_merged_in_the_common_rows(project):
    resized(project, 12)
    deltas(project, params={"rows": "common"})
    assert problems(project) == []
    assert tensor(project, HEAD).shape == (10, 4)


def test_a_resized_head_does_not_define_an_output(project):
    resized(project, 12)
    project.set_output("m", {"operator": "passthrough", "experts": ["code"]})
    (error,) = problems(project)
    assert "shape [12, 4] in adapter `code` and [10, 4] in `base`" in error.message
    assert "resize `base`" in error.hint


# --- slices -------------------------------------------------------------------------------------------------------


def test_an_adapter_can_be_sliced(tmp_path):
    layers = {f"model.layers.{n}.q.weight": (8, 6) for n in range(3)}
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, {"model.embed_tokens.weight": (10, 4)} | layers), config={})
    add_adapter(project, "code", factors(5, "model.layers.2.q", 8, 6))
    slices = [{"source": "code", "layers": "2..3"}, {"source": "base", "layers": "0..1"}]
    project.set_output("m", {"operator": "passthrough", "slices": slices})
    found = tensor(project, "model.layers.0.q.weight").experts[0]
    assert names(found)[2] == ("base", "model.layers.2.q.weight")
    assert names(tensor(project, "model.layers.1.q.weight").experts[0]) == [("base", "model.layers.0.q.weight")]


def test_in_a_slice_a_delta_is_one_of_the_same_layer_alone(tmp_path):
    layers = {f"model.layers.{n}.q.weight": (8, 6) for n in range(3)}
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, layers), config={})
    add_adapter(project, "code", factors(5, "model.layers.2.q", 8, 6))
    slices = [
        {"experts": ["code"], "layers": "2..3"},
        {"experts": [{"source": "code", "layers": "2..3"}], "layers": "0..1"},
    ]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "slices": slices})
    same, other = (tensor(project, f"model.layers.{n}.q.weight").experts[0] for n in (0, 1))
    assert same.lora.on is None
    assert other.lora.on.info.name == "model.layers.2.q.weight"
