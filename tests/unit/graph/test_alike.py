"""Blocks that are planned together come about as each of them does when it is planned alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan

from mergepipe.graph.alike import alike_blocks, block_digests, blocks_bytes
from mergepipe.graph.blocks import TensorRecipe, plan_block
from mergepipe.plan.access import EXACT, OMITTED, TensorAccess

# Blocks have 64 elements, four rows; the experts have fewer rows than the base, so that some are only the base's.
NAME = "model.embed_tokens.weight"
ROWS = {"base": 45, "e1": 37, "e2": 45, "e3": 37}
RECIPES = {
    "linear": {"operator": "linear", "base": "base"},
    "task arithmetic": {"operator": "task_arithmetic", "base": "base"},
    "weightless": {"operator": "task_arithmetic", "base": "base", "params": {"weight": 0.0}},
    "ties": {"operator": "ties", "base": "base", "params": {"density": 0.5}},
    "model stock": {"operator": "model_stock", "base": "base"},
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Return, by name, the recipe of one tensor under each operator."""
    project = SmallProject(tmp_path_factory.mktemp("alike"))
    for seed, (source, rows) in enumerate(ROWS.items()):
        project.add_source(source, random_tensors(seed, {NAME: (rows, 16)}))
    found = {}
    for name, recipe in RECIPES.items():
        params = recipe.get("params", {}) | {"rows": "common"}
        project.set_output("m", {**recipe, "params": params, "experts": ["e1", "e2", "e3"]})
        planned = plan(project, "m")
        found[name] = TensorRecipe.of(planned.tensors[0], planned.geometry)
    return found


@st.composite
def contents(draw):
    """Draw per slot packed digests of few kinds, so that some are equal; None where nothing is known."""
    packed = []
    for rows in ROWS.values():
        kinds = draw(st.lists(st.integers(0, 3), min_size=-(-rows // 4), max_size=-(-rows // 4)))
        packed.append(draw(st.sampled_from([b"".join(bytes([kind]) * 32 for kind in kinds)] * 4 + [None])))
    return packed


LEVELS = st.none() | st.lists(st.sampled_from([OMITTED, EXACT]), min_size=10, max_size=10).map(bytes)
ACCESSES = st.none() | st.tuples(LEVELS, LEVELS, LEVELS).map(lambda levels: TensorAccess(levels=levels))


@pytest.mark.parametrize("name", RECIPES)
@given(known=contents(), access=ACCESSES)
def test_blocks_that_are_planned_together_come_about_as_each_alone(recipes, name, known, access):
    recipe = recipes[name]
    recipe = replace(recipe, tensor=replace(recipe.tensor, access=access))
    known = [None if slot is None else packed for slot, packed in zip(recipe.tensor.slots, known, strict=True)]
    seen = []
    for alike in alike_blocks(recipe, known):
        assert list(alike.blocks) == sorted(alike.blocks)
        for block in alike.blocks:
            alone = plan_block(recipe, block, block_digests(recipe, known, block))
            assert replace(alike.plan, block=block, key=alone.key) == alone
            assert not alike.plan.key
        seen += alike.blocks
    assert sorted(seen) == list(range(recipe.grid.count))


@given(st.sets(st.integers(0, 11)))
def test_the_bytes_of_blocks_are_the_sum_of_the_bytes_of_each(recipes, blocks):
    grid = recipes["linear"].grid
    assert grid.count == 12
    sizes = [stop - start for start, stop in map(grid.byte_range, blocks)]
    assert blocks_bytes(grid, blocks) == sum(sizes)
