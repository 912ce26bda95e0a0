"""The story of docs/guides/review-in-pull-requests.md, from an empty folder to CI: real commands, real git.

Weights lie beside the repository, as the guide has it; a clone that lies beside it, too, finds them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml
from support.checkpoints import random_tensors, write_checkpoint
from support.cli import run_process
from support.projects import edit_tensor

from mergepipe.cli.main import mergepipe as command_line

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "review-in-pull-requests.md"
WORKFLOW = ROOT / "examples" / "ci" / "mergepipe.yml"
SHAPES = {
    "lm_head.weight": (16, 8),
    "model.embed_tokens.weight": (16, 8),
    **{f"model.layers.{i}.mlp.{name}.weight": (8, 8) for i in range(4) for name in ("down_proj", "up_proj")},
    "model.norm.weight": (8,),
}
REPLACED = ("model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight")
GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_COMMITTER_NAME": "Ada",
    "GIT_COMMITTER_EMAIL": "ada@example.org",
}


@dataclass(frozen=True)
class Person:
    """Somebody who types commands in a folder; `mergepipe` is on the PATH."""

    folder: Path
    path: Path

    def run(self, line: str, *, code: int | None = 0, **env: str):
        """Run a line of shell, as a runner of GitHub does, and check how it ends."""
        environment = {**GIT, "PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}", **env}
        result = run_process(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", line], self.folder, environment
        )
        assert code is None or result.code == code, f"{line}\n{result.text}"
        return result

    def mergefile(self, old: str, new: str):
        """Edit the Mergefile."""
        path = self.folder / "Mergefile.toml"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")


def checkpoint(folder: Path, seed: int, other: tuple[str, ...] = ()) -> None:
    """Write a checkpoint of a tiny family; the tensors ``other`` are others than the seed gives."""
    tensors = random_tensors(seed, SHAPES, dtype="BF16")
    tensors |= random_tensors(seed + 100, {name: SHAPES[name] for name in other}, dtype="BF16")
    write_checkpoint(folder, tensors)


@dataclass(frozen=True)
class Story:
    """What was told once: folder, and what the commands printed on the way."""

    folder: Path
    status: str
    unchanged: str
    git_diff: str
    diff: str
    json: dict
    comment: str


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Merge, commit, replace an expert in a branch, build, look, commit."""
    folder = tmp_path_factory.mktemp("story")
    command = folder / "bin" / "mergepipe"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mergepipe "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    for seed, name in enumerate(("base", "math", "code")):
        checkpoint(folder / "models" / name, seed)
    checkpoint(folder / "models" / "math-v2", 1, REPLACED)
    ada = Person(folder / "merges", command.parent)
    ada.folder.mkdir()
    ada.run("git init -q -b main")
    ada.run("printf 'build/\\n.mergecache/\\n' >> .gitignore")
    ada.run("mergepipe init ../models/base ../models/math ../models/code && mergepipe build && mergepipe git setup")
    ada.run("git add .gitattributes .gitignore Mergefile.toml Mergefile.lock && git commit -qm 'Merge math and code'")
    status = ada.run("git status --short").stdout
    unchanged = ada.run("mergepipe diff").stdout

    ada.run("git checkout -q -b math-v2")
    ada.mergefile('"../models/math"', '"../models/math-v2"')
    ada.run("mergepipe build")
    printed = ada.run("git diff -- Mergefile.lock").stdout
    told = [ada.run(f"mergepipe diff {form}", code=1).stdout for form in ("", "--json")]
    ada.run("git commit -qam 'Take the new math expert'")
    comment = ada.run("mergepipe diff --format markdown main HEAD", code=1).stdout
    return Story(folder, status, unchanged, printed, told[0], json.loads(told[1]), comment)


@pytest.fixture
def ada(story, tmp_path):
    """Return somebody in a copy of the story's folder, where the branch is checked out."""
    shutil.copytree(story.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Person(tmp_path / "merges", tmp_path / "bin")


def test_nothing_but_the_merge_is_in_git(story, ada):
    files = ada.run("git ls-files").stdout.split()
    assert files == [".gitattributes", ".gitignore", "Mergefile.lock", "Mergefile.toml"]
    assert story.status == ""
    assert story.unchanged == "no differences between HEAD and Mergefile.lock\n"


def test_git_shows_a_replaced_expert_and_the_tensors_that_follow(story):
    assert story.git_diff.splitlines()[0] == "a/Mergefile.lock -> b/Mergefile.lock"
    assert story.git_diff.splitlines()[1:] == story.diff.splitlines()[1:]
    assert [line for line in story.diff.splitlines() if line.startswith("source ")] == ["source math: changed"]
    assert "2 of 11 tensors changed" in story.diff
    assert "layers 1-2: mlp.down_proj (2)" in story.diff


def test_the_difference_is_that_expert_and_those_tensors_exactly(story):
    assert [source["name"] for source in story.json["sources"]] == ["math"]
    (output,) = story.json["outputs"]
    assert [tensor["name"] for tensor in output["changes"]] == list(REPLACED)
    assert [(cause["kind"], cause["name"], cause["tensors"]) for cause in output["causes"]] == [("source", "math", 2)]


def test_the_comment_names_the_expert_and_the_tensors(story):
    assert story.comment.startswith("### mergepipe: `main` → `HEAD`\n")
    assert "| `math` | changed (path) |" in story.comment
    assert "source `math`" in story.comment
    assert "- layers 1-2: `mlp.down_proj` (2)" in story.comment
    assert "`code`" not in story.comment
    assert "lm_head" not in story.comment


def test_a_clean_clone_builds_the_same_and_notices_a_source_that_was_tampered_with(ada, tmp_path):
    Person(tmp_path, ada.path).run("git clone -q merges clone")
    bob = Person(tmp_path / "clone", ada.path)
    cache = {"MERGEPIPE_CACHE_DIR": str(tmp_path / "bobs-cache")}
    bob.run("mergepipe build --locked", **cache)
    assert bob.run("git status --short").stdout == ""
    (output,) = (bob.folder / "build").iterdir()
    for name in ("model.safetensors", "README.md"):
        assert (ada.folder / "build" / output.name / name).read_bytes() == (output / name).read_bytes()

    edit_tensor(tmp_path / "models/code/model.safetensors", "model.norm.weight", 3, 7.0)
    before = (bob.folder / "Mergefile.lock").read_bytes()
    failed = bob.run("mergepipe build --locked", code=3, **cache)
    assert "sources.code.digest: b3:" in failed.stderr
    assert "its content changed" in failed.stderr
    assert "sources.math" not in failed.stderr
    assert (bob.folder / "Mergefile.lock").read_bytes() == before


def test_the_hook_refuses_a_mergefile_that_was_not_built(ada):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    check = f"{hook['entry']} Mergefile.toml Mergefile.lock"
    shutil.rmtree(ada.folder.parent / "models")  # it needs none
    ada.run(check)
    ada.mergefile('"../models/math-v2"', '"../models/math"')
    assert 'sources.math.path: "../models/math-v2" -> "../models/math"' in ada.run(check, code=3).stderr


def test_the_guide_shows_what_is_printed(story):
    """Set ``UPDATE_GOLDEN=1`` to write it anew."""
    fence = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
    text = GUIDE.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        text = fence.sub(lambda _: story.diff, text)
        GUIDE.write_text(text, encoding="utf-8")
    assert [without_digests(shown) for shown in fence.findall(text)] == [without_digests(story.diff)]


def without_digests(text: str) -> str:
    return re.sub(r"b3:[0-9a-f]{12}", "b3:...", text)


# --- CI ----------------------------------------------------------------------------------------------------------


def workflow_steps() -> dict[str, dict]:
    """Return the steps of the workflow that run something, by name."""
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    return {step["name"]: step for step in job["steps"] if "run" in step}


# What GitHub's own programs do is not for a test: the installation, and the comment through `gh`.
OFFLINE = [name for name in workflow_steps() if name not in ("Install mergepipe", "Comment on the pull request")]


def test_the_workflow_asks_for_little_and_pins_what_it_uses():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"}
    assert job["permissions"] == {"contents": "read", "pull-requests": "write"}
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"actions/[a-z-]+@v[0-9]+", action)] == []
    # What a pull request says must not become part of a script.
    assert [step["name"] for step in workflow_steps().values() if "${{" in step["run"]] == []


@pytest.mark.parametrize("step", list(workflow_steps()))
def test_the_scripts_of_the_workflow_are_scripts(tmp_path, step):
    script = tmp_path / "step.sh"
    script.write_text(workflow_steps()[step]["run"], encoding="utf-8")
    assert run_process(["bash", "-n", str(script)], tmp_path).code == 0


def mergepipe_commands() -> list[str]:
    lines = [line for step in workflow_steps().values() for line in step["run"].splitlines()]
    configuration = yaml.safe_load((ROOT / "examples/ci/pre-commit-config.yaml").read_text(encoding="utf-8"))
    lines += [hook["entry"] for repo in configuration["repos"] for hook in repo["hooks"]]
    return [found for line in lines for found in re.findall(r"\bmergepipe (?!-->)[a-z][^;|>}]*", line)]


@pytest.mark.parametrize("command", mergepipe_commands())
def test_the_commands_of_the_examples_exist(command):
    args = shlex.split(command)[1:]
    context = command_line.make_context("mergepipe", args)
    while isinstance(context.command, click.Group):
        name, found, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = found.make_context(name, rest, parent=context)
    assert len(mergepipe_commands()) == 5


@pytest.mark.slow
def test_the_steps_of_the_workflow_run(ada, tmp_path):
    ada.run("git checkout -q main && git merge -q --no-ff -m 'Merge the pull request' math-v2")
    Person(tmp_path, ada.path).run("git clone -q --depth 2 file://$PWD/merges checkout")
    runner = Person(tmp_path / "checkout", ada.path)
    shutil.copytree(ada.folder / ".mergecache", runner.folder / ".mergecache", symlinks=True)
    github = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    assert len(OFFLINE) == 4
    runner.run("\n".join(workflow_steps()[name]["run"] for name in OFFLINE), **github)
    comment = (tmp_path / "diff.md").read_text(encoding="utf-8")
    assert comment.startswith("<!-- mergepipe -->\n### mergepipe: `HEAD^1` → `HEAD`\n")
    assert "- layers 1-2: `mlp.down_proj` (2)" in comment
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == comment


@pytest.mark.slow
def test_the_first_pull_request_is_compared_with_nothing(ada, tmp_path):
    ada.run("git checkout -q --orphan start && git rm -q --cached Mergefile.lock && git commit -qm Start")
    ada.run("git add Mergefile.lock && git commit -qm 'Build it'")
    github = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    ada.run(workflow_steps()["Say what changes"]["run"], **github)
    assert "### mergepipe: nothing → `HEAD`" in (tmp_path / "diff.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["Does the lock go with the Mergefile?", "Build, and keep the lock"])
def test_a_pull_request_whose_lock_was_not_built_fails(ada, step):
    ada.mergefile('"../models/math-v2"', '"../models/math"')
    assert "sources.math.path" in ada.run(workflow_steps()[step]["run"], code=3).stderr
