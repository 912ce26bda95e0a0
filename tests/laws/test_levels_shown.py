"""What is said of levels: by builds, plans, explanations, reports, cards and locks, all from one plan."""

import json
import math
import re
import shutil

import pytest
from support.cli import run_mergepipe
from support.levels import EXPERTS, levels_project

from mergepipe.cli.explain import _lines as explain_lines
from mergepipe.cli.pages.report import page
from mergepipe.cli.pages.report_maps import heat_maps
from mergepipe.cli.render import build_lines
from mergepipe.cli.render_plan import plan_lines
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.writer import render_lock

TENSOR = "model.layers.0.a.weight"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    project = levels_project(tmp_path_factory.mktemp("built"), "15%")
    plan = project.open().plan()
    return project, plan, project.build()


def counts(project):
    """Return by level the expert blocks, from the manifest's matrices: every block here has content of its own."""
    found = {}
    for tensor in project.manifest("m").tensors:
        for level in tensor.levels or bytes([255]) * len(EXPERTS):
            name = {0: "omitted", 255: "exact"}.get(level, str(level))
            found[name] = found.get(name, 0) + 1
    return found


def test_plan_build_lock_manifest_and_report_say_the_same(built):
    project, plan, build = built
    planned, wanted = plan.outputs["m"].as_json(), counts(project)
    assert len(set(wanted) - {"omitted", "exact"}) > 1
    assert {name: count["blocks"] for name, count in planned["levels"].items()} == wanted
    assert sum(count["bytes"] for count in planned["levels"].values()) == planned["expert_bytes"]["planned"]
    for expert in planned["experts"].values():
        assert sum(count["bytes"] for count in expert["levels"].values()) == expert["planned"]
    assert build.as_json()["outputs"]["m"]["levels"] == wanted
    assert project.build_one("m").as_json()["levels"] == wanted, "an output that is up to date knows them"
    locked = parse_lock(project.lock.read_bytes(), project.lock).outputs[0]
    assert locked == project.manifest("m").output
    assert sum(tensor.levels.bytes for tensor in locked.tensors) == planned["expert_bytes"]["planned"]
    report = project.open().report().outputs["m"]
    assert report.budget.levels == wanted
    assert sum(sum(cell.levels.values()) for cell in report.cells) == sum(wanted.values())
    assert sum(tensor.bytes_read for tensor in report.tensors) == planned["expert_bytes"]["planned"]


def test_the_lock_is_one_fact_a_line_and_reads_back(built):
    text = built[0].lock.read_text()
    assert "revision = 1\n" in text
    assert 'budget = "15% in levels"\nlevels_version = 2\n' in text
    assert render_lock(parse_lock(text, built[0].lock)) == text


def test_a_lock_of_whole_blocks_is_what_it_was(tmp_path):
    project = levels_project(tmp_path, {"expert_reads": "25%"})
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "25%", "precision": "blocks"}})
    built = project.build_one("m")
    assert built.levels is None
    text = project.lock.read_text()
    assert "revision = 0\n" in text
    assert "level" not in text
    assert "level" not in (project.folder("m") / "mergepipe.json").read_text().replace('"access":{"levels"', "")


def test_people_read_at_which_levels_blocks_are(built):
    project, plan, build = built
    text = "\n".join(plan_lines(plan, str, verbose=True))
    assert "level 3 (3 bits)" in text
    assert "% of the deltas' length" in text
    assert "in the cache" in text
    assert "at level 3" in "\n".join(build_lines(build, str, verbose=False))
    text = "\n".join(explain_lines(project.open().explain("m", TENSOR), str, verbose=False))
    assert "approximate: 1 at level 3, 2 at level 5" in text
    assert "of its deltas missing: some are approximate" in text


def test_the_explanation_of_an_output_says_its_levels(built):
    project, plan, _ = built
    found = project.open().explain("m")
    assert found.summary.levels == plan.outputs["m"].as_json()["levels"]
    assert "at level 3" in "\n".join(explain_lines(found, str, verbose=False))


def test_an_explanation_knows_what_is_missing_of_each_expert(built):
    found = built[0].open().explain("m", TENSOR)
    for expert in found.experts:
        reads = expert.reads
        assert reads.read == reads.blocks == sum(count["blocks"] for count in reads.levels.values())
        assert reads.bytes_read == sum(count["bytes"] for count in reads.levels.values())
    # Equal weights, additive: the bound of the tensor is at least that of residuals that are orthogonal.
    missing = math.sqrt(math.fsum(expert.reads.residual**2 for expert in found.experts))
    assert 0.3 * missing <= found.error.bound
    assert json.dumps(found.as_json())


def test_the_card_says_of_which_bits_it_is_made(built):
    card = (built[0].folder("m") / "README.md").read_text()
    assert "of most deltas the first 3 to 5 bits of each element" in card


def test_the_map_of_levels_goes_from_nothing_to_exact(built):
    report = built[0].open().report().outputs["m"]
    (levels,) = [one for one in heat_maps(report) if one.name == "map-levels"]
    assert all(3 <= value <= 5 for value in levels.known() if value != 8)
    shown = page(report)
    assert 'aria-label="Colour scale"' in shown
    assert ">nothing</li>" in shown
    assert ">exact</li>" in shown
    assert "Expert blocks: at level 3" in shown


def test_an_output_that_is_up_to_date_reads_nothing_without_its_packs(tmp_path):
    project = levels_project(tmp_path)
    project.build()
    shutil.rmtree(project.cache / "progressive")
    assert project.open().status().outputs["m"].state == "up-to-date"
    built = project.build_one("m")
    assert (built.state, built.index_bytes_read, built.expert_bytes["read"]) == ("unchanged", 0, 0)
    assert list(project.cache.glob("progressive/*")) == []


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a folder with locks and directories of three budgets: 15% and 25% in levels, and 25% in whole blocks."""
    root = tmp_path_factory.mktemp("changed")
    project = levels_project(root / "project", "15%")
    for name, share, precision in (("old", "15%", "levels"), ("new", "25%", "levels"), ("blocks", "25%", "blocks")):
        project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": share, "precision": precision}})
        project.build()
        shutil.copy(project.lock, root / f"{name}.lock")
        shutil.copytree(project.folder("m"), root / name)
    return root


def test_the_difference_of_two_locks_says_levels(changed):
    text = run_mergepipe(["diff", "old.lock", "new.lock"], changed).stdout
    assert re.search(r"levels +6 at level 3, 2 at level 4, 10 at level 5, 3 exact -> 6 at level 5, ", text)
    assert "moved" not in text
    text = run_mergepipe(["diff", "new.lock", "blocks.lock"], changed).stdout
    assert re.search(r'budget +"25% in levels" -> "25%"', text)
    assert re.search(r"levels_version +2 -> none", text)
    assert re.search(r"levels +6 at level 5, .* -> whole blocks", text)


@pytest.mark.parametrize("option", [[], ["--format", "markdown"]])
def test_the_difference_of_two_manifests_says_which_blocks_moved(changed, option):
    text = run_mergepipe(["diff", "old", "new", *option], changed).stdout
    assert "6 blocks from level 3 to level 5" in text
    found = json.loads(run_mergepipe(["diff", "old", "new", "--json"], changed).stdout)["outputs"][0]
    assert sum(move["blocks"] for move in found["moved_blocks"]) == 18
    assert {"old": "3", "new": "5", "blocks": 6} in found["moved_blocks"]
    by_tensor = [move for change in found["changes"] for move in change["moved_blocks"]]
    assert sum(move["blocks"] for move in by_tensor) == 18


def test_a_plan_says_which_codes_are_gone(tmp_path):
    project = levels_project(tmp_path)
    project.build()
    assert "gone" not in "\n".join(plan_lines(project.open().plan(), str, verbose=False))
    shutil.rmtree(project.cache / "progressive")
    codes = project.open().plan().outputs["m"].codes
    assert codes["missing"] == codes["bytes"] > 0
    text = "\n".join(plan_lines(project.open().plan(), str, verbose=False))
    assert re.search(r"codes +0 B in the cache, [0-9.]+ KB gone: made again where they are read", text)
