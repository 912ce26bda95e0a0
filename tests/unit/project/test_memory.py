"""The memory that `plan` names is not exceeded: processes that build a medium family, measured by the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from support.checkpoints import random_tensors
from support.cli import run_mergepipe, run_process
from support.projects import SmallProject

from mergepipe.checkpoints.geometry import GEOMETRY_1

EXPERTS = ("e1", "e2", "e3", "e4")
OUTPUTS = {
    "linear": {},
    "ties": {"params": {"density": 0.5}},
    "dare_ties": {"params": {"density": 0.5}},
    "model_stock": {},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a project over checkpoints of 50 MB each."""
    project = SmallProject(tmp_path_factory.mktemp("medium"), GEOMETRY_1)
    shapes = {"model.embed_tokens.weight": (8000, 1024), "model.norm.weight": (1024,)}
    for layer in range(4):
        shapes |= {f"model.layers.{layer}.{name}.weight": (1024, 1024) for name in ("q", "k", "v", "o")}
    for seed, name in enumerate(("base", *EXPERTS)):
        project.add_source(name, random_tensors(seed, shapes, "bfloat16", scale=0.02))
    for operator, recipe in OUTPUTS.items():
        project.set_output(operator, {"operator": operator, "base": "base", "experts": list(EXPERTS), **recipe})
    return project


# Runs a module as a program, and notes the most memory that this process had in use. Arguments: note, its own.
_NOTING = """
import runpy, sys
from pathlib import Path
note, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module("mergepipe", run_name="__main__", alter_sys=True)
finally:
    Path(note).write_text(Path("/proc/self/status").read_text())
"""


def peak_of(args, cwd, note):
    """Return the most memory that ``mergepipe ARGS`` had in use, in bytes; what its processes share counts once."""
    seen, ended = [0], threading.Event()
    watching = threading.Thread(target=watch, args=(str(note), seen, ended))
    watching.start()
    try:
        result = run_process([sys.executable, "-c", _NOTING, str(note), *args], cwd)
    finally:
        ended.set()
        watching.join()
    assert result.code == 0, result.text
    line = next(line for line in note.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
    return max(int(line.split()[1]), *seen) * 1024


def watch(argument, seen, ended):
    """Look again and again what all processes with this argument have in use together, in KiB."""
    while not ended.wait(0.02):
        total = 0
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if argument.encode() in Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"):
                    lines = Path(f"/proc/{entry}/smaps_rollup").read_text(encoding="ascii").splitlines()
                    total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
        seen.append(total)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own figure is read from /proc")
@pytest.mark.parametrize(
    ("outputs", "limits"),
    [
        (["linear"], []),
        (["linear"], ["-j", "1", "--memory", "4 MiB"]),
        (["ties"], []),
        (["ties"], ["--memory", "64 MiB"]),
        (["ties"], ["-j", "4", "--memory", "8 MiB"]),
        (["dare_ties", "model_stock"], []),
        ([], ["-j", "4"]),
    ],
)
def test_a_build_stays_within_the_memory_that_its_plan_names(project, tmp_path, outputs, limits):
    cache = ["--cache-dir", str(tmp_path / "cache")]
    planned = run_mergepipe(["plan", *cache, *limits, "--json", *outputs], project.root)
    named = json.loads(planned.stdout)["estimate"]["peak_memory_bytes"]
    shutil.rmtree(project.root / "build", ignore_errors=True)  # made with another cache
    used = peak_of(["build", *cache, *limits, "--quiet", *outputs], project.root, tmp_path / "status")
    assert used <= named
    assert named < 3 * used, "a limit that says something"
