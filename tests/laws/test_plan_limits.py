"""What `plan` says that a build reads at most is never passed, however little memory there is between passes."""

import shutil

import numpy as np
import pytest
from laws.test_custom_operators import CustomProject
from laws.test_plan_tells import done, told
from support.adapters import add_adapter, factors
from support.checkpoints import random_tensors, read_checkpoint
from support.cli import run_mergepipe
from support.every_operator import RECIPES
from support.levels import levels_project, near
from support.projects import SmallProject
from support.quick import every

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.statistics import forget_statistics
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.operators.contract import Operator
from mergepipe.operators.registry import operators

# More elements in a block than a table of magnitudes has room for: those of float32 numbers take a second round.
GEOMETRY = Geometry(block_elements=2048)
SHAPES = {"model.layers.0.a": (96, 64), "model.layers.1.b": (40, 64), "model.n": (5000,), "model.v": (64,)}
# Nothing stays in memory, a block or two of each input do, all does: half of a limit is for that, a tensor takes half.
MEMORY = (600, 170_000, None)
PLAIN = {"write": {"dtype": "float32"}}
MORE = {
    "ties-plain": {
        "operator": "ties",
        "base": "base",
        "experts": [{"source": "e1", "density": 0.5}, {"source": "e2", "density": 1.0}, "e3"],
    },
    "dare_linear-l1": {
        "operator": "dare_linear",
        "base": "base",
        "experts": ["e1", "e2", "e3"],
        "params": {"density": 0.5, "rescale": "l1"},
    },
    "della-l1": {
        "operator": "della",
        "base": "base",
        "experts": ["e1", "e2"],
        "params": {"density": 0.5, "rescale": "l1"},
    },
    "sce-all": {"operator": "sce", "base": "base", "experts": ["e1", "e2"], "params": {"select_topk": 1.0}},
}
LIMITED = RECIPES | MORE
NAMES = every(
    sorted(LIMITED), ["linear", "slerp", "ties", "ties-plain", "breadcrumbs", "della-l1", "sce", "arcee_fusion"]
)


def family(dtype=np.float32, *, apart=False):
    """Return a base and three experts; but for ``apart``, some blocks are the base's, or another expert's."""
    base = {name: array.astype(dtype) for name, array in random_tensors(0, SHAPES).items()}
    found = {"base": base}
    for number in (1, 2, 3):
        deltas = random_tensors(number, SHAPES)
        found[f"e{number}"] = {name: (array + 0.1 * deltas[name]).astype(dtype) for name, array in base.items()}
    for name in () if apart else ("model.layers.0.a", "model.n"):
        rows = 32 if name.endswith("a") else 2048
        found["e1"][name][:rows] = base[name][:rows]
        found["e3"][name][-rows:] = found["e2"][name][-rows:]
    return found


def make(root, *, dtype=np.float32, apart=False, **outputs):
    project = SmallProject(root, GEOMETRY)
    project.add_sources(family(dtype, apart=apart))
    for name, recipe in outputs.items():
        project.set_output(name, recipe | PLAIN)
    return project


def sums(counts):
    expert, base, index, *_ = counts
    return expert, base, expert + base + index


def check(project, memory):
    """Plan and build; check that no limit is passed, and what is no limit is met. Return what both said of `m`."""
    report = project.open(memory=memory).plan()
    builds = project.build(memory=memory).outputs
    for name, planned in report.outputs.items():
        found, said = done(builds[name]), told(planned)
        assert planned.next_build.bounded
        if planned.next_build.exact:
            assert said == found, name
        else:
            assert all(most >= count for most, count in zip(sums(said), sums(found), strict=True)), name
    total = sum(sum(done(build)[:3]) for build in builds.values())
    assert sum(report.reads.values()) >= total
    if report.exact:
        assert sum(report.reads.values()) == total
    return report.outputs["m"], builds["m"]


def without_statistics(project):
    catalog = Catalog(CacheLayout(project.cache), GEOMETRY.block_elements, create=True)
    forget_statistics(catalog)
    catalog.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("memory", every(MEMORY, MEMORY[:1]))
def test_no_build_reads_more_than_its_plan_says(tmp_path, memory, name):
    project = make(tmp_path, m=LIMITED[name])
    check(project, memory)
    # All content is known now, and no statistic is.
    without_statistics(project)
    project.set_output("m", LIMITED[name] | {"write": {"dtype": "bfloat16"}})
    check(project, memory)
    # Of one tensor some statistics are known.
    project.add_source("e2", family()["e2"] | {"model.layers.0.a": family()["e1"]["model.layers.0.a"]})
    check(project, memory)
    check(project, memory)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("memory", every(MEMORY[:2], MEMORY[:1]))
def test_where_no_blocks_are_equal_each_figure_is_a_limit(tmp_path, memory, name):
    """Others are read to index them, and no more: they count as merged in a plan that does not know that."""
    project = make(tmp_path, apart=True, m=LIMITED[name])
    planned, built = check(project, memory)
    assert planned.next_build.index_bytes >= built.index_bytes_read
    assert told(planned)[:2] == done(built)[:2]
    without_statistics(project)
    project.set_output("m", LIMITED[name] | {"write": {"dtype": "bfloat16"}})
    planned, built = check(project, memory)
    assert planned.next_build.index_bytes >= built.index_bytes_read
    assert told(planned)[:2] == done(built)[:2]


@pytest.mark.parametrize("name", every(["ties", "sce", "arcee_fusion", "breadcrumbs_ties", "slerp"], ["ties", "slerp"]))
@pytest.mark.parametrize("memory", every(MEMORY[:2], MEMORY[:1]))
def test_numbers_of_64_bits_take_more_rounds_and_no_more_than_are_told(tmp_path, memory, name):
    check(make(tmp_path, dtype=np.float64, m=RECIPES[name]), memory)


def test_where_every_round_is_needed_the_limit_is_what_is_read(tmp_path):
    """All magnitudes differ: no table of a block with more than 1024 of them is complete."""
    recipe = {"operator": "ties", "base": "base", "experts": ["e1", "e2"], "params": {"density": 0.5}}
    project = make(tmp_path, apart=True, m=recipe)
    planned, built = check(project, MEMORY[0])
    assert told(planned)[:3] == done(built)[:3]
    assert built.index_bytes_read > 1.5 * sum(done(built)[:2])


@pytest.mark.parametrize("memory", every(MEMORY, MEMORY[:1]))
def test_outputs_that_are_built_together_keep_to_the_limits_of_all(tmp_path, memory):
    project = make(tmp_path, m=MORE["ties-plain"], s=MORE["sce-all"], n=RECIPES["slerp"])
    check(project, memory)
    # A linear output with a new source beside reductions whose statistics are known: its blocks are read before them.
    project.add_source("e4", family()["e3"])
    for name, density in (("m", 0.25), ("s", 0.5)):
        params = {"select_topk": density} if name == "s" else {"density": density}
        project.set_output(name, MORE["sce-all" if name == "s" else "ties-plain"] | {"params": params} | PLAIN)
    project.set_output("l", {"operator": "linear", "experts": ["e1", "e4"]} | PLAIN)
    check(project, memory)


@pytest.mark.parametrize("memory", every(MEMORY[:2], MEMORY[:1]))
@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_a_budget_on_a_stage_that_is_not_built_yet_is_measured_first(tmp_path, memory, operator):
    stage = {"operator": "linear", "experts": ["e1", "e2"]}
    project = make(tmp_path, stage=stage)
    recipe = {"operator": operator, "base": "stage", "experts": ["e2", "e3"]}
    recipe |= {"params": {"density": 0.5}} if operator == "ties" else {}
    project.set_output("m", recipe | {"budget": {"expert_reads": "40%", "precision": "blocks"}} | PLAIN)
    planned, built = check(project, memory)
    assert built.index_bytes_read > 0
    assert planned.next_build.index_bytes >= built.index_bytes_read


Q = "model.layers.0.q.weight"


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
@pytest.mark.parametrize("precision", ["blocks", "levels"])
def test_factors_of_adapters_are_read_to_measure_a_budget_and_again_to_merge(tmp_path, operator, precision):
    project = make(tmp_path, stage={"operator": "linear", "experts": ["e1", "e2"]})
    project.add_sources({name: one | random_tensors(7, {Q: (16, 16)}) for name, one in family().items()})
    add_adapter(project, "low", factors(5, Q.removesuffix(".weight"), 16, 16))
    recipe = {"operator": operator, "base": "stage", "experts": ["e3", "low"]}
    recipe |= {"params": {"density": 0.5}} if operator == "ties" else {}
    project.set_output("m", recipe | {"budget": {"expert_reads": "60%", "precision": precision}} | PLAIN)
    planned, built = check(project, None)
    assert planned.next_build.index_bytes == built.index_bytes_read
    # A tensor whose factors are known is measured again.
    without_statistics(project)
    project.set_output("stage", project.outputs["stage"] | {"experts": ["e1", {"source": "e2", "weight": 0.5}]})
    check(project, None)


# --- levels over a stage: a budget that is not resolved before the build ------------------------------------------


def in_levels_of_a_stage(root):
    project = levels_project(root)
    project.outputs["stage"] = {"operator": "linear", "experts": ["e1", "e2"]}
    project.set_output("m", project.outputs["m"] | {"experts": ["stage", "e3"]})
    return project


def test_what_one_output_reads_whole_and_another_in_levels_may_be_read_in_both_ways(tmp_path):
    project = in_levels_of_a_stage(tmp_path)
    project.set_output("n", {"operator": "task_arithmetic", "base": "base", "experts": ["stage", "e3"]})
    _, built = check(project, None)
    assert built.expert_bytes["read"] > 0


@pytest.mark.parametrize("order", [("m", "n"), ("n", "m")])
def test_what_is_read_to_measure_counts_for_those_whose_budgets_it_is_for(tmp_path, order):
    """And what another certainly reads whole saves them no codes."""
    project = in_levels_of_a_stage(tmp_path)
    recipes = {"m": project.outputs.pop("m"), "n": {"operator": "linear", "experts": ["e3", "e1"]}}
    project.outputs["s2"] = {"operator": "linear", "experts": ["stage", "e2"]}
    recipes["m"]["experts"] = ["e3", "stage"]
    recipes["l"] = {"operator": "linear", "experts": ["stage", "s2"]}
    for name in (*order, "l"):
        project.set_output(name, recipes[name])
    check(project, None)


def test_codes_that_are_gone_may_have_to_be_made_again_once_the_budget_is_resolved(tmp_path):
    """Their prices are known, so that measuring does not make them; the merge does, from what it reads once more."""
    project = in_levels_of_a_stage(tmp_path)
    project.build()
    project.open().cache_prune(max_bytes=0)
    project.set_output("m", project.outputs["m"] | {"params": {"weight": 0.4}})
    planned, built = check(project, None)
    assert planned.next_build.index_bytes == built.index_bytes_read


def test_what_a_stage_turns_out_to_be_may_have_a_code_that_is_gone(tmp_path):
    project = in_levels_of_a_stage(tmp_path)
    project.build()
    before = project.outputs["stage"]
    project.set_output("stage", before | {"experts": ["e1", "e2", "e3"]})
    project.build()
    shutil.rmtree(project.cache / "progressive")
    project.open().cache_prune(max_bytes=0)
    project.set_output("stage", before)
    project.set_output("m", project.outputs["m"] | {"params": {"weight": 0.4}})
    check(project, None)


def test_what_is_cold_is_read_beside_codes_that_are_made_again_and_once_more_to_merge(tmp_path):
    project = levels_project(tmp_path)
    project.build()
    shutil.rmtree(project.cache / "progressive")
    project.set_output("m", project.outputs["m"] | {"params": {"weight": 0.4}})
    project.add_source("e4", near(4, read_checkpoint(project.root / project.sources["base"])))
    project.set_output("l", {"operator": "linear", "experts": ["e4", "e3"]})
    check(project, None)


def test_a_code_that_a_stage_makes_again_is_there_for_what_is_made_from_it(tmp_path):
    project = levels_project(tmp_path, "60%")
    project.set_output("top", project.outputs["m"] | {"experts": ["m", "e1"]})
    project.build()
    shutil.rmtree(project.cache / "progressive")
    for pack in (project.cache / "packs").iterdir():
        pack.unlink()
    project.set_output("top", project.outputs["top"] | {"params": {"weight": 0.4}})
    planned = project.open().plan()
    built = project.build().outputs
    assert planned.outputs["m"].next_build.exact
    assert told(planned.outputs["m"])[:3] == done(built["m"])[:3]
    assert not planned.outputs["top"].next_build.exact
    assert planned.outputs["top"].next_build.index_bytes > built["top"].index_bytes_read


# --- custom operators ---------------------------------------------------------------------------------------------

CUSTOM = """
from mergepipe.operators.model_stock import ModelStock


class Again(ModelStock):
    def reduce(self, prepared, facts, slots):
        return (yield from super().reduce(prepared, facts, slots))


class Told(Again):
    def rounds(self, prepared, facts):
        return 1


class Odd(Again):
    def rounds(self, prepared, facts):
        return 0
"""


@pytest.mark.parametrize(("name", "bounded"), [("Again", False), ("Told", True), ("Odd", False)])
def test_of_a_custom_reduction_that_does_not_say_how_many_rounds_it_takes_there_is_no_limit(tmp_path, name, bounded):
    project = CustomProject(tmp_path, GEOMETRY)
    project.declared = {"custom": f"ops.py:{name}"}
    project.add_sources(family())
    project.code(CUSTOM)
    project.set_output("m", {"operator": "custom", "base": "base", "experts": ["e1", "e2"]})
    report = project.open(memory=MEMORY[0]).plan()
    assert (report.bounded, report.outputs["m"].next_build.bounded) == (bounded, bounded)
    assert report.as_json()["next_build"]["bounded"] == bounded
    text = run_mergepipe(("--allow-custom", "plan"), tmp_path).stdout
    assert ("reads at most" in text, "reads about" in text) == (bounded, not bounded)
    project.build(memory=MEMORY[0])
    project.set_output("m", project.outputs["m"] | {"write": {"dtype": "bfloat16"}})
    planned = project.open(memory=MEMORY[0]).plan().outputs["m"].next_build
    assert planned.exact
    assert planned.bounded, "statistics are known: there are no rounds"


def test_every_reduction_says_how_many_rounds_it_takes():
    for operator in operators().values():
        reduces = type(operator).reduce is not Operator.reduce
        assert reduces == (type(operator).rounds is not Operator.rounds), operator.signature.name


@pytest.mark.parametrize("first", ["levels", "exact"])
def test_what_one_output_reads_by_levels_and_another_exactly_is_within_the_limit(tmp_path, first):
    """The stage's content is not known when the plan is made: nor is what the budget will buy of it."""
    project = make(tmp_path, s={"operator": "linear", "experts": ["e1", "e2"]})
    merge = {"operator": "task_arithmetic", "base": "base", "experts": ["s", "e3"]} | PLAIN
    for name in sorted(["exact", "levels"], key=lambda name: name != first):
        project.set_output(name, merge)

    def within(budget, **params):
        project.set_output("levels", merge | {"budget": {"expert_reads": budget, "precision": "levels"}})
        project.set_output("exact", merge | {"params": params})
        report = project.open().plan()
        builds = project.build().outputs
        assert sum(report.reads.values()) >= sum(sum(done(build)[:3]) for build in builds.values())
        for name, planned in report.outputs.items():
            assert not planned.next_build.exact or told(planned) == done(builds[name]), name

    within("30%")
    within("20%", **{"lambda": 0.5})
    project.open().cache_prune(max_bytes=0)  # statistics and packs go, what levels come to stays
    within("25%", **{"lambda": 0.6})
    project.add_source("e1", family()["e1"] | {"model.v": family()["e2"]["model.v"]})
    within("35%", **{"lambda": 0.7})
