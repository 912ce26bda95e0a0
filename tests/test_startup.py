"""What commands import: start-up must be quick, so what is slow to import is imported only where it is used."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.cli import run_mergepipe, run_process

ROOT = Path(__file__).parents[1]
HEAVY = frozenset({"torch", "networkx", "numpy", "rich"})
# Neither a build on the CPU nor what only looks needs these two.
MERGING = frozenset({"torch", "networkx"})

# Runs a module as a program and notes, whatever way it ends, what it had imported. Arguments: note, module, its own.
_NOTING = """
import json, runpy, sys
note, module, sys.argv = sys.argv[1], sys.argv[2], sys.argv[2:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    with open(note, "w") as file:
        json.dump(sorted(sys.modules), file)
"""


@pytest.fixture
def project(tmp_path):
    """Return a copy of the example at the root of the repository."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "Mergefile.toml", folder)
    return folder


def imported_by(args: list[str], cwd: Path) -> set[str]:
    """Return the top-level modules that ``mergepipe ARGS`` imports; it must succeed."""
    note = cwd / "imported.json"
    result = run_process([sys.executable, "-c", _NOTING, str(note), "mergepipe", *args], cwd)
    assert result.code == 0, result.text
    modules = json.loads(note.read_text(encoding="utf-8"))
    assert "mergepipe.cli.main" in modules
    return {name.partition(".")[0] for name in modules}


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    code = "import sys, mergepipe; print(*sorted(sys.modules), sep='\\n')"
    result = run_process([sys.executable, "-c", code], tmp_path)
    assert result.code == 0, result.text
    assert "mergepipe" in result.stdout.split()
    assert HEAVY & {name.partition(".")[0] for name in result.stdout.split()} == set()


def test_the_package_gives_its_public_names_on_demand(tmp_path):
    code = "import mergepipe; print(mergepipe.open.__name__, mergepipe.Project.__name__, mergepipe.__version__)"
    result = run_process([sys.executable, "-c", code], tmp_path)
    assert result.code == 0, result.text
    assert result.stdout.split()[:2] == ["open_project", "Project"]


LOOKING = [
    *(["--version"], ["--help"], ["build", "--help"], ["cache", "prune", "--help"]),
    *(["help", "build"], ["completion", "zsh"]),
]


@pytest.mark.parametrize("args", LOOKING, ids=" ".join)
def test_version_and_help_import_nothing_heavy(tmp_path, args):
    assert HEAVY & imported_by(args, tmp_path) == set()


# Prints what a process that has run a command tells numpy's OpenBLAS, and how many threads it then has.
_COUNTING = """
import os, sys
from mergepipe.__main__ import main
sys.argv = ["mergepipe", "--version"]
try:
    main()
finally:
    import numpy
    print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
@pytest.mark.parametrize("told", [None, "2"])
def test_numpy_begins_no_threads_beside_the_processes_of_a_build_unless_it_is_told_to(tmp_path, monkeypatch, told):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    env = {"OPENBLAS_NUM_THREADS": told} if told else {}
    result = run_process([sys.executable, "-c", _COUNTING], tmp_path, env)
    assert result.code == 0, result.text
    said, threads = result.stdout.split()[-2:]
    assert said == (told or "1")
    assert threads == "1" or told


@pytest.mark.parametrize("command", ["plan", "status"])
def test_commands_that_only_look_import_neither_torch_nor_networkx(project, command):
    assert MERGING & imported_by([command], project) == set()


def test_a_build_with_nothing_to_do_imports_neither_torch_nor_networkx(project):
    assert run_mergepipe(["build"], project).code == 0
    assert MERGING & imported_by(["build"], project) == set()
    assert MERGING & imported_by(["status"], project) == set()


def test_a_build_on_the_cpu_imports_neither_torch_nor_networkx(project):
    modules = imported_by(["build"], project)
    assert MERGING & modules == set()
    assert "numpy" in modules, "what a build with work imports is seen by this test"
