"""`mergepipe git`: drivers that real git calls, in real repositories, and a check that opens nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.cli import run_process
from support.diffs import digest, of_layers, output, source, tensors
from unit.cli.fakes import Runner, clean_variables

from mergepipe.lockfile.reader import read_lock
from mergepipe.lockfile.records import Lockfile
from mergepipe.lockfile.writer import render_lock

SOURCES = {name: source(name).digest for name in ("base", "code", "math")}
NAMES = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
LINE = "Mergefile.lock diff=mergepipe merge=mergepipe"
NOWHERE = "/nonexistent/python"


@dataclass
class Repository:
    """A repository, and a PATH on which mergepipe may be."""

    root: Path
    path: Path
    runner: Runner

    def run(self, line: str, *, code: int | None = 0):
        """Run a shell line in it."""
        environment = dict.fromkeys(NAMES, "a@b.c") | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "PATH": f"{self.path}{os.pathsep}/usr/bin{os.pathsep}/bin",
        }
        result = run_process(["/bin/sh", "-c", line], self.root, environment)
        assert code is None or result.code == code, f"{line}\n{result.text}"
        return result

    def tool(self, line: str, *, code: int = 0, folder: str = "."):
        """Run mergepipe in this process, in a folder of the repository."""
        with contextlib.chdir(self.root / folder):
            result = self.runner(*shlex.split(line))
        assert result.code == code, f"{line}\n{result.text}"
        return result

    @property
    def lock(self) -> Path:
        return self.root / "Mergefile.lock"

    def commit(self, message: str, lock: Lockfile) -> None:
        self.lock.write_text(render_lock(lock), encoding="utf-8")
        self.run(f"git add -A && git commit -qm {message}")

    def without_python(self) -> None:
        """Make as if the environment that registered the drivers were gone."""
        for key in ("diff.mergepipe.command", "merge.mergepipe.driver"):
            value = self.run(f"git config {key}").stdout.strip()
            self.run(f"git config {key} {shlex.quote(value.replace(sys.executable, NOWHERE))}")
        (self.path / "mergepipe").unlink()


@pytest.fixture
def repository(tmp_path, monkeypatch, capsys):
    """Return an empty repository; `mergepipe` is on the PATH."""
    clean_variables(monkeypatch, {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull})
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "mergepipe"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mergepipe "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    (tmp_path / "project").mkdir()
    found = Repository(tmp_path / "project", tmp_path / "bin", Runner(project=None, capture=capsys))
    found.run("git init -q -b main")
    return found


def lock(left: str = "1", right: str = "1", **versions: int) -> Lockfile:
    """Return a lock of two outputs, each in some version."""
    outputs = [
        output(name, SOURCES, tensors(name, of_layers(range(2), "mlp.up_proj") if version != "1" else None))
        for name, version in (("left", left), ("right", right))
    ]
    outputs = [replace(entry, params={"seed": version}) for entry, version in zip(outputs, (left, right), strict=True)]
    return Lockfile(
        geometry=1, sources=tuple(source(name, versions.get(name, 1)) for name in SOURCES), outputs=tuple(outputs)
    )


# --- setup -----------------------------------------------------------------------------------------------------------


def test_setup_registers_once_and_can_be_undone(repository):
    before = (repository.root / ".git/config").read_text(encoding="utf-8")
    missing = repository.tool("git setup --check", code=1)
    assert f"missing {LINE}" in missing.stdout
    first = repository.tool("git setup")
    assert f"set {LINE}" in first.stdout
    assert (repository.root / ".gitattributes").read_text(encoding="utf-8") == f"{LINE}\n"
    configuration = (repository.root / ".git/config").read_text(encoding="utf-8")
    again = repository.tool("git setup --json")
    assert json.loads(again.stdout) | {"root": ""} == {"root": "", "state": "complete", "changed": [], "missing": []}
    assert (repository.root / ".git/config").read_text(encoding="utf-8") == configuration
    repository.tool("git setup --check")
    repository.tool("git setup --remove")
    assert (repository.root / ".git/config").read_text(encoding="utf-8") == before
    assert not (repository.root / ".gitattributes").exists()
    assert "nothing to remove" in repository.tool("git setup --remove").stdout


@pytest.mark.parametrize("other", ["*.png binary", "*.png binary\n", "*.png binary\r\n", "Mergefile.lock text\n", "\n"])
def test_other_lines_stay(repository, other):
    path = repository.root / ".gitattributes"
    path.write_bytes(other.encode())
    repository.tool("git setup")
    end = "\r\n" if "\r" in other else "\n"
    assert path.read_bytes() == (other if other.endswith("\n") else other + "\n").encode() + f"{LINE}{end}".encode()
    repository.tool("git setup --remove")
    assert path.read_bytes().rstrip() == other.encode().rstrip()


def test_a_line_in_the_way_is_reported(repository):
    (repository.root / "sub").mkdir()
    (repository.root / "sub/.gitattributes").write_text("*.lock -diff -merge\n", encoding="utf-8")
    (repository.root / "sub/Mergefile.toml").touch()
    result = repository.tool("git setup", code=1, folder="sub")
    assert "another line of .gitattributes is in the way" in result.stdout


def test_another_mergefile_and_a_folder_below(repository):
    (repository.root / "sub").mkdir()
    repository.tool("-C sub -f 'My merge.toml' git setup")
    lines = (repository.root / ".gitattributes").read_text(encoding="utf-8").splitlines()
    assert lines == [LINE, '"My merge.lock" diff=mergepipe merge=mergepipe']
    attribute = repository.run("git check-attr merge -- 'sub/My merge.lock'").stdout
    assert attribute.strip().endswith("merge: mergepipe")


def test_settings_of_others_stay(repository):
    repository.run("git config diff.mergepipe.cachetextconv true && git config diff.other.command x")
    repository.tool("git setup")
    repository.tool("git setup --remove")
    assert (
        repository.run("git config diff.mergepipe.cachetextconv && git config diff.other.command").stdout == "true\nx\n"
    )


def test_without_a_repository_there_is_nothing_to_set_up(repository, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    result = repository.tool("git setup", code=2, folder="../elsewhere")
    assert "is not in a git repository" in result.stderr
    repository.tool("git setup --check --remove", code=2)


# --- diff ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def changed(repository):
    """Return the repository with a lock committed, another on the disk, and the drivers."""
    repository.tool("git setup")
    repository.commit("one", lock())
    repository.lock.write_text(render_lock(lock(left="2")), encoding="utf-8")
    return repository


def test_git_diff_explains_a_lock(changed):
    shown = changed.run("git diff").stdout
    assert shown.startswith("a/Mergefile.lock -> b/Mergefile.lock\n\noutput left (task_arithmetic): 2 of 51 tensors")
    assert "digest" not in shown
    assert "\x1b[" not in shown
    assert "\x1b[" in changed.run("git -c color.ui=always diff").stdout
    assert changed.run("git diff --no-ext-diff").stdout.startswith("diff --git")
    changed.run("git commit -qam two")
    assert changed.run("git show --ext-diff --format= HEAD").stdout == shown
    assert "@@ [outputs.left]" in changed.run("git log -p -1").stdout, "and where it is not asked, tables are named"


def test_git_diff_shows_locks_that_are_new_or_gone(changed):
    changed.lock.unlink()
    gone = changed.run("git diff").stdout
    assert gone.startswith("a/Mergefile.lock -> nothing\n")
    assert "output left (task_arithmetic): removed, 51 tensors" in gone


def test_git_diff_of_a_lock_that_cannot_be_read_is_git_s_own(changed):
    changed.lock.write_text("<<<<<<< ours\n", encoding="utf-8")
    result = changed.run("git diff")
    assert "git conflict marker" in result.stderr
    assert "+<<<<<<< ours" in result.stdout


def test_git_diff_works_without_mergepipe(changed):
    changed.without_python()
    result = changed.run("git diff")
    assert result.stderr == ""
    assert '+params.seed = "2"' in result.stdout


def test_the_registered_python_is_used_where_mergepipe_is_not_on_the_path(changed):
    (changed.path / "mergepipe").unlink()
    assert changed.run("git diff").stdout.startswith("a/Mergefile.lock -> b/Mergefile.lock\n")


# --- merge -----------------------------------------------------------------------------------------------------------


def merge(repository, base: Lockfile, ours: Lockfile, theirs: Lockfile, *, code: int | None = None):
    repository.tool("git setup")
    repository.commit("base", base)
    repository.run("git checkout -q -b theirs")
    repository.commit("theirs", theirs)
    repository.run("git checkout -q main")
    repository.commit("ours", ours)
    return repository.run("git merge -q theirs -m merged", code=code)


def test_git_merges_two_outputs(repository):
    merge(repository, lock(), lock(left="2"), lock(right="2"), code=0)
    assert read_lock(repository.lock) == lock(left="2", right="2")
    assert repository.run("git status --short").stdout == ""


def test_git_leaves_a_conflict_where_both_changed_one_output(repository):
    result = merge(repository, lock(), lock(left="2"), lock(left="3"), code=1)
    assert "both sides changed output `left`" in result.stderr
    assert "rm Mergefile.lock && mergepipe build && git add Mergefile.lock" in result.stderr
    assert repository.run("git status --short").stdout == "UU Mergefile.lock\n"
    assert "<<<<<<< ours" in repository.lock.read_text(encoding="utf-8")
    assert "git conflict marker" in repository.tool("diff HEAD:Mergefile.lock Mergefile.lock", code=2).stderr


def test_git_leaves_a_conflict_where_lines_would_merge_to_a_wrong_lock(repository):
    new = {"math": digest("math 2")}
    ours = [replace(entry, sources=SOURCES | new) for entry in lock().outputs]
    ours_lock = replace(lock(math=2), outputs=tuple(ours))
    added = output("zebra", SOURCES, tensors("zebra"))
    theirs = replace(lock(), outputs=(*lock().outputs, added))
    result = merge(repository, lock(), ours_lock, theirs, code=1)
    assert "output `zebra` was made from other content of source `math`" in result.stderr
    text = repository.lock.read_text(encoding="utf-8")
    assert text.startswith("<<<<<<< ours\n")
    assert render_lock(ours_lock) in text
    assert render_lock(theirs) in text


def test_git_merges_two_first_locks_only_if_they_are_equal(repository):
    repository.tool("git setup")
    repository.run("git add -A && git commit -qm empty")
    repository.run("git checkout -q -b theirs")
    repository.commit("theirs", lock(left="2"))
    repository.run("git checkout -q main")
    repository.commit("ours", lock())
    assert "both sides changed output `left`" in repository.run("git merge -q theirs", code=1).stderr


def test_git_rebases_with_the_driver(repository):
    repository.tool("git setup")
    repository.commit("base", lock())
    repository.run("git checkout -q -b topic")
    repository.commit("topic", lock(left="2"))
    repository.run("git checkout -q main")
    repository.commit("main", lock(right="2"))
    repository.run("git checkout -q topic && git rebase -q main")
    assert read_lock(repository.lock) == lock(left="2", right="2")


def test_without_mergepipe_git_merges_lines_and_calls_it_a_conflict(repository):
    repository.tool("git setup")
    repository.commit("base", lock())
    repository.without_python()
    repository.run("git checkout -q -b theirs")
    repository.commit("theirs", lock(right="2"))
    repository.run("git checkout -q main")
    repository.commit("ours", lock(left="2"))
    result = repository.run("git merge -q theirs", code=1)
    assert "mergepipe cannot merge Mergefile.lock" in result.stderr
    assert repository.run("git status --short").stdout == "UU Mergefile.lock\n"


def test_a_lock_of_a_newer_mergepipe_is_not_merged(repository, tmp_path):
    text = render_lock(lock())
    for name, content in {
        "base": text,
        "ours": text.replace("revision = 0", "revision = 2\nnews = 1"),
        "theirs": render_lock(lock(left="2")),
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    driver = "git merge-driver base ours theirs 'a b/Mergefile.lock'"
    result = repository.tool(driver, code=1, folder="..")
    assert "ours: a newer mergepipe wrote it" in result.stderr
    assert "rm 'a b/Mergefile.lock'" in result.stderr
    assert "<<<<<<< ours" in (tmp_path / "ours").read_text(encoding="utf-8")
    assert repository.tool(f"{driver} --json", code=1, folder="..").stderr.startswith('{"warning": ')


def test_a_side_that_says_it_all_keeps_its_text(repository, tmp_path):
    text = "# a comment\n" + render_lock(lock(left="2")).replace("\n", "\r\n")
    for name, content in {"base": render_lock(lock()), "ours": text, "theirs": render_lock(lock())}.items():
        (tmp_path / name).write_bytes(content.encode())
    repository.tool("git merge-driver base ours theirs Mergefile.lock", folder="..")
    assert (tmp_path / "ours").read_bytes() == text.encode()


# --- check -----------------------------------------------------------------------------------------------------------

MERGEFILE = """\
version = 1
[sources.base]
path = "models/base"
[sources.math]
path = "models/math"
[sources.code]
path = "models/code"
[outputs.left]
operator = "task_arithmetic"
base = "base"
experts = [{ source = "math", weight = 0.5 }, "code"]
"""
LEFT = Lockfile(geometry=1, sources=tuple(map(source, SOURCES)), outputs=(output("left", SOURCES, tensors("left")),))


@pytest.fixture
def project(repository):
    """Return a project without models, whose lock is right."""
    (repository.root / "Mergefile.toml").write_text(MERGEFILE, encoding="utf-8")
    repository.lock.write_text(render_lock(LEFT), encoding="utf-8")
    return repository


def test_a_lock_that_goes_with_its_mergefile(project):
    assert project.tool("git check").stdout == "Mergefile.lock goes with its Mergefile\n"
    result = project.tool("git check Mergefile.lock Mergefile.toml --json")
    assert json.loads(result.stdout) == {"checked": ["Mergefile.lock"]}


EDITS = [
    ('"models/math"', '"models/math-2"', 'sources.math.path: "models/math" -> "models/math-2"'),
    ("weight = 0.5", "weight = 0.6", "outputs.left.experts[0].weight: 0.5 -> 0.6"),
    ('"task_arithmetic"', '"ties"', 'outputs.left.operator: "task_arithmetic" -> "ties"'),
    ('base = "base"\n', 'base = "base"\nparams = { lambda = 2 }\n', "outputs.left.params.lambda: none -> 2.0"),
    (', "code"]', "]", "outputs.left.experts: math, code -> math"),
    ('base = "base"\n', 'base = "base"\npath = "out"\n', 'outputs.left.path: "build/left" -> "out"'),
    ('base = "base"\n', 'base = "base"\npublish = false\n', "outputs.left.publish: none -> false"),
    (
        'base = "base"\n',
        'base = "base"\nbudget = { expert_reads = "25%" }\n',
        'outputs.left.budget: "full" -> "25% in levels"',
    ),
    ('base = "base"\n', 'base = "base"\nwrite = { dtype = "bf16" }\n', 'outputs.left.write.dtype: none -> "bfloat16"'),
    ("[outputs.left]", "[outputs.other]", "outputs.other: none -> "),
    ('base = "base"\n', 'base = "base"\nrules = [{ match = "x", params = { lambda = 2 } }]\n', "outputs.left.rules[0]"),
]


@pytest.mark.parametrize(("old", "new", "difference"), EDITS, ids=[edit[2].split(":")[0] for edit in EDITS])
def test_a_mergefile_that_was_edited_and_not_built(project, old, new, difference):
    assert old in MERGEFILE
    (project.root / "Mergefile.toml").write_text(MERGEFILE.replace(old, new), encoding="utf-8")
    assert difference in project.tool("git check", code=3).stderr


def test_locks_that_are_missing_or_contradict_themselves(project):
    wrong = replace(LEFT, sources=(source("base"), source("code"), source("math", 2)))
    project.lock.write_text(render_lock(wrong), encoding="utf-8")
    refused = project.tool("git check", code=3).stderr
    assert "`Mergefile.lock` contradicts itself" in refused
    assert "output `left` was made from other content of source `math`" in refused
    project.lock.unlink()
    assert "`Mergefile.lock` does not exist" in project.tool("git check", code=3).stderr
    project.lock.write_text("<<<<<<< ours\n", encoding="utf-8")
    project.tool("git check", code=2)


def test_a_lock_that_no_build_can_have_written_is_refused(project):
    """Both halves are right alone: a line by line merge of two locks is how they come together."""
    other = replace(LEFT.outputs[0], name="other", path="build/other")
    text = MERGEFILE + MERGEFILE[MERGEFILE.index("[outputs.left]") :].replace(".left", ".other")
    (project.root / "Mergefile.toml").write_text(text, encoding="utf-8")
    for changes, message in (
        ({}, None),
        ({"code": {"median": digest("b")}}, "outputs `left` and `other` were made with different code of operator"),
    ):
        outputs = (replace(LEFT.outputs[0], code={"median": digest("a")}), replace(other, **changes))
        project.lock.write_text(render_lock(replace(LEFT, outputs=outputs)), encoding="utf-8")
        result = project.tool("git check", code=3 if message else 0)
        assert (message or "goes with its Mergefile") in result.text


def test_every_file_is_checked_before_it_fails(project):
    for name in ("one", "two"):
        (project.root / name).mkdir()
        (project.root / name / "Mergefile.toml").write_text(MERGEFILE, encoding="utf-8")
    result = project.tool("git check one/Mergefile.toml Mergefile.toml two/Mergefile.lock --json", code=3)
    assert [e["path"] for e in json.loads(result.stderr)["error"]["errors"]] == [
        "one/Mergefile.lock",
        "two/Mergefile.lock",
    ]
