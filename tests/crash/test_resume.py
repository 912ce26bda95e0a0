"""A killed build goes on where it was: staged blocks are hashed again and used, and damaged ones are made again."""

from __future__ import annotations

import os
import random

import pytest
from support.crash import OUTPUTS, blocks, states

# By default finished blocks are recorded twice a second: a small build records once.
RECORD_ALWAYS = "import mergepipe.engine.run as run; run._RECORD_EVERY = 0"


def kill_in_the_middle(site, passes):
    """Kill a build when blocks were recorded for the n-th time, with one thread so that the order is known."""
    env = {"MERGEPIPE_CRASH_POINT": f"engine.tensor-recorded:{passes}"}
    result = site.run("build", "-j", "1", env=env, prelude=RECORD_ALWAYS)
    assert result.code == -9, result.text


@pytest.mark.parametrize("passes", [2, 5])
def test_blocks_that_were_recorded_are_not_computed_again(site, clean, passes):
    kill_in_the_middle(site, passes)
    assert site.staged() != []
    report = site.report()
    site.check_done(clean[1])
    assert 0 < blocks(report, "computed") < clean[1].blocks
    assert blocks(report, "cached") >= passes
    assert blocks(report, "computed") + blocks(report, "cached") + blocks(report, "copied") == clean[1].blocks
    assert site.staged() == []


def test_three_kills_in_a_row_each_leave_less_to_do(site, clean):
    for passes in (1, 3, 2):
        kill_in_the_middle(site, passes)
    report = site.report()
    site.check_done(clean[1])
    assert blocks(report, "computed") <= clean[1].blocks - 6


def test_what_was_hashed_before_the_kill_is_not_read_again_to_merge_nothing(built, clean):
    built.turn_to(2)
    built.kill_at("engine.shard-complete")
    report = built.report()
    built.check_done(clean[2])
    assert blocks(report, "computed") == 0
    assert sum(output["expert_bytes"]["read"] for output in report["outputs"].values()) == 0
    assert states(report) == ["built", "built"]


def flip(path, offset):
    """Flip a bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_staged_bytes_are_found_and_made_again(site, clean, seed):
    site.kill_at("engine.tensor-recorded")
    generator = random.Random(seed)
    names = site.staged()
    undisturbed = clean[1].blocks
    for name in generator.sample(names, 3):
        path = site.cache / "staging" / name
        flip(path, generator.randrange(path.stat().st_size // 2, path.stat().st_size))
    report = site.report()
    site.check_done(clean[1])
    assert 3 <= blocks(report, "computed") < undisturbed


def test_a_damaged_header_of_a_staged_shard_is_written_again(site, clean):
    site.kill_at("engine.tensor-recorded")
    for name in site.staged():
        flip(site.cache / "staging" / name, 20)
    site.report()
    site.check_done(clean[1])


@pytest.mark.parametrize("how", ["shorter", "longer", "empty", "gone", "zeros"])
def test_a_staged_shard_of_another_size_or_content_does_no_harm(site, clean, how):
    site.kill_at("engine.tensor-recorded")
    for name in site.staged():
        path = site.cache / "staging" / name
        size = path.stat().st_size
        if how == "gone":
            path.unlink()
        elif how == "zeros":
            path.write_bytes(bytes(size))
        else:
            os.truncate(path, {"shorter": size - 1, "longer": size + 1, "empty": 0}[how])
    report = site.report()
    site.check_done(clean[1])
    assert blocks(report, "computed") + blocks(report, "copied") == clean[1].blocks
    assert site.staged() == []


def test_shards_of_two_outputs_that_were_swapped_are_found_out(site, clean):
    site.kill_at("engine.tensor-recorded")
    by_size = {}
    for name in site.staged():
        by_size.setdefault((site.cache / "staging" / name).stat().st_size, []).append(name)
    first, second = next(names for names in by_size.values() if len(names) >= 2)[:2]
    folder = site.cache / "staging"
    (folder / first).rename(folder / "x")
    (folder / second).rename(folder / first)
    (folder / "x").rename(folder / second)
    site.report()
    site.check_done(clean[1])


def test_a_source_that_changed_after_the_kill_is_merged_as_it_is_now(site, clean):
    kill_in_the_middle(site, 5)
    site.turn_to(2)
    report = site.report()
    site.check_done(clean[2])
    assert list(report["outputs"]) == list(OUTPUTS)
