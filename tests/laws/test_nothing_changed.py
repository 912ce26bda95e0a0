"""Law 6: nothing changed, so no weight byte is read and nothing is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import random_tensors
from support.cli import clean_environment
from support.projects import Reads, SmallProject, data_start, snapshot

from mergepipe.fsio import identity

SHAPES = {f"model.layers.{n}.w": (16, 16) for n in range(4)} | {"model.embed_tokens.weight": (40, 8)}
TESTS = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        side = {"tokenizer.json": "{}", "generation_config.json": "{}"}
        project.add_source(
            name, random_tensors(seed, SHAPES, "bfloat16"), shards=seed + 1, config={"x": 1}, side_files=side
        )
    experts = ["e1", {"source": "e2", "weight": 0.3}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    project.set_output("n", {"operator": "linear", "experts": experts, "write": {"shard_size": 700}})
    project.build()
    return project


def weight_files(project):
    return sorted(path for name in project.sources for path in (project.root / "models" / name).glob("*.safetensors"))


def test_a_second_build_reads_headers_and_no_weight(project, monkeypatch):
    reads = Reads(monkeypatch)
    reports = project.build().outputs
    assert {report.state for report in reports.values()} == {"unchanged"}
    assert all(not reads.data_ranges(path) for path in weight_files(project))
    assert {path for path, _, _ in reads.ranges} == set(weight_files(project))  # no pack and no output either
    for report in reports.values():
        read = (report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read, report.bytes_written)
        assert read == (0, 0, 0, 0)
        assert report.blocks["cached"] == report.blocks["total"]
        assert report.blocks["computed"] == report.blocks["copied"] == report.expert_blocks["read"] == 0


def test_a_source_written_a_moment_before_a_build_is_not_hashed_again_by_the_next(project, monkeypatch):
    """The build waits until a later write would show in the file's times, here on a machine with a slow clock."""
    monkeypatch.setattr(identity, "FINE_GRANULARITY_NS", 150_000_000)
    project.add_source("e1", random_tensors(7, SHAPES, "bfloat16"))
    assert {report.state for report in project.build().outputs.values()} == {"built"}
    again = project.build().outputs
    assert sum(report.index_bytes_read for report in again.values()) == 0


def test_a_header_is_read_to_its_last_byte_and_no_further(project, monkeypatch):
    reads = Reads(monkeypatch)
    project.open().plan()
    for path in weight_files(project):
        assert max(stop for file, _, stop in reads.ranges if file == path) == data_start(path)


def test_a_second_build_writes_nothing(project):
    before = snapshot(project.root)
    assert not project.build().lock_changed
    assert snapshot(project.root) == before


def test_plan_and_status_write_nothing(project):
    before = snapshot(project.root)
    opened = project.open()
    opened.plan()
    status = opened.status()
    opened.cache_info()
    assert snapshot(project.root) == before
    assert {output.state for output in status.outputs.values()} == {"up-to-date"}
    assert status.lock_state == "current"


def test_status_without_a_cache_makes_none(project, tmp_path):
    other = project.clone(tmp_path / "other")
    before = snapshot(other.root)
    assert {output.state for output in other.open().status().outputs.values()} == {"unbuilt"}
    other.open().plan()
    assert snapshot(other.root) == before


def test_building_one_output_leaves_the_others_and_their_lock_entries_alone(project):
    before = snapshot(project.root)
    project.build("n")
    assert snapshot(project.root) == before


def test_a_second_build_after_every_kind_of_build_is_unchanged(project):
    project.set_output("n", project.outputs["n"] | {"write": {"shard_size": 1500}})
    project.build()
    project.open().cache_prune(max_bytes=0)
    (project.folder("m") / "notes.txt").write_text("mine")
    for _ in range(2):
        assert {report.state for report in project.build().outputs.values()} == {"unchanged"}
    before = snapshot(project.root)
    project.build()
    assert snapshot(project.root) == before


_SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from mergepipe.checkpoints.geometry import GEOMETRY_1
from support.projects import SmallProject
project = SmallProject(Path({root!r}), GEOMETRY_1)
def moved():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])
project.open().build()
first = moved()
report = project.open().build()
second = moved()
print(json.dumps([report.as_json()["outputs"]["m"]["state"], *(b - a for a, b in zip(first, second))]))
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_the_kernel_saw_a_second_build_read_no_weights(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, {"w": (1000, 1000)}, "bfloat16"))
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e1"]})
    code = _SCRIPT.format(tests=str(TESTS), root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean_environment()
    )
    state, read, written = json.loads(done.stdout)
    assert state == "unchanged"
    assert read < 200_000  # of 4,000,000 bytes of weights; the catalog, the lock and headers are read
    assert written == 0


def two_equal_outputs(root):
    project = SmallProject(root)
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, {"w": (40, 16)}))
    recipe = {"operator": "linear", "experts": ["e1"]}
    project.set_output("one", recipe)
    project.set_output("two", recipe)
    return project


def states(project):
    return [output.state for output in project.open().status().outputs.values()]


def test_pruning_the_cache_leaves_outputs_up_to_date(tmp_path):
    project = two_equal_outputs(tmp_path)
    project.build()
    project.open().cache_prune(0)
    before = snapshot(project.folder("one"), project.folder("two"))
    assert states(project) == ["up-to-date", "up-to-date"]
    assert [output.state for output in project.build().outputs.values()] == ["unchanged", "unchanged"]
    assert snapshot(project.folder("one"), project.folder("two")) == before


def test_a_file_that_was_edited_before_the_cache_is_pruned_is_still_found_out(tmp_path):
    project = two_equal_outputs(tmp_path)
    project.build()
    path = project.folder("one") / "model.safetensors"
    data = bytearray(path.read_bytes())
    path.unlink()
    data[-1] ^= 1
    path.write_bytes(data)
    project.open().cache_prune(0)
    assert states(project)[0] == "stale"
    assert [output.state for output in project.build().outputs.values()] == ["built", "unchanged"]


def test_outputs_of_equal_content_built_one_after_the_other_stay_up_to_date(tmp_path):
    project = two_equal_outputs(tmp_path)
    project.build("one")
    project.build("two")
    assert states(project) == ["up-to-date", "up-to-date"]
