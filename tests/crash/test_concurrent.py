"""Several processes on one project or one cache: all end well, or one says what it waits for; nothing is mixed."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import pytest
from support.crash import OUTPUTS, Site, check_refused, files_in, states
from support.forked import ForkServer
from support.meanwhile import HOLD, let_go, tidy, wait_for_holder


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_builds_at_once_all_end_well_and_make_what_one_makes(site, clean, count, first):
    version = 1
    if not first:
        site.report()
        site.turn_to(2)
        version = 2
    processes = [site.start() for _ in range(count)]
    results = [process.wait() for process in processes]
    assert [result.code for result in results] == [0] * count, [result.text for result in results]
    site.check_done(clean[version])
    assert site.litter() == []
    assert site.staged() == []
    assert states(site.report()) == ["unchanged", "unchanged"]


@pytest.mark.slow
def test_builds_started_at_any_moments_of_one_another_end_well(site, clean):
    generator = random.Random(4)
    for version in range(1, 25):
        site.turn_to(version)
        processes = []
        for _ in range(generator.choice([2, 3, 4])):
            processes.append(site.start())
            time.sleep(generator.random() * 0.15)
        results = [process.wait() for process in processes]
        assert all(result.code == 0 for result in results), [result.text for result in results]
        site.check_done(clean[version])
        assert site.litter() == []


def test_a_build_that_waits_says_for_what_and_ends_well(site, clean):
    holder = site.start("build", prelude=HOLD)
    wait_for_holder(site)
    waiter = site.start("build")
    time.sleep(0.3)
    let_go(site)
    assert holder.wait().code == 0
    result = waiter.wait()
    assert result.code == 0, result.text
    assert ".mergecache" in result.stderr
    assert re.search("wait|hold", result.stderr), result.stderr
    tidy(site)
    site.check_done(clean[1])


def test_builds_of_different_outputs_at_once_lose_no_entry_of_the_lock(site, clean):
    holder = site.start("build", "one", prelude=HOLD)
    wait_for_holder(site)
    waiter = site.start("build", "two")
    time.sleep(0.3)
    let_go(site)
    assert [holder.wait().code, waiter.wait().code] == [0, 0]
    tidy(site)
    site.check_done(clean[1])
    assert states(site.report()) == ["unchanged", "unchanged"]


def test_a_mergefile_edited_while_a_build_waits_is_taken_by_the_next_build(built, clean):
    built.turn_to(2)
    holder = built.start("build", prelude=HOLD)
    wait_for_holder(built)
    waiter = built.start("build")
    time.sleep(0.3)
    built.turn_to(3)
    let_go(built)
    assert holder.wait().code == 0
    result = waiter.wait()
    assert result.code in (0, 1), result.text  # the source that it looked at before has changed
    tidy(built)
    built.report()
    built.check_done(clean[3])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_a_holder_by_a_signal_lets_the_next_one_go_on(built, clean, number):
    built.turn_to(2)
    holder = built.start("build", prelude=HOLD)
    wait_for_holder(built)
    waiter = built.start()
    time.sleep(0.2)
    holder.kill(number)
    assert holder.wait().code in (-number, 130, 143)
    result = waiter.wait()
    assert result.code == 0, result.text
    tidy(built)
    built.check_done(clean[2])
    assert built.litter() == []


def test_a_stopped_holder_is_waited_for_and_nothing_is_broken_when_the_waiter_is_killed(built, clean):
    built.turn_to(2)
    holder = built.start("build", prelude=HOLD)
    wait_for_holder(built)
    holder.kill(signal.SIGSTOP)
    waiter = built.start()
    time.sleep(0.3)
    waiter.kill()
    assert waiter.wait().code == -9
    holder.kill(signal.SIGCONT)
    let_go(built)
    assert holder.wait().code == 0
    tidy(built)
    built.check_done(clean[2])


def test_killed_builds_among_builds_at_once_break_nothing(built, clean):
    generator = random.Random(5)
    for version in range(2, 5):
        built.turn_to(version)
        processes = [built.start() for _ in range(3)]
        time.sleep(generator.random() * 0.2)
        processes[0].kill()
        codes = [process.wait().code for process in processes]
        assert set(codes[1:]) == {0}, codes
        built.check_done(clean[version])
        assert built.litter() == []


# --- one cache for two projects -----------------------------------------------------------------------------------


def test_two_projects_with_one_cache_build_at_once(tmp_path, server, clean):
    first, second = Site(tmp_path / "a", server, 1), Site(tmp_path / "b", server, 2)
    env = {"MERGEPIPE_CACHE_DIR": str(tmp_path / "cache")}
    for versions in ((1, 2), (3, 4), (4, 3)):
        for site, version in zip((first, second), versions, strict=True):
            site.turn_to(version)
        processes = [site.start(env=env) for site in (first, second, first)]
        results = [process.wait() for process in processes]
        assert [result.code for result in results] == [0, 0, 0], [result.text for result in results]
        for site, version in zip((first, second), versions, strict=True):
            site.check_done(clean[version])
            assert site.litter() == []
    for site in (first, second):
        assert '"unchanged"' in site.run(env=env).stdout


def test_a_project_goes_on_from_what_another_one_left_in_a_shared_cache(tmp_path, server, clean):
    first, second = Site(tmp_path / "a", server, 1), Site(tmp_path / "b", server, 1)
    env = {"MERGEPIPE_CACHE_DIR": str(tmp_path / "cache")}
    first.kill_at("engine.shard-complete", env)
    result = second.run(env=env)
    assert result.code == 0, result.text
    second.check_done(clean[1])
    assert first.run(env=env).code == 0
    first.check_done(clean[1])


def test_two_caches_that_publish_into_one_directory_end_with_one_whole_state(site, clean, tmp_path):
    for version in (1, 2, 3):
        site.turn_to(version)
        envs = [{"MERGEPIPE_CACHE_DIR": str(tmp_path / name)} for name in ("x", "y")]
        processes = [site.start(env=env) for env in envs]
        results = [process.wait() for process in processes]
        assert {result.code for result in results} <= {0, 1}, [result.text for result in results]
        for result in results:
            if result.code:
                check_refused(result)
        result = site.run(env=envs[0])
        assert result.code == 0, result.text
        site.check_done(clean[version])
        assert site.litter() == []


# --- others beside a build ----------------------------------------------------------------------------------------


def at_once_with_builds(site, versions, commands, env=None):
    """Build version after version, and run commands again and again meanwhile; return how the commands ended."""
    ended, asked = [], []

    def build_on():
        for version in versions:
            site.turn_to(version)
            ended.append(site.run(env=env))

    builder = threading.Thread(target=build_on)
    with ForkServer() as other:
        builder.start()
        try:
            while builder.is_alive():
                asked += [(command, other.run(command, site.home)) for command in commands]
        finally:
            builder.join(600)
    assert all(result.code == 0 for result in ended), [result.text for result in ended]
    assert len(ended) == len(versions)
    return asked


ASKING = (("status", "--json"), ("plan", "--json"), ("cache", "info", "--json"))


def test_status_plan_and_cache_info_answer_while_builds_run(built):
    asked = at_once_with_builds(built, range(2, 10), ASKING)
    failed = [(command, result.text) for command, result in asked if result.code != 0]
    # A source that is being written cannot be read: that is no fault of the answer.
    assert [text for _, text in failed if "changed" not in text] == []
    assert {command for command, _ in asked} == set(ASKING)


@pytest.mark.parametrize("env", [{}, {"MERGEPIPE_NO_EXCHANGE": "1"}], ids=["exchanged", "renamed"])
def test_verifying_while_outputs_are_published_finds_no_fault_in_them(built, env):
    asked = at_once_with_builds(built, range(2, 8), [("verify", "one", "two"), ("cache", "verify", "--dry-run")], env)
    for command, result in asked:
        # What takes the place of an output that is being read is said, and is no fault of either. With two renames the
        # directory is away for a moment, and the lock is replaced after the outputs.
        said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        moved = [line for line in said if re.search("took its place|not there|Mergefile.lock|no such", line)]
        assert said == moved, (command, result.text)
    assert built.run("verify").code == 0


def test_status_answers_while_a_build_holds_the_cache(built, clean):
    built.turn_to(2)
    holder = built.start("build", prelude=HOLD)
    wait_for_holder(built)
    result = built.run("status", "--json")
    assert result.code == 0, result.text
    assert result.seconds < 60  # it did not wait for the build, which holds the cache for twice as long
    let_go(built)
    assert holder.wait().code == 0
    tidy(built)
    built.check_done(clean[2])


def test_pruning_waits_for_a_build_and_takes_nothing_from_it(built, clean):
    built.turn_to(2)
    holder = built.start("build", prelude=HOLD)
    wait_for_holder(built)
    pruning = built.start("cache", "prune", "--max-size", "0")
    time.sleep(0.2)
    let_go(built)
    assert holder.wait().code == 0
    result = pruning.wait()
    assert result.code == 0, result.text
    tidy(built)
    built.check_done(clean[2])
    assert os.listdir(built.cache / "packs") == []
    assert states(built.report()) == ["unchanged", "unchanged"]
    assert {name: files_in(built.out(name)) for name in OUTPUTS} == clean[2].outputs
