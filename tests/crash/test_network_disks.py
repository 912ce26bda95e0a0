"""File systems without locks or links, as some network disks are: said in words, and built all the same."""

from __future__ import annotations

import errno
import json
import os
import time

import pytest
from support.crash import OUTPUTS, Site, check_refused, states
from support.meanwhile import HOLD, let_go, tidy, wait_for_holder

NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]
NO_LINKS = [errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL]
HELD = "build.lock.held"  # stands in for the lock of the cache


@pytest.fixture
def site(tmp_path, faulty):
    """Return a project that was not built yet, at which calls may fail."""
    return Site(tmp_path / "site", faulty)


def failing(site, call, error):
    """Return the environment in which a call fails in the project, whenever it is made."""
    return {"FAULT_CALL": call, "FAULT_PATH": str(site.home), "FAULT_NTH": "0", "FAULT_ERROR": str(error)}


@pytest.mark.parametrize("error", NO_LOCKS, ids=errno.errorcode.get)
def test_without_locks_it_builds_and_says_what_stands_in_for_them(site, clean, error):
    env = failing(site, "lock", error)
    for version in (1, 2):
        site.turn_to(version)
        result = site.run(env=env)
        assert result.code == 0, result.text
        assert result.stderr.count("has no locks") == 1
        assert HELD in result.stderr
        site.check_done(clean[version])
        assert HELD not in os.listdir(site.cache)
        assert site.litter() == []
    result = site.run("status", env=env)
    assert result.code == 0, result.text
    assert "has no locks" not in result.stderr, "nobody locks anything to look"
    assert states(site.report()) == ["unchanged", "unchanged"]


@pytest.mark.parametrize("point", ["engine.tensor-recorded", "packs.renamed", "publish.swapped", "lock.written"])
def test_without_locks_a_killed_holder_of_the_cache_is_taken_over(site, clean, point):
    env = failing(site, "lock", errno.ENOLCK)
    site.kill_at(point, env)
    assert HELD in os.listdir(site.cache)
    result = site.run(env=env)
    assert result.code == 0, result.text
    site.check_done(clean[1])
    assert HELD not in os.listdir(site.cache)


def test_without_locks_a_second_build_waits_all_the_same(site, clean):
    env = failing(site, "lock", errno.ENOLCK)
    holder = site.start("build", env=env, prelude=HOLD)
    wait_for_holder(site)
    waiter = site.start(env=env)
    answer = site.run("status", "--json", env=env)
    time.sleep(0.3)
    let_go(site)
    assert holder.wait().code == 0
    result = waiter.wait()
    assert result.code == 0, result.text
    assert "waiting for another build" in result.stderr
    assert answer.code == 0, answer.text
    tidy(site)
    site.check_done(clean[1])


def test_without_locks_a_sweep_evaluates_its_models(site, clean):
    env = failing(site, "lock", errno.ENOLCK)
    assert site.run(env=env).code == 0
    result = site.run("sweep", "two", "--budgets", "50%,100%", "--eval", "sh -c 'echo size 1'", "--json", env=env)
    assert result.code == 0, result.text
    assert [point["figures"]["size"] for point in json.loads(result.stdout)["points"]] == [1, 1]
    site.check_done(clean[1])
    assert site.litter() == []


@pytest.mark.parametrize("error", NO_LINKS, ids=errno.errorcode.get)
def test_without_links_shards_are_copied_and_that_is_said(site, clean, error):
    result = site.run(env=failing(site, "link", error))
    assert result.code == 0, result.text
    site.check_done(clean[1])
    for name in OUTPUTS:
        assert f"build/{name}` makes no links" in result.stderr
        assert all(shard.stat().st_nlink == 1 for shard in site.out(name).glob("*.safetensors"))
    assert states(site.report()) == ["unchanged", "unchanged"]


def test_where_links_work_nothing_is_said_of_them(site):
    result = site.run()
    assert result.code == 0, result.text
    assert result.stderr == ""


def test_without_locks_and_links_files_of_the_user_are_kept(site, clean):
    assert site.run().code == 0
    (site.out("one") / "notes.txt").write_text("mine")
    site.turn_to(2)
    assert site.run(env=failing(site, "link", errno.EPERM)).code == 0
    assert (site.out("one") / "notes.txt").read_text() == "mine"
    (site.out("one") / "notes.txt").unlink()
    site.check_done(clean[2])


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_lock_that_fails_for_another_reason_stops_the_build_in_words(site, error):
    check_refused(site.run(env=failing(site, "lock", error)), ".mergecache")
    site.check_between(None)
