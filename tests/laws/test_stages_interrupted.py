"""A build that stops in a later stage: nothing is published, and the next one goes on from the finished stages."""

import shutil

import numpy as np
import pytest
from support.checkpoints import read_checkpoint
from support.projects import edit_tensor, snapshot
from support.stages import BLOCKS, ELEMENTS, A, counts, declare, merged, packs, states

from mergepipe.engine.run import Engine
from mergepipe.errors import MergepipeError, PlanError, SourceChangedError, StorageError


@pytest.fixture(params=[True, False], ids=["published", "unpublished"])
def project(tmp_path, request):
    """Return a project of two stages that was not built yet."""
    return declare(tmp_path / "project", publish=request.param)


def before_final(monkeypatch, action):
    """Do something when the stage is finished, just before the engine runs for `final`."""
    run = Engine.run

    def run_later(engine, plans):
        if plans[0].output.name == "final":
            action()
        return run(engine, plans)

    monkeypatch.setattr(Engine, "run", run_later)


def stopped(project, kind, match):
    """Build, which must fail; nothing is published, and the stage is in the cache."""
    places = [project.folder(name) for name in ("stage", "final")]
    before = [snapshot(place) for place in places if place.exists()], project.lock.exists()
    with pytest.raises(kind, match=match) as caught:
        project.build()
    assert ([snapshot(place) for place in places if place.exists()], project.lock.exists()) == before
    return caught.value


@pytest.mark.parametrize("source", ["e3", "base", "e1"])
def test_a_source_that_changes_between_two_stages_stops_the_build(project, monkeypatch, source):
    """`e1` is not read for `final`; the build says all the same that it is made from two states of it."""
    with monkeypatch.context() as patch:
        before_final(patch, lambda: edit_tensor(project.source_file(source), A, 0, 9.0))
        error = stopped(project, SourceChangedError, "changed while it was being read")
    assert error.facts["source"] == source
    assert len(packs(project)) == (1 if source != "e1" else 2)
    reports = project.build().outputs
    assert reports["stage"].blocks["computed"] == {"e3": 0, "base": 1, "e1": 1}[source]
    project.check("final")


def test_a_source_that_is_gone_in_a_later_stage_stops_the_build(project, monkeypatch):
    path = project.source_file("e3")
    with monkeypatch.context() as patch:
        before_final(patch, lambda: path.rename(path.with_name("away")))
        stopped(project, SourceChangedError, "changed while it was being read")
    path.with_name("away").rename(path)
    reports = project.build().outputs
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    project.check("final")


def test_a_failure_in_a_later_stage_keeps_the_packs_of_the_first(project, monkeypatch):
    def fail():
        raise StorageError("no room", path="x")

    with monkeypatch.context() as patch:
        before_final(patch, fail)
        stopped(project, StorageError, "no room")
    (pack,) = packs(project)
    before = snapshot(pack)
    reports = project.build().outputs
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert reports["stage"].blocks["cached"] == BLOCKS
    assert reports["stage"].state == "built"
    assert snapshot(pack)[str(pack)][:3] == before[str(pack)][:3]  # the same file
    project.check("final")


def test_what_only_content_tells_of_a_later_stage_stops_it_and_not_the_first(tmp_path):
    """A tensor that is not merged must be the same in all sources; the stage has the base's."""
    project = declare(tmp_path)
    for name in project.sources:
        with_positions(project, name, 7 if name == "e3" else 0)
    error = stopped(project, PlanError, "cannot be merged, and `e3` holds other values than `base`")
    assert error.exit_status == 2
    assert states(project.build("stage")) == {"stage": "built"}


def with_positions(project, name, value):
    tensors = read_checkpoint(project.root / project.sources[name])
    project.add_source(name, tensors | {"model.positions": np.full(4, value)})


def test_a_stage_that_was_finished_before_a_change_of_mind_is_used_by_the_next_build(project, monkeypatch):
    def fail():
        raise StorageError("no room", path="x")

    with monkeypatch.context() as patch:
        before_final(patch, fail)
        stopped(project, StorageError, "no room")
    project.set_output("final", merged("stage", base="e3"))
    reports = project.build().outputs
    assert counts(reports["stage"]) == (0, 0, 0, 0)
    assert counts(reports["final"]) == (BLOCKS, 4 * ELEMENTS, 4 * ELEMENTS, 0)
    project.check("final")


def test_a_stage_that_cannot_be_published_keeps_both_outputs_as_they_are(tmp_path):
    project = declare(tmp_path)
    project.build()
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    shutil.rmtree(project.folder("stage"))
    project.folder("stage").write_text("a file of the user's")
    before = snapshot(project.folder("final"))
    with pytest.raises(MergepipeError, match="is a file, not a directory"):
        project.build("final")
    assert snapshot(project.folder("final")) == before
