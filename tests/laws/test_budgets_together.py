"""Budgets together with adapters, stages, slices, common rows, values that are not finite, and own operators."""

import shutil

import numpy as np
import pytest
from laws.test_budgets import budgeted
from laws.test_every_operator import family, make
from support.adapters import factors, write_adapter
from support.budgets import levels, limit, percent, with_budget
from support.projects import SmallProject

from mergepipe.errors import PlanError


def test_adapters_are_read_whole_and_cost_nothing(tmp_path):
    project = SmallProject(tmp_path)
    rng = np.random.default_rng(0)
    base = rng.standard_normal((16, 16)).astype(np.float32)
    project.add_source("base", {"q.weight": base})
    project.add_source("e", {"q.weight": base + rng.standard_normal((16, 16)).astype(np.float32)})
    write_adapter(tmp_path / "models/lora", factors(1, "q", 16, 16))
    project.sources["lora"], project.adapters["lora"] = "models/lora", "base"
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e", "lora"], "budget": percent(0)}
    project.set_output("m", recipe)
    report = project.build_one("m")
    stored = 2 * 2 * 16 * 4
    assert report.expert_bytes["planned"] == report.expert_bytes["read"] == stored
    assert report.expert_blocks["omitted"] == 4
    project.set_output("only", recipe | {"experts": ["lora"]})
    project.build("only")
    assert project.raw("only") == project.raw("m")


def test_stages_have_budgets_of_their_own(tmp_path):
    project = budgeted(tmp_path / "one", "task_arithmetic", percent(30))
    stage = project.outputs["m"] | {"path": "build/stage", "write": {"dtype": "bfloat16"}}
    final = project.outputs["m"] | {"experts": ["stage", "e3"]}
    project.outputs = {"stage": stage, "m": final}
    project.save()
    # What the stage will hold must be made before it can be measured: a plan says so.
    assert any("not known yet" in note for note in project.open().plan().outputs["m"].notes)
    report = project.build()
    assert report.outputs["m"].expert_bytes["read"] == report.outputs["m"].expert_bytes["planned"] > 0
    assert {o.state for o in project.build().outputs.values()} == {"unchanged"}
    assert project.open().plan().outputs["m"].index_bytes_read == 0
    other = SmallProject(tmp_path / "two")
    for name, tensors in family().items():
        other.add_source(name, tensors)
    shutil.copytree(project.folder("stage"), other.root / "models/stage")
    other.sources["stage"] = "models/stage"
    other.set_output("m", final)
    other.build()
    assert other.raw("m") == project.raw("m")


def test_slices_have_one_budget_for_all(tmp_path):
    project = make(tmp_path, "task_arithmetic")
    parts = [
        {"layers": "0..1", "experts": ["e1", "e2"]},
        {"layers": "1..2", "operator": "linear", "experts": ["e2", "e3"]},
        {"layers": "1..2", "experts": ["e2", "e3"]},
    ]
    recipe = {"operator": "task_arithmetic", "base": "base", "slices": parts}
    project.set_output("m", recipe)
    full = project.build_one("m")
    raw = project.raw("m")
    report = with_budget(project, percent(40)).build_one("m")
    assert 0 < report.expert_bytes["planned"] <= 0.4 * full.expert_bytes["full"]
    assert report.expert_blocks["omitted"] > 0
    with_budget(project, percent(99.9)).build_one("m")
    assert project.raw("m") == raw


def test_rows_behind_the_common_ones_are_the_bases_whatever_is_left_out(tmp_path):
    rng = np.random.default_rng(0)
    base = {"model.embed_tokens.weight": rng.standard_normal((22, 16)).astype(np.float32)}
    short = {"model.embed_tokens.weight": base["model.embed_tokens.weight"][:14] + np.float32(1)}
    for operator in ("linear", "task_arithmetic"):
        project = SmallProject(tmp_path / operator)
        project.add_source("base", base)
        project.add_source("e", short)
        recipe = {"operator": operator, "base": "base", "experts": ["e"], "params": {"rows": "common"}}
        project.set_output("m", recipe | {"budget": limit(64 * 4 * 2)})  # two of four blocks
        report = project.build_one("m")
        found = project.tensors("m")["model.embed_tokens.weight"]
        rows = [row for row in range(14) if (levels(project)["model.embed_tokens.weight"][0][row // 4])]
        want = np.array(base["model.embed_tokens.weight"])
        want[rows] = short["model.embed_tokens.weight"][rows]
        assert len(rows) in {6, 8}
        assert report.expert_bytes["read"] == len(rows) * 64
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_values_that_are_not_finite_are_read_first(tmp_path):
    base = {"w": np.ones((16, 16), np.float32)}
    expert = {"w": np.ones((16, 16), np.float32)}
    expert["w"][0], expert["w"][4, 4], expert["w"][8] = 100, np.nan, 200
    project = SmallProject(tmp_path)
    project.add_source("base", base)
    project.add_source("e", expert)
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e"], "params": {"non_finite": "allow"}}
    project.set_output("m", recipe | {"budget": percent(25)})
    report = project.build_one("m")
    assert levels(project)["w"][0][1] == 255
    assert np.isnan(project.tensors("m")["w"][4, 4])
    assert report.bound.relative_to_update is None
    none = with_budget(project, percent(0)).build_one("m")
    assert (none.bound.kind, none.bound.absolute) == ("none", None)


CUSTOM = """
from mergepipe.operators.custom import merge_function

def towards(base, experts, *, share=0.5):
    return base + share * (sum(experts) / len(experts) - base)

@merge_function(base="none")
def mean(base, experts):
    assert base is None
    return sum(experts) / len(experts)
"""


@pytest.mark.parametrize("function", ["towards", "mean"])
def test_functions_of_the_users_get_the_base_for_what_is_left_out(tmp_path, function):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((16, 16)).astype(np.float32)
    experts = [base + rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2)]
    project = SmallProject(tmp_path)
    for name, array in zip(("base", "e1", "e2"), (base, *experts), strict=True):
        project.add_source(name, {"w": array})
    (tmp_path / "ops.py").write_text(CUSTOM)
    project.set_output("m", {"operator": "own", "base": "base", "experts": ["e1", "e2"], "budget": percent(50)})
    text = project.mergefile.read_text()
    project.mergefile.write_text(f'{text}\n[operators.own]\npython = "ops.py:{function}"\n')
    report = project.build_one("m", allow_custom=True)
    assert report.bound.kind == "none"
    filled = [np.array(base), np.array(base)]
    for expert, row in enumerate(levels(project)["w"]):
        for block, level in enumerate(row):
            if level:
                filled[expert][block * 4 : block * 4 + 4] = experts[expert][block * 4 : block * 4 + 4]
    mean = (filled[0] + filled[1]) / 2
    want = mean if function == "mean" else base + (mean - base) / 2
    np.testing.assert_allclose(project.tensors("m")["w"], want, rtol=1e-5, atol=1e-6)


def test_passthrough_takes_no_budget(tmp_path):
    project = budgeted(tmp_path, "passthrough", percent(30))
    with pytest.raises(PlanError, match="no base takes the place"):
        project.open().plan()


def test_explain_shows_a_tensor_under_a_budget(tmp_path):
    project = budgeted(tmp_path, "linear", percent(30))
    project.build()
    found = project.open().explain("m", "model.layers.0.attn.weight")
    assert found.base.used == "for what is left out"
    assert [expert.used for expert in found.experts] == ["read"] * 3
