"""`mergepipe verify` on the command line: what it prints, and how it ends."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.projects import SmallProject
from unit.cli.fakes import assert_golden
from unit.cli.verified import BLOCK, DAMAGED, LINE, VERIFIED

from mergepipe.cli.verify import verify
from mergepipe.project.verify import VerifyOptions


def test_what_is_right_is_a_short_table(cli):
    result = cli("verify")
    assert (result.code, result.stderr) == (0, "")
    assert_golden("verify.txt", result.stdout)


def test_every_problem_is_an_error_with_a_hint_on_stderr(cli):
    cli.project.result = DAMAGED
    result = cli("verify")
    assert result.code == 1
    assert_golden("verify-damaged.txt", f"{result.stdout}---\n{result.stderr}")
    assert "\x1b" not in result.text


def test_quiet_prints_the_problems_alone(cli):
    cli.project.result = DAMAGED
    result = cli("verify", "--quiet")
    assert (result.code, result.stdout) == (1, "")
    assert result.stderr.count("error: ") == 4


def test_many_problems_are_cut_and_verbose_shows_all(cli):
    output = replace(VERIFIED.outputs[0], problems=(BLOCK,) * 30)
    cli.project.result = replace(VERIFIED, outputs=(output,))
    assert cli("verify").stderr.count("error: ") == 20
    assert "10 more problems: `--verbose` shows all" in cli("verify").stderr
    assert cli("verify", "-v").stderr.count("error: ") == 30


def test_json_is_the_report_alone_and_the_code_is_the_same(cli):
    cli.project.result = DAMAGED
    result = cli("verify", "--json")
    assert (result.code, result.stderr) == (1, "")
    found = json.loads(result.stdout)
    assert found == DAMAGED.as_json()
    assert found["ok"] is False
    assert found["lock"]["problems"] == [
        {"kind": "lock", "where": LINE.where, "message": LINE.what, "hint": LINE.hint, **LINE.facts}
    ]


def test_options_reach_the_project(cli):
    words = ["assistant", "--full", "--rebuild-sample", "2.5%", "--seed", "9", "--source", "math=/x/y", "-j", "3"]
    assert cli("verify", *words).code == 0
    options = VerifyOptions(full=True, sample=2.5, seed=9, sources={"math": Path("/x/y")})
    assert cli.project.calls == [("verify", {"targets": ("assistant",), "options": options})]
    assert cli.project.opened["workers"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rebuild-sample", "0"], "more than 0"),
        (["--rebuild-sample", "101%"], "at most 100"),
        (["--rebuild-sample", "nan"], "not a percentage"),
        (["--source", "math"], "NAME=PATH"),
        (["--signature"], "needs a key"),
        (["--public-key", "x.pub"], "not asked for"),
        (["--source", "math=/x"], "`--source` says where blocks are made again from, and none are"),
        (["./nothing", "--seed", "3"], "`--seed` chooses the blocks that are made again, and none are"),
        (["--rebuild-sample", "5%", "--source", "a=/x", "--source", "a=/y"], "`--source a=...` is given twice"),
        (["./nothing"], "no such directory"),
        (["./nothing/mergepipe.json"], "no such directory"),
        (["."], "it has no `mergepipe.json`"),
    ],
)
def test_what_cannot_be_asked_ends_with_2(cli, words, message):
    result = cli("verify", *words)
    assert (result.code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "hint: " in result.stderr


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path / "project")
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, {"a": (16, 16)}))
    project.set_output("assistant", {"operator": "linear", "experts": ["base", "e1"]})
    assert run_mergepipe(["build"], project.root).code == 0
    (project.root / "copy-of-assistant").symlink_to(project.folder("assistant"))
    return project


def test_the_examples_work_and_a_directory_needs_no_project(project, tmp_path):
    for line, _ in verify.examples:
        result = run_mergepipe(line.split()[1:], project.root)
        assert (result.code, result.stderr) == (0, ""), line
    project.folder("assistant").rename(tmp_path / "alone")
    result = run_mergepipe(["verify", "alone"], tmp_path)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("assistant: verified\n  path      alone\n")
    (tmp_path / "alone" / "README.md").write_text("other")
    result = run_mergepipe(["verify", "alone/"], tmp_path)
    assert (result.code, result.stderr.splitlines()[0]) == (
        1,
        "error: alone/README.md: is not what was written: its digest differs",
    )
