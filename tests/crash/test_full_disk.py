"""Disks that are full, and limits on the size of a file: said in words, nothing broken, and no work lost."""

from __future__ import annotations

import os

import pytest
from support.crash import Site, blocks, check_refused, files_in, states
from support.quick import every

PAGE = 4096
# By default finished blocks are recorded twice a second: a small build would have recorded none yet.
RECORD_ALWAYS = "import mergepipe.engine.run as run; run._RECORD_EVERY = 0"
# A disk that somebody else fills while the build runs: there was room for it when it began.
UNCHECKED = "import mergepipe.project.room as room; room.check_room = lambda disks: None"


def mount(server, home, size):
    """Mount an empty disk of ``size`` bytes at a folder of the server's."""
    server.view(home).mkdir(parents=True, exist_ok=True)
    server.execute("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(home))


def resize(server, home, size):
    server.execute("mount", "-o", f"remount,size={size}", str(home))


def free_bytes(folder):
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


class Ballast:
    """A file that leaves a disk with ``free`` bytes."""

    def __init__(self, folder, free):
        self.path = folder / "ballast"
        self.path.write_bytes(bytes(max(0, free_bytes(folder) - free)))

    def drop(self):
        self.path.unlink()


@pytest.fixture
def small_cache(tmp_path, mounting):
    """Return a function that gives a project whose cache has a disk of its own."""
    site = Site(tmp_path / "site", mounting)

    def make(size):
        mount(mounting, site.home / ".mergecache", size)
        return site

    yield make
    mounting.execute("umount", str(site.home / ".mergecache"))


@pytest.mark.parametrize("size", [PAGE, 150_000, 1_000_000, 3_000_000, 4_800_000])
def test_a_first_build_with_too_small_a_cache_disk_stops_and_goes_on_when_there_is_room(small_cache, clean, size):
    site = small_cache(size)
    # One thread: with more, the jobs in flight may fill the disk before the first of them is done.
    result = site.run("build", "-j", "1", prelude=f"{UNCHECKED}; {RECORD_ALWAYS}")
    check_refused(result, "No space left", ".mergecache")
    site.check_between(None)
    assert site.litter() == []
    resize(site.server, site.home / ".mergecache", 64_000_000)
    report = site.report()
    site.check_done(clean[1])
    if size >= 3_000_000:
        assert blocks(report, "computed") < clean[1].blocks, "what was finished before is used"


@pytest.mark.parametrize("free", [0, 100_000, 1_500_000])
def test_a_rebuild_with_too_little_room_in_the_cache_keeps_the_old_state(small_cache, clean, free):
    site = small_cache(64_000_000)
    site.report()
    ballast = Ballast(site.cache, free)
    site.turn_to(2)
    result = site.run(prelude=UNCHECKED)
    check_refused(result, "No space left", ".mergecache")
    site.check_between(clean[1])
    assert site.litter() == []
    ballast.drop()
    site.report()
    site.check_done(clean[2])
    assert site.staged() == []


@pytest.mark.parametrize("size", [PAGE, 1_000_000, 4_000_000])
def test_a_cache_disk_without_room_for_a_build_refuses_it_before_anything_is_read(small_cache, size):
    site = small_cache(size)
    result = site.run()
    if size > PAGE:  # a page does not hold the catalog
        check_refused(result, "No space left for this build", ".mergecache", "and", "are free")
    check_refused(result, "No space left", ".mergecache")
    site.check_between(None)
    assert site.litter() == []
    assert site.staged() == []


@pytest.mark.parametrize(("point", "free"), [("engine.first-block", 4_500_000), ("engine.tensor-recorded", 1_500_000)])
def test_what_a_killed_build_left_takes_no_room_from_the_next(small_cache, clean, point, free):
    site = small_cache(64_000_000)
    assert site.run("build", "-j", "1", env={"MERGEPIPE_CRASH_POINT": point}).code == -9
    Ballast(site.cache, free)  # less than the outputs take: what was staged has its blocks already
    site.report()
    site.check_done(clean[1])
    assert site.staged() == []


@pytest.fixture
def small_output(tmp_path, mounting):
    """Return a project, built, whose outputs have a disk of their own."""
    site = Site(tmp_path / "site", mounting)
    mount(mounting, site.home / "build", 64_000_000)
    site.report()
    yield site
    mounting.execute("umount", str(site.home / "build"))


@pytest.mark.parametrize("free", [0, 100_000, 2_000_000])
def test_a_full_output_disk_keeps_the_old_output_and_the_work(small_output, clean, free):
    site = small_output
    ballast = Ballast(site.build, free)
    site.turn_to(2)
    result = site.run(prelude=UNCHECKED)
    check_refused(result, "No space left", "build/one")
    site.check_between(clean[1])
    ballast.drop()
    assert site.litter() == []
    report = site.report()
    site.check_done(clean[2])
    assert blocks(report, "computed") == 0, "the merge was finished before the disk was full"


@pytest.mark.parametrize("free", [0, 2_000_000])
def test_an_output_disk_without_room_refuses_a_build_before_anything_is_read(small_output, clean, free):
    site = small_output
    ballast = Ballast(site.build, free)
    site.turn_to(2)
    check_refused(site.run(), "No space left for this build", "build/one", "are free")
    site.check_between(clean[1])
    assert site.staged() == []
    ballast.drop()
    assert blocks(site.report(), "computed") > 0, "nothing was merged before"
    site.check_done(clean[2])


def test_a_build_that_has_nothing_to_do_needs_no_room(small_output):
    site = small_output
    ballast = Ballast(site.build, 0)
    assert states(site.report()) == ["unchanged", "unchanged"]
    ballast.drop()


FILL_BEFORE_THE_SECOND = """
import os
import mergepipe.project.publication as steps

def publish(ready, *rest, **options):
    if ready.prepared.target.name == "two":
        stat = os.statvfs("build")
        with open("build/ballast", "wb") as file:
            file.write(bytes(stat.f_bavail * stat.f_frsize - 1_000_000))
    original(ready, *rest, **options)

original, steps.publish = steps.publish, publish
"""


def test_a_disk_that_is_full_between_two_outputs_leaves_each_whole(small_output, clean):
    site = small_output
    site.turn_to(2)
    check_refused(site.run(prelude=FILL_BEFORE_THE_SECOND), "No space left", "build/two")
    assert files_in(site.out("one")) == clean[2].outputs["one"]
    assert files_in(site.out("two")) == clean[1].outputs["two"]
    assert site.lock_bytes() == clean[1].lock
    (site.build / "ballast").unlink()
    assert site.litter() == []
    report = site.report()
    site.check_done(clean[2])
    assert states(report) == ["unchanged", "built"]


@pytest.fixture
def small_disk(tmp_path, mounting):
    """Return a project that has a disk of its own, built at version 1, and the bytes that version 2 takes more."""
    home = tmp_path / "disk"
    mount(mounting, home, 96_000_000)
    trial = Site(home / "trial", mounting)
    trial.report()
    trial.turn_to(2)
    before = free_bytes(trial.root)
    trial.report()
    needed = before - free_bytes(trial.root)
    mounting.execute("rm", "-r", str(home / "trial"))
    site = Site(home / "site", mounting)
    site.report()
    yield site, needed
    mounting.execute("umount", str(home))


@pytest.mark.parametrize("short", every([1, 2, 4, 8, 16, 40], [1, 8, 40]))
def test_a_disk_that_is_full_a_few_pages_too_early_breaks_nothing(small_disk, clean, short):
    site, needed = small_disk
    ballast = Ballast(site.root.parent, max(0, needed - short * PAGE))
    site.turn_to(2)
    result = site.run(prelude=UNCHECKED)
    site.check_between(clean[1], clean[2])
    if result.code != 0:  # the old directory's pages come free while the new one is published
        check_refused(result, "No space left")
        assert site.litter() == []
        if site.lock_bytes() == clean[2].lock:
            site.check_done(clean[2])
    ballast.drop()
    site.report()
    site.check_done(clean[2])


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.mark.parametrize("limit", [2 * PAGE, 100_000, 600_000])
def test_a_limit_on_the_size_of_a_file_is_named_and_breaks_nothing(built, clean, limit):
    built.turn_to(2)
    result = built.run(prelude=LIMITED.format(limit))
    check_refused(result, "File too large", ".mergecache")
    built.check_between(clean[1])
    assert built.litter() == []
    built.report()
    built.check_done(clean[2])


def test_a_first_build_with_a_limit_on_the_size_of_a_file_leaves_no_output(site, clean):
    result = site.run(prelude=LIMITED.format(600_000))
    check_refused(result, "File too large", ".mergecache")
    site.check_between(None)
    site.report()
    site.check_done(clean[1])
