"""The manuals of the commands: complete, in one form, true."""

import glob
import json
import re
import shlex
from pathlib import Path

import click
import pytest
from support.checkpoints import random_tensors, write_checkpoint

import mergepipe as mergepipe_package
from mergepipe._version import __version__
from mergepipe.cli.help_facts import MANUALS, VARIABLES
from mergepipe.cli.main import mergepipe


def all_commands(command):
    """Yield a command and those below it."""
    yield command
    for member in getattr(command, "commands", {}).values():
        yield from all_commands(member)


def words_of(command, words=()):
    """Yield the words of every command, the program's own (none) first."""
    yield words
    for name, member in getattr(command, "commands", {}).items():
        yield from words_of(member, (*words, name))


COMMANDS = list(words_of(mergepipe))
SECTIONS = ("Commands", "Options", "Global options", "Exit codes", "Files", "Environment", "Examples", "See also")


def sections(text):
    """Return the lines of the sections of a manual, by their titles in order."""
    found, lines = {}, []
    for line in text.splitlines():
        if line.removesuffix(":") in SECTIONS:
            lines = found.setdefault(line.removesuffix(":"), [])
        elif line:
            lines.append(line)
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help_with_examples(cli, command, flag):
    result = cli(*command, flag)
    assert (result.code, result.stderr) == (0, "")
    lines = [line for line in sections(result.stdout)["Examples"] if line.startswith("  mergepipe ")]
    assert 2 <= len(lines) <= 5
    assert any(" ".join(command) in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_manual_has_its_sections_in_one_order(cli, command):
    text = cli(*command, "--help").stdout
    found = sections(text)
    assert list(found) == [title for title in SECTIONS if title in found]
    assert {"Global options", "Exit codes", "Examples"} <= set(found)
    summary = text.split("\n\n")[1].strip()
    assert summary[0].isupper()
    assert summary.endswith(".")


def test_there_is_a_manual_for_each_command_and_no_other():
    assert set(MANUALS) == {" ".join(words) for words in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_exit_codes_are_told_for_each_command(cli, command):
    lines = sections(cli(*command, "--help").stdout)["Exit codes"]
    codes = [int(line.split()[0]) for line in lines if line[2] != " "]
    assert codes == sorted({0, 1, 2, 130, *codes})
    assert set(codes) <= {0, 1, 2, 3, 130}
    assert (3 in codes) == (command in [(), ("build",), ("git", "check")])


@pytest.mark.parametrize("words", MANUALS)
def test_what_a_manual_refers_to_is_there(words):
    manual = MANUALS[words]
    root = Path(__file__).parents[3]
    for line in manual.see_also:
        if line.startswith("docs/"):
            assert (root / line).is_file(), line
        elif line != "mergepipe help COMMAND":
            command = mergepipe
            for word in line.split()[1:]:
                command = command if word.startswith("-") else command.commands[word]
    assert set(manual.environment) <= set(VARIABLES)


def test_every_variable_of_the_environment_is_told():
    package = Path(mergepipe_package.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(MERGEPIPE_[A-Z_]+)"', text)}
    ours_alone = {"MERGEPIPE_CRASH_POINT", "MERGEPIPE_NO_EXCHANGE"}  # for tests
    assert named - ours_alone <= set(VARIABLES)
    told = {name for manual in MANUALS.values() for name in manual.environment}
    assert told == set(VARIABLES)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_and_the_option_say_the_same(cli, command):
    asked, option = cli("help", *command), cli(*command, "--help")
    assert (asked.code, asked.stdout) == (0, option.stdout)
    shown = json.loads(cli("help", *command, "--json").stdout)
    assert shown == {"command": " ".join(["mergepipe", *command]), "help": option.stdout.rstrip("\n")}


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["biuld"], "did you mean `build`?"), (["cache", "prun"], "did you mean `prune`?"), (["build", "x"], None)],
)
def test_help_of_what_is_no_command_is_refused(cli, words, hint):
    result = cli("help", *words)
    assert result.code == 2
    assert result.stderr.startswith(f"error: no such command: `mergepipe {' '.join(words)}`\n")
    assert hint is None or hint in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_eighty_columns(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, cli(*command, "--help").stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_lists_the_global_options_apart(cli, command):
    common = cli(*command, "--help").stdout.partition("\nGlobal options:\n")[2].partition("\nExit codes:")[0]
    for option in ("-C DIR", "--file FILE", "--cache-dir DIR", "--json", "--quiet", "--verbose", "--color", "--debug"):
        assert option in common


def test_help_lists_the_commands_in_order_of_use(cli):
    commands = cli("--help").stdout.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    commands = [line for line in commands if line[2] != " "]
    expected = ["init", "import", "build", "plan", "sweep", "status", "explain", "report", "diff", "verify", "replay"]
    assert [line.split()[0] for line in commands] == [*expected, "pack", "git", "cache", "completion", "help"]


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


EXAMPLES = [line for command in all_commands(mergepipe) for line, _ in command.examples]
# What the fake project can do; the others are run on real ones in their own tests.
FAKED = ("init", "import", "build", "plan", "sweep", "status", "cache", "completion", "help")


def arguments(line):
    """Return the words behind the program's name, up to what is the shell's."""
    words = shlex.split(line)[1:]
    return words[: next((number for number, word in enumerate(words) if word.startswith((">", "&&", "|"))), None)]


@pytest.mark.parametrize("line", EXAMPLES, ids=str)
def test_examples_are_command_lines_of_what_there_is(line):
    context = mergepipe.make_context("mergepipe", arguments(line), resilient_parsing=False)
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, command, rest = context.command.resolve_command(context, rest)
        if "--help" in rest:
            break
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("line", [line for line in EXAMPLES if arguments(line)[0] in FAKED], ids=str)
def test_examples_are_command_lines_that_work(cli, models, line):
    words = [name for word in arguments(line) for name in (sorted(glob.glob(word)) or [word])]
    if words[0] in ("init", "import"):
        words.append("--force")
    result = cli(*words)
    assert result.code == 0, result.stderr
