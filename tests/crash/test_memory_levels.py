"""Memory of builds in levels: within the limit, and no more than a plan says, when codes are made and read."""

from __future__ import annotations

import json
import shutil

import pytest
from crash.test_memory_limits import LIMITS, MIB, SLACK, bare, large, linux, peak_of_build
from support.cli import run_mergepipe
from support.projects import SmallProject

from mergepipe.checkpoints.geometry import GEOMETRY_1

__all__ = ["bare", "large"]  # fixtures
# What two workers need to code deltas at the least: buffers of a block and of a tile (`mergepipe.engine.limits`).
CODING = 16 * MIB


@linux
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("limit", [*LIMITS, None])
@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "linear"])
def test_builds_in_levels_stay_within_the_memory_that_they_are_given(large, bare, tmp_path, name, limit):
    project = SmallProject(tmp_path / "project", GEOMETRY_1)
    project.sources = {source: str(large.root / path) for source, path in large.sources.items()}
    recipe = large.outputs[name] | ({"base": "base"} if name == "linear" else {})
    options = ["-j", "2", *(["--memory", f"{limit} MiB"] if limit else [])]
    for share in (40, 41):  # codes are made, then read
        project.set_output("m", recipe | {"budget": {"expert_reads": f"{share}%", "precision": "levels"}})
        if share > 40:
            shutil.rmtree(project.root / "build", ignore_errors=True)
        used = peak_of_build(project.root, "m", *options)
        project.set_output("m", recipe | {"budget": {"expert_reads": f"{share + 10}%", "precision": "levels"}})
        plan = json.loads(run_mergepipe(["plan", "--json", *options], project.root).stdout)
        assert used <= plan["estimate"]["peak_memory_bytes"]
        assert limit is None or used - bare <= limit * MIB + SLACK + CODING
