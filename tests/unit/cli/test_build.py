import json

import pytest
from unit.cli.fakes import BUDGETED, BUILT, UNCHANGED, assert_golden, build_report

from mergepipe.errors import LockDiffersError, PlanError, SourceChangedError


@pytest.fixture
def three(cli):
    cli.project.result = build_report(BUILT, UNCHANGED, BUDGETED)
    return cli


def test_says_what_was_read_reused_computed_and_written(three):
    result = three("build")
    assert (result.code, result.stderr.count("\n")) == (0, 1)
    assert_golden("build.txt", result.stdout)


def test_verbose_adds_bounds_plans_and_digests(three):
    assert_golden("build-verbose.txt", three("build", "-v").stdout)


def test_fits_eighty_columns(three):
    for line in three("build", "-v").stdout.splitlines():
        assert len(line) <= 80


def test_says_that_the_lock_is_as_it_was(cli):
    cli.project.result = build_report(UNCHANGED, changed=False)
    assert cli("build").stdout.endswith("\nMergefile.lock unchanged\n")


def test_json_is_the_report_alone(three):
    result = three("build", "--json")
    assert json.loads(result.stdout) == three.project.result.as_json()
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_numbers_that_json_lacks_are_null(cli):
    from dataclasses import replace

    cli.project.result = build_report(replace(BUILT, seconds=float("nan")))
    assert json.loads(cli("build", "--json").stdout)["outputs"]["assistant"]["seconds"] is None


def test_quiet_prints_nothing(three):
    result = three("build", "-q")
    assert (result.stdout, result.stderr, result.code) == ("", "", 0)


def test_quiet_json_prints_the_object(three):
    assert json.loads(three("-q", "build", "--json").stdout)["lock"] == {"path": "Mergefile.lock", "changed": True}


def test_decisions_of_a_built_output_are_notes_on_stderr(cli):
    result = cli("build")
    assert result.stderr == f"note: {BUILT.decisions[0]}\n"
    assert "extra" not in result.stdout


def test_a_note_that_was_reported_already_is_not_said_again(cli):
    def during(reporter):
        reporter.note(BUILT.decisions[0])
        reporter.note("something else")

    cli.project.during = during
    assert cli("build").stderr == f"note: {BUILT.decisions[0]}\nnote: something else\n"


def test_verbose_repeats_the_decisions_of_unchanged_outputs(cli):
    assert UNCHANGED.decisions[0] in cli("build", "-v").stderr


def test_warnings_go_to_stderr(cli):
    cli.project.during = lambda reporter: reporter.warn("a damaged pack\nit was recomputed")
    result = cli("build")
    assert result.stderr.startswith("warning: a damaged pack\n  it was recomputed\n")
    assert "damaged" not in result.stdout


def test_warnings_with_json_are_lines_of_json(cli):
    cli.project.during = lambda reporter: reporter.warn("a damaged pack")
    assert json.loads(cli("build", "--json").stderr) == {"warning": {"message": "a damaged pack"}}


def test_options_reach_the_project(cli):
    cli("build", "a", "b", "--locked", "--force", "-j", "3", "--memory", "2 GiB")
    assert cli.project.calls == [("build", {"outputs": ("a", "b"), "locked": True, "force": True})]
    assert (cli.project.opened["workers"], cli.project.opened["memory"]) == (3, 2 * 2**30)


def test_without_options_the_project_decides(cli):
    cli("build")
    assert cli.project.calls == [("build", {"outputs": (), "locked": False, "force": False})]
    assert (cli.project.opened["workers"], cli.project.opened["memory"]) == (None, None)
    assert cli.project.opened["cache_dir"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(SourceChangedError("moved"), 1), (PlanError("no fit"), 2), (LockDiffersError("other"), 3)],
    ids=["failed", "wrong input", "lock differs"],
)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_exit_code_is_the_errors(cli, error, code, flags):
    cli.project.result = error
    result = cli("build", *flags)
    assert result.code == code
    assert result.stdout == ""


def test_interrupted_build_says_how_it_goes_on(cli):
    cli.project.result = KeyboardInterrupt()
    result = cli("build")
    assert result.code == 130
    assert result.stderr == "error: interrupted\nhint: the next `mergepipe build` goes on from here\n"


def test_interrupted_build_with_json(cli):
    cli.project.result = KeyboardInterrupt()
    result = cli("build", "--json")
    assert result.code == 130
    assert json.loads(result.stderr)["error"]["kind"] == "cancelled"


def test_names_that_would_steer_the_terminal_are_escaped(cli):
    from dataclasses import replace

    odd = replace(BUILT, name="a\x1b[31m[red]", path="build/\x07", decisions=("tensor `x\x1b[2J`",))
    cli.project.result = build_report(odd)
    result = cli("build", "--color", "never")
    assert "\x1b" not in result.text
    assert "\x07" not in result.text
    assert "a\\x1b[31m[red] (ties)" in result.stdout


def test_paths_are_shown_from_where_the_user_is(cli, tmp_path, monkeypatch):
    below = tmp_path / "models" / "base"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    stdout = cli("build").stdout
    assert "path      ../../build/assistant\n" in stdout
    assert stdout.endswith("../../Mergefile.lock updated\n")
