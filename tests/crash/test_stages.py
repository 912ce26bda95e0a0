"""Outputs made from one another: a build that ends between two stages, or inside a later one, loses nothing."""

from __future__ import annotations

import pytest
from support.crash import CleanBuilds, StagedSite, check_refused, states
from support.forked import ForkServer

from mergepipe.fsio.crash import CRASH_POINTS

HIDDEN_SHARDS = 3  # of the first stage: what it is made of is complete when this many shards are
NAMES = ["hidden", "one", "two"]
# By default finished blocks are recorded twice a second: a small build records once a level.
RECORD_ALWAYS = "import mergepipe.engine.run as run; run._RECORD_EVERY = 0"
# A disk that somebody else fills while the build runs: there was room for it when it began.
UNCHECKED = "import mergepipe.project.room as room; room.check_room = lambda disks: None"


@pytest.fixture(scope="session")
def clean(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> CleanBuilds:
    """Return what clean builds make, by version."""
    return CleanBuilds(tmp_path_factory.mktemp("staged"), server, StagedSite)


@pytest.fixture
def site(tmp_path, server: ForkServer) -> StagedSite:
    """Return a project at version 1 that was not built yet."""
    return StagedSite(tmp_path / "site", server)


@pytest.fixture
def built(site: StagedSite) -> StagedSite:
    """Return a project that was built at version 1."""
    site.report()
    return site


def finish(site, reference):
    """Build to the end, and once more: as clean, nothing left over, and then nothing to do."""
    report = site.report()
    assert list(report["outputs"]) == NAMES
    site.check_done(reference)
    assert site.litter() == []
    assert site.staged() == []
    again = site.report()
    assert states(again) == ["unchanged"] * 3
    site.check_done(reference)
    return report


KILLS = [(point, passes) for point in CRASH_POINTS for passes in (1, 2, 3)]
SOME_KILLS = [(point, 1 + number % 3) for number, point in enumerate(CRASH_POINTS)]


@pytest.mark.parametrize(("point", "passes"), SOME_KILLS)
def test_killed_at_any_point_in_some_stage_the_next_build_ends_clean(built, clean, point, passes):
    killed_at(built, clean, point, passes)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "passes"), [kill for kill in KILLS if kill not in SOME_KILLS])
def test_killed_at_any_point_in_any_stage_the_next_build_ends_clean(built, clean, point, passes):
    killed_at(built, clean, point, passes)


def killed_at(built, clean, point, passes):
    built.turn_to(2)
    code = built.run(env={"MERGEPIPE_CRASH_POINT": f"{point}:{passes}"}).code
    assert code in (0, -9)  # not every point is passed three times
    built.check_between(clean[1], clean[2])
    finish(built, clean[2])


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_first_build_killed_at_any_point_shows_nothing_or_all(site, clean, point):
    site.kill_at(point)
    site.check_between(None, clean[1])
    finish(site, clean[1])


def test_killed_between_two_stages_the_first_is_not_merged_again(site, clean):
    site.kill_at(f"engine.shard-complete:{HIDDEN_SHARDS}")
    hidden = finish(site, clean[1])["outputs"]["hidden"]
    assert hidden["state"] == "built"
    assert hidden["blocks"]["cached"] == hidden["blocks"]["total"]
    assert (hidden["expert_bytes"]["read"], hidden["base_bytes_read"], hidden["index_bytes_read"]) == (0, 0, 0)


def test_killed_in_the_second_stage_the_first_is_kept_and_the_second_goes_on(tmp_path, server, clean):
    went_on = 0
    for passes in range(12, 24, 2):  # how often work was recorded; the second stage begins somewhere among these
        site = StagedSite(tmp_path / str(passes), server)
        env = {"MERGEPIPE_CRASH_POINT": f"engine.tensor-recorded:{passes}"}
        assert site.run("build", "-j", "1", env=env, prelude=RECORD_ALWAYS).code == -9
        shards = len(list((site.cache / "packs").iterdir()))
        outputs = finish(site, clean[1])["outputs"]
        if shards >= HIDDEN_SHARDS:
            assert outputs["hidden"]["blocks"]["computed"] == outputs["hidden"]["blocks"]["copied"] == 0
            went_on += 0 < outputs["one"]["blocks"]["cached"] < outputs["one"]["blocks"]["total"]
    assert went_on > 0


@pytest.mark.parametrize("published", [1, 2])
def test_killed_while_the_outputs_are_published_no_stage_is_merged_again(built, clean, published):
    built.turn_to(2)
    built.kill_at(f"publish.swapped:{published}")
    built.check_between(clean[1], clean[2])
    outputs = finish(built, clean[2])["outputs"]
    assert all(output["blocks"]["computed"] == output["blocks"]["copied"] == 0 for output in outputs.values())


def test_a_source_that_changed_after_the_kill_between_two_stages_is_merged_as_it_is_now(built, clean):
    built.turn_to(2)
    built.kill_at(f"packs.recorded:{HIDDEN_SHARDS}")
    built.turn_to(3)
    built.report()
    built.check_done(clean[3])


def test_the_packs_of_a_stage_are_lost_between_a_kill_and_the_next_build(built, clean):
    built.turn_to(2)
    built.kill_at(f"engine.shard-complete:{HIDDEN_SHARDS + 1}")
    for pack in (built.cache / "packs").iterdir():
        pack.unlink()
    finish(built, clean[2])


@pytest.mark.parametrize("megabytes", [1, 4, 6])
def test_a_disk_that_fills_up_in_any_stage_keeps_the_outputs_and_the_work(tmp_path, mounting, clean, megabytes):
    site = StagedSite(tmp_path / "site", mounting)
    cache = site.home / ".mergecache"
    mounting.view(cache).mkdir()
    mounting.execute("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(cache))
    try:
        result = site.run("build", "-j", "1", prelude=f"{UNCHECKED}; {RECORD_ALWAYS}")
        check_refused(result, "No space left", ".mergecache")
        site.check_between(None)
        assert site.litter() == []
        mounting.execute("mount", "-o", "remount,size=64m", str(cache))
        hidden = finish(site, clean[1])["outputs"]["hidden"]
        assert (hidden["blocks"]["cached"] == hidden["blocks"]["total"]) == (megabytes > 3)
    finally:
        mounting.execute("umount", str(cache))


def test_two_builds_at_once_exclude_each_other(built, clean):
    built.turn_to(2)
    running = [built.start() for _ in range(3)]
    results = [process.wait() for process in running]
    assert [result.code for result in results] == [0, 0, 0], results[0].text
    built.check_done(clean[2])
    assert states(built.report()) == ["unchanged"] * 3


def test_one_build_of_a_stage_and_one_of_what_is_made_from_it(built, clean):
    built.turn_to(2)
    running = [built.start("build", name) for name in ("hidden", "two", "one")]
    assert [process.wait().code for process in running] == [0, 0, 0]
    built.check_done(clean[2])
