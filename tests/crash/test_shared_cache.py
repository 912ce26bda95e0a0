"""Two projects on one cache directory, and looking after a cache while builds run: nothing that is needed goes."""

from __future__ import annotations

import json
import os
import random
import time

import pytest
from support.crash import Site, states
from support.meanwhile import HOLD, let_go, tidy, wait_for_holder


@pytest.fixture
def shared(tmp_path, server):
    """Return two projects that differ in their outputs, and the environment that gives them one cache."""
    sites = [Site(tmp_path / name, server, version) for name, version in (("first", 1), ("second", 2))]
    return sites, {"MERGEPIPE_CACHE_DIR": str(tmp_path / "shared")}


def built(site, env):
    result = site.run(env=env)
    assert result.code == 0, result.text
    return json.loads(result.stdout)



def packs(env):
    return sorted(os.listdir(os.path.join(env["MERGEPIPE_CACHE_DIR"], "packs")))


def work_at_once(sites, env, commands, rounds, generator):
    """In every round both projects go to another version and build, while these commands look after the cache."""
    for _ in range(rounds):
        for site in sites:
            site.turn_to(site.version + 2)
        running = [(site, site.start(env=env)) for site in sites]
        for command in commands:
            site = generator.choice(sites)
            running.append((site, site.start("cache", *command, env=env)))
            time.sleep(generator.random() * 0.05)
        results = [process.wait() for _, process in running]
        assert [result.code for result in results] == [0] * len(results), [result.text for result in results]


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.long])])
def test_builds_of_two_projects_and_the_care_of_their_cache_do_not_disturb_one_another(shared, clean, rounds):
    sites, env = shared
    commands = [("prune", "--unreferenced"), ("verify",), ("prune", "--max-size", "3 MB"), ("info",)]
    work_at_once(sites, env, commands, rounds, random.Random(5))
    for site in sites:
        assert states(built(site, env)) == ["unchanged", "unchanged"]
        site.check_done(clean[site.version])
        assert site.litter() == []
    assert sites[0].run("cache", "verify", env=env).code == 0


def test_pruning_from_one_project_keeps_what_the_lock_of_the_other_names(shared, clean):
    sites, env = shared
    for site in sites:
        built(site, env)
    before = packs(env)
    result = sites[0].run("cache", "prune", "--unreferenced", "--json", env=env)
    report = json.loads(result.stdout)
    assert (report["removed"], packs(env)) == (0, before)
    assert sorted(report["locks"]) == sorted(str(site.home / "Mergefile.lock") for site in sites)
    sites[0].turn_to(3)
    built(sites[0], env)
    assert json.loads(sites[1].run("cache", "prune", "--unreferenced", "--json", env=env).stdout)["removed"] > 0
    for site in sites:
        assert states(built(site, env)) == ["unchanged", "unchanged"]
        site.check_done(clean[site.version])


@pytest.mark.parametrize(
    "command", [("prune", "--max-size", "0"), ("prune", "--unreferenced"), ("verify",), ("verify", "--dry-run")]
)
def test_the_care_of_a_cache_waits_for_a_build_that_holds_it(shared, clean, command):
    sites, env = shared
    holder = sites[0].start(env=env, prelude=HOLD)
    wait_for_holder(sites[0])
    before = packs(env)
    waiter = sites[1].start("cache", *command, env=env)
    time.sleep(0.3)
    assert packs(env) == before
    let_go(sites[0])
    assert holder.wait().code == 0
    result = waiter.wait()
    assert result.code == 0, result.text
    assert "waiting for another build that holds the cache" in result.stderr
    tidy(sites[0])
    sites[0].check_done(clean[1])
    assert states(built(sites[0], env)) == ["unchanged", "unchanged"]


def test_the_care_of_a_cache_goes_on_after_a_killed_build(shared, clean):
    sites, env = shared
    built(sites[1], env)
    holder = sites[0].start(env=env, prelude=HOLD)
    wait_for_holder(sites[0])
    waiter = sites[1].start("cache", "prune", "--unreferenced", env=env)
    time.sleep(0.2)
    holder.kill()
    assert holder.wait().code == -9
    assert waiter.wait().code == 0
    tidy(sites[0])
    for site in sites:
        built(site, env)
        site.check_done(clean[site.version])
