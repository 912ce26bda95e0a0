import json
import re

import pytest
from unit.cli.fakes import assert_golden

from mergepipe._version import __version__
from mergepipe.cli.main import mergepipe as command_line
from mergepipe.errors import (
    CollectedErrors,
    FormatError,
    InternalError,
    MergefileError,
    PlanError,
    SourceError,
    raise_collected,
)

SEVERAL = CollectedErrors(
    [
        MergefileError(
            "Mergefile.toml:14: outputs.assistant.experts[1].wieght: unknown key\n  expected one of `weight`, `on`",
            hint="did you mean `weight`?",
            line=14,
        ),
        PlanError("tensor `a.b` has shapes that differ\nbase: (4, 3)\nmath: (5, 3)"),
        SourceError(
            "source `old`: `models/old` holds no safetensors weights, only `pytorch_model.bin`",
            hint="convert it once:\n    import torch\n    save_file(state)",
        ),
    ]
)
UNITS = "(write a number and a unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"


def stable(text):
    """Return a text without the versions."""
    return re.sub(r"mergepipe \S+, Python \S+", "mergepipe VERSION, Python VERSION", text)


def test_one_error_with_facts_and_a_hint(cli):
    cli.project.result = MergefileError("first line\nsecond\n  third", hint="do this")
    assert cli("build").stderr == "error: first line\n  second\n    third\nhint: do this\n"


def test_several_errors_are_shown_in_turn_and_counted(cli):
    cli.project.result = SEVERAL
    result = cli("build")
    assert (result.code, result.stdout) == (2, "")
    assert_golden("errors.txt", result.stderr)


def test_several_errors_in_colour(cli):
    cli.project.result = SEVERAL
    assert_golden("errors-colour.txt", cli("build", "--color", "always").stderr)


def test_several_errors_with_json_are_one_line(cli):
    cli.project.result = SEVERAL
    result = cli("build", "--json")
    assert result.stderr.count("\n") == 1
    assert json.loads(result.stderr) == {"error": SEVERAL.as_json()}
    assert result.stdout == ""


def test_facts_of_an_error_are_in_its_json(cli):
    cli.project.result = FormatError("tensors overlap", rule="overlap", hint="download it again", tensor="a.b")
    assert json.loads(cli("plan", "--json").stderr) == {
        "error": {
            "kind": "format",
            "message": "tensors overlap",
            "hint": "download it again",
            "rule": "overlap",
            "tensor": "a.b",
        }
    }


def test_facts_that_json_does_not_know_are_text(cli, tmp_path):
    cli.project.result = SourceError("gone", path=tmp_path, share=float("inf"), shape=(1, 2))
    error = json.loads(cli("plan", "--json").stderr)["error"]
    assert (error["path"], error["share"], error["shape"]) == (str(tmp_path), None, [1, 2])


def test_quiet_still_prints_errors(cli):
    cli.project.result = SourceError("gone")
    assert cli("-q", "build").stderr == "error: gone\n"


def test_control_characters_in_messages_are_escaped(cli):
    cli.project.result = SourceError("tensor `\x1b]0;title\x07`\nline \r two", hint="\x1b[2J")
    assert cli("build").stderr == "error: tensor `\\x1b]0;title\\x07`\n  line \\r two\nhint: \\x1b[2J\n"


def test_an_unexpected_exception_is_an_internal_error_without_traceback(cli):
    cli.project.result = ValueError("boom")
    result = cli("build")
    assert result.code == 1
    assert f"mergepipe {__version__}, Python 3." in result.stderr
    assert_golden("internal-error.txt", stable(result.stderr))


def test_an_unexpected_exception_with_debug_has_a_traceback(cli):
    cli.project.result = ValueError("boom")
    stderr = cli("build", "--debug").stderr
    assert stderr.startswith("Traceback (most recent call last):\n")
    assert "\nValueError: boom\nerror: internal error: ValueError: boom\n" in stderr
    assert stderr.endswith("hint: please report this, with the traceback above\n")


def test_an_expected_error_has_a_traceback_with_debug_only(cli):
    cli.project.result = SourceError("gone")
    assert "Traceback" not in cli("build").stderr
    assert "Traceback" in cli("build", "--debug").stderr


def test_an_unexpected_exception_with_json(cli):
    cli.project.result = ValueError("boom")
    result = cli("--json", "build")
    error = json.loads(result.stderr)["error"]
    assert (result.code, error["kind"], error["version"]) == (1, "internal", __version__)


def test_a_broken_promise_is_called_an_internal_error(cli):
    cli.project.result = InternalError("read 5 bytes, planned 4", output="assistant")
    result = cli("build")
    assert result.stderr.startswith(f"error: internal error: read 5 bytes, planned 4\n  mergepipe {__version__}")
    assert json.loads(cli("build", "--json").stderr)["error"]["output"] == "assistant"


def test_what_the_operating_system_refuses_is_no_internal_error(cli):
    cli.project.result = PermissionError(13, "Permission denied", "/models/a")
    result = cli("build")
    assert result.code == 1
    assert result.stderr == (
        "error: cannot use `/models/a`: Permission denied\nhint: check the permissions of the path\n"
    )


def test_an_interrupt_outside_of_a_build(cli):
    cli.project.result = KeyboardInterrupt()
    result = cli("status")
    assert (result.code, result.stderr) == (130, "error: interrupted\n")


def test_a_collection_of_one_has_no_count(cli):
    cli.project.result = CollectedErrors([SourceError("gone", hint="look")])
    assert cli("build").stderr == "error: gone\nhint: look\n"


def test_errors_collected_twice_are_counted_once(cli):
    with pytest.raises(CollectedErrors) as caught:
        raise_collected([SEVERAL, SourceError("gone")])
    cli.project.result = caught.value
    assert cli("build").stderr.endswith("\nerror: gone\n\n4 problems found\n")


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (("bild",), "no such command: `bild`", "did you mean `build`?"),
        (("zzz",), "no such command: `zzz`", f"commands are: {', '.join(command_line.commands)}"),
        (("cache", "inof"), "no such command: `inof`", "did you mean `info`?"),
        (("build", "--lokced"), "no such option: `--lokced`", "did you mean `--locked`?"),
        (("build", "--cachedir", "x"), "no such option: `--cachedir`", "did you mean `--cache-dir`?"),
        (("build", "--zzz"), "no such option: `--zzz`", "see `mergepipe build --help`"),
        (
            ("--locked", "build"),
            "no such option: `--locked`",
            "it belongs after its command: `mergepipe build --locked`",
        ),
        (
            ("build", "-j", "0"),
            "invalid value for `-j` / `--workers`: 0 is not in the range x>=1",
            "see `mergepipe build --help`",
        ),
        (
            ("build", "-j", "two"),
            "invalid value for `-j` / `--workers`: `two` is not a whole number",
            "see `mergepipe build --help`",
        ),
        (
            ("build", "--memory", "much"),
            f"invalid value for `--memory`: not a size: `much` {UNITS}",
            "see `mergepipe build --help`",
        ),
        (("cache", "info", "x"), "got unexpected extra argument (x)", "see `mergepipe cache info --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line(cli, argv, message, hint):
    result = cli(*argv)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\nhint: {hint}\n"
    as_json = cli(*argv, "--json")
    assert (as_json.code, as_json.stdout) == (2, "")
    assert json.loads(as_json.stderr) == {"error": {"kind": "usage", "message": message, "hint": hint}}


def test_json_after_two_dashes_is_no_flag(cli):
    assert cli("build", "--zzz", "--", "--json").stderr.startswith("error: ")


def test_json_without_a_command_is_an_error(cli):
    result = cli("--json")
    assert result.code == 2
    assert json.loads(result.stderr)["error"]["message"] == "no command is given"
