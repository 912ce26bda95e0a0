"""The files around the code: installing, checking and building must work from them, and they must agree."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.cli import run_process

import mergepipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = ("demo", "test", "test-slow", "lint", "types", "docs", "reference", "bench", "clean")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements() -> list[Requirement]:
    """Return everything that pyproject.toml asks for, the extras included, mergepipe itself left out."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    found = [Requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.name != "mergepipe"]


def pins() -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in text_of("constraints.txt").splitlines()]
    pinned = [line.split("==") for line in lines if line]
    assert all(len(pin) == 2 for pin in pinned), "every constraint is one exact version"
    return {str(canonicalize_name(name)): version for name, version in pinned}


def copy_of_build_files(folder: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def run_make(folder: Path, *args: str):
    # Within `make test`, this make would take itself for a part of that one.
    outer = {name: "" for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS") if name in os.environ}
    return run_process(["make", *args], folder, outer)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_every_dependency_is_pinned_to_a_version_in_its_range():
    pinned = pins()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"constraints.txt lacks {name}"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not take {pinned[name]}"


def test_every_dependency_has_its_reason_in_the_docs():
    page = text_of("docs/dependencies.md")
    assert [r.name for r in requirements() if f"`{r.name}`" not in page] == []


def test_the_docs_give_reasons_for_dependencies_only():
    tables = re.findall(r"^\| (`.+?`) \|", text_of("docs/dependencies.md"), re.MULTILINE)
    names = {name for cell in tables for name in re.findall(r"`([^`]+)`", cell)}
    assert names - {"torch"} - set(PROJECT["optional-dependencies"]) <= {r.name for r in requirements()}


def test_a_plain_install_needs_no_torch():
    assert not any("torch" in line or "transformers" in line for line in PROJECT["dependencies"])


def test_nothing_names_an_index_of_packages():
    for name in ("Makefile", ".ci/run", "constraints.txt", "pyproject.toml", "README.md"):
        assert not re.search(r"index-url|find-links|trusted-host", text_of(name)), name


def test_the_console_script_is_the_command_line():
    assert PROJECT["scripts"] == {"mergepipe": "mergepipe.__main__:main"}
    (script,) = entry_points(group="console_scripts", name="mergepipe")
    assert callable(script.load())


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "mergepipe" / "py.typed").is_file()


def test_the_changelog_has_this_version():
    assert mergepipe.__version__ in text_of("CHANGELOG.md")


def test_the_license_is_the_one_that_the_project_names():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text_of("LICENSE")


def test_git_ignores_what_builds_make():
    ignored = text_of(".gitignore").split()
    assert {".venv/", ".mergecache/", "/build/"} <= set(ignored)


def test_ci_is_an_executable_script_of_valid_bash():
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & stat.S_IXUSR
    assert run_process(["bash", "-n", str(path)], ROOT).code == 0


def run_ci_function(folder: Path, call: str):
    """Run a function of the CI script with no program at hand but those in a folder."""
    functions = re.findall(r"^\w+\(\) \{$.*?^\}$", text_of(".ci/run"), re.MULTILINE | re.DOTALL)
    script = "\n".join(["set -euo pipefail", *functions, call])
    return run_process([shutil.which("bash") or "bash", "-c", script], folder, {"PATH": str(folder)})


def test_ci_installs_a_browser_where_there_is_none_and_tries_again(tmp_path):
    for name in ("timeout", "env", "id", "touch", "chmod"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "sleep").symlink_to(shutil.which("true"))
    (tmp_path / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    # The first attempt fails, as package servers do; installing makes a program.
    (tmp_path / "apt-get").write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 100; }}\n"
        f'case "$*" in *install*chromium) touch {tmp_path}/chromium; chmod +x {tmp_path}/chromium;; esac\n'
    )
    for name in ("sudo", "apt-get"):
        (tmp_path / name).chmod(0o755)
    result = run_ci_function(tmp_path, "install_chromium")
    assert (result.code, result.stdout.splitlines()[-1]) == (0, f"{tmp_path}/chromium"), result.text
    assert "attempt 1 of `timeout 120" in result.stdout
    (tmp_path / "apt-get").unlink()
    again = run_ci_function(tmp_path, "install_chromium")
    assert (again.code, again.stdout) == (0, f"{tmp_path}/chromium\n"), "it is there: nothing is installed"


def test_ci_fails_where_no_browser_can_be_had(tmp_path):
    for name in ("timeout", "env", "id"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name in ("sleep", "sudo"):
        (tmp_path / name).symlink_to(shutil.which("true" if name == "sleep" else "false"))
    assert run_ci_function(tmp_path, "install_chromium & wait $!").code != 0


def test_ci_ends_within_its_limit(tmp_path):
    limits = dict(re.findall(r"\b(LIMIT|SUITE_LIMIT)=(\d+)", text_of(".ci/run")))
    assert int(limits["LIMIT"]) < 25 * 60
    assert "timeout" in re.search(r"^suite\(\) \{$(.*?)^\}$", text_of(".ci/run"), re.MULTILINE | re.DOTALL)[1]
    steps = re.findall(r"^suite make (\S+)", text_of(".ci/run"), re.MULTILINE)
    assert steps == ["test", "test-slow"]


def test_ci_runs_the_checks_of_the_makefile():
    script = text_of(".ci/run")
    missing = [name for name in ("lint", "types", "docs", "demo", "test", "test-slow") if f"make {name}" not in script]
    assert missing == []


@needs_make
@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_its_targets(tmp_path, target):
    result = run_make(copy_of_build_files(tmp_path), "--dry-run", target)
    assert result.code == 0, result.text


@needs_make
def test_make_without_a_target_says_what_there_is(tmp_path):
    result = run_make(copy_of_build_files(tmp_path))
    assert result.code == 0, result.text
    assert [name for name in TARGETS if f"make {name} " not in result.stdout] == []


@needs_make
def test_make_says_that_a_python_is_too_old(tmp_path):
    folder = copy_of_build_files(tmp_path)
    old = tmp_path / "python-of-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.10.9" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = run_make(folder, "demo", f"PYTHON={old}")
    assert result.code != 0
    assert "needs Python 3.11 or newer" in result.stderr
    assert "Python 3.10.9" in result.stderr
    assert not (folder / ".venv").exists()


@needs_make
def test_make_says_that_there_is_no_python(tmp_path):
    result = run_make(copy_of_build_files(tmp_path), "demo", "PYTHON=no-such-python")
    assert result.code != 0
    assert "there is no `no-such-python`" in result.stderr
