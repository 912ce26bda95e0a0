"""Measuring one command over one family, as a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.family import mergefile, parameters, tensors, write_family

EXPERTS = 8
BUDGET = 'expert_reads = "10%"\nstats = "sample"'
COMMANDS = ("first plan", "plan", "status")
"""In the order in which a round runs them; the first begins with an empty cache, and takes the samples."""
BLOCK_ELEMENTS = 1 << 18

Json = dict[str, Any]

# Runs the command line in this process, and says at its end what it took; VmHWM is of this program alone.
_CHILD = """
import json, os, resource, runpy, sys
note, sys.argv = sys.argv[1], ["mergepipe", *sys.argv[2:]]
try:
    runpy.run_module("mergepipe", run_name="__main__", alter_sys=True)
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    facts = {"cpu": usage.ru_utime + usage.ru_stime, "rss": int(peak.split()[1]) * 1024}
    with open(note, "w") as file:
        json.dump(facts, file)
"""


def measure(shape: str, work: Path, rounds: int) -> Json:
    """Write the family of a shape, measure the commands over it, and remove it."""
    found = tensors(shape)
    folder = work / shape
    try:
        write_family(found, folder / "family", EXPERTS)
        project = folder / "project"
        project.mkdir()
        (project / "Mergefile.toml").write_text(mergefile(folder / "family", EXPERTS, BUDGET))
        runs: dict[str, list[Json]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            shutil.rmtree(project / ".mergecache", ignore_errors=True)
            for name in COMMANDS:
                runs[name].append(_run(["--json", name.split()[-1]], project))
        catalog = (project / ".mergecache" / "catalog.db").stat().st_size
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    planned = runs["first plan"][0]["output"]["outputs"]["merged"]
    for run in (run for several in runs.values() for run in several):
        del run["output"]
    return {
        "tensors": len(found),
        "parameters": parameters(found),
        "expert_blocks": planned["expert_blocks"]["total"],
        "expert_bytes": planned["expert_bytes"]["full"],
        "index_bytes": planned["index_bytes_read"],
        "catalog_bytes": catalog,
        "runs": runs,
    }


def _run(arguments: Sequence[str], project: Path) -> Json:
    with tempfile.TemporaryDirectory() as temporary:
        note = Path(temporary) / "note.json"
        command = [sys.executable, "-c", _CHILD, str(note), *arguments]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(f"`mergepipe {' '.join(arguments)}` failed:\n{done.stderr}")
        facts = json.loads(note.read_text())
    return {"wall": wall, "load": os.getloadavg()[0], **facts, "output": json.loads(done.stdout)}
