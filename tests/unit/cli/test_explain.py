"""`explain`: the resolved values of every tensor, and where each comes from."""

import json

import numpy as np
import pytest
from support.adapters import factors, write_adapter
from support.budgets import percent
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.projects import SmallProject, skip_flushing
from unit.cli.fakes import assert_golden, clean_variables

from mergepipe.cli.main import run
from mergepipe.errors import MergefileError

SHAPES = {"model.embed_tokens.weight": (8, 4)} | {f"model.layers.{n}.mlp.weight": (4, 4) for n in range(3)}

UNUSED = "not read: it has no part in the result"


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, SHAPES))
    project.set_output(
        "m",
        {
            "operator": "task_arithmetic",
            "base": "base",
            "experts": ["e1", {"source": "e2", "weight": [0.0, 1.0]}],
            "params": {"lambda": 0.5, "weight": 0.25},
            "rules": [
                {"layers": "1..3", "params": {"lambda": 0.75}},
                {"match": "*.2.*", "experts": {"e1": {"weight": 0.0}}},
            ],
        },
    )
    return project


def values(found):
    return {name: (param.value, param.origin) for name, param in found.items()}


@pytest.fixture
def command(capsys, monkeypatch):
    """Return what runs a command line in a folder, in this process, and returns what it prints."""
    clean_variables(monkeypatch)
    skip_flushing(monkeypatch)

    def run_in(root, *argv):
        capsys.readouterr()
        code = run(["-C", str(root), *argv])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run_in


@pytest.fixture
def explained(command):
    """Return what `explain` prints, as a user sees it."""
    return lambda root, *argv: command(root, "explain", *argv)


@pytest.fixture
def build(command):
    """Return what builds a project as a user does."""
    return lambda project: command(project.root, "build", "-q")


def test_a_tensor_outside_the_layers_takes_the_first_anchor(project):
    found = project.open().explain("m", "model.embed_tokens.weight")
    assert values(found.params)["lambda"] == (0.5, "outputs.m.params.lambda")
    assert values(found.params)["normalize"] == (False, "default")
    first, second = found.experts
    assert values(first.params) == {"weight": (0.25, "outputs.m.params.weight")}
    assert values(second.params) == {"weight": (0.0, "outputs.m.experts[1].weight")}
    assert (first.used, second.used) == ("read", UNUSED)
    assert (found.layer, found.layers) == (None, 3)


def test_later_rules_win_over_what_stands_beside_the_expert(project):
    found = project.open().explain("m", "model.layers.2.mlp.weight")
    assert values(found.params)["lambda"] == (0.75, "outputs.m.rules[0].params.lambda")
    first, second = found.experts
    assert values(first.params) == {"weight": (0.0, "outputs.m.rules[1].experts.e1.weight")}
    assert values(second.params) == {"weight": (1.0, "outputs.m.experts[1].weight")}
    assert (first.used, second.used, second.tensor) == (UNUSED, "read", "model.layers.2.mlp.weight")


def test_the_values_are_those_that_the_merge_used(project):
    project.build()
    for tensor in project.manifest("m").tensors:
        found = project.open().explain("m", tensor.name)
        assert {name: param.value for name, param in found.params.items()} == dict(tensor.parameters.params)
        for expert, params in zip(found.experts, tensor.parameters.experts, strict=True):
            assert {name: param.value for name, param in expert.params.items()} == dict(params)


def test_an_output_is_explained_in_groups_of_equal_parameters(project):
    found = project.open().explain("m")
    names = tuple(SHAPES)
    assert [group.tensors for group in found.groups] == [names[:2], names[2:3], names[3:]]
    assert [group.params["lambda"] for group in found.groups] == [0.5, 0.75, 0.75]
    assert [group.experts["e2"]["weight"] for group in found.groups] == [0.0, 0.5, 1.0]


def test_what_groups_have_in_common_is_said_once(project):
    text = run_mergepipe(["explain", "m"], project.root).stdout
    lines = text.splitlines()
    assert lines[lines.index("task_arithmetic: 4 tensors") : -1] == [
        "task_arithmetic: 4 tensors",
        "  params    normalize = false, base = base",
        "  expert    e1",
        "  expert    e2",
        "  layer 0 and outside the layers, 2 tensors",
        "    params    lambda = 0.5",
        "    expert    e1, weight = 0.25",
        "    expert    e2, weight = 0",
        "  layer 1, 1 tensor",
        "    params    lambda = 0.75",
        "    expert    e1, weight = 0.25",
        "    expert    e2, weight = 0.5",
        "  layer 2, 1 tensor",
        "    params    lambda = 0.75",
        "    expert    e1, weight = 0",
        "    expert    e2, weight = 1",
    ]


def test_an_unknown_tensor_is_refused_with_one_that_is_near(project):
    with pytest.raises(MergefileError, match=r"has no tensor `model\.layers\.1\.mpl\.weight`") as caught:
        project.open().explain("m", "model.layers.1.mpl.weight")
    assert "`model.layers.1.mlp.weight`" in caught.value.hint


def test_the_command_says_where_each_value_comes_from(project):
    result = run_mergepipe(["explain", "m", "model.layers.1.mlp.weight"], project.root)
    assert (result.code, result.stderr) == (0, "")
    assert "lambda = 0.75      from outputs.m.rules[0].params.lambda (line 13, rule 1)" in result.stdout
    assert "weight = 0.5  from outputs.m.experts[1].weight (line 11)" in result.stdout
    assert run_mergepipe(["explain", "m", "nothing"], project.root).code == 2


def test_json_is_stable(project):
    found = json.loads(run_mergepipe(["explain", "m", "model.layers.1.mlp.weight", "--json"], project.root).stdout)
    assert found["params"]["lambda"] == {
        "value": 0.75, "origin": "outputs.m.rules[0].params.lambda", "line": 13, "rule": 1,
    }  # fmt: skip
    assert found["params"]["normalize"] == {"value": False, "origin": "default", "line": None, "rule": None}
    assert [expert["source"] for expert in found["experts"]] == ["e1", "e2"]
    assert (found["operator"], found["decision"], found["layer"]) == ("task_arithmetic", "merge", 1)


# --- what is printed, word by word ------------------------------------------------------------------------------------


def test_before_the_first_build_it_says_what_is_known(project, explained):
    assert_golden("explain-unbuilt.txt", explained(project.root, "m"))
    assert_golden("explain-unbuilt-tensor.txt", explained(project.root, "m", "model.layers.1.mlp.weight"))
    assert not project.cache.exists()


def test_a_built_output_and_what_changes_of_it(project, build, explained):
    build(project)
    assert_golden("explain.txt", explained(project.root, "m"))
    assert_golden("explain-verbose.txt", explained(project.root, "m", "-v"))
    assert_golden("explain-tensor.txt", explained(project.root, "m", "model.layers.1.mlp.weight"))
    assert_golden("explain-tensor-verbose.txt", explained(project.root, "m", "model.layers.1.mlp.weight", "-v"))
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5, "weight": 0.375}})
    assert_golden("explain-stale.txt", explained(project.root, "m"))
    assert_golden("explain-stale-tensor.txt", explained(project.root, "m", "model.layers.1.mlp.weight"))
    build(project)
    assert_golden("explain-rebuilt-tensor.txt", explained(project.root, "m", "model.layers.1.mlp.weight"))


def test_a_budget_says_what_is_left_out_and_its_share_of_the_error(project, build, explained):
    project.set_output("m", project.outputs["m"] | {"budget": percent(50)})
    before = "  budget    50%, what it reads is not known before deltas are measured (`plan`)"
    assert before in explained(project.root, "m").splitlines()
    build(project)
    assert_golden("explain-budget.txt", explained(project.root, "m"))
    assert_golden("explain-budget-tensor.txt", explained(project.root, "m", "model.embed_tokens.weight"))


def test_adapters_slices_stages_and_copies(tmp_path, build, explained):
    shapes = {f"model.layers.{n}.q.weight": (12, 8) for n in range(3)}
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, shapes) | {"model.ids": np.arange(4)})
    write_adapter(tmp_path / "models/lora", factors(7, "model.layers.0.q", 12, 8))
    project.sources["lora"], project.adapters["lora"] = "models/lora", "base"
    project.set_output("stage", {"operator": "linear", "experts": ["base", "e1"], "publish": False})
    slices = [{"experts": ["lora"], "layers": "0..2"}, {"experts": ["stage"], "layers": "1..3"}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "slices": slices})
    build(project)
    assert_golden("explain-slices.txt", explained(tmp_path, "m"))
    assert_golden("explain-adapter-tensor.txt", explained(tmp_path, "m", "model.layers.0.q.weight"))
    assert_golden("explain-slice-tensor.txt", explained(tmp_path, "m", "model.layers.3.q.weight"))
    assert_golden("explain-copied-tensor.txt", explained(tmp_path, "m", "model.ids"))
    assert_golden("explain-stage-tensor.txt", explained(tmp_path, "stage", "model.layers.2.q.weight"))


def test_the_json_of_a_tensor_and_of_an_output(project, build, explained):
    """The keys are stable: people script against them."""
    build(project)
    tensor = json.loads(explained(project.root, "m", "model.layers.1.mlp.weight", "--json"))
    output = json.loads(explained(project.root, "m", "--json"))
    assert_golden("explain-keys.txt", "\n".join([*keys_of("tensor", tensor), *keys_of("output", output), ""]))


def keys_of(path, value):
    """Yield every key path of a JSON value; of a list that of its first member."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from keys_of(f"{path}.{key}", member)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys_of(f"{path}[]", value[0])
    else:
        yield path


def test_not_measured_is_said_and_what_is_known_is_shown(project, build, explained):
    build(project)
    assert "contributions are not known: it was not measured" in explained(project.root, "m", "--no-measure")
    explained(project.root, "m")
    assert "contributions: the share by norm" in explained(project.root, "m", "--no-measure")


def test_names_that_steer_a_terminal_are_escaped(tmp_path, build, explained):
    project = SmallProject(tmp_path)
    name = "evil\x1b[31m\u202e.weight"
    for seed, source in enumerate(("base", "e1")):
        project.add_source(source, random_tensors(seed, {name: (4, 4)}))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    build(project)
    for text in (explained(tmp_path, "m", "-v"), explained(tmp_path, "m", name)):
        assert "evil\\x1b[31m\\u202e" in text
        assert not set("\x1b\u202e") & set(text)


def test_paths_and_budgets_are_shown_as_people_write_them(project, monkeypatch, capsys):
    clean_variables(monkeypatch)
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "2 MB", "precision": "blocks"}})
    project.build()
    below = project.root / "notes"
    below.mkdir()
    monkeypatch.chdir(below)
    assert run(["explain", "m", "--no-measure"]) == 0
    shown = capsys.readouterr().out
    assert ", ../build/m\n" in shown
    assert "  budget    2 MB, " in shown
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "1 KiB", "precision": "blocks"}})
    assert "the budget changed: 2 MB -> 1 KiB" in project.open().status().outputs["m"].reasons
