"""Outputs as sources of others: the same bits as one merge after the other, and no more work than what changed."""

import shutil

import pytest
from support.checkpoints import read_checkpoint, write_safetensors
from support.projects import Reads, edit_tensor, snapshot, tensor_range
from support.stages import BLOCK, BLOCKS, ELEMENTS, A, B, counts, declare, merged, packs, states

from mergepipe.lockfile.reader import read_lock


@pytest.fixture(params=[True, False], ids=["published", "unpublished"])
def project(tmp_path, request):
    """Return a project of two stages that was built."""
    project = declare(tmp_path / "project", publish=request.param)
    project.build()
    return project


def files(project, output):
    """Return the files of an output's directory as bytes, without the manifest: it has the measured costs."""
    return {path.name: path.read_bytes() for path in project.folder(output).iterdir() if path.name != "mergepipe.json"}


# --- what comes out --------------------------------------------------------------------------------------------------


def test_the_result_is_that_of_the_merges_one_after_the_other(project, tmp_path):
    project.check("final")
    first = project.clone(tmp_path / "apart")
    first.outputs = {"stage": first.outputs["stage"] | {"publish": True}}
    first.save()
    first.build()
    second = project.clone(tmp_path / "second")
    shutil.copytree(first.folder("stage"), second.root / "models/stage")
    second.sources["stage"] = "models/stage"
    del second.outputs["stage"]
    second.save()
    second.build()
    assert second.raw("final") == project.raw("final")
    both = files(second, "final"), files(project, "final")
    assert both[0].keys() == both[1].keys()
    assert {name for name in both[0] if both[0][name] != both[1][name]} == {"README.md"}  # it says where a source is


CHAINS = {
    "base": {"next": merged("e3", base="stage"), "last": merged("next", "e1", operator="linear")},
    "dtype": {
        "next": merged("stage", "e3", operator="linear", write={"dtype": "bfloat16"}),
        "last": merged({"source": "next", "weight": -0.3}, write={"shard_size": 900}),
    },
    "both": {"next": merged("stage", {"source": "e3", "weight": 0.0}), "last": merged("stage", base="next")},
    "copy": {
        "next": {"operator": "passthrough", "experts": ["stage"]},
        "last": {"operator": "passthrough", "experts": [{"source": "next", "scale": 2.0}]},
    },
    "self": {"next": merged("stage", "e3", base="stage"), "last": merged("next", "stage", operator="linear")},
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("publish", [True, False])
def test_three_levels_agree_with_the_definition(tmp_path, chain, publish):
    project = declare(tmp_path, publish=publish, order=("stage",))
    for name, recipe in CHAINS[chain].items():
        project.set_output(name, recipe)
    report = project.build()
    assert list(report.outputs) == ["stage", "next", "last"]
    project.check("next")
    project.check("last")
    assert set(states(project.build()).values()) == {"unchanged"}  # two equal outputs share a pack: a link touched it
    before = snapshot(project.root)
    assert set(states(project.build()).values()) == {"unchanged"}
    assert snapshot(project.root) == before


def result(project):
    published = [name for name, recipe in project.outputs.items() if recipe.get("publish", True)]
    plans = {name: plan.digest for name, plan in project.open().plan().outputs.items()}
    return {name: files(project, name) for name in sorted(published)}, plans, project.lock.read_text()


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("way", ["order", "one-by-one", "workers", "pruned", "final-first", "stage-sharded"])
def test_the_result_depends_on_nothing_else(tmp_path, publish, way):
    clean = declare(tmp_path / "clean", publish=publish)
    clean.build()
    order = ("final", "stage") if way == "order" else ("stage", "final")
    other = declare(tmp_path / "other", publish=publish, order=order)
    match way:
        case "one-by-one":
            other.build("stage")
            assert not other.folder("final").exists()
        case "workers":
            other.build(workers=1, memory=1)
        case "pruned":
            other.build("stage")
            other.open().cache_prune(max_bytes=0)
        case "final-first":
            assert list(other.build("final").outputs) == ["stage", "final"]
        case "stage-sharded":
            other.set_output("stage", other.outputs["stage"] | {"write": {"shard_size": 300}})
            other.build()
            assert other.raw("final") == clean.raw("final")
            other.set_output("stage", clean.outputs["stage"])
    report = other.build()
    assert list(report.outputs) == ["stage", "final"]
    assert result(other) == result(clean)


def test_final_comes_before_its_stage_in_no_report(tmp_path):
    project = declare(tmp_path, order=("final", "stage"))
    assert list(project.open().plan().outputs) == ["stage", "final"]
    assert list(project.open().status().outputs) == ["stage", "final"]
    assert list(project.build().outputs) == ["stage", "final"]


def test_a_stage_that_is_named_is_built_alone(tmp_path):
    project = declare(tmp_path)
    assert list(project.build("stage").outputs) == ["stage"]
    assert not project.folder("final").exists()
    assert {output.name for output in read_lock(project.lock).outputs} == {"stage"}


def test_outputs_of_one_level_read_what_they_share_once(tmp_path, monkeypatch):
    project = declare(tmp_path)
    project.set_output("other", merged("stage", "e3", operator="linear"))
    reads = Reads(monkeypatch)
    reports = project.build().outputs
    ranges = reads.data_ranges(project.source_file("e3"))
    assert sum(stop - start for start, stop in ranges) == 4 * ELEMENTS
    (pack,) = [path for path in packs(project) if reads.data_ranges(path)]
    assert sum(stop - start for start, stop in reads.data_ranges(pack)) == 4 * ELEMENTS
    assert reports["final"].expert_bytes["read"] == 2 * 4 * ELEMENTS
    assert reports["other"].expert_bytes["read"] == 0
    assert reports["other"].expert_blocks["shared"] == 2 * BLOCKS


# --- what is counted -------------------------------------------------------------------------------------------------


def test_reads_of_a_stage_count_as_those_of_any_source(tmp_path, monkeypatch):
    project = declare(tmp_path)
    project.set_output("onto", merged("e3", base="stage"))
    plans = project.open().plan().outputs
    assert plans["final"].expert_bytes["planned"] == 2 * 4 * ELEMENTS
    planned = {name: expert.planned for name, expert in plans["final"].experts.items()}
    assert planned == {"stage": 4 * ELEMENTS, "e3": 4 * ELEMENTS}
    assert plans["onto"].base_bytes == 4 * ELEMENTS
    reports = project.build("final").outputs
    assert counts(reports["stage"]) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert counts(reports["final"]) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    onto = project.build_one("onto")
    assert counts(onto) == (BLOCKS, 4 * ELEMENTS, 4 * ELEMENTS, 0)


def test_a_stage_is_never_read_to_be_hashed(tmp_path, monkeypatch):
    project = declare(tmp_path)
    project.set_output("final", merged({"source": "stage", "weight": 0.0}, "e3"))
    reads = Reads(monkeypatch)
    report = project.build()
    assert not any(reads.data_ranges(path) for path in packs(project))
    assert all(output.index_bytes_read == 0 for name, output in report.outputs.items() if name == "stage")
    project.check("final")


# --- nothing changed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pruned", [False, True])
def test_nothing_changed_reads_no_weight_and_writes_nothing(project, monkeypatch, pruned):
    if pruned:
        project.open().cache_prune(max_bytes=0)
        assert packs(project) == []
        assert set(states(project.build()).values()) == {"unchanged"}  # links went: published files are hashed once
        assert packs(project) == []
    before = snapshot(project.root)
    reads = Reads(monkeypatch)
    report = project.build()
    assert states(report) == {"stage": "unchanged", "final": "unchanged"}
    assert not report.lock_changed
    assert {path for path, _, _ in reads.ranges} == {project.source_file(name) for name in project.sources}
    assert not any(reads.data_ranges(project.source_file(name)) for name in project.sources)
    assert snapshot(project.root) == before
    status = project.open().status()
    assert {output.state for output in status.outputs.values()} == {"up-to-date"}
    assert status.lock_state == "current"
    assert snapshot(project.root) == before


def test_a_touched_source_is_hashed_and_nothing_else(project):
    path = project.source_file("e1")
    path.touch()
    reports = project.build().outputs
    assert {report.state for report in reports.values()} == {"unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 4 * ELEMENTS)
    assert counts(reports["final"]) == (0, 0, 0, 0)


# --- what changed ----------------------------------------------------------------------------------------------------


def test_one_tensor_of_one_expert_of_a_stage_reruns_what_depends_on_it_in_both_stages(project, monkeypatch):
    changed = read_checkpoint(project.source_file("e1").parent)
    changed[B] = changed[B] + 1
    write_safetensors(project.source_file("e1"), changed)
    reads = Reads(monkeypatch)
    reports = project.build().outputs
    assert counts(reports["stage"]) == (4, 2 * 4 * 256, 4 * 256, 4 * (ELEMENTS - 256))
    assert counts(reports["final"]) == (4, 2 * 4 * 256, 4 * 256, 0)
    start, stop = tensor_range(project.source_file("e3"), B)
    ranges = reads.data_ranges(project.source_file("e3"))
    assert (ranges[0][0], ranges[-1][1], sum(b - a for a, b in ranges)) == (start, stop, stop - start)
    project.check("final")


def test_one_element_reruns_one_block_of_each_stage(project):
    edit_tensor(project.source_file("e1"), A, 2 * BLOCK + 5, 9.0)
    reports = project.build().outputs
    assert counts(reports["stage"]) == (1, 2 * 4 * BLOCK, 4 * BLOCK, 4 * (ELEMENTS - BLOCK))
    assert counts(reports["final"]) == (1, 2 * 4 * BLOCK, 4 * BLOCK, 0)
    project.check("final")


def test_a_stage_that_comes_out_as_before_leaves_what_is_made_from_it_alone(project):
    """An expert of weight 0 at one layer changes there: the stage is built again, to the same bits."""
    project.set_output("stage", merged({"source": "e1", "weight": [0.0, 0.5]}, "e2") | publish_of(project))
    project.build()
    before = snapshot(project.folder("final"))
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    reports = project.build().outputs
    assert reports["stage"].state == "built"
    assert reports["stage"].blocks["computed"] == 0
    assert reports["final"].state == "unchanged"
    assert counts(reports["final"]) == (0, 0, 0, 0)
    assert snapshot(project.folder("final")) == before
    assert set(states(project.build()).values()) == {"unchanged"}


def publish_of(project):
    return {key: value for key, value in project.outputs["stage"].items() if key == "publish"}


def test_a_tensor_of_a_stage_that_comes_out_as_before_is_not_merged_again(project):
    """`a` of the stage is computed again to the same bits, `b` to others: of `final` only `b` is."""
    rules = [{"match": "*.a", "params": {"lambda": 0.0}}]
    project.set_output("stage", merged("e1", "e2", rules=rules) | publish_of(project))
    project.build()
    rules = [{"match": "*.a", "params": {"lambda": 0.0}, "experts": {"e1": {"weight": 0.7}}}]
    project.set_output("stage", merged({"source": "e1", "weight": 0.6}, "e2", rules=rules) | publish_of(project))
    report = project.build().outputs["final"]
    assert report.blocks["computed"] == 5  # `b` and `v`
    assert report.expert_bytes["read"] == 2 * 4 * (256 + 64)
    project.check("final")


def test_another_shard_size_of_a_stage_changes_nothing_behind_it(project):
    project.set_output("stage", project.outputs["stage"] | {"write": {"shard_size": 300}})
    reports = project.build().outputs
    assert reports["stage"].state == "built"
    assert reports["stage"].blocks["computed"] == 0
    assert reports["final"].state == "unchanged"


def test_what_only_final_reads_reruns_final_alone(project):
    project.set_output("final", merged("stage", {"source": "e3", "weight": 0.9}))
    reports = project.build().outputs
    assert states(project.build()) == {"stage": "unchanged", "final": "unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert counts(reports["final"]) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
