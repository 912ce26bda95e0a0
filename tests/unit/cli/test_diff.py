"""What `mergepipe diff` prints, how it ends, and what it says when there is nothing to compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.diffs import NEW, OLD, digest, of_layers, output, source, tensors
from unit.cli.fakes import Runner, clean_variables

from mergepipe.cli.diff_markdown import LIMIT
from mergepipe.lockfile.records import LockedExpert, LockedTensor, Lockfile
from mergepipe.lockfile.writer import render_lock

GOLDEN = Path(__file__).parents[2] / "golden" / "diff"
IDENTITY = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def git(*args: str) -> str:
    return subprocess.run(["git", *args], check=True, capture_output=True, encoding="utf-8").stdout


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a runner of command lines in a folder with two locks."""
    nowhere = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    clean_variables(monkeypatch, nowhere | IDENTITY | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
    monkeypatch.chdir(tmp_path)
    write("old.lock", OLD)
    write("new.lock", NEW)
    return Runner(project=None, capture=capsys)


def write(name: str, lock: Lockfile) -> None:
    Path(name).write_text(render_lock(lock), encoding="utf-8")


@pytest.fixture
def repository(run):
    """Return the runner, in a repository with OLD committed and NEW on the disk."""
    git("init", "-q", "-b", "main")
    Path("Mergefile.toml").write_text("version = 1\n", encoding="utf-8")
    write("Mergefile.lock", OLD)
    git("add", "Mergefile.toml", "Mergefile.lock")
    git("commit", "-qm", "one")
    write("Mergefile.lock", NEW)
    return run


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "file"), [("text", "diff.txt"), ("markdown", "diff.md")])
def test_prints_causes_and_what_follows(run, form, file):
    result = run("diff", "old.lock", "new.lock", "--format", form)
    assert (result.code, result.stderr) == (1, "")
    assert_golden(file, result.stdout)


def test_verbose_text_has_all_that_is_declared(run):
    assert_golden("verbose.txt", run("diff", "old.lock", "new.lock", "-v").stdout)


def test_json_has_everything(run):
    result = run("diff", "old.lock", "new.lock", "--format", "json")
    assert (result.code, result.stderr) == (1, "")
    assert result.stdout == run("diff", "old.lock", "new.lock", "--json").stdout
    assert_golden("diff.json", json.dumps(json.loads(result.stdout), indent=1) + "\n")


def keys_of(value) -> set[str]:
    """Return the keys of JSON data, those of mappings from names left out."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(member) for key, member in value.items() if key not in ("modules", "bound"))
    return set(value).union(*inner)


def test_every_key_of_the_json_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("## `diff`")[2].partition("\n## ")[0]
    keys = keys_of(json.loads((GOLDEN / "diff.json").read_text(encoding="utf-8")))
    assert len(keys) > 30
    assert [key for key in sorted(keys) if f"`{key}`" not in section] == []


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_says_that_nothing_differs(run, form):
    result = run("diff", "old.lock", "old.lock", "--format", form)
    assert (result.code, result.stderr) == (0, "")
    assert (
        result.stdout
        == {
            "text": "no differences between old.lock and old.lock\n",
            "markdown": "### mergepipe: no differences between `old.lock` and `old.lock`\n",
        }[form]
    )
    assert json.loads(run("diff", "old.lock", "old.lock", "--json").stdout)["equal"] is True


def test_an_expert_in_place_of_another_is_told_with_its_parameters(run):
    (entry,) = (o for o in OLD.outputs if o.name == "average")
    experts = (entry.experts[0], LockedExpert(source="chat", params={"weight": 0.4}))
    write("a.lock", OLD)
    write("b.lock", replace(OLD, outputs=(*(o for o in OLD.outputs if o != entry), replace(entry, experts=experts))))
    assert "  experts  math, code -> math, chat (weight 0.4)\n" in run("diff", "a.lock", "b.lock").stdout


def test_quiet_says_it_by_the_exit_code_alone(run):
    assert (run("-q", "diff", "old.lock", "new.lock").stdout, run("-q", "diff", "old.lock", "new.lock").code) == ("", 1)


def test_colour_adds_nothing_but_colour(run):
    import click

    coloured = run("--color", "always", "diff", "old.lock", "new.lock").stdout
    assert "\x1b[" in coloured
    assert click.unstyle(coloured) == run("diff", "old.lock", "new.lock").stdout


# --- hostile and large -----------------------------------------------------------------------------------------------

HOSTILE = "model.layers.0.`x`|@team <img src=x> [a](http://b) \\ **bold**.weight\x1b[31m\u202e"


def hostile_locks() -> None:
    found = (LockedTensor(name=HOSTILE, digest=digest("1"), read=1, total=1),)
    before = output(HOSTILE, {"base": digest("base 1")}, found)
    after = replace(before, tensors=(replace(found[0], digest=digest("2")),), digest=digest("3"), operator=HOSTILE)
    sources = (source("base"), source(HOSTILE))
    write("a.lock", Lockfile(geometry=1, sources=sources, outputs=(before,)))
    write("b.lock", Lockfile(geometry=1, sources=(source("base"), source(HOSTILE, 2)), outputs=(after,)))


def test_names_do_nothing_to_a_terminal(run):
    hostile_locks()
    shown = run("diff", "a.lock", "b.lock").stdout
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "@team" in shown


def test_names_do_nothing_to_a_comment(run):
    hostile_locks()
    shown = run("diff", "a.lock", "b.lock", "--format", "markdown").stdout
    outside = re.sub(r"`[^`\n]*`", "", shown)  # what is left has no code spans
    assert "@" not in outside
    assert "<img" not in outside
    assert "http:" not in outside
    assert "**bold" not in outside
    assert {line.count("|") for line in shown.splitlines() if line.startswith("| ")} <= {5, 7}
    assert shown.count("<details>") == shown.count("</details>") == 1


def large_lock(version: str) -> Lockfile:
    """Return a lock of many outputs with many tensors that have nothing in common."""
    outputs = []
    for number in range(60):
        names = [f"block{i}.{'part' * 20}{i}.weight" for i in range(40)]
        found = tuple(LockedTensor(name=n, digest=digest(f"{number} {n} {version}"), read=1, total=1) for n in names)
        outputs.append(output(f"output-{number}", {"base": digest("base 1")}, found))
    sources = [source("base"), *(source(f"source-{i}", int(version)) for i in range(300))]
    return Lockfile(geometry=1, sources=tuple(sources), outputs=tuple(outputs))


def test_a_comment_is_cut_where_github_would_not_take_it(run):
    write("a.lock", large_lock("1"))
    write("b.lock", large_lock("2"))
    shown = run("diff", "a.lock", "b.lock", "--format", "markdown").stdout
    assert LIMIT * 0.8 < len(shown.encode()) <= LIMIT < 65_536
    assert "| … and 20 more |" in shown
    assert "| … and 260 more |" in shown
    assert re.search(r"… and details of [0-9]+ more outputs$", shown.strip())
    assert shown.count("<details>") == shown.count("</details>") > 1


# --- what is compared ------------------------------------------------------------------------------------------------


def compared(result) -> tuple[int, str, str]:
    found = json.loads(result.stdout)
    return result.code, found["old"]["name"], found["new"]["name"]


def test_the_committed_lock_and_the_one_on_disk_by_default(repository):
    assert compared(repository("diff", "--json")) == (1, "HEAD", "Mergefile.lock")
    git("commit", "-qam", "two")
    assert repository("diff").code == 0
    assert compared(repository("diff", "HEAD~1", "--json")) == (1, "HEAD~1", "Mergefile.lock")
    assert compared(repository("diff", "HEAD~1", "main", "--json")) == (1, "HEAD~1", "main")


def test_works_from_anywhere_in_the_project(repository, monkeypatch, tmp_path):
    text = repository("diff").stdout
    Path("sub/deep").mkdir(parents=True)
    monkeypatch.chdir("sub/deep")
    assert repository("diff").stdout.splitlines()[1:] == text.splitlines()[1:]
    assert repository("diff", "HEAD:Mergefile.lock").code == 1
    monkeypatch.chdir("/")
    assert repository("-C", str(tmp_path), "diff").stdout == text
    assert repository("-f", str(tmp_path / "Mergefile.toml"), "diff").code == 1


def test_the_lock_of_another_mergefile(repository):
    Path("other").mkdir()
    write("other/Two.lock", NEW)
    git("add", "other")
    git("commit", "-qm", "two")
    write("other/Two.lock", OLD)
    assert compared(repository("-f", "other/Two.toml", "diff", "--json")) == (1, "HEAD", "other/Two.lock")
    assert compared(repository("diff", "HEAD:other/Two.lock", "HEAD:./Mergefile.lock", "--json"))[0] == 1


def test_works_in_a_linked_worktree(repository, tmp_path, monkeypatch):
    git("worktree", "add", "-q", str(tmp_path / "linked"), "-b", "linked")
    monkeypatch.chdir(tmp_path / "linked")
    assert repository("diff").code == 0
    write("Mergefile.lock", NEW)
    assert compared(repository("diff", "--json")) == (1, "HEAD", "Mergefile.lock")


def test_works_in_a_hook_of_a_linked_worktree(repository, tmp_path, monkeypatch):
    Path("sub").mkdir()
    for name in ("Mergefile.toml", "Mergefile.lock"):
        Path(name).rename(f"sub/{name}")
    git("add", "-A")
    git("commit", "-qm", "two")
    git("worktree", "add", "-q", str(tmp_path / "linked"), "-b", "linked")
    monkeypatch.chdir(tmp_path / "linked" / "sub")
    monkeypatch.setenv("GIT_DIR", git("rev-parse", "--absolute-git-dir").strip())
    assert repository("diff").code == 0
    monkeypatch.chdir(tmp_path / "sub")
    monkeypatch.setenv("GIT_DIR", "../.git")
    monkeypatch.setenv("GIT_INDEX_FILE", "../.git/index")
    assert repository("diff", ":sub/Mergefile.lock").code == 0


def test_a_path_that_exists_wins_over_a_revision(repository):
    git("branch", "release")
    write("release", NEW)
    assert json.loads(repository("diff", "release", "new.lock", "--json").stdout)["old"]["kind"] == "lock"
    forced = json.loads(repository("diff", "rev:release", "new.lock", "--json").stdout)
    assert (forced["old"], forced["equal"]) == ({"name": "release", "kind": "revision"}, False)
    both = json.loads(repository("diff", "--rev", "release", "main", "--json").stdout)
    assert (both["old"]["kind"], both["new"]["kind"], both["equal"]) == ("revision", "revision", True)


def test_the_index_and_files_in_git(repository):
    git("add", "Mergefile.lock")
    assert json.loads(repository("diff", ":Mergefile.lock", "--json").stdout)["equal"] is True
    assert repository("diff", "HEAD:Mergefile.lock", "new.lock").code == 1
    assert repository("diff", "HEAD:", "old.lock").code == 0


def test_ranges_of_revisions(repository):
    git("checkout", "-q", "-b", "topic")
    git("commit", "-qam", "two")
    git("checkout", "-q", "main")
    moved = replace(OLD, sources=OLD.sources[:3])
    write("Mergefile.lock", moved)
    git("commit", "-qam", "three")
    base = git("rev-parse", "--short", "HEAD~1").strip()
    assert compared(repository("diff", "main..topic", "--json")) == (1, "main", "topic")
    assert compared(repository("diff", "main...topic", "--json")) == (1, base, "topic")
    assert (
        repository("diff", "main...topic", "--json").stdout.partition('"sources"')[2]
        == repository("diff", base, "topic", "--json").stdout.partition('"sources"')[2]
    )
    assert compared(repository("diff", "topic..", "--json")) == (1, "topic", "HEAD")
    Path("a..b").mkdir()
    write("a..b/Mergefile.lock", moved)
    assert compared(repository("diff", "a..b", "--json")) == (0, "a..b", "Mergefile.lock")
    assert "`nothing` is not a git revision" in repository("diff", "main...nothing").stderr


def test_no_lock_stands_for_nothing(run):
    found = json.loads(run("diff", "/dev/null", "new.lock", "--json").stdout)
    assert {item["change"] for item in (*found["sources"], *found["outputs"])} == {"added"}
    assert run("diff", "/dev/null", "/dev/null").code == 0


def test_a_folder_stands_for_its_lock(run):
    Path("a").mkdir()
    write("a/Mergefile.lock", OLD)
    assert run("diff", "a", "old.lock").code == 0


def test_the_mergefile_need_not_be_right(repository):
    Path("Mergefile.toml").write_text("<<<<<<< ours\n", encoding="utf-8")
    assert repository("diff").code == 1


# --- errors ----------------------------------------------------------------------------------------------------------


def conflict(lock: str) -> str:
    return lock.replace("geometry = 1", "<<<<<<< ours\ngeometry = 1\n=======\ngeometry = 2\n>>>>>>> theirs")


def spoil(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


PROBLEMS = [
    "no repository",
    "no commit",
    "no lock on disk",
    "no lock in the revision",
    "neither file nor revision",
    "unknown revision",
    "unknown path in a revision",
    "a branch with the name of a folder",
    "conflict marks",
    "a newer version",
    "a mergefile",
    "not a manifest",
    "formats that exclude each other",
]


def provoke(run, problem: str):
    text = render_lock(OLD)
    match problem:
        case "no repository":
            spoil("Mergefile.toml", "version = 1\n")
            return run("diff")
        case "conflict marks":
            spoil("old.lock", conflict(text))
        case "a newer version":
            spoil("old.lock", text.replace("version = 1\n", "version = 2\n", 1))
        case "a mergefile":
            spoil("Mergefile.toml", "version = 1\n")
            return run("diff", "Mergefile.toml", "new.lock")
        case "not a manifest":
            spoil("mergepipe.json", "{}")
            return run("diff", "mergepipe.json", "new.lock")
        case "formats that exclude each other":
            return run("diff", "--json", "--format", "text", "old.lock", "new.lock")
        case _:
            return provoke_in_git(run, problem)
    return run("diff", "old.lock", "new.lock")


def provoke_in_git(run, problem: str):
    git("init", "-q", "-b", "main")
    spoil("Mergefile.toml", "version = 1\n")
    if problem == "no commit":
        return run("diff")
    git("add", "Mergefile.toml")
    git("commit", "-qm", "one")
    if problem == "no lock in the revision":
        write("Mergefile.lock", OLD)
        return run("diff")
    if problem == "no lock on disk":
        return run("diff", "old.lock")
    if problem == "a branch with the name of a folder":
        git("branch", "docs")
        Path("docs").mkdir()
        return run("diff", "docs", "old.lock")
    words = {
        "neither file nor revision": "HAED",
        "unknown revision": "rev:HAED",
        "unknown path in a revision": "HEAD:nowhere/Mergefile.lock",
    }
    return run("diff", words[problem], "old.lock")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_says_why_nothing_can_be_compared(run, tmp_path, problem):
    result = provoke(run, problem)
    assert (result.code, result.stdout) == (2, "")
    (GOLDEN / "errors").mkdir(exist_ok=True)
    assert_golden(f"errors/{problem.replace(' ', '-')}.txt", result.stderr.replace(str(tmp_path), "/project"))


@pytest.mark.parametrize("in_git", [False, True])
def test_the_name_of_an_output_that_was_built_is_answered_with_its_directory(run, in_git):
    if in_git:
        git("init", "-q", "-b", "main")
        git("commit", "-qm", "one", "--allow-empty")
    spoil("Mergefile.toml", "version = 1\n")
    Path("build/merged").mkdir(parents=True)
    spoil("build/merged/mergepipe.json", "{}")
    result = run("diff", "merged", "old.lock")
    assert result.code == 2
    assert result.stderr.endswith("\nhint: the output of this name is `build/merged`\n")
    assert "build" not in run("diff", "other", "old.lock").stderr


def test_in_a_shallow_clone_the_hint_says_how_to_get_the_rest(repository, tmp_path, monkeypatch):
    git("commit", "-qam", "two")
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}", str(tmp_path / "shallow"))
    asked = (["HEAD~1"], ["rev:HEAD~1"], ["HEAD~1:Mergefile.lock"], ["origin/topic...HEAD"], ["HEAD~1..HEAD"])
    assert "unshallow" not in repository("diff", "HEAD~7").stderr
    monkeypatch.chdir(tmp_path / "shallow")
    for words in asked:
        result = repository("diff", *words)
        assert (result.code, result.stdout) == (2, "")
        assert "`git fetch --unshallow` gets the rest" in result.stderr, words
        assert "fetch-depth: 0" in result.stderr


def test_without_git_two_files_can_be_compared(run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run("diff", "old.lock", "new.lock").code == 1
    refused = run("diff", "HEAD", "new.lock")
    assert refused.code == 2
    spoil("Mergefile.toml", "version = 1\n")
    refused = run("diff")
    assert refused.code == 2
    assert "error: the command `git` is not found" in refused.stderr


@pytest.mark.parametrize("name", ["", "-x", "--output=x", "a b", "\x1b[31m", "HEAD..main", "@{u}", "x\0y", "rev:", ":"])
def test_odd_names_are_errors_like_any_other(repository, name):
    result = repository("diff", "--", name, "old.lock")
    assert result.code == 2
    assert "internal error" not in result.stderr
    assert "\x1b" not in result.stderr


def test_an_error_of_ours_does_not_look_like_a_difference(run, monkeypatch):
    import mergepipe.project.diff as module

    monkeypatch.setattr(module, "diff_sides", lambda *_: 1 / 0)
    result = run("diff", "old.lock", "new.lock", "--json")
    assert result.code == 2
    assert json.loads(result.stderr)["error"]["kind"] == "internal"


def test_the_examples_of_the_help_work(repository):
    git("commit", "-qam", "two")
    for line in ("diff", "diff main HEAD", "diff --format markdown main"):
        assert repository(*line.split()).code in (0, 1)


def test_changes_of_layers_can_be_made_for_tests():
    assert list(of_layers(range(1), "a")) == ["model.layers.0.a.weight"]
    assert len(tensors("x", {"lm_head.weight": ""})) == len(tensors("x")) - 1
