"""The planner's choice is nearer to the full read than the same bytes chosen at random or by a hash, at each budget."""

import math

import numpy as np
import pytest
from support.budgets import percent
from support.projects import SmallProject

from benchmarks.budgets.family import Choice, choices
from benchmarks.budgets.projects import ChoosingProject, choosing

SHAPES = {f"model.layers.{layer}.mlp.{part}.weight": (64, 32) for layer in range(2) for part in ("up", "down")}
SHAPES |= {f"model.layers.{layer}.norm.weight": (48,) for layer in range(2)}
EXPERTS = ("python", "c", "legal", "js")
RECIPES = {
    "task_arithmetic": {"experts": [{"source": name, "weight": 0.3} for name in EXPERTS]},
    "ties": {"experts": list(EXPERTS), "params": {"density": 0.5}},
}
SEEDS = 5


def skewed(project):
    """Add a base, and experts whose deltas differ in length from tensor to tensor and from row to row."""
    rng = np.random.default_rng(11)
    base = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in SHAPES.items()}
    project.add_source("base", base)
    for name in EXPERTS:
        project.add_source(name, {key: array + delta(rng, array) for key, array in base.items()})
    return project


def delta(rng, array):
    rows = rng.lognormal(0, 0.7, (len(array), *(1,) * (array.ndim - 1)))
    return (rng.normal(0, rng.lognormal(-6, 0.7), array.shape) * rows).astype(np.float32)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return skewed(SmallProject(tmp_path_factory.mktemp("choices")))


@pytest.mark.parametrize("operator", RECIPES)
def test_the_planners_choice_is_the_nearest_at_each_budget(project, operator):
    project.set_output("m", {"operator": operator, "base": "base"} | RECIPES[operator])
    opened = ChoosingProject(project.open())
    reading = opened.reading("m")
    wanted = [choice for choice in choices(SEEDS) if 0 < choice.percent < 100]
    found = opened.compared(reading, [choice.select(reading) for choice in wanted]).deviations
    lengths = {choice: math.sqrt(deviation.squares) for choice, deviation in zip(wanted, found, strict=True)}
    assert {choice.kind for choice in wanted} == {"gain", "hash", "random"}
    for choice, length in lengths.items():
        ours = lengths[Choice(kind="gain", percent=choice.percent)]
        assert 0 < ours < length or choice.kind == "gain", choice


def test_a_model_that_is_built_for_a_choice_is_the_one_that_was_compared(project):
    recipe = {"operator": "ties", "base": "base"} | RECIPES["ties"]
    project.set_output("m", recipe | {"budget": {"expert_reads": "25%", "precision": "blocks"}})
    choice = Choice(kind="random", percent=25, seed=2)
    opened = ChoosingProject(project.open())
    reading = opened.reading("m")
    selection = choice.select(reading)
    (deviation,) = opened.compared(reading, [selection]).deviations
    with choosing(choice.select):
        built = project.build_one("m")
    assert built.expert_bytes["read"] == built.expert_bytes["planned"] == selection.planned_bytes
    found = project.tensors("m")
    project.set_output("full", recipe)
    project.build_one("full")
    square = sum(np.sum((found[name].astype(float) - full) ** 2) for name, full in project.tensors("full").items())
    assert math.sqrt(square) == pytest.approx(math.sqrt(deviation.squares), rel=1e-9)
    project.set_output("own", recipe | {"budget": percent(25)})  # the planner is itself again
    assert project.build_one("own").expert_bytes["planned"] == reading.order.cut(
        reading.order.fitting(reading.expert_bytes // 4)
    ).planned_bytes
