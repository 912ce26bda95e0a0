"""Budgets that buy levels: what `plan` says of the next build is what it reports, packs or no packs."""

import math
import shutil

import numpy as np
import pytest
from laws.test_plan_tells import step, told
from support.levels import EXPERTS, SHAPES, levels_project, near

from mergepipe.errors import MergefileError

BYTES = 4 * sum(rows * (columns[0] if columns else 1) for rows, *columns in SHAPES.values())
CODED = 4 * 2 * 96 * 64


@pytest.fixture
def project(tmp_path):
    return levels_project(tmp_path)


def weighed(project, weight, name="m"):
    project.set_output(name, project.outputs["m"] | {"params": {"weight": weight}})


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "linear"])
def test_codes_cost_their_chunks(tmp_path, operator):
    project = levels_project(tmp_path, operator=operator)
    planned = step(project)["m"]
    assert planned.next_build.exact
    assert 0 < planned.expert_bytes["to_read"] == planned.expert_bytes["planned"] <= 0.25 * 3 * BYTES
    planned = step(project)["m"]
    assert planned.next_build.unchanged
    assert planned.expert_bytes["cached"] == planned.expert_bytes["planned"]


def test_packs_that_are_gone_are_made_again_from_the_sources_and_that_is_said(project):
    project.build()
    shutil.rmtree(project.cache / "progressive")
    assert step(project)["m"].next_build.unchanged, "an output that is up to date needs no pack"
    weighed(project, 0.4)
    planned = step(project)["m"]
    assert planned.next_build.index_bytes == (1 + len(EXPERTS)) * CODED
    weighed(project, 0.5)
    assert step(project)["m"].next_build.index_bytes == 0


def test_outputs_of_one_build_read_each_stage_once(project):
    weighed(project, 0.4, "n")
    project.set_output("n", project.outputs["n"] | {"budget": {"expert_reads": "40%", "precision": "levels"}})
    plans = step(project)
    assert told(plans["n"])[0] < plans["n"].expert_bytes["planned"]


def test_blocks_that_are_cached_count_as_such_at_their_levels(project):
    project.build()
    project.add_source("e3", near(9, project.tensors("m")))
    step(project)
    step(project)


def test_blocks_that_come_about_alike_but_for_their_levels_are_told_apart(project):
    project.build()
    levels = {tensor.levels for tensor in project.manifest("m").tensors if tensor.levels is not None}
    assert any(len(set(matrix)) > 1 for matrix in levels), "levels that are all the same show nothing"


def test_room_for_packs_is_counted_until_they_are_there(project):
    def cache_bytes():
        opened = project.open()
        report = opened.plan()
        return next(disk.needed for disk in report.disks if disk.cache)

    project.build()
    weighed(project, 0.4)
    before = cache_bytes()
    size = sum(path.stat().st_size for path in (project.cache / "progressive").iterdir())
    shutil.rmtree(project.cache / "progressive")
    assert cache_bytes() - before == size, "what codes come to stays known"


def test_a_sweep_in_levels_says_what_builds_come_to(project):
    report = project.open().sweep("m", ["10", "25", "100"], measure=True)
    assert [point.precision for point in report.all_points] == ["blocks"] * 3 + ["levels"] * 3
    assert report.own is not None
    assert [report.is_own(point) for point in report.levels] == [False, True, False]
    found = {}
    for budget in ({"expert_reads": "100%"}, {"expert_reads": "25%", "precision": "levels"}):
        project.set_output("m", project.outputs["m"] | {"budget": budget})
        built = project.build_one("m")
        found[budget["expert_reads"]] = {name: value.astype(np.float64) for name, value in project.tensors("m").items()}
    point = report.levels[1]
    assert point.expert_bytes == built.expert_bytes["planned"]
    assert point.bound.absolute == built.bound.absolute
    deviation = math.sqrt(math.fsum(float(np.sum((found["25%"][n] - found["100%"][n]) ** 2)) for n in found["100%"]))
    assert point.deviation.length.absolute == pytest.approx(deviation, rel=1e-9)
    assert deviation <= point.bound.absolute
    blocks = report.points[1]
    assert blocks.expert_bytes <= 0.25 * 3 * BYTES
    assert point.deviation.length.absolute < blocks.deviation.length.absolute


def test_a_sweep_takes_one_precision_alone_and_no_levels_of_samples(project):
    report = project.open().sweep("m", ["25"], precision="levels")
    assert [point.precision for point in report.all_points] == ["levels"]
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "stats": "sample"}})
    assert project.open().sweep("m", ["25"]).levels == ()
    with pytest.raises(MergefileError, match="cannot be swept in levels"):
        project.open().sweep("m", ["25"], precision="levels")
