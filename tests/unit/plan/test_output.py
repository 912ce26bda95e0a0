"""The plan of an output: its digest, and what a full read costs."""

import shutil

import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject
from unit.plan.helpers import plan

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.plan.output import plan_digest

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.a": (16, 16), "model.v": (70,)}


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, SHAPES))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1", "e2"]})
    return project


def digest(project):
    return plan_digest(plan(project))


CHANGES = {
    "operator": {"operator": "linear"},
    "weight": {"experts": [{"source": "e1", "weight": 0.5}, "e2"]},
    "order": {"experts": ["e2", "e1"]},
    "fewer experts": {"experts": ["e1"]},
    "lambda": {"params": {"lambda": 0.5}},
    "normalize": {"params": {"normalize": True}},
    "non_finite": {"params": {"non_finite": "allow"}},
    "rule": {"rules": [{"match": "*.v", "params": {"weight": 0.5}}]},
    "gradient": {"params": {"weight": [0.5, 1.0]}},
    "dtype": {"write": {"dtype": "float16"}},
    "shards": {"write": {"shard_size": 1000}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_of_a_plan_depends_on_everything_that_it_decides(project, change):
    before = digest(project)
    project.set_output("m", project.outputs["m"] | CHANGES[change])
    assert digest(project) != before


def test_the_digest_of_a_plan_depends_on_the_size_of_blocks(project):
    before = digest(project)
    project.geometry = Geometry(block_elements=65)
    assert digest(project) != before


SAME = {
    "the default weight": {"experts": [{"source": "e1", "weight": 1.0}, "e2"]},
    "an integer": {"experts": [{"source": "e1", "weight": 1}, "e2"]},
    "a constant gradient": {"params": {"weight": [1.0, 1.0]}},
    "a rule that says what holds anyway": {"rules": [{"match": "*", "params": {"lambda": 1.0}}]},
    "another path": {"path": "elsewhere"},
    "larger shards than needed": {"write": {"shard_size": 10**6}},
}


@pytest.mark.parametrize("change", SAME)
def test_the_digest_of_a_plan_does_not_depend_on_how_it_is_said(project, change):
    before = digest(project)
    project.set_output("m", project.outputs["m"] | SAME[change])
    assert digest(project) == before


def test_the_digest_of_a_plan_depends_on_shapes_and_dtypes_and_not_on_content_or_files(project):
    before = digest(project)
    project.add_source("e1", random_tensors(9, SHAPES), shards=3, config={"x": 1})
    shutil.move(project.root / "models/e2", project.root / "moved")
    project.sources["e2"] = "moved"
    project.save()
    assert digest(project) == before
    project.add_source("e1", random_tensors(9, SHAPES, "bfloat16"))
    assert digest(project) != before


def test_planning_twice_gives_equal_plans(project):
    first, second = plan(project), plan(project)
    assert first.tensors == second.tensors
    assert first.layout == second.layout


@pytest.mark.parametrize(
    ("recipe", "expert_bytes", "base_bytes", "expert_blocks"),
    [
        ({}, 2 * 4 * 582, 4 * 582, 20),
        ({"operator": "linear"}, 2 * 4 * 582, 0, 20),
        ({"operator": "linear", "experts": ["base", "e1"]}, 4 * 582, 4 * 582, 10),
        ({"operator": "linear", "experts": ["base", "e1"], "base": None}, 2 * 4 * 582, 0, 20),
        ({"experts": ["base", "e1"]}, 4 * 582, 4 * 582, 10),
        ({"operator": "passthrough", "experts": ["e1"]}, 4 * 582, 0, 10),
        ({"rules": [{"match": "*.v", "params": {"weight": 0.0}}]}, 2 * 4 * 512, 4 * 582, 16),
        ({"params": {"lambda": 0.0}}, 0, 4 * 582, 0),
    ],
)
def test_a_plan_states_what_a_full_read_costs_and_a_first_build_reads_just_that(
    project, recipe, expert_bytes, base_bytes, expert_blocks
):
    changed = project.outputs["m"] | recipe
    project.set_output("m", {key: value for key, value in changed.items() if value is not None})
    found = plan(project)
    assert (found.expert_bytes, found.base_bytes) == (expert_bytes, base_bytes)
    assert (found.expert_blocks, found.blocks) == (expert_blocks, 10)
    report = project.build_one("m")
    assert report.expert_bytes == {"full": expert_bytes, "planned": expert_bytes, "read": expert_bytes}
    assert report.base_bytes_read == base_bytes
    assert report.expert_blocks["total"] == expert_blocks


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
def test_rows_that_are_not_merged_cost_no_expert_bytes(tmp_path, operator):
    project = SmallProject(tmp_path, Geometry(block_elements=12))
    for seed, (name, rows) in enumerate([("base", 10), ("e1", 12), ("e2", 4)]):
        project.add_source(name, random_tensors(seed, {"wte.weight": (rows, 4)}))
    recipe = {"operator": operator, "base": "base", "experts": ["e1", "e2"], "params": {"rows": "common"}}
    project.set_output("m", recipe)
    found, report = plan(project), project.build_one("m")
    assert report.expert_bytes["read"] == report.expert_bytes["planned"] == 2 * 48 + 4 * 16
    assert report.expert_blocks["read"] == report.expert_blocks["total"] == found.expert_blocks == 4
    assert report.base_bytes_read == found.base_bytes


def test_buffers_cost_no_expert_bytes(project):
    for seed, name in enumerate(project.sources):
        project.add_source(name, random_tensors(seed, SHAPES) | {"ids": np.arange(1000)})
    assert plan(project).expert_bytes == 2 * 4 * 582


def test_the_report_of_a_plan_says_what_each_expert_costs(project):
    planned = project.open().plan().outputs["m"]
    assert {name: expert.full for name, expert in planned.experts.items()} == {"e1": 4 * 582, "e2": 4 * 582}
    assert planned.as_json()["expert_bytes"]["by_expert"] == {"e1": 4 * 582, "e2": 4 * 582}
    assert planned.tensors == 3
    assert planned.output_bytes == sum(shard.size for shard in plan(project).layout.shards)
    assert planned.as_json()["estimate"]["peak_memory_bytes"] > 0
