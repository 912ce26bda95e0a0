"""Places that may not be written, sources that vanish or change during a build, and outputs that somebody replaced."""

from __future__ import annotations

import os
import shutil

import pytest
from support.crash import MANIFEST, OUTPUTS, Site, blocks, check_refused, files_in, states
from support.meanwhile import build_meanwhile

DENIED = "Permission denied"


def lock_away(*paths):
    """Take the right to write from paths, those below them first."""
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)


def give_back(*paths):
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)


def tree(root):
    """Return a tree's files, with links as what they point to, and its modes."""
    return {
        str(path.relative_to(root)): (os.lstat(path).st_mode, str(path.readlink()) if path.is_symlink() else None)
        for path in root.rglob("*")
    } | files_in(root)


# --- no right to write --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "packs", "staging", "catalog.db", "build.lock"])
def test_a_cache_that_may_not_be_written_is_named_and_the_old_state_stays(built, clean, part):
    built.turn_to(2)
    lock_away(built.cache / part)
    result = built.run()
    if result.code == 0:  # such as a catalog whose folder may be written
        built.check_done(clean[2])
        give_back(built.cache / part)
        return
    check_refused(result, ".mergecache")
    built.check_between(clean[1])
    assert built.litter() == []
    give_back(built.cache / part)
    built.report()
    built.check_done(clean[2])


def test_an_output_is_explained_without_what_a_cache_that_may_not_be_written_cannot_keep(built):
    lock_away(*sorted(built.cache.rglob("*"), reverse=True), built.cache)
    result = built.run("explain", OUTPUTS[0])
    assert result.code == 0, result.text
    assert "contributions are not known: it is measured into the cache" in result.stdout
    assert DENIED in result.stdout
    give_back(built.cache, *built.cache.rglob("*"))
    assert "contributions: the share by norm" in built.run("explain", OUTPUTS[0]).stdout


def test_a_project_that_may_not_be_written_gets_no_cache(site, clean):
    lock_away(site.root)
    check_refused(site.run(), DENIED, ".mergecache")
    give_back(site.root)
    site.report()
    site.check_done(clean[1])


def test_status_needs_no_right_to_write(built):
    everything = [built.cache / "catalog.db", built.cache / "build.lock", built.cache, built.build, built.root]
    lock_away(*everything)
    before = tree(built.root)
    result = built.run("status", "--json")
    assert result.code == 0, result.text
    assert '"up-to-date"' in result.stdout
    assert '"stale"' not in result.stdout
    assert tree(built.root) == before
    give_back(*reversed(everything))


def test_a_cache_on_a_disk_mounted_read_only_is_refused_in_words(tmp_path, mounting, clean):
    site = Site(tmp_path / "site", mounting)
    site.report()
    site.turn_to(2)
    cache = str(site.home / ".mergecache")
    mounting.execute("mount", "--bind", cache, cache)
    mounting.execute("mount", "-o", "remount,bind,ro", cache)
    check_refused(site.run(), "Read-only file system", ".mergecache")
    site.check_between(clean[1])
    assert site.run("status").code == 0
    mounting.execute("umount", cache)
    site.report()
    site.check_done(clean[2])


def test_a_folder_of_outputs_that_may_not_be_written_keeps_the_outputs_and_the_work(built, clean):
    built.turn_to(2)
    lock_away(built.build)
    check_refused(built.run(), DENIED, "build/one")
    built.check_between(clean[1])
    give_back(built.build)
    assert blocks(built.report(), "computed") == 0
    built.check_done(clean[2])
    assert built.litter() == []


def test_a_lock_that_may_not_be_written_is_written_by_the_next_build(built, clean):
    built.turn_to(2)
    lock_away(built.root)
    check_refused(built.run(), DENIED, "Mergefile.lock")
    assert built.lock_bytes() == clean[1].lock
    give_back(built.root)
    assert states(built.report()) == ["unchanged", "unchanged"]
    built.check_done(clean[2])
    assert built.litter() == []


@pytest.mark.parametrize("folder", [".", "notes"])
def test_an_output_directory_that_may_not_be_written_is_replaced_all_the_same(built, clean, folder):
    notes = built.out("one") / "notes" / "mine.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    lock_away(built.out("one") / folder)
    built.turn_to(2)
    built.report()
    assert notes.read_text() == "mine"
    give_back(built.out("one"), notes.parent)
    shutil.rmtree(notes.parent)
    built.check_done(clean[2])
    assert built.litter() == []


def test_a_source_that_may_not_be_read_is_named(built, clean):
    built.turn_to(2)
    built.weights("b").chmod(0)
    result = built.run()
    check_refused(result, DENIED, "models/b/model.safetensors", code=result.code)
    assert result.code in (1, 2)
    built.check_between(clean[1])
    give_back(built.weights("b"))
    built.report()
    built.check_done(clean[2])


# --- sources that change during a build ---------------------------------------------------------------------------

VANISH = {
    "unlinked": "os.unlink(path)",
    "its folder removed": "shutil.rmtree(os.path.dirname(path))",
    "a link to a copy": "os.rename(path, path + '.copy'); os.symlink(path + '.copy', path)",
    "a link to itself": "os.unlink(path); os.symlink(path, path)",
    "a link to nowhere": "os.unlink(path); os.symlink('/nowhere', path)",
    "a directory": "os.unlink(path); os.mkdir(path)",
    "shorter": "os.truncate(path, os.path.getsize(path) // 2)",
    "longer": "open(path, 'ab').write(b'more')",
    "another file": "shutil.copy(path, path + '.new'); os.replace(path + '.new', path)",
    "written to": "file = open(path, 'r+b'); file.seek(-500_000, 2); file.write(b'1' * 1000); file.close()",
    "unreadable": "os.chmod(path, 0)",
}


def restore(site, saved):
    shutil.rmtree(site.root / "models")
    shutil.copytree(saved, site.root / "models")


MOMENTS = (0, 3, -1)
CHANGES = [(what, moment) for what in VANISH for moment in MOMENTS]
SOME_CHANGES = [(what, MOMENTS[number % 3]) for number, what in enumerate(VANISH)]


@pytest.mark.parametrize(("what", "moment"), SOME_CHANGES)
def test_a_source_that_changes_during_a_build_is_named_and_nothing_is_published(built, clean, tmp_path, what, moment):
    change_a_source(built, clean, tmp_path, what, moment)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "moment"), [change for change in CHANGES if change not in SOME_CHANGES])
def test_a_source_that_changes_at_any_moment_of_a_build_is_named(built, clean, tmp_path, what, moment):
    change_a_source(built, clean, tmp_path, what, moment)


def change_a_source(built, clean, tmp_path, what, moment):
    built.turn_to(2)
    saved = shutil.copytree(built.root / "models", tmp_path / "saved")
    result = build_meanwhile(built, VANISH[what], moment, built.weights("b"))
    check_refused(result, "models/b/model.safetensors")
    built.check_between(clean[1])
    assert built.litter() == []
    restore(built, saved)
    built.report()
    built.check_done(clean[2])


@pytest.mark.parametrize("what", ["unlinked", "written to"])
def test_a_source_that_changes_during_a_first_build_leaves_no_output(site, clean, tmp_path, what):
    saved = shutil.copytree(site.root / "models", tmp_path / "saved")
    result = build_meanwhile(site, VANISH[what], 3, site.weights("a"))
    check_refused(result, "models/a/model-00001-of-00002.safetensors")
    site.check_between(None)
    assert site.litter() == []
    restore(site, saved)
    site.report()
    site.check_done(clean[1])


def test_what_was_made_of_a_source_before_it_changed_is_never_used_for_another_content(built, clean):
    built.turn_to(2)
    result = build_meanwhile(built, VANISH["written to"], 4, built.weights("b"))
    assert result.code == 1, result.text
    Site(built.home.parent / "other", built.server, 3)
    shutil.copyfile(built.home.parent / "other/models/b/model.safetensors", built.weights("b"))
    built.turn_to(3)
    built.report()
    built.check_done(clean[3])


# --- outputs that somebody replaced -------------------------------------------------------------------------------


def put_file(path):
    shutil.rmtree(path)
    path.write_text("mine")


def put_link(path):
    path.rename(path.parent.parent / "moved")
    path.symlink_to("../moved")


def put_broken_link(path):
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def put_directory(path):
    shutil.rmtree(path)
    path.mkdir()
    (path / "thesis.txt").write_text("mine")


def put_model(path):
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    path.with_name("copy").rename(path)
    (path / MANIFEST).unlink()


@pytest.mark.parametrize("put", [put_file, put_link, put_broken_link, put_directory, put_model])
def test_an_output_that_was_replaced_is_not_touched(built, clean, put):
    put(built.out("one"))
    built.turn_to(2)
    before = tree(built.root)
    cached = set(before) & {f".mergecache/{name}" for name in ("catalog.db", "catalog.db-journal")}
    check_refused(built.run(), "build/one", code=2)
    after = tree(built.root)
    assert {name: after.get(name) for name in before if name not in cached} == {
        name: kept for name, kept in before.items() if name not in cached
    }
    assert built.lock_bytes() == clean[1].lock


REPLACED = {
    "a file": "shutil.rmtree(path); open(path, 'w').write('mine')",
    "a link": "shutil.move(path, path + '-moved'); os.symlink(path + '-moved', path)",
    "a directory": "shutil.rmtree(path); os.mkdir(path); open(path + '/thesis.txt', 'w').write('mine')",
}


@pytest.mark.parametrize("what", REPLACED)
def test_an_output_that_is_replaced_during_the_build_is_not_touched(built, clean, what):
    built.turn_to(2)
    result = build_meanwhile(built, REPLACED[what], 2, built.out("one"))
    check_refused(result, "build/one", code=2)
    out = built.out("one")
    if what == "a file":
        assert out.read_text() == "mine"
        out.unlink()
    elif what == "a link":
        assert out.is_symlink()
        assert files_in(built.build / "one-moved") == clean[1].outputs["one"]
        out.unlink()
        shutil.rmtree(built.build / "one-moved")
    else:
        assert (out / "thesis.txt").read_text() == "mine"
        shutil.rmtree(out)
    assert built.lock_bytes() == clean[1].lock
    built.report()
    built.check_done(clean[2])
    assert built.litter() == []


def test_an_output_that_is_removed_during_the_build_is_made_anew(built, clean):
    built.turn_to(2)
    result = build_meanwhile(built, "shutil.rmtree(path)", 2, built.build)
    assert result.code == 0, result.text
    built.check_done(clean[2])


def test_a_file_that_a_user_puts_into_the_output_during_the_build_stays(built, clean):
    built.turn_to(2)
    result = build_meanwhile(built, "open(path + '/mine.txt', 'w').write('mine')", 2, built.out("one"))
    assert result.code == 0, result.text
    assert (built.out("one") / "mine.txt").read_text() == "mine"
    (built.out("one") / "mine.txt").unlink()
    built.check_done(clean[2])


def test_outputs_may_lie_behind_a_link(site, clean):
    (site.root / "elsewhere").mkdir()
    site.build.symlink_to("elsewhere")
    site.report()
    site.check_done(clean[1])
    site.turn_to(2)
    site.report()
    site.check_done(clean[2])
    assert sorted(os.listdir(site.root / "elsewhere")) == sorted(OUTPUTS)


def test_a_file_where_the_folder_of_outputs_should_be_is_named(site):
    site.build.write_text("mine")
    result = site.run()
    check_refused(result, "build", code=result.code)
    assert result.code in (1, 2)
    assert site.build.read_text() == "mine"
    assert site.lock_bytes() is None


def test_an_output_that_is_a_mount_point_is_refused_and_keeps_its_content(tmp_path, mounting, clean):
    site = Site(tmp_path / "site", mounting)
    site.report()
    place = str(site.home / "build/one")
    mounting.execute("mount", "--bind", place, place)
    site.turn_to(2)
    try:
        check_refused(site.run(), "build/one")
        site.check_between(clean[1])
        assert site.litter() == []
    finally:
        mounting.execute("umount", place)
    site.report()
    site.check_done(clean[2])
    assert site.litter() == []


@pytest.mark.parametrize("kind", ["directory", "garbage", "conflict", "empty"])
def test_a_lock_that_is_none_stops_the_build_before_anything_is_published(built, clean, kind):
    built.turn_to(2)
    built.lock.unlink()
    if kind == "directory":
        built.lock.mkdir()
    else:
        conflict = clean[1].lock + b"<<<<<<< ours\n=======\n>>>>>>> theirs\n"
        built.lock.write_bytes({"garbage": b"\x00\xff\x01", "conflict": conflict, "empty": b""}[kind])
    check_refused(built.run(), "Mergefile.lock", code=2)
    assert {name: files_in(built.out(name)) for name in OUTPUTS} == clean[1].outputs
    shutil.rmtree(built.lock) if kind == "directory" else built.lock.unlink()
    built.report()
    built.check_done(clean[2])


@pytest.mark.parametrize("cache", ["build/one", "build/one/cache", "build"])
def test_a_cache_and_an_output_may_not_lie_in_one_another(built, clean, cache):
    built.turn_to(2)
    check_refused(built.run(env={"MERGEPIPE_CACHE_DIR": str(built.home / cache)}), "build/one", code=2)
    built.check_between(clean[1])
