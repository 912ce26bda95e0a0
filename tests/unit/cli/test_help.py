import glob
import shlex

import pytest
from support.checkpoints import random_tensors, write_checkpoint

from mergepipe._version import __version__
from mergepipe.cli.main import mergepipe


def all_commands(command):
    """Yield a command and those below it."""
    yield command
    for member in getattr(command, "commands", {}).values():
        yield from all_commands(member)


COMMANDS = [
    (),
    ("init",),
    ("build",),
    ("plan",),
    ("status",),
    ("cache",),
    ("cache", "info"),
    ("cache", "prune"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help_with_examples(cli, command, flag):
    result = cli(*command, flag)
    assert (result.code, result.stderr) == (0, "")
    examples = result.stdout.partition("\nExamples:\n")[2].splitlines()
    lines = [line for line in examples if line.startswith("  mergepipe ")]
    assert 2 <= len(lines) <= 4
    assert all(line.startswith("  mergepipe ") and " ".join(command) in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_eighty_columns(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, cli(*command, "--help").stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_lists_the_global_options_apart(cli, command):
    common = cli(*command, "--help").stdout.partition("\nGlobal options:\n")[2].partition("\nExamples:")[0]
    for option in ("-C DIR", "--file FILE", "--cache-dir DIR", "--json", "--quiet", "--verbose", "--color", "--debug"):
        assert option in common


def test_help_lists_the_commands_in_order_of_use(cli):
    commands = cli("--help").stdout.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    expected = ["init", "import", "build", "plan", "sweep", "status", "explain", "cache"]
    assert [line.split()[0] for line in commands] == expected
    assert all(line.endswith(".") for line in commands)


@pytest.mark.parametrize("command", [(), ("cache",)], ids=" ".join)
def test_without_a_command_the_help_is_shown(cli, command):
    alone, asked = cli(*command), cli(*command, "--help")
    assert (alone.code, alone.stdout, alone.stderr) == (0, asked.stdout, "")


def test_the_version(cli):
    assert cli("--version").stdout == f"mergepipe {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS[1:], ids=" ".join)
def test_help_opens_no_project(cli, command):
    cli(*command, "--help")
    assert cli.project.opened == {}


CONFIGURATION = """\
merge_method: ties
base_model: models/one
models: [{model: org/name}]
parameters: {weight: 1}
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Work in a folder with what the examples name: checkpoints, a configuration, another project."""
    for name in ("project/models/one", "project/models/name", "project/math", "project/code", "qwen"):
        write_checkpoint(tmp_path / name, random_tensors(1, {"a": (2, 2)}))
    for name in ("project", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "Mergefile.toml").touch()
    (tmp_path / "project" / "ties.yml").write_text(CONFIGURATION, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "project")


@pytest.mark.parametrize("line", [line for command in all_commands(mergepipe) for line, _ in command.examples], ids=str)
def test_examples_are_command_lines_that_work(cli, models, line):
    words = [name for word in shlex.split(line)[1:] for name in (sorted(glob.glob(word)) or [word])]
    if words[0] in ("init", "import"):
        words.append("--force")
    result = cli(*words)
    assert result.code == 0, result.stderr
