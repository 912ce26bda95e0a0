"""Outputs made from outputs, on the command line of a real project."""

import json

import pytest
from support.cli import run_mergepipe
from support.stages import declare


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a project whose stage is not published, and what its first build printed."""
    project = declare(tmp_path_factory.mktemp("stages"), publish=False, order=("final", "stage"))
    return project, run_mergepipe(["build"], project.root)


def test_a_build_shows_the_stage_first_and_that_it_is_not_published(built):
    _, result = built
    assert result.code == 0, result.text
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["stage", "final", "Mergefile.lock"]
    paths = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  path")]
    assert paths == ["not published", "build/final"]


def test_status_and_plan_show_it_too(built):
    project, _ = built
    status = run_mergepipe(["status"], project.root).stdout.splitlines()
    assert status[:2] == ["stage  up-to-date  not published", "final  up-to-date  build/final"]
    plan = run_mergepipe(["plan", "final"], project.root).stdout
    assert plan.index("stage (") < plan.index("not published") < plan.index("final (")
    assert [line.split()[2:4] for line in plan.splitlines() if line.startswith("    in all")] == [["4.61", "KB"]] * 2
    for command in ("plan", "status"):
        outputs = json.loads(run_mergepipe([command, "--json"], project.root).stdout)["outputs"]
        assert [output["path"] for output in outputs.values()] == [None, "build/final"]


def test_json_of_a_build_has_no_path_for_it(built):
    project, _ = built
    outputs = json.loads(run_mergepipe(["build", "final", "--json"], project.root).stdout)["outputs"]
    assert list(outputs) == ["stage", "final"]
    assert [output["path"] for output in outputs.values()] == [None, "build/final"]
    assert list(json.loads(run_mergepipe(["build", "stage", "--json"], project.root).stdout)["outputs"]) == ["stage"]


def test_a_cycle_is_refused_with_the_way_round(tmp_path):
    project = declare(tmp_path)
    project.set_output("stage", project.outputs["stage"] | {"base": "final"})
    result = run_mergepipe(["build"], project.root)
    assert result.code == 2
    assert "outputs.stage: a cycle: `stage` needs `final` needs `stage`" in result.stderr


def test_an_adapter_on_an_output_is_refused_by_name(tmp_path):
    project = declare(tmp_path)
    text = project.mergefile.read_text() + '[sources.lora]\npath = "models/lora"\non = "stage"\n'
    project.mergefile.write_text(text)
    result = run_mergepipe(["status"], project.root)
    assert result.code == 2
    assert "sources.lora.on: an adapter on an output is not supported yet" in result.stderr
    assert "build `stage` first" in result.stderr
