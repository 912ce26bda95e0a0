"""What a manifest says of levels: replayed and rebuilt from the sources alone, and refused where it cannot be."""


import pytest
from laws.test_replay_refusals import edited, refused
from support.levels import levels_project
from support.replays import assert_replays, leave_sources_alone

from mergepipe.errors import LockError, PlanError
from mergepipe.project.verify import VerifyOptions


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    project = levels_project(tmp_path_factory.mktemp("built"), "15%")
    project.build()
    return project


@pytest.fixture
def project(tmp_path):
    project = levels_project(tmp_path / "project", "15%")
    project.build()
    return project


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "linear"])
def test_levels_give_the_same_bytes_again_from_the_sources_alone(tmp_path, operator):
    project = levels_project(tmp_path / "project", operator=operator)
    project.build()
    levels = set(b"".join(tensor.levels or b"" for tensor in project.manifest("m").tensors))
    assert levels - {0, 255}, "a budget that buys no approximation shows nothing"
    leave_sources_alone(project)
    report = assert_replays(project, "m", tmp_path / "empty")
    assert report.budget == "25% in levels"


def test_a_sample_is_made_again_from_codes_that_are_there_and_from_the_sources(built):
    for _ in range(2):
        report = built.open().verify(["m"], VerifyOptions(sample=100.0))
        assert list(report.problems) == []
        for pack in (built.cache / "progressive").glob("*"):
            pack.unlink()


def test_the_whole_is_verified_with_its_sources(built):
    assert list(built.open().verify([], VerifyOptions(full=True)).problems) == []


def write(data, number, text):
    """Give a tensor other levels, and take out the counts that would not agree with them."""
    data["tensors"][number]["access"] = {"levels": text}
    for key in ("bytes", "levels"):
        data["tensors"][number]["expert_blocks"].pop(key, None)


HOSTILE = {
    "too many planes": lambda d: write(d, 0, "CAgI" * 3),
    "planes of what has no code": lambda d: write(d, 2, "AwMD"),
    "planes of a budget of blocks": lambda d: d["output"].update(budget="15%"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_levels_that_cannot_be_are_refused(project, tmp_path, what):
    edited(project, HOSTILE[what], "m")
    errors = refused(project, tmp_path / "empty", PlanError, "m")
    assert "access levels of tensor" in errors[0].message


def test_other_levels_than_those_that_were_read_are_noticed(project, tmp_path):
    edited(project, lambda d: write(d, 0, "BQUF" * 3), "m")
    assert "bytes of expert blocks" in refused(project, tmp_path / "empty", LockError, "m")[0].message


def counted(data):
    return data["tensors"][0]["expert_blocks"]


CONTRADICTORY = {
    "more blocks than the access has": lambda d: counted(d)["levels"].update({"3": 9}),
    "a level that the access has not": lambda d: counted(d)["levels"].update({"7": 1}),
    "levels without a version": lambda d: d["output"].pop("levels_version"),
}


@pytest.mark.parametrize("what", CONTRADICTORY)
def test_counts_that_contradict_the_access_are_no_manifest(project, tmp_path, what):
    edited(project, CONTRADICTORY[what], "m")
    message = refused(project, tmp_path / "empty", LockError, "m")[0].message
    assert "expert blocks at level" in message or "no `levels_version`" in message


@pytest.mark.parametrize("change", [{"bytes": 5}, {"levels": {"3": 3}}])
def test_counts_that_the_result_does_not_bear_out_are_noticed(project, tmp_path, change):
    edited(project, lambda d: counted(d).update(change), "m")
    message = refused(project, tmp_path / "empty", LockError, "m")[0].message
    assert "at level" in message
    assert "and it is" in message


def test_a_manifest_of_another_code_is_refused_before_anything_is_read(project, tmp_path):
    edited(project, lambda d: d["output"].update(levels_version=9), "m")
    error = refused(project, tmp_path / "empty", PlanError, "m")[0]
    assert "`levels_version` would be 2, and was 9" in error.message


@pytest.mark.parametrize(
    ("what", "instead"),
    [("levels_version = 2", "levels_version = 3"), (" at level 3", " at level 2"), (" B, 3", " B, 2")],
)
def test_a_lock_that_says_other_levels_is_noticed(project, what, instead):
    text = project.lock.read_text()
    assert what in text
    project.lock.write_text(text.replace(what, instead, 1))
    (problem,) = project.open().verify([]).problems
    assert problem.kind == "lock"
    with pytest.raises(LockError, match="levels"):
        project.build(locked=True)
