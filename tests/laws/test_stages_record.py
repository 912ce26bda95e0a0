"""What is written about stages: side files, lock, card and manifest, and what is refused before a weight is read."""

import json
import shutil

import pytest
from support.checkpoints import random_tensors
from support.projects import Reads, edit_tensor, snapshot
from support.stages import CONFIG, ELEMENTS, SHAPES, A, B, counts, declare, merged, states

from mergepipe.errors import MergepipeError
from mergepipe.lockfile.reader import read_lock


@pytest.fixture(params=[True, False], ids=["published", "unpublished"])
def project(tmp_path, request):
    """Return a project of two stages that was built."""
    project = declare(tmp_path / "project", publish=request.param)
    project.build()
    return project


# --- side files ------------------------------------------------------------------------------------------------------


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


# --- on record -------------------------------------------------------------------------------------------------------


def test_the_lock_names_a_stage_with_its_digest_and_not_among_the_sources(project):
    lock = read_lock(project.lock)
    assert [source.name for source in lock.sources] == ["base", "e1", "e2", "e3"]
    assert lock.output("final").sources["stage"] == lock.output("stage").digest
    assert lock.output("stage").sources.keys() == {"base", "e1", "e2"}


def test_card_and_manifest_name_a_stage(project):
    assert "| expert | `stage` | output `stage` of the same Mergefile | `b3:" in side(project, "final", "README.md")
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
    assert status.outputs["final"].reasons[0].startswith("source `stage` has other content: b3:")
    assert status.lock_state == "outdated"
    project.build()
    assert read_lock(project.lock).output("final").sources["stage"] == after.output("stage").digest
    assert project.open().status().lock_state == "current"


def test_status_says_what_a_stale_stage_means_for_what_is_made_from_it(project):
    edit_tensor(project.source_file("e1"), A, 0, 9.0)
    status = project.open().status().outputs
    assert status["stage"].reasons == ("source `e1` changed on disk, or was not read before",)
    assert status["final"].reasons == ("output `stage`, which it is made from, is not up to date",)


def test_another_tokenizer_of_a_stage_leaves_its_content_known(project):
    (project.root / "models/base/tokenizer.json").write_text('{"of": "nobody"}')
    status = project.open().status().outputs
    assert status["stage"].reasons == status["final"].reasons == ("config or tokenizer files changed",)
    project.set_output("final", project.outputs["final"] | {"write": {"tokenizer": "e3"}})
    project.build()
    (project.root / "models/base/tokenizer.json").write_text('{"of": "somebody"}')
    status = project.open().status().outputs
    assert {name: output.state for name, output in status.items()} == {"stage": "stale", "final": "up-to-date"}
    reports = project.build().outputs
    assert {name: report.state for name, report in reports.items()} == {"stage": "built", "final": "unchanged"}
    assert counts(reports["stage"]) == (0, 0, 0, 0)


# --- what is wrong ---------------------------------------------------------------------------------------------------


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
