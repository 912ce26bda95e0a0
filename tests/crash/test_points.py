"""A build killed at every named point: what is there is whole, and the next build ends as a clean one does."""

from __future__ import annotations

import random

import pytest
from support.cli import run_mergepipe
from support.crash import MANIFEST, blocks, states

from mergepipe.fsio.crash import CRASH_POINTS

NO_EXCHANGE = {"MERGEPIPE_NO_EXCHANGE": "1"}
PUBLISHING = [point for point in CRASH_POINTS if point.startswith(("publish.", "lock."))]
PAIRS = [(first, second) for i, first in enumerate(CRASH_POINTS) for second in CRASH_POINTS[i:]]
SOME_PAIRS = random.Random(2).sample(PAIRS, 8)


def finish(site, reference, *, whole=True):
    """Build to the end, and once more: as clean, nothing left over, and then nothing to do.

    Shards that were begun for a version that nobody finished stay in staging (``whole`` false).
    """
    report = site.report()
    site.check_done(reference)
    assert site.litter() == []
    assert site.staged() == [] or not whole
    again = site.report()
    assert states(again) == ["unchanged", "unchanged"]
    assert not again["lock"]["changed"]
    site.check_done(reference)
    return report


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_rebuild_killed_at_any_point_keeps_old_or_new_and_the_next_one_ends_clean(built, clean, point):
    built.turn_to(2)
    sources = built.sources()
    built.kill_at(point)
    built.check_between(clean[1], clean[2])
    if built.lock_bytes() == clean[2].lock:
        built.check_done(clean[2])
    finish(built, clean[2])
    assert built.sources() == sources


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_first_build_killed_at_any_point_shows_nothing_or_all_and_the_next_one_ends_clean(site, clean, point):
    site.kill_at(point)
    site.check_between(None, clean[1])
    finish(site, clean[1])


@pytest.mark.parametrize("point", ["engine.tensor-recorded", "publish.recorded"])
def test_the_same_of_a_process_that_a_user_starts(built, clean, point):
    built.turn_to(2)
    assert run_mergepipe(["build"], built.root, {"MERGEPIPE_CRASH_POINT": point}).code == -9
    built.check_between(clean[1], clean[2])
    result = run_mergepipe(["build"], built.root)
    assert result.code == 0, result.text
    built.check_done(clean[2])


@pytest.mark.parametrize("point", PUBLISHING)
def test_the_same_without_the_exchange_of_two_names(built, clean, point):
    built.turn_to(2)
    built.kill_at(point, NO_EXCHANGE)
    built.check_between(clean[1], clean[2])
    finish(built, clean[2])


@pytest.mark.parametrize(("first", "second"), SOME_PAIRS)
def test_killed_twice_in_a_row(built, clean, first, second):
    killed_twice(built, clean, first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if pair not in SOME_PAIRS])
def test_killed_twice_in_a_row_at_any_two_points(built, clean, first, second):
    killed_twice(built, clean, first, second)


def killed_twice(site, clean, first, second):
    site.turn_to(2)
    site.kill_at(first)
    code = site.run(env={"MERGEPIPE_CRASH_POINT": second}).code
    # What the first run finished is not done again, so that a late run may not pass an early point any more.
    assert code in (0, -9)
    site.check_between(clean[1], clean[2])
    finish(site, clean[2])


@pytest.mark.parametrize("point", ["engine.tensor-recorded", "packs.renamed", "publish.swapped"])
def test_after_a_kill_the_project_may_move_on_to_another_version(built, clean, point):
    built.turn_to(2)
    built.kill_at(point)
    built.turn_to(3)
    built.check_between(clean[1], clean[2])
    finish(built, clean[3], whole=False)


@pytest.mark.parametrize("point", ["publish.assembled", "publish.recorded", "publish.swapped", "lock.written"])
def test_after_a_kill_the_project_may_go_back_to_the_version_before(built, clean, point):
    built.turn_to(2)
    built.kill_at(point)
    built.turn_to(1)
    finish(built, clean[1], whole=False)


@pytest.mark.parametrize("env", [{}, NO_EXCHANGE], ids=["exchange", "two-step"])
@pytest.mark.parametrize("point", ["publish.assembled", "publish.swap-begun", "publish.swapped"])
def test_files_of_the_user_survive_a_kill(built, clean, point, env):
    notes = built.out("one") / "notes" / "mine.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    (built.out("one") / "link").symlink_to("notes/mine.txt")
    built.turn_to(2)
    built.kill_at(point, env)
    built.report()
    assert notes.read_text() == "mine"
    assert (built.out("one") / "link").readlink().as_posix() == "notes/mine.txt"
    notes.unlink()
    (built.out("one") / "link").unlink()
    notes.parent.rmdir()
    finish(built, clean[2])


def test_a_kill_between_publication_and_lock_costs_no_second_merge(built, clean):
    built.turn_to(2)
    built.kill_at("lock.written")
    assert built.lock_bytes() == clean[1].lock
    report = finish(built, clean[2])
    assert states(report) == ["unchanged", "unchanged"]
    assert blocks(report, "computed") == 0
    assert report["lock"]["changed"]
    assert (built.out("one") / MANIFEST).exists()
