import json
from pathlib import Path

import pytest

GLOBAL = [("--json",), ("-q",), ("--quiet",), ("-v",), ("--verbose",), ("--color", "always"), ("--debug",)]


@pytest.mark.parametrize("flags", GLOBAL, ids=" ".join)
@pytest.mark.parametrize(
    "command", [("build",), ("plan",), ("status",), ("cache", "info"), ("cache", "prune")], ids=" ".join
)
def test_global_flags_mean_the_same_before_and_after_the_command(cli, command, flags):
    before, after = cli(*flags, *command), cli(*command, *flags)
    assert (before.code, after.code) == (0, 0)
    assert before == after
    # The cache has nothing to say in more words or in colour.
    if flags[0] in ("--json", "-q", "--quiet") or (flags[0] == "--color" and command[0] != "cache"):
        assert before != cli(*command)


def test_a_flag_between_a_group_and_its_command_counts(cli):
    assert json.loads(cli("cache", "--json", "info").stdout)["packs"] == 3


def test_of_two_values_the_later_wins(cli):
    assert "\x1b" not in cli("--color", "always", "status", "--color", "never").stdout
    assert "\x1b" in cli("--color", "never", "status", "--color", "always").stdout


@pytest.mark.parametrize("before", [True, False])
def test_c_works_as_if_started_there(cli, tmp_path, monkeypatch, before):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    directory = ("-C", "..")
    argv = (*directory, "build") if before else ("build", *directory)
    assert cli(*argv, "--cache-dir", "cache").code == 0
    assert cli.project.opened["cwd"] == tmp_path
    assert cli.project.opened["path"] == Path("Mergefile.toml")
    assert cli.project.opened["cache_dir"] == Path("cache")
    assert Path.cwd() == home


def test_c_names_a_directory_that_is_not_there(cli):
    result = cli("-C", "nowhere", "build")
    assert result.code == 2
    assert result.stderr == "error: cannot work in `nowhere`: No such file or directory\n"
    assert cli.project.opened == {}


@pytest.mark.parametrize("argv", [("-f", "other.toml", "build"), ("build", "--file", "other.toml")], ids=" ".join)
def test_file_names_another_mergefile(cli, argv):
    cli(*argv)
    assert cli.project.opened["path"] == Path("other.toml")


def test_the_nearest_mergefile_above_is_used(cli, tmp_path, monkeypatch):
    below = tmp_path / "models" / "base"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert cli("status").code == 0
    assert cli.project.opened["path"] == Path("../../Mergefile.toml")


def test_no_mergefile_at_all(cli, tmp_path):
    (tmp_path / "Mergefile.toml").unlink()
    result = cli("build")
    assert result.code == 2
    assert result.stderr == (
        f"error: there is no `Mergefile.toml` in `{tmp_path}` or above\n"
        "hint: `mergepipe init` writes one, `--file` names another\n"
    )


def test_a_mergefile_of_another_spelling_is_pointed_out(cli, tmp_path):
    (tmp_path / "Mergefile.toml").rename(tmp_path / "mergefile.toml")
    assert "hint: the file `mergefile.toml` must be called `Mergefile.toml`\n" in cli("build").stderr


@pytest.mark.parametrize("argv", [["--cache-dir=~/cache", "build"], ["build"]])
def test_a_tilde_that_no_shell_expanded_is_the_home_directory(cli, monkeypatch, tmp_path, argv):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MERGEPIPE_CACHE_DIR", "~/cache")
    assert cli(*argv).code == 0
    assert cli.project.opened["cache_dir"] == tmp_path / "cache"


def test_cache_directory_from_the_environment(cli, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_CACHE_DIR", "/tmp/shared-cache")
    cli("build")
    assert cli.project.opened["cache_dir"] == Path("/tmp/shared-cache")


@pytest.mark.parametrize("argv", [("--cache-dir", "mine", "build"), ("build", "--cache-dir", "mine")], ids=" ".join)
def test_cache_directory_of_the_command_line_comes_first(cli, monkeypatch, argv):
    monkeypatch.setenv("MERGEPIPE_CACHE_DIR", "/tmp/shared-cache")
    cli(*argv)
    assert cli.project.opened["cache_dir"] == Path("mine")


def test_an_empty_cache_variable_is_none(cli, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_CACHE_DIR", "")
    cli("build")
    assert cli.project.opened["cache_dir"] is None


def test_no_colour_where_stdout_is_no_terminal(cli):
    assert "\x1b" not in cli("build").text


def test_colour_where_it_is_forced(cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in cli("status").stdout


@pytest.mark.parametrize(("value", "coloured"), [("1", False), ("", True)])
def test_no_color_is_respected_unless_it_is_empty(cli, monkeypatch, value, coloured):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", value)
    assert ("\x1b" in cli("status").stdout) is coloured


def test_the_command_line_overrides_no_color(cli, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" in cli("status", "--color=always").stdout
