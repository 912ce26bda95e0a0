"""Files of a user in an output directory: whatever fails, at whatever moment they appear, they are there afterwards."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.crash import check_refused, files_in

from mergepipe.errors import StorageError
from mergepipe.fsio import swap
from mergepipe.publish.directory import Contents, Publication

NO_EXCHANGE = {"MERGEPIPE_NO_EXCHANGE": "1"}
WAYS = pytest.mark.parametrize("env", [{}, NO_EXCHANGE], ids=["exchange", "two-step"])

# A user saves a file at the last moment: the next directory is complete, and the old one still in its place.
SAVE_LATE = """
import mergepipe.fsio.swap as swap

def point(name):
    if name == "publish.swap-begun":
        with open("build/one/late.txt", "w") as file:
            file.write("saved late")
    original(name)

original, swap.crash_point = swap.crash_point, point
"""


@WAYS
@pytest.mark.parametrize("point", [None, "publish.swapped", "publish.cleaned", "lock.written"])
def test_a_file_saved_at_the_last_moment_is_in_the_new_output(built, clean, env, point):
    built.turn_to(2)
    killing = {"MERGEPIPE_CRASH_POINT": point} if point else {}
    result = built.run(env={**env, **killing}, prelude=SAVE_LATE)
    assert result.code == (-9 if point else 0), result.text
    built.report()
    late = built.out("one") / "late.txt"
    assert late.read_text() == "saved late"
    late.unlink()
    built.check_done(clean[2])
    assert built.litter() == []


@WAYS
def test_a_file_saved_at_the_last_moment_survives_a_swap_that_fails_half_way(built, clean, env):
    built.turn_to(2)
    failing = (
        SAVE_LATE
        + """
def fsync(path):
    raise OSError(5, "Input/output error")

swap.fsync_path = fsync
"""
    )
    check_refused(built.run(env=env, prelude=failing), "Input/output error")
    assert (built.out("one") / "late.txt").read_text() == "saved late"
    built.report()
    assert (built.out("one") / "late.txt").read_text() == "saved late"
    (built.out("one") / "late.txt").unlink()
    built.check_done(clean[2])


def test_every_kind_of_thing_in_an_output_is_kept(built, clean):
    out = built.out("one")
    (out / "deep" / "er").mkdir(parents=True)
    (out / "deep" / "er" / "notes with spaces ü.txt").write_text("1")
    (out / "script.sh").write_text("#!/bin/sh\n")
    (out / "script.sh").chmod(0o750)
    (out / "link to a file").symlink_to("script.sh")
    (out / "link to a folder").symlink_to("deep")
    (out / "link to nowhere").symlink_to("/nowhere")
    os.link(out / "script.sh", built.root / "models" / "same inode")
    (out / ".hidden").write_text("2")
    (out / "empty folder").mkdir()
    os.utime(out / ".hidden", (1_000_000_000, 1_000_000_000))
    before = {path.relative_to(out): os.lstat(path) for path in out.rglob("*")}
    owned = {Path(name) for name in clean[1].outputs["one"]}
    for version in (2, 3):
        built.turn_to(version)
        built.report()
    after = {path.relative_to(out): os.lstat(path) for path in out.rglob("*")}
    for name, stat in before.items():
        if name not in owned and name != Path("empty folder"):
            assert name in after, name
            assert after[name].st_mode == stat.st_mode, name
    assert (out / ".hidden").stat().st_mtime == 1_000_000_000
    assert (out / "link to a folder" / "er" / "notes with spaces ü.txt").read_text() == "1"


@WAYS
def test_a_directory_taken_over_by_force_keeps_its_files_through_kills(site, clean, env):
    site.out("one").mkdir(parents=True)
    (site.out("one") / "thesis.txt").write_text("mine")
    check_refused(site.run(), "build/one", code=2)
    for point in ("publish.assembled", "publish.swap-begun", "publish.swapped"):
        result = site.run("build", "--force", env={**env, "MERGEPIPE_CRASH_POINT": point})
        assert result.code in (0, -9)
        assert (site.out("one") / "thesis.txt").read_text() == "mine"
    assert site.run("build", "--force").code == 0
    assert (site.out("one") / "thesis.txt").read_text() == "mine"
    (site.out("one") / "thesis.txt").unlink()
    site.check_done(clean[1])
    assert site.litter() == []


def test_a_file_deleted_by_the_user_after_a_kill_stays_deleted_once_the_output_is_built(built):
    mine = built.out("one") / "mine.txt"
    mine.write_text("1")
    built.turn_to(2)
    built.kill_at("publish.swapped")
    assert mine.exists()
    built.report()
    mine.unlink()
    built.turn_to(3)
    built.report()
    assert not mine.exists()


# --- one publication ----------------------------------------------------------------------------------------------

MANIFEST = b'{"version": 1, "files": ["mergepipe.json", "config.json"]}'
CONTENTS = Contents(links={}, files={"mergepipe.json": MANIFEST, "config.json": b"{}"})


@pytest.fixture
def published(tmp_path):
    """Return an output directory that was published."""
    target = tmp_path / "build" / "out"
    with Publication(target, force=False) as publication:
        publication.assemble(CONTENTS)
        publication.swap()
    return target


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_what_stops_a_swap_after_the_exchange_loses_no_file_of_the_user(published, monkeypatch, error):
    def stop(*_):
        raise error

    def publish():
        with Publication(published, force=False) as publication:
            publication.assemble(CONTENTS)
            (published / "late.txt").write_text("saved late")
            with monkeypatch.context() as patched:
                patched.setattr(swap, "fsync_path", stop)
                publication.swap()

    with pytest.raises((StorageError, KeyboardInterrupt)):
        publish()
    with Publication(published, force=False):
        pass
    assert (published / "late.txt").read_text() == "saved late"
    assert sorted(os.listdir(published.parent)) == ["out"]


def test_an_interrupted_assembly_leaves_the_old_directory_and_nothing_beside_it(published, monkeypatch):
    before = files_in(published)
    monkeypatch.setattr("mergepipe.publish.directory.write_file", interrupted)
    with pytest.raises(KeyboardInterrupt), Publication(published, force=False) as publication:
        publication.assemble(CONTENTS)
    assert files_in(published) == before
    assert os.listdir(published.parent) == ["out"]


def test_an_interrupted_first_assembly_leaves_nothing(tmp_path, monkeypatch):
    target = tmp_path / "out"
    monkeypatch.setattr("mergepipe.publish.directory.write_file", interrupted)
    with pytest.raises(KeyboardInterrupt), Publication(target, force=False) as publication:
        publication.assemble(CONTENTS)
    assert os.listdir(tmp_path) == []


def interrupted(*_args, **_options):
    raise KeyboardInterrupt


def test_a_directory_that_vanishes_while_it_is_published_is_made_anew(published):
    with Publication(published, force=False) as publication:
        publication.assemble(CONTENTS)
        shutil.rmtree(published)
        publication.swap()
    assert sorted(os.listdir(published)) == ["config.json", "mergepipe.json"]
    assert os.listdir(published.parent) == ["out"]
