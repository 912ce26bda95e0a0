"""Memory limits: honoured by every operator, as the kernel counts it, and refused with the numbers where too small."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from support.checkpoints import as_dtype, random_tensors, write_checkpoint
from support.cli import run_mergepipe, run_process
from support.every_operator import RECIPES
from support.projects import TINY, SmallProject

from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.errors import PlanError

MIB = 1 << 20
LIMITS = (64, 128, 256)  # MiB
# Beside the weights there are plan, graph and catalog, and what the C library does not give back.
SLACK = 24 * MIB
LARGE = {"model.embed_tokens.weight": (32_000, 2048), "model.layers.0.mlp.up_proj.weight": (4096, 2048)}
# Runs a command line, and prints the most memory that its process ever had in use, in KiB.
PEAK = """
import sys
from mergepipe.cli.main import run
code = run(sys.argv[1:])
print([line for line in open("/proc/self/status") if line.startswith("VmHWM:")][0].split()[1])
sys.exit(code)
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own figure is read from /proc")


def peak_of_build(root, *args):
    """Return the most memory, in bytes, that a build with a cache of its own had in use."""
    argv = [sys.executable, "-c", PEAK, "build", "--quiet", *args]
    result = run_process(argv, root, {"OPENBLAS_NUM_THREADS": "1"}, timeout=600)
    assert result.code == 0, result.text
    return int(result.stdout.split()[-1]) * 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return a project over four checkpoints of 150 MB, with an output for each recipe, and a tiny one beside it."""
    project = SmallProject(tmp_path_factory.mktemp("large"), GEOMETRY_1)
    common = {name: np.random.default_rng(9).standard_normal(shape, np.float32) for name, shape in LARGE.items()}
    for seed, source in enumerate(("base", "e1", "e2", "e3")):
        generator = np.random.default_rng(seed)
        moved = {
            name: (values + (0.05 * generator.standard_normal(values.shape, np.float32) if seed else 0)).astype(
                as_dtype("BF16")
            )
            for name, values in common.items()
        }
        project.sources[source] = f"models/{source}"
        write_checkpoint(project.root / "models" / source, moved)
    for name, recipe in RECIPES.items():
        project.outputs[name] = {**recipe, "publish": False}
    project.save()
    return project


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return the memory of a process that builds next to nothing, by recipe."""
    project = SmallProject(tmp_path_factory.mktemp("bare"), GEOMETRY_1)
    for seed, source in enumerate(("base", "e1", "e2", "e3")):
        project.add_source(source, random_tensors(seed, {"model.layers.0.w": (4, 4)}, "bfloat16"))
    project.set_output("m", {**RECIPES["ties"], "publish": False})
    return peak_of_build(project.root)


@linux
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_operator_stays_within_the_memory_that_it_is_given(large, bare, tmp_path, name, limit):
    used = peak_of_build(
        large.root, name, "--memory", f"{limit} MiB", "-j", "2", "--cache-dir", str(tmp_path / "cache")
    )
    assert used - bare <= limit * MIB + SLACK, f"{used / MIB:.0f} MiB, {bare / MIB:.0f} MiB of them for an empty build"


# --- limits that are too small ------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """Return a project whose blocks have half a megabyte."""
    project = SmallProject(tmp_path / "project", GEOMETRY_1)
    for seed, source in enumerate(("base", "e1", "e2")):
        project.add_source(source, random_tensors(seed, {"model.w": (400, 1024), "model.norm": (64,)}, "bfloat16"))
    experts = [{"source": "e1", "weight": 0.5}, {"source": "e2", "weight": 0.5}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    return project


@pytest.mark.parametrize("command", ["build", "plan"])
def test_a_limit_that_is_too_small_for_one_block_is_refused_with_the_numbers(project, command):
    result = run_mergepipe([command, "--memory", "1 MiB", "--json"], project.root)
    assert result.code == 2, result.text
    error = json.loads(result.stderr)["error"]
    assert (error["needed"], error["limit"]) == (4 * 512 * 1024, MIB)  # three inputs, and what is made of them
    assert "`model.w`" in error["message"]
    assert "--memory '2 MiB'" in error["hint"]
    assert not (project.root / "build").exists()
    assert not list((project.root / ".mergecache" / "staging").glob("*"))


def test_the_limit_that_the_error_names_is_enough_for_any_number_of_workers(project):
    result = run_mergepipe(["build", "--memory", "2 MiB", "-j", "8"], project.root)
    assert result.code == 0, result.text
    project.check("m")


def test_an_output_with_passes_needs_twice_as_much(project):
    project.set_output("m", {**project.outputs["m"], "operator": "ties", "params": {"density": 0.5}})
    with pytest.raises(PlanError) as caught:
        project.open(memory=3 * MIB).build()
    assert caught.value.facts["needed"] == 4 * MIB
    assert project.build_one("m", memory=4 * MIB).state == "built"


def test_an_output_that_is_up_to_date_needs_no_memory(project):
    project.build()
    assert project.build_one("m", memory=1).state == "unchanged"


def test_what_fits_in_a_megabyte_is_never_refused(tmp_path):
    project = SmallProject(tmp_path, TINY)
    for seed, source in enumerate(("base", "e1")):
        project.add_source(source, random_tensors(seed, {"model.w": (40, 16)}))
    project.set_output("m", {"operator": "linear", "experts": ["base", "e1"]})
    project.build(memory=1)
    project.check("m")
