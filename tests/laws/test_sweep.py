"""A sweep says what builds with its budgets would read, and how far they would be from the full read."""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from laws.test_every_operator import family
from support.cli import run_mergepipe
from support.every_operator import RECIPES
from support.projects import SmallProject, data_start, snapshot
from support.quick import every

from mergepipe.errors import MergefileError, OperatorError
from mergepipe.mergefile.schema import Budget
from mergepipe.project import evaluate
from mergepipe.project.evaluate import Command, EvaluationError

SWEPT = ("linear", "task_arithmetic", "slerp", "karcher", "ties", "dare_linear", "della", "sce", "model_stock")
BUDGETS = ("0", "10", "25%", "700 B", "60", "100")


def make(root, name="task_arithmetic", budget=None, dtype="float32"):
    project = SmallProject(root)
    for source, tensors in family("bfloat16").items():
        project.add_source(source, tensors)
    declare(project, name, budget, dtype)
    return project


def declare(project, name, budget=None, dtype="float32"):
    recipe = {"base": "base"} | RECIPES[name] | {"write": {"dtype": dtype}}
    project.set_output("m", recipe | ({"budget": {"precision": "blocks"} | budget} if budget else {}))


def wide(project):
    return {name: array.astype(np.float64) for name, array in project.tensors("m").items()}


def norm(arrays):
    return math.sqrt(math.fsum(float(np.sum(array * array)) for array in arrays))


def echo(text, code=0):
    """Return a command that looks at the model, and says something."""
    program = f"import os, sys; os.listdir(sys.argv[1]); print({text!r}); sys.exit({code})"
    return Command(words=(sys.executable, "-c", program), directory=Path.cwd())


# --- what it says is what builds do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every(SWEPT, ["linear", "slerp", "karcher", "ties", "dare_linear", "sce"]))
def test_deviation_bytes_and_bound_are_those_of_builds(tmp_path, name):
    project = make(tmp_path, name)
    report = project.open().sweep("m", BUDGETS, measure=True)
    read = project.build_one("m").expert_bytes["read"]
    # Without a budget these two do not look at the base, so that what equals it is read, once.
    assert read > report.full_bytes if name in ("linear", "karcher") else read == report.full_bytes
    full, base = wide(project), {n: a.astype(np.float64) for n, a in family("bfloat16")["base"].items()}
    update = norm(full[n] - base[n] for n in full)
    assert report.update == pytest.approx(update, rel=1e-12)
    for point in report.points:
        declare(project, name, {"expert_reads": "100%" if point.budget == "full" else point.budget})
        built = project.build_one("m")
        found, length = wide(project), point.deviation.length
        assert length.absolute == pytest.approx(norm(found[n] - full[n] for n in full), rel=1e-12)
        assert length.relative_to_update == pytest.approx(length.absolute / update, rel=1e-12)
        assert length.relative_to_output == pytest.approx(length.absolute / norm(full.values()), rel=1e-12)
        assert point.deviation.largest == max(np.max(np.abs(found[n] - full[n]), initial=0.0) for n in full)
        assert point.expert_bytes == (report.full_bytes if point.budget == "full" else built.expert_bytes["planned"])
        assert (point.bound.kind, point.bound.absolute) == (built.bound.kind, built.bound.absolute)
        if point.bound.kind != "none":
            assert length.absolute <= point.bound.absolute + 1e-5 * norm(full.values())


def test_a_stack_of_slices_is_swept_like_any_other_output(tmp_path):
    project = make(tmp_path)
    slices = [
        {"layers": "0..1", "experts": ["e1", "e2"]},
        {"layers": "0..2", "operator": "linear", "experts": ["e3", "e1"]},
    ]
    recipe = {"operator": "ties", "base": "base", "slices": slices, "write": {"dtype": "float32"}}
    project.set_output("m", recipe)
    report = project.open().sweep("m", ["30", "100"], measure=True, mapped=True)
    project.build()
    full = wide(project)
    project.set_output("m", recipe | {"budget": {"expert_reads": "30%", "precision": "blocks"}})
    assert project.build_one("m").expert_bytes["planned"] == report.points[0].expert_bytes
    found = wide(project)
    distance = norm(found[n] - full[n] for n in full)
    assert report.points[0].deviation.length.absolute == pytest.approx(distance, rel=1e-12)
    assert distance > 0
    assert report.experts == ("e1", "e2", "e3")
    assert {cell.layer for cell in report.map.cells} == {0, 1, 2, None}


def test_more_is_read_and_less_is_lost_from_point_to_point(tmp_path):
    report = make(tmp_path).open().sweep("m", ["0", "5", "...", "100"], measure=True)
    assert [point.budget for point in report.points] == [*(f"{5 * n}%" for n in range(20)), "full"]
    for smaller, larger in zip(report.points, report.points[1:], strict=False):
        assert smaller.expert_bytes <= larger.expert_bytes
        assert smaller.bound.absolute >= larger.bound.absolute
        assert smaller.expected.absolute >= larger.expected.absolute
    first, last = report.points[0], report.points[-1]
    assert (first.expert_bytes, first.blocks, first.deviation.length.relative_to_update) == (0, 0, 1.0)
    assert (last.expert_bytes, last.blocks) == (report.full_bytes, report.full_blocks)
    assert (last.bound.kind, last.bound.absolute, last.losses) == ("exact", 0.0, ())
    assert last.deviation.length.absolute == 0.0


def test_the_outputs_own_budget_does_not_matter_and_is_reported(tmp_path):
    free = make(tmp_path / "free").open().sweep("m", BUDGETS, measure=True)
    assert free.own is None
    for number, budget in enumerate(({"expert_reads": "40%"}, {"max_error": 0.5}, {"expert_reads": "100%"})):
        report = make(tmp_path / str(number), budget=budget).open().sweep("m", BUDGETS, measure=True)
        assert report.points == free.points
        assert (report.own is None) == (budget == {"expert_reads": "100%"})
    own = make(tmp_path / "own", budget={"expert_reads": "25%"}).open().sweep("m", ["25"])
    assert (own.own.budget, own.own.expert_bytes) == ("25%", own.points[0].expert_bytes)


def test_a_budget_that_is_a_size_is_called_as_it_was_written(tmp_path):
    project = make(tmp_path, budget={"expert_reads": "2 KB"})
    report = project.open().sweep("m", ["700 B", "1024 B", "2 KB"], command=echo("score 1"))
    assert [point.budget for point in report.points] == ["700 B", "1 KiB", "2 KB"]
    assert [point.figures for point in report.points] == [{"score": 1.0}] * 3
    assert report.own.budget == "2 KB"
    project.build()
    assert 'budget = "2000 B"' in (project.root / "Mergefile.lock").read_text(), "a lock keeps bytes"


def test_a_bound_is_relative_to_the_measured_update_where_the_plan_does_not_know_it(tmp_path):
    project = make(tmp_path, "ties")
    planned = project.open().sweep("m", ["20"]).points[0]
    measured = project.open().sweep("m", ["20"], measure=True)
    assert (planned.bound.relative_to_update, planned.expected.relative_to_update) == (None, None)
    assert measured.points[0].bound.relative_to_update == planned.bound.absolute / measured.update


def test_an_output_made_from_another_is_swept_without_publishing_either(tmp_path):
    project = make(tmp_path)
    project.set_output("top", {"operator": "task_arithmetic", "base": "m", "experts": ["e1"], "path": "build/top"})
    found = project.open().sweep("top", ["0", "50", "100"], measure=True)
    assert [point.deviation.length.relative_to_update for point in found.points][::2] == [1.0, 0.0]
    assert not (tmp_path / "build").exists()
    assert not project.lock.exists()


# --- what it reads and writes -----------------------------------------------------------------------------------------


def test_nothing_is_written_but_the_cache(tmp_path):
    project = make(tmp_path)
    before = snapshot(*(path for path in tmp_path.iterdir() if path.name != ".mergecache"))
    project.open().sweep("m", BUDGETS, measure=True, mapped=True)
    assert snapshot(*(path for path in tmp_path.iterdir() if path.name != ".mergecache")) == before
    assert list((project.cache / "packs").iterdir()) == []
    assert list((project.cache / "staging").iterdir()) == []


def test_the_deltas_are_measured_once_and_all_budgets_compared_in_one_pass(tmp_path):
    project = make(tmp_path)
    inputs = sum(project.source_file(name).stat().st_size for name in ("base", "e1", "e2", "e3"))
    inputs -= sum(data_start(project.source_file(name)) for name in ("base", "e1", "e2", "e3"))
    first = project.open().sweep("m", BUDGETS)
    assert (first.index_bytes_read, first.measured_bytes_read) == (inputs, 0)
    again = project.open().sweep("m", BUDGETS, measure=True, precision="blocks")
    assert again.index_bytes_read == 0
    assert 0 < again.measured_bytes_read <= inputs, "however many budgets there are"


@pytest.mark.parametrize("workers", [1, 4])
def test_the_numbers_do_not_depend_on_threads_or_memory(tmp_path, workers):
    expected = make(tmp_path / "a", "model_stock").open(workers=2).sweep("m", BUDGETS, measure=True)
    found = make(tmp_path / "b", "model_stock").open(workers=workers, memory=4096).sweep("m", BUDGETS, measure=True)
    assert found.points == expected.points


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_output_without_a_base_is_refused(tmp_path):
    project = make(tmp_path)
    project.set_output("m", {"operator": "linear", "experts": ["e1", "e2"]})
    with pytest.raises(MergefileError, match="output `m` cannot be swept: it has no base") as caught:
        project.open().sweep("m", ["10"])
    assert caught.value.hint == "give it a `base`"


def test_an_unknown_output_is_refused(tmp_path):
    with pytest.raises(MergefileError, match="`n` is not an output"):
        make(tmp_path).open().sweep("n", ["10"])


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (["x"], "`x` is no budget"),
        (["101"], "at most 100%"),
        (["5 parsecs"], "is no budget"),
        ([], "at least one budget"),
        (["5", "...", "50"], "stands between rising percentages"),
        (["5", "4", "...", "50"], "stands between rising percentages"),
        (["1 MB", "2 MB", "...", "5 MB"], "stands between rising percentages"),
        (["0", "0.0000001", "...", "100"], "more than 1,000 budgets"),
        ([Budget(max_error=0.1)], "no `max_error`"),
    ],
)
def test_what_is_no_budget_is_refused(tmp_path, budgets, message):
    with pytest.raises(MergefileError, match=re.escape(message)):
        make(tmp_path).open().sweep("m", budgets)


def test_budgets_are_taken_once_each_exactly_as_written(tmp_path):
    report = make(tmp_path).open().sweep("m", ["30", "30%", "0.1", "0.2", "...", "0.5", "1 KB", Budget(share=0.3)])
    assert sorted(point.budget for point in report.points) == ["0.1%", "0.2%", "0.3%", "0.4%", "0.5%", "1 KB", "30%"]


def test_a_number_that_is_not_finite_stops_a_sweep_like_a_build(tmp_path):
    project = make(tmp_path)
    tensors = family("bfloat16")["e1"]
    tensors["model.norm.weight"][3] = np.inf
    project.add_source("e1", tensors)
    with pytest.raises(OperatorError, match=r"model\.norm\.weight"):
        project.open().sweep("m", ["0", "100"], measure=True)


# --- the map ----------------------------------------------------------------------------------------------------------


def test_the_map_adds_up_to_the_budgets(tmp_path):
    report = make(tmp_path).open().sweep("m", ["0", "25", "100"], mapped=True)
    cells, steps = report.map.cells, report.map.steps
    assert len(steps) == 101
    for at, step in enumerate(steps):
        assert sum(cell.selected[at] for cell in cells) == step.blocks
    assert sum(cell.blocks for cell in cells) == report.full_blocks
    assert all(list(cell.selected) == sorted(cell.selected) for cell in cells)
    assert {step.budget: step.expert_bytes for step in steps}["25%"] == report.points[1].expert_bytes
    assert {(cell.layer, cell.module) for cell in cells} == {
        (None, "model.embed_tokens"),
        (0, "attn"),
        (0, "conv"),
        (1, "attn"),
        (1, "mlp"),
        (None, "model.norm"),
        (None, "model.scale"),
        (None, "model.empty"),
    }
    assert {cell.expert for cell in cells} == {0, 1, 2}


# --- evaluating -------------------------------------------------------------------------------------------------------


def test_each_model_is_built_for_the_command_and_gone_afterwards(tmp_path):
    project = make(tmp_path)
    project.build()
    before = snapshot(*(path for path in tmp_path.iterdir() if path.name != ".mergecache"))
    packs = sorted(path.name for path in (project.cache / "packs").iterdir())
    seen = tmp_path.parent / f"{tmp_path.name}-seen"
    program = (
        "import hashlib, json, pathlib, sys; model = pathlib.Path(sys.argv[1]);"
        "data = (model / 'model.safetensors').read_bytes();"
        f"pathlib.Path({str(seen)!r}).open('a').write(hashlib.sha256(data).hexdigest() + '\\n');"
        "print('loading'); print(json.dumps({'size': len(data), 'inner': {'budget': 1.5}, 'name': 'x'}))"
    )
    command = Command(words=(sys.executable, "-c", program, "{}"), directory=tmp_path)
    report = project.open().sweep("m", ["0", "50", "100"], command=command, precision="blocks")
    assert report.figures == ("size", "inner.budget")
    assert len({point.figures["size"] for point in report.points}) == 1
    assert snapshot(*(path for path in tmp_path.iterdir() if path.name != ".mergecache")) == before
    assert sorted(path.name for path in (project.cache / "packs").iterdir()) == packs
    hashes = seen.read_text().split()
    assert len(set(hashes)) == 3
    assert hashes[2] == sha(project), "the model of everything is the full read's"
    declare(project, "task_arithmetic", {"expert_reads": "50%"})
    project.build()
    assert hashes[1] == sha(project), "the model of half is that of a build with half"
    assert project.build_one("m").state == "unchanged"


def sha(project):
    return hashlib.sha256((project.folder("m") / "model.safetensors").read_bytes()).hexdigest()


def leftovers(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".mergepipe-sweep")]


def test_a_command_that_fails_names_the_budget_and_shows_what_it_said(tmp_path):
    program = "import sys; print('boom ' + sys.argv[1][-1], file=sys.stderr); sys.exit(3)"
    command = Command(words=(sys.executable, "-c", program), directory=tmp_path)
    with pytest.raises(EvaluationError, match="the model of budget 10% was not evaluated") as caught:
        make(tmp_path).open().sweep("m", ["10", "50"], command=command)
    assert "ended with exit code 3\nboom m" in caught.value.message
    assert caught.value.facts["budget"] == "10%"
    assert leftovers(tmp_path) == []


def test_a_command_without_figures_and_one_that_is_not_there_are_errors(tmp_path):
    project = make(tmp_path)
    with pytest.raises(EvaluationError, match="printed no figures for the model of budget 10%\nall is well"):
        project.open().sweep("m", ["10"], command=echo("all is well"))
    with pytest.raises(EvaluationError, match="cannot be run: No such file"):
        project.open().sweep("m", ["10"], command=Command(words=("no-such-program",), directory=tmp_path))
    assert leftovers(tmp_path) == []


def test_an_interrupted_sweep_leaves_nothing_and_a_killed_ones_leavings_go(tmp_path, monkeypatch):
    project = make(tmp_path)
    project.cache.mkdir()
    (tmp_path / ".mergepipe-sweep-killed" / "packs").mkdir(parents=True)
    (tmp_path / ".mergepipe-sweep-killed-models" / "m").mkdir(parents=True)
    (tmp_path / ".mergepipe-sweep-alive").mkdir()
    (tmp_path / ".mergepipe-sweep-alive-models").mkdir()

    def interrupted(*words, **options):
        raise KeyboardInterrupt

    with evaluate._holding(tmp_path / ".mergepipe-sweep-alive"):
        monkeypatch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            project.open().sweep("m", ["10"], command=echo("1"))
    assert sorted(leftovers(tmp_path)) == [".mergepipe-sweep-alive", ".mergepipe-sweep-alive-models"]


@pytest.mark.parametrize(
    ("printed", "figures"),
    [
        ("8.25", {"value": 8.25}),
        ("-1e-3\n", {"value": -0.001}),
        ("x\nperplexity 8.25", {"perplexity": 8.25}),
        ("perplexity=8.25 loss=2.5", {"perplexity": 8.25, "loss": 2.5}),
        ("perplexity: 8.25, loss: 2.5", {"perplexity": 8.25, "loss": 2.5}),
        ("mean     2.1103   8.250", {"mean": 2.1103, "mean.2": 8.25}),
        ("exact match 0.5", {"exact match": 0.5}),
        ('{"a": 1, "b": {"c": 2.5, "d": true, "e": "x"}}', {"a": 1.0, "b.c": 2.5}),
        ('{\n  "a": 1,\n  "b": 2\n}\n', {"a": 1.0, "b": 2.0}),
        ("loss=nan", {"loss": math.nan}),
        ("", None),
        ("done", None),
        ("{}", None),
        ("took 3 s", None),
        ("see https://example.org/8", None),
        ("it took all of us a while and then 3", None),
        ('{"a": "x"}', None),
        ("true", None),
    ],
)
def test_figures_are_found_in_what_a_command_prints(printed, figures):
    found = evaluate.parse_figures(printed)
    assert found == figures or (str(found) == str(figures))


@pytest.mark.parametrize("text", ["", "   ", "'open"])
def test_what_is_no_command_is_refused(tmp_path, text):
    with pytest.raises(MergefileError, match="the command"):
        Command.parse(text, tmp_path)


def test_the_report_is_json(tmp_path):
    report = make(tmp_path).open().sweep("m", BUDGETS, measure=True, command=echo("acc 0.5"))
    shown = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert [point["figures"] for point in shown["points"]] == [{"acc": 0.5}] * len(report.points)
    assert shown["points"][0]["deviation"]["relative_to_update"] == 1.0


# --- the guide --------------------------------------------------------------------------------------------------------


def test_the_guide_shows_what_a_sweep_of_the_example_prints(tmp_path):
    root = Path(__file__).parents[2]
    shutil.copytree(root / "examples", tmp_path / "examples")
    shutil.copy(root / "Mergefile.toml", tmp_path)
    guide = (root / "docs" / "guides" / "choose-a-budget.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```bash\nmergepipe (.+)\n```\n\n```text", guide)
    (shown,) = re.findall(r"```text\n(.+?)```", guide, re.DOTALL)
    printed = run_mergepipe(command.split(), tmp_path)
    assert (printed.code, printed.stdout) == (0, shown)
