"""Stages whose packs are gone or damaged, and stages that are not published: they cost time, and never a result."""

import shutil

import pytest
from support.projects import Messages, data_start, edit_tensor, snapshot, tensor_range
from support.stages import (
    BLOCKS,
    ELEMENTS,
    SHAPES,
    A,
    V,
    counts,
    declare,
    drop_pack_of_stage,
    merged,
    packs,
    stage_pack,
    states,
)

from mergepipe.engine.run import Engine
from mergepipe.errors import MergepipeError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.lockfile.reader import read_lock


@pytest.fixture(params=[True, False], ids=["published", "unpublished"])
def project(tmp_path, request):
    """Return a project of two stages that was built."""
    project = declare(tmp_path / "project", publish=request.param)
    project.build()
    return project


# --- packs that are gone ---------------------------------------------------------------------------------------------


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


def test_a_pruned_stage_comes_back_where_a_touched_source_makes_final_look_at_it(project):
    """Only when the touched source was hashed is it known that nothing changed: until then the stage is needed."""
    project.open().cache_prune(max_bytes=0)
    project.build()  # links went: published files are hashed once
    project.source_file("e3").touch()
    reports = project.build().outputs
    assert {report.state for report in reports.values()} == {"unchanged"}
    assert len(packs(project)) == 2
    project.check("final")


def test_a_touched_source_leaves_a_pruned_stage_alone_where_final_is_still_cached(project):
    drop_pack_of_stage(project)
    project.source_file("e3").touch()
    reports = project.build().outputs
    assert {report.state for report in reports.values()} == {"unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert counts(reports["final"]) == (0, 0, 0, 4 * ELEMENTS)
    assert len(packs(project)) == 1


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
    assert {name: report.state for name, report in reports.items()} == {"stage": "unchanged", "final": "built"}
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
    assert {name: report.state for name, report in reports.items()} == {"stage": "built", "final": "unchanged"}
    assert snapshot(project.folder("final")) == before
    project.check("stage")


def test_a_stage_whose_directory_is_gone_is_published_again_alone(tmp_path):
    project = declare(tmp_path)
    project.build()
    shutil.rmtree(project.folder("stage"))
    status = project.open().status().outputs
    assert {name: output.state for name, output in status.items()} == {"stage": "stale", "final": "up-to-date"}
    reports = project.build().outputs
    assert {name: report.state for name, report in reports.items()} == {"stage": "built", "final": "unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    project.check("stage")


# --- not published ---------------------------------------------------------------------------------------------------


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
    assert {name: report.state for name, report in reports.items()} == {"stage": "built", "final": "unchanged"}
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
    assert {name: report.state for name, report in reports.items()} == {"stage": "unchanged", "final": "built"}
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
