"""Action keys: whatever can change a value changes its key."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import tensor

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.graph.keys import ABSENT, block_key, tensor_key

digests = st.binary(min_size=32, max_size=32)


@given(
    st.lists(
        st.tuples(digests, st.lists(digests | st.just(ABSENT), min_size=3, max_size=3), st.integers(0, 2**40)),
        min_size=2,
        max_size=2,
    )
)
def test_block_keys_are_equal_for_equal_ingredients_alone(pair):
    one, two = pair
    assert (block_key(*one) == block_key(*two)) == (one == two)


def test_the_place_of_an_input_matters():
    recipe, first, second = bytes(32), b"a" * 32, b"b" * 32
    assert block_key(recipe, [first, second], 4) != block_key(recipe, [second, first], 4)
    assert block_key(recipe, [first, ABSENT], 4) != block_key(recipe, [ABSENT, first], 4)


def test_how_many_elements_are_merged_matters():
    assert block_key(bytes(32), [b"a" * 32], 4) != block_key(bytes(32), [b"a" * 32], 5)


def test_a_tensor_key_depends_on_recipe_shape_blocks_rows_and_inputs(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, {"w": (4, 4)}))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    plan, geometry = tensor(project, "w"), Geometry(block_elements=64)
    inputs = [b"a" * 32, b"b" * 32]
    keys = [
        tensor_key(plan, geometry, inputs),
        tensor_key(dataclasses.replace(plan, recipe=b"r" * 32), geometry, inputs),
        tensor_key(dataclasses.replace(plan, shape=(2, 8)), geometry, inputs),
        tensor_key(dataclasses.replace(plan, common_rows=3), geometry, inputs),
        tensor_key(plan, Geometry(block_elements=65), inputs),
        tensor_key(plan, geometry, inputs[::-1]),
        tensor_key(plan, geometry, [None, inputs[1]]),
        tensor_key(plan, geometry, [inputs[0], None]),
    ]
    assert len(set(keys)) == len(keys)
    assert tensor_key(dataclasses.replace(plan, name="other"), geometry, inputs) == keys[0]


def test_the_recipe_of_a_tensor_depends_on_dtypes_and_parameters_and_not_on_names(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (4, 4), "v": (4, 4)}))
    project.add_source("half", random_tensors(3, {"w": (4, 4), "v": (4, 4)}, np.float16))

    def recipe(name="w", **changes):
        project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]} | changes)
        return tensor(project, name).recipe

    different = [
        recipe(),
        recipe(experts=["half"]),
        recipe(experts=["e1", "e2"]),
        recipe(experts=[{"source": "e1", "weight": 0.5}]),
        recipe(experts=[{"source": "e1", "weight": np.nextafter(1.0, 2.0).item()}]),
        recipe(params={"lambda": 0.5}),
        recipe(params={"normalize": True}),
        recipe(params={"non_finite": "allow"}),
        recipe(write={"dtype": "bfloat16"}),
        recipe(operator="linear"),
        recipe(base="half"),
    ]
    assert len(set(different)) == len(different)
    assert recipe("v") == recipe() == recipe(experts=["e2"]) == recipe(path="x") == recipe(write={"shard_size": 4})
    assert recipe(rules=[{"match": "v", "params": {"lambda": 3.0}}]) == recipe()
