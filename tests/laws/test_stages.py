"""Outputs as sources of others: the same bits as one merge after the other, and no more work than what changed."""

import json
import shutil

import pytest
from support.checkpoints import random_tensors, read_checkpoint, write_safetensors
from support.projects import Messages, Reads, SmallProject, data_start, edit_tensor, snapshot, tensor_range

from mergepipe.engine.run import Engine
from mergepipe.errors import MergepipeError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.lockfile.reader import read_lock

# Blocks of 64 elements: `a` and `b` have four each, `v` one.
BLOCK = 64
SHAPES = {"model.layers.0.a": (16, 16), "model.layers.1.b": (16, 16), "model.v": (64,)}
A, B, V = SHAPES
ELEMENTS, BLOCKS = 576, 9
CONFIG = {"architectures": ["M"], "torch_dtype": "float32", "num_hidden_layers": 2}


def merged(*experts, base="base", operator="task_arithmetic", **entries):
    return {"operator": operator, "base": base, "experts": list(experts), **entries}


def declare(root, *, publish=True, order=("stage", "final")):
    """Return a project of two stages: `final` merges `stage` and a third expert onto the base."""
    project = SmallProject(root)
    for seed, name in enumerate(("base", "e1", "e2", "e3")):
        side = {"tokenizer.json": f'{{"of": "{name}"}}', "generation_config.json": "{}"}
        project.add_source(name, random_tensors(seed, SHAPES), config=CONFIG, side_files=side)
    recipes = {
        "stage": merged({"source": "e1", "weight": 0.5}, "e2") | ({} if publish else {"publish": False}),
        "final": merged({"source": "stage", "weight": [0.2, 0.7]}, {"source": "e3", "weight": 0.4}),
    }
    for name in order:
        project.set_output(name, recipes[name])
    return project


@pytest.fixture(params=[True, False], ids=["published", "unpublished"])
def project(tmp_path, request):
    """Return a project of two stages that was built."""
    project = declare(tmp_path / "project", publish=request.param)
    project.build()
    return project


def counts(report):
    """Return computed blocks; expert, base and index bytes read."""
    return (report.blocks["computed"], report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read)


def states(report):
    return {name: output.state for name, output in report.outputs.items()}


def files(project, output):
    """Return the files of an output's directory as bytes, without the manifest: it has the measured costs."""
    return {path.name: path.read_bytes() for path in project.folder(output).iterdir() if path.name != "mergepipe.json"}


def packs(project):
    return sorted((project.cache / "packs").iterdir())


# --- what comes out -----------------------------------------------------------------------------------------------


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


# --- what is counted ----------------------------------------------------------------------------------------------


def test_reads_of_a_stage_count_as_those_of_any_source(tmp_path, monkeypatch):
    project = declare(tmp_path)
    project.set_output("onto", merged("e3", base="stage"))
    plans = project.open().plan().outputs
    assert plans["final"].expert_bytes["planned"] == 2 * 4 * ELEMENTS
    assert plans["final"].experts == {"stage": 4 * ELEMENTS, "e3": 4 * ELEMENTS}
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


# --- nothing changed ----------------------------------------------------------------------------------------------


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


# --- what changed -------------------------------------------------------------------------------------------------


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


# --- packs that are gone ------------------------------------------------------------------------------------------


def test_a_pruned_stage_is_built_again_only_where_its_bytes_are_needed(project):
    project.open().cache_prune(max_bytes=0)
    (project.folder("final") / "config.json").unlink()  # final is published anew, but its tensors are gone too
    reports = project.build().outputs
    assert reports["stage"].state == "unchanged"
    assert reports["stage"].blocks["computed"] == BLOCKS
    assert reports["final"].state == "built"
    assert len(packs(project)) == 2
    project.check("final")
    assert set(states(project.build()).values()) == {"unchanged"}


def drop_pack_of_stage(project):
    """Prune the pack of the stage alone."""
    name = read_lock(project.lock).output("stage").shards[0].digest.hex()
    builder = project.open()
    with builder._writing() as (catalog, _):
        catalog.drop_pack(name)
    (project.cache / "packs" / f"{name}.safetensors").unlink()


def test_a_pruned_stage_is_left_alone_where_what_needs_it_is_only_written_anew(project):
    drop_pack_of_stage(project)
    project.set_output("final", project.outputs["final"] | {"write": {"shard_size": 500}})
    reports = project.build().outputs
    assert counts(reports["stage"]) == counts(reports["final"]) == (0, 0, 0, 0)
    assert reports["final"].state == "built"
    assert reports["final"].blocks["cached"] == BLOCKS
    project.check("final")
    assert len(project.manifest("final").tensors) == len(SHAPES)


def test_a_pruned_stage_comes_back_for_another_weight_of_final(project):
    drop_pack_of_stage(project)
    project.set_output("final", merged("stage", "e3"))
    reports = project.build().outputs
    assert reports["stage"].state == "unchanged"
    assert counts(reports["stage"]) == (BLOCKS, 2 * 4 * ELEMENTS, 4 * ELEMENTS, 0)
    assert counts(reports["final"])[0] == BLOCKS
    project.check("final")


def test_a_chain_of_pruned_stages_comes_back(tmp_path):
    project = declare(tmp_path, publish=False, order=("stage",))
    project.set_output("middle", merged("stage", base="e3", publish=False))
    project.set_output("final", merged("middle", "e1"))
    project.build()
    project.open().cache_prune(max_bytes=0)
    project.set_output("final", merged("middle", {"source": "e1", "weight": 0.1}))
    reports = project.build().outputs
    assert [report.state for report in reports.values()] == ["unchanged", "unchanged", "built"]
    project.check("final")
    assert set(states(project.build()).values()) == {"unchanged"}


def flip(path, at=-1):
    """Flip a bit of a file without a trace in its identity that the cache could notice."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)


def stage_pack(project):
    return project.cache / "packs" / f"{read_lock(project.lock).output('stage').shards[0].digest.hex()}.safetensors"


@pytest.mark.parametrize("noticed", [True, False], ids=["by-identity", "by-reading"])
def test_a_damaged_pack_of_a_stage_is_found_and_made_again(tmp_path, noticed):
    project = declare(tmp_path, publish=False)
    project.build()
    flip(stage_pack(project))
    if not noticed:
        forge_identity(project, stage_pack(project))
    project.set_output("final", merged("stage", "e3"))
    messages = Messages()
    reports = project.build(reporter=messages).outputs
    project.check("final")
    assert states_of(reports) == {"stage": "unchanged", "final": "built"}
    assert reports["stage"].blocks["computed"] == BLOCKS
    assert len(list((project.cache / "quarantine").iterdir())) == 1
    (warning,) = messages.warnings
    assert "is damaged: it was taken out of use, and output `stage` is built again" in warning
    assert set(states(project.build()).values()) == {"unchanged"}


def forge_identity(project, pack):
    """Let the catalog take a pack for the one that it recorded, whatever is in it now."""
    with project.open()._writing() as (catalog, _):
        catalog.record_pack_identity(pack.stem, FileIdentity.at(pack))


def test_a_block_that_nobody_reads_is_not_looked_at(tmp_path):
    """The packs of a stage are not hashed: the digests of the blocks that are read are compared."""
    project = declare(tmp_path, publish=False)
    project.build()
    start, _ = tensor_range(stage_pack(project), V)
    flip(stage_pack(project), data_start(stage_pack(project)) + start)
    project.set_output("final", project.outputs["final"] | {"rules": [{"match": "*.a", "params": {"lambda": 0.5}}]})
    messages = Messages()
    reports = project.build(reporter=messages).outputs
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert counts(reports["final"]) == (4, 2 * 4 * 256, 4 * 256, 0)
    assert not messages.warnings
    project.check("final")


def test_a_pack_that_is_damaged_again_and_again_ends_the_build(tmp_path, monkeypatch):
    project = declare(tmp_path, publish=False)
    project.build("stage")
    run = Engine.run

    def damaging(engine, plans):
        if plans[0].output.name == "final":
            flip(stage_pack(project))
        return run(engine, plans)

    monkeypatch.setattr(Engine, "run", damaging)
    with pytest.raises(MergepipeError, match="changed while it was being read"):
        project.build()
    assert not project.folder("final").exists()
    monkeypatch.setattr(Engine, "run", run)
    project.build()
    project.check("final")


def test_a_published_stage_that_was_edited_is_mended_and_what_is_made_from_it_untouched(tmp_path):
    project = declare(tmp_path)
    project.build()
    path = project.folder("stage") / "model.safetensors"
    path.chmod(0o644)
    edit_tensor(path, A, 0, 9.0)
    before = snapshot(project.folder("final"))
    reports = project.build().outputs
    assert states_of(reports) == {"stage": "built", "final": "unchanged"}
    assert snapshot(project.folder("final")) == before
    project.check("stage")


def states_of(reports):
    return {name: report.state for name, report in reports.items()}


def test_a_stage_whose_directory_is_gone_is_published_again_alone(tmp_path):
    project = declare(tmp_path)
    project.build()
    shutil.rmtree(project.folder("stage"))
    status = project.open().status().outputs
    assert {name: output.state for name, output in status.items()} == {"stage": "stale", "final": "up-to-date"}
    reports = project.build().outputs
    assert states_of(reports) == {"stage": "built", "final": "unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    project.check("stage")


# --- not published ------------------------------------------------------------------------------------------------


def test_an_unpublished_output_is_written_nowhere_but_into_the_cache(tmp_path):
    project = declare(tmp_path, publish=False)
    report = project.build()
    assert not (project.root / "build/stage").exists()
    assert report.outputs["stage"].path is None
    assert report.as_json()["outputs"]["stage"]["path"] is None
    assert project.open().plan().as_json()["outputs"]["stage"]["path"] is None
    assert project.open().status().as_json()["outputs"]["stage"] == {"state": "up-to-date", "path": None, "reasons": []}
    assert len(packs(project)) == 2
    locked = read_lock(project.lock).output("stage")
    assert (locked.path, len(locked.tensors)) == (None, len(SHAPES))
    assert "publish = false\noperator" in project.lock.read_text()


def test_an_unpublished_output_that_nothing_needs_is_built_when_it_is_named_or_all_are(tmp_path):
    project = declare(tmp_path, publish=False)
    project.set_output("final", merged("e1", "e3"))
    assert list(project.build("final").outputs) == ["final"]
    assert len(packs(project)) == 1
    assert states(project.build("stage")) == {"stage": "built"}
    assert len(packs(project)) == 2
    assert states(project.build()) == {"stage": "unchanged", "final": "unchanged"}


def test_an_unpublished_output_may_be_published_later_and_the_other_way_round(tmp_path):
    project = declare(tmp_path, publish=False)
    project.build()
    project.set_output("stage", project.outputs["stage"] | {"publish": True})
    reports = project.build().outputs
    assert states_of(reports) == {"stage": "built", "final": "unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    project.check("stage")
    project.set_output("stage", project.outputs["stage"] | {"publish": False})
    assert states(project.build()) == {"stage": "unchanged", "final": "unchanged"}
    assert project.folder("stage").exists()  # it is the user's to remove
    assert read_lock(project.lock).output("stage").path is None


def test_a_directory_in_the_place_of_an_unpublished_output_is_no_matter(tmp_path):
    project = declare(tmp_path, publish=False)
    mine = project.root / "build/stage/mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    project.build()
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_an_output_that_becomes_a_stage_later_is_not_built_again(tmp_path):
    project = declare(tmp_path, order=("stage",))
    project.build()
    before = snapshot(project.folder("stage"))
    project.set_output("final", merged("stage", "e3"))
    reports = project.build().outputs
    assert states_of(reports) == {"stage": "unchanged", "final": "built"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert snapshot(project.folder("stage")) == before
    project.check("final")
    drop_pack_of_stage(project)
    project.set_output("final", project.outputs["final"] | {"write": {"shard_size": 500}})
    assert counts(project.build().outputs["stage"]) == (0, 0, 0, 0)  # its block digests were recorded meanwhile


def test_two_projects_share_a_cache_with_unpublished_outputs_of_one_name(tmp_path):
    one, two = declare(tmp_path / "one", publish=False), declare(tmp_path / "two", publish=False)
    edit_tensor(two.source_file("e1"), A, 0, 9.0)
    for project in (one, two):
        project.build(cache_dir=tmp_path / "cache")
    for project in (one, two):
        assert set(states(project.build(cache_dir=tmp_path / "cache")).values()) == {"unchanged"}
        project.check("final")


# --- side files ---------------------------------------------------------------------------------------------------


def side(project, output, name):
    return (project.folder(output) / name).read_text()


def test_side_files_go_through_a_stage_that_is_not_published(tmp_path):
    project = declare(tmp_path, publish=False, order=("stage",))
    project.set_output("stage", project.outputs["stage"] | {"write": {"tokenizer": "e2", "dtype": "bfloat16"}})
    project.set_output("final", merged("e3", base="stage"))
    project.set_output("other", merged("e3", write={"tokenizer": "stage"}))
    project.build()
    for name in ("final", "other"):
        assert side(project, name, "tokenizer.json") == '{"of": "e2"}'
    assert json.loads(side(project, "final", "config.json"))["torch_dtype"] == "bfloat16"
    assert json.loads(side(project, "other", "config.json"))["torch_dtype"] == "float32"
    (project.root / "models/e2/tokenizer.json").write_text('{"of": "another"}')
    reports = project.build().outputs
    assert {name: report.state for name, report in reports.items()} == dict.fromkeys(project.outputs, "built")
    assert all(counts(report) == (0, 0, 0, 0) for report in reports.values())
    assert side(project, "final", "tokenizer.json") == '{"of": "another"}'


def test_an_output_that_gives_its_tokenizer_alone_is_not_built_for_that(tmp_path):
    project = declare(tmp_path, publish=False)
    project.set_output("final", merged("e1", write={"tokenizer": "stage"}))
    assert list(project.build("final").outputs) == ["final"]
    assert side(project, "final", "tokenizer.json") == '{"of": "base"}'
    assert read_lock(project.lock).output("final").write["tokenizer"] == "stage"


# --- on record ----------------------------------------------------------------------------------------------------


def test_the_lock_names_a_stage_with_its_digest_and_not_among_the_sources(project):
    lock = read_lock(project.lock)
    assert [source.name for source in lock.sources] == ["base", "e1", "e2", "e3"]
    assert lock.output("final").sources["stage"] == lock.output("stage").digest
    assert lock.output("stage").sources.keys() == {"base", "e1", "e2"}


def test_card_and_manifest_name_a_stage(project):
    assert "| expert | stage | output `stage` of the same Mergefile | `b3:" in side(project, "final", "README.md")
    (record,) = [source for source in project.manifest("final").sources if source.name == "stage"]
    assert record.location == {"output": "stage"}
    assert record.digest == read_lock(project.lock).output("stage").digest
    assert (record.tensors, record.bytes) == (len(SHAPES), 4 * ELEMENTS)


def test_locked_builds_agree_and_refuse_early(project):
    assert states(project.build(locked=True)) == {"stage": "unchanged", "final": "unchanged"}
    project.open().cache_prune(max_bytes=0)
    shutil.rmtree(project.cache)
    assert not project.build(locked=True, force=True).lock_changed
    before = snapshot(project.folder("final"))
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    with pytest.raises(MergepipeError, match=r"outputs\.stage|sources\.e1") as caught:
        project.build(locked=True)
    assert caught.value.exit_status == 3
    assert snapshot(project.folder("final")) == before


def test_the_lock_keeps_what_was_not_built(project):
    lock = project.lock.read_text()
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    project.build("stage")
    old, new = (text for text in (lock, project.lock.read_text()))
    assert old != new
    after = read_lock(project.lock)
    assert after.output("final").sources["stage"] != after.output("stage").digest
    status = project.open().status()
    assert status.outputs["stage"].state == "up-to-date"
    assert status.outputs["final"].reasons == ("source `stage` has other content",)
    assert status.lock_state == "unverified" or status.lock_state == "outdated"
    project.build()
    assert read_lock(project.lock).output("final").sources["stage"] == after.output("stage").digest
    assert project.open().status().lock_state == "current"


def test_status_says_what_a_stale_stage_means_for_what_is_made_from_it(project):
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    status = project.open().status().outputs
    assert status["stage"].reasons == ("source `e1` changed on disk, or was not read before",)
    assert status["final"].reasons == ("output `stage`, which it is made from, is not up to date",)


# --- what is wrong ------------------------------------------------------------------------------------------------


def refused(project, *outputs, **options):
    """Return the error of a build that must fail before anything is read or written."""
    before = snapshot(project.root)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        with pytest.raises(MergepipeError) as caught:
            project.build(*outputs, **options)
        assert not any(reads.data_ranges(project.source_file(name)) for name in project.sources)
    assert snapshot(project.root) == before
    return caught.value


def test_an_unknown_stage_is_an_error_that_names_the_nearest(tmp_path):
    project = declare(tmp_path)
    project.set_output("final", merged("stagee"))
    error = refused(project)
    assert "unknown source `stagee`" in error.message
    assert "`stage`" in error.hint


def test_a_cycle_of_stages_is_refused(tmp_path):
    project = declare(tmp_path)
    project.set_output("stage", merged("final"))
    error = refused(project)
    assert "a cycle: `stage` needs `final` needs `stage`" in error.message
    assert error.exit_status == 2


def test_a_problem_of_a_later_stage_is_found_before_a_weight_of_the_first_is_read(tmp_path):
    project = declare(tmp_path)
    shapes = SHAPES | {B: (16, 8)}
    project.add_source("e3", random_tensors(3, shapes), config=CONFIG)
    error = refused(project)
    assert f"tensor `{B}` has shape [16, 8] in expert `e3`" in error.message
    assert error.exit_status == 2
    assert list(project.build("stage").outputs) == ["stage"]


def test_problems_of_all_stages_are_reported_together(tmp_path):
    project = declare(tmp_path, publish=False)
    project.add_source("e2", random_tensors(2, SHAPES | {A: (4, 4)}), config=CONFIG)
    project.set_output("other", merged("e3", rules=[{"match": "nothing", "params": {"lambda": 0.5}}]))
    error = refused(project)
    assert "in expert `e2`" in error.message
    assert "matches no tensor" in error.message
    assert "`final`" not in error.message  # what it is made from cannot be planned: nothing can be said of it


def test_a_side_file_of_a_stage_that_cannot_be_read_is_found_early(tmp_path):
    project = declare(tmp_path, publish=False)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    (project.root / "models/base/tokenizer.json").write_text(pointer)
    assert "tokenizer.json" in refused(project).message


def test_the_directory_of_a_published_stage_is_protected(tmp_path):
    project = declare(tmp_path)
    mine = project.folder("stage") / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    error = refused(project, "final")
    assert "was not made by mergepipe" in error.message
