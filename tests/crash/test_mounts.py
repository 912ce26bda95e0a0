"""Disks that go away, places that may only be read, and directories that become links while a build runs."""

from __future__ import annotations

import os
import shutil

import pytest
from support.checkpoints import random_tensors
from support.crash import MANIFEST, Site, check_refused, files_in
from support.meanwhile import build_meanwhile
from support.projects import SmallProject
from support.quick import every

# When something happens: before the first job of the engine, in the middle, after the last one.
MOMENTS = [0, 3, -1]


# --- a mount that vanishes ----------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path, mounting):
    """Return a project, built, and a function that moves one of its folders to a disk mounted in its place."""
    site = Site(tmp_path / "site", mounting)
    site.report()
    places = []

    def mount(folder):
        copy, place = tmp_path / "disk", str(site.home / folder)
        if not copy.exists():
            mounting.execute("mv", place, str(copy))
            mounting.execute("mkdir", place)
        mounting.execute("mount", "--bind", str(copy), place)
        places[:] = [place]
        return f"subprocess.run(['umount', '-l', {place!r}], check=True)"

    yield site, mount
    mounting.execute("sh", "-c", f"umount -l '{places[0]}' 2>/dev/null; true")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_source_whose_disk_vanishes_is_named_and_nothing_is_published(disk, clean, moment):
    site, mount = disk
    vanish = mount("models/b")
    site.turn_to(2)
    check_refused(build_meanwhile(site, vanish, moment), "models/b")
    site.check_between(clean[1])
    assert site.litter() == []
    mount("models/b")
    site.report()
    site.check_done(clean[2])


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cache_whose_disk_vanishes_costs_time_only(disk, clean, moment):
    site, mount = disk
    vanish = mount(".mergecache")
    site.turn_to(2)
    result = build_meanwhile(site, vanish, moment)
    if result.code:
        check_refused(result, ".mergecache")
    site.check_between(clean[1], clean[2])
    assert site.litter() == []
    mount(".mergecache")
    site.report()
    site.check_done(clean[2])


@pytest.mark.parametrize("moment", MOMENTS)
def test_outputs_whose_disk_vanishes_are_as_they_were_when_it_is_back(disk, clean, moment):
    site, mount = disk
    vanish = mount("build")
    site.turn_to(2)
    result = build_meanwhile(site, vanish, moment)
    if result.code:
        check_refused(result, "build")
    mount("build")
    for name in ("one", "two"):
        assert files_in(site.out(name)) == clean[1].outputs[name]
    site.report()
    site.check_done(clean[2])


# --- places that may only be read ---------------------------------------------------------------------------------


def test_sources_on_a_disk_mounted_read_only_are_read(tmp_path, mounting, clean):
    site = Site(tmp_path / "site", mounting)
    models = str(site.home / "models")
    mounting.execute("mount", "--bind", models, models)
    mounting.execute("mount", "-o", "remount,bind,ro", models)
    try:
        site.report()
        site.check_done(clean[1])
    finally:
        mounting.execute("umount", models)


def test_sources_that_may_only_be_read_are_read_and_stay_as_they_are(site, clean):
    paths = [*(site.root / "models").rglob("*"), site.root / "models"]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = site.sources()
    site.report()
    for path in paths:
        assert path.stat().st_mode & 0o222 == 0
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert site.sources() == before
    site.check_done(clean[1])


def test_a_cache_on_a_disk_mounted_read_only_still_answers(tmp_path, mounting, clean):
    site = Site(tmp_path / "site", mounting)
    site.report()
    cache = str(site.home / ".mergecache")
    mounting.execute("mount", "--bind", cache, cache)
    mounting.execute("mount", "-o", "remount,bind,ro", cache)
    try:
        for command in (("status",), ("plan",), ("verify", "--quick")):
            result = site.run(*command)
            assert "Traceback" not in result.text, result.text
        assert site.run("status").code == site.run("plan").code == 0
        check_refused(site.run("cache", "prune", "--max-size", "0"), ".mergecache")
        site.check_done(clean[1])
    finally:
        mounting.execute("umount", cache)


# --- a directory that becomes a link ------------------------------------------------------------------------------


@pytest.fixture
def mine(built):
    """Return a folder of the user's, with things that look like mergepipe's own, beside a project that was built."""
    folder = built.root.parent / "mine"
    (folder / "one").mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    (folder / "one" / "thesis.txt").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"mine")
    return folder


PLACES = ["models/b", "models", "build/one", "build", ".mergecache/staging", ".mergecache/packs"]


def swapped(path, other):
    return f"os.rename({str(path)!r}, {str(path) + '-moved'!r}); os.symlink({str(other)!r}, {str(path)!r})"


# Each place once and each moment twice; the slow suite has the others.
SWAPS = [(place, moment) for place in PLACES for moment in MOMENTS]


@pytest.mark.parametrize("swap", every(SWAPS, zip(PLACES, [*MOMENTS, *MOMENTS], strict=True)), ids=str)
def test_a_directory_swapped_for_a_link_takes_no_file_of_the_user(built, clean, mine, swap):
    place, moment = swap
    built.turn_to(2)
    before = files_in(mine)
    path = built.root / place
    result = build_meanwhile(built, swapped(path, mine), moment)
    assert "Traceback" not in result.text, result.text
    assert "internal error" not in result.text, result.text
    after = files_in(mine)
    assert {name: after.get(name) for name in before} == before
    if path.is_symlink():
        path.unlink()
        (path.parent / f"{path.name}-moved").rename(path)
    if not place.startswith("."):
        built.check_between(clean[1], clean[2])
    built.report()
    built.check_done(clean[2])
    assert {name: files_in(mine).get(name) for name in before} == before


@pytest.mark.parametrize("point", ["publish.assembled", "publish.recorded", "publish.swap-begun", "publish.swapped"])
@pytest.mark.parametrize("hidden", ["new", "old", "swap"])
def test_a_link_put_under_a_hidden_name_of_the_publication_leads_to_no_loss(built, clean, mine, point, hidden):
    before = files_in(mine)
    built.turn_to(2)
    built.kill_at(point)
    place = built.build / f".one.mergepipe-{hidden}"
    moved = built.root / "moved"
    if os.path.lexists(place):
        place.rename(moved)
    place.symlink_to(mine)
    result = built.run()
    assert "Traceback" not in result.text, result.text
    assert files_in(mine) == before
    if result.code:
        place.unlink(missing_ok=True)
        built.report()
    built.check_done(clean[2])
    assert files_in(mine) == before
    shutil.rmtree(moved, ignore_errors=True)
    assert built.litter() == []


# --- few handles --------------------------------------------------------------------------------------------------

HANDLES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"


@pytest.fixture
def many(tmp_path):
    """Return a project of many outputs, each of many shards, over sources of many shards."""
    project = SmallProject(tmp_path / "many")
    shapes = {f"model.layers.{layer}.w": (64, 64) for layer in range(100)}
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, shapes), shards=100)
    for number in range(4):
        experts = [{"source": name, "weight": 0.1 * (number + 1)} for name in ("e1", "e2")]
        recipe = {"operator": "task_arithmetic", "base": "base", "experts": experts, "write": {"shard_size": "20 KB"}}
        project.set_output(f"o{number}", recipe)
    return project


@pytest.mark.parametrize("workers", [1, 8])
def test_a_process_with_few_file_handles_builds_many_shards(many, server, workers):
    result = server.run(("build", "-j", str(workers), "--quiet"), many.root, prelude=HANDLES.format(64))
    assert result.code == 0, result.text
    assert len(list((many.root / "build" / "o3").glob("*.safetensors"))) == 100
    for number in range(4):
        many.check(f"o{number}")
    for command in (("verify",), ("status",), ("cache", "info"), ("replay", "build/o1", "--check")):
        result = server.run(command, many.root, prelude=HANDLES.format(64))
        assert result.code == 0, result.text
    assert (many.folder("o0") / MANIFEST).exists()


def test_with_too_few_file_handles_for_anything_it_says_so(built, clean):
    built.turn_to(2)
    result = built.run(prelude=HANDLES.format(6))
    if result.code:
        check_refused(result, code=result.code)
    built.check_between(clean[1], clean[2])
    built.report()
    built.check_done(clean[2])
