"""`explain`: the resolved values of every tensor, and where each comes from."""

import json

import pytest
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.projects import SmallProject

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
    assert text.splitlines() == [
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
    assert "lambda = 0.75      from outputs.m.rules[0].params.lambda" in result.stdout
    assert "weight = 0.5  from outputs.m.experts[1].weight" in result.stdout
    assert run_mergepipe(["explain", "m", "nothing"], project.root).code == 2


def test_json_is_stable(project):
    found = json.loads(run_mergepipe(["explain", "m", "model.layers.1.mlp.weight", "--json"], project.root).stdout)
    assert found["params"]["lambda"] == {"value": 0.75, "origin": "outputs.m.rules[0].params.lambda"}
    assert [expert["source"] for expert in found["experts"]] == ["e1", "e2"]
    assert (found["operator"], found["decision"], found["layer"]) == ("task_arithmetic", "merge", 1)
