"""A cache that is damaged, partly gone, or full of what does not belong there: a right build or an error in words."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3

import pytest
from support.crash import OUTPUTS, Site, blocks, check_refused, files_in, states


def catalog(site):
    return site.cache / "catalog.db"


def overwrite(path, data):
    path.write_bytes(data)


def change_version(path, version):
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


def drop_table(path, table):
    with sqlite3.connect(path) as db:
        db.execute(f"DROP TABLE {table}")
    db.close()


def flip(path, generator, count=1):
    data = bytearray(path.read_bytes())
    for _ in range(count):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.chmod(0o644)
    path.write_bytes(data)


def build_right_or_refused(site, clean, version=2, before=1, *, in_words=True):
    """Build: the right bytes, or an error in words with the old state intact; without the cache always right."""
    sources = site.sources()
    result = site.run()
    if result.code == 0:
        site.check_done(clean[version])
    else:
        assert result.code == 1, result.text
        if in_words:
            check_refused(result, ".mergecache")
        site.check_between(before and clean[before], clean[version])
        shutil.rmtree(site.cache)
        site.report()
        site.check_done(clean[version])
    assert site.litter() == []
    assert site.sources() == sources
    return result


# --- the catalog --------------------------------------------------------------------------------------------------

LOST = {
    "garbage": lambda path: overwrite(path, random.Random(1).randbytes(50_000)),
    "text": lambda path: overwrite(path, b"<!doctype html>" * 1000),
    "empty": lambda path: overwrite(path, b""),
    "a version of no mergepipe": lambda path: change_version(path, 99_999),
    "an older version": lambda path: change_version(path, 1),
    "no version": lambda path: change_version(path, 0),
    "deleted": lambda path: path.unlink(),
    "its header alone": lambda path: os.truncate(path, 100),
}


@pytest.mark.parametrize("damage", LOST)
def test_a_catalog_that_is_none_is_set_aside_and_costs_time_only(built, clean, damage):
    built.turn_to(2)
    LOST[damage](catalog(built))
    assert '"unbuilt"' in built.run("status", "--json").stdout
    report = built.report()
    built.check_done(clean[2])
    assert states(report) == ["built", "built"]
    assert blocks(report, "computed") == clean[2].blocks
    assert states(built.report()) == ["unchanged", "unchanged"]


def test_a_catalog_of_a_newer_mergepipe_is_refused_and_left_alone(built, clean):
    built.turn_to(2)
    change_version(catalog(built), 99)
    before = catalog(built).read_bytes()
    for command in (("build",), ("status",), ("plan",), ("cache", "info"), ("cache", "prune"), ("cache", "verify")):
        result = built.run(*command)
        check_refused(result, "newer mergepipe")
        assert "upgrade mergepipe" in result.stderr
    built.check_done(clean[1])
    assert catalog(built).read_bytes() == before
    assert built.run("build", "--cache-dir", "other").code == 0
    built.check_done(clean[2])


@pytest.mark.parametrize("damage", ["garbage", "deleted"])
def test_without_a_catalog_outputs_that_are_right_stay_right(built, clean, damage):
    LOST[damage](catalog(built))
    built.report()
    built.check_done(clean[1])
    assert built.litter() == []


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_truncated_catalog_makes_no_wrong_byte(built, clean, share):
    built.turn_to(2)
    os.truncate(catalog(built), int(catalog(built).stat().st_size * share))
    build_right_or_refused(built, clean)


@pytest.mark.parametrize("table", ["files", "tensors", "packs", "results", "staged", "published"])
def test_a_catalog_without_one_of_its_tables_makes_no_wrong_byte(built, clean, table):
    built.turn_to(2)
    drop_table(catalog(built), table)
    build_right_or_refused(built, clean)


def flip_in_catalog(site, clean, seed):
    generator = random.Random(seed)
    if seed % 2:
        site.turn_to(2)
    flip(catalog(site), generator, count=20)
    status = site.run("status")
    assert "Traceback" not in status.text
    # Damage inside SQLite's own pages may surface anywhere: what counts is that no wrong byte comes of it.
    build_right_or_refused(site, clean, site.version, in_words=False)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_the_catalog_make_no_wrong_byte(built, clean, seed):
    flip_in_catalog(built, clean, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 150))
def test_many_flipped_bits_in_the_catalog_make_no_wrong_byte(built, clean, seed):
    flip_in_catalog(built, clean, seed)


def test_a_journal_of_garbage_is_ignored(built, clean):
    built.turn_to(2)
    overwrite(built.cache / "catalog.db-journal", random.Random(1).randbytes(20_000))
    built.report()
    built.check_done(clean[2])


def test_a_journal_left_by_a_kill_is_rolled_back(built, clean, tmp_path):
    """The journal of a transaction that was cut short, beside a database of which some pages were written already."""
    built.turn_to(2)
    with sqlite3.connect(catalog(built), isolation_level=None) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM results")
        db.execute("UPDATE tensors SET blocks = zeroblob(3000), digest = zeroblob(32)")
        db.execute("DELETE FROM files")
        shutil.copytree(built.cache, tmp_path / "cut")
        db.execute("ROLLBACK")
    db.close()
    shutil.copyfile(tmp_path / "cut/catalog.db", catalog(built))
    shutil.copyfile(tmp_path / "cut/catalog.db-journal", built.cache / "catalog.db-journal")
    assert (built.cache / "catalog.db-journal").stat().st_size > 0
    report = built.report()
    built.check_done(clean[2])
    assert blocks(report, "computed") < clean[2].blocks, "what the catalog said before the kill still counts"


def test_a_catalog_that_is_a_directory_is_an_error_in_words_or_set_aside(built, clean):
    built.turn_to(2)
    catalog(built).unlink()
    catalog(built).mkdir()
    assert "internal error" not in built.run("status").text
    build_right_or_refused(built, clean)


def test_the_catalog_of_another_project_makes_no_wrong_byte(built, clean, server, tmp_path):
    other = Site(tmp_path / "other", server, 4)
    other.report()
    built.turn_to(2)
    shutil.copyfile(catalog(other), catalog(built))
    build_right_or_refused(built, clean)


# --- packs --------------------------------------------------------------------------------------------------------


def packs(site):
    return sorted((site.cache / "packs").iterdir())


def replace_with(path, make):
    path.unlink()
    make(path)


PACK_DAMAGE = {
    "deleted": lambda path, _: path.unlink(),
    "empty": lambda path, _: replace_with(path, lambda new: new.write_bytes(b"")),
    "shorter": lambda path, _: (path.chmod(0o644), os.truncate(path, path.stat().st_size - 1)),
    "flipped": flip,
    "another pack": lambda path, generator: replace_with(
        path, lambda new: shutil.copyfile(generator.choice(list(path.parent.iterdir())), new)
    ),
    "a directory": lambda path, _: replace_with(path, lambda new: new.mkdir()),
    "a link to nowhere": lambda path, _: replace_with(path, lambda new: new.symlink_to("/nowhere")),
    "unreadable": lambda path, _: path.chmod(0),
}


@pytest.mark.parametrize(
    ("damage", "which"), [*((damage, "one") for damage in PACK_DAMAGE), ("deleted", "all"), ("flipped", "all")]
)
def test_damaged_packs_are_found_out_and_made_again(built, clean, damage, which):
    generator = random.Random(damage + which)
    built.turn_to(2)
    for path in packs(built) if which == "all" else [generator.choice(packs(built))]:
        PACK_DAMAGE[damage](path, generator)
    build_right_or_refused(built, clean)
    assert states(built.report()) == ["unchanged", "unchanged"]


@pytest.mark.parametrize("damage", ["deleted", "flipped", "another pack"])
def test_a_damaged_pack_of_an_output_that_is_gone_is_made_again(built, clean, damage):
    shutil.rmtree(built.build)
    generator = random.Random(damage)
    for path in packs(built):
        PACK_DAMAGE[damage](path, generator)
    build_right_or_refused(built, clean, 1)


def test_the_folder_of_packs_deleted_costs_time_only(built, clean):
    built.turn_to(2)
    shutil.rmtree(built.cache / "packs")
    built.report()
    built.check_done(clean[2])


def test_a_bit_flipped_in_a_pack_and_so_in_its_output_is_found_out(built, clean):
    """Pack and published shard are one inode: whoever edits one edits the other."""
    shard = sorted(built.out("two").glob("*.safetensors"))[1]
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\x01\x02\x03")
    report = built.report()
    built.check_done(clean[1])
    assert report["outputs"]["two"]["state"] == "built"
    assert blocks(report, "computed") > 0


AFTER_THE_MERGE = """
import mergepipe.engine.run as run

def check(self):
    original(self)
    path = {path!r}
    with open(path, "r+b") as file:
        file.seek(-1000, 2)
        file.write(b"edited")

original, run.SourceIndex.check_unchanged = run.SourceIndex.check_unchanged, check
"""


def test_a_published_shard_edited_while_a_build_links_its_pack_again_is_found_out(built, server, tmp_path):
    """The edit reaches the pack through the shared inode after the build has found the pack to be right."""
    other = Site(tmp_path / "other", server)
    for site in (built, other):
        site.edit_source(5)
    other.report()
    expected = {name: files_in(other.out(name)) for name in OUTPUTS}
    now = files_in(built.out("two"))
    same = [name for name, digest in expected["two"].items() if "safetensors" in name and now.get(name) == digest]
    shard = built.out("two") / next(name for name in same if not name.endswith(".json"))
    shard.chmod(0o644)
    result = built.run(prelude=AFTER_THE_MERGE.format(path=str(shard)))
    if result.code:
        check_refused(result)
    built.report()
    assert {name: files_in(built.out(name)) for name in OUTPUTS} == expected


# --- what does not belong there -----------------------------------------------------------------------------------


def test_garbage_in_staging_does_no_harm_and_pruning_removes_what_has_a_name_of_ours(built, clean):
    built.turn_to(2)
    staging = built.cache / "staging"
    own = f"{'0' * 16}-{'1' * 32}.safetensors"
    (staging / own).write_bytes(b"w" * 1000)
    (staging / "junk").write_bytes(b"x" * 1000)
    (staging / ("0" * 64 + ".safetensors")).write_bytes(b"y" * 1000)
    (staging / "folder").mkdir()
    (staging / "folder" / "deep").write_bytes(b"z")
    (staging / "nowhere").symlink_to("/nowhere")
    built.report()
    built.check_done(clean[2])
    assert built.run("cache", "info").code == 0
    assert own in built.staged()
    assert built.run("cache", "prune").code == 0
    assert built.staged() == sorted(["0" * 64 + ".safetensors", "folder", "junk", "nowhere"])


def test_garbage_under_the_names_of_staged_shards_is_found_out(site, clean):
    site.kill_at("engine.tensor-recorded")
    generator = random.Random(3)
    for name in site.staged():
        path = site.cache / "staging" / name
        path.write_bytes(generator.randbytes(path.stat().st_size))
    report = site.report()
    site.check_done(clean[1])
    assert blocks(report, "cached") == 0


@pytest.mark.parametrize("kind", ["directory", "symlink"])
def test_something_else_under_the_name_of_a_staged_shard_is_an_error_in_words_or_removed(site, clean, kind):
    site.kill_at("engine.tensor-recorded")
    path = site.cache / "staging" / site.staged()[0]
    path.unlink()
    path.mkdir() if kind == "directory" else path.symlink_to(site.weights("b"))
    build_right_or_refused(site, clean, version=1, before=None)


@pytest.mark.parametrize("kind", ["folder", "full", "file"])
def test_a_quarantine_that_is_there_already_is_no_obstacle(built, clean, kind):
    built.turn_to(2)
    quarantine = built.cache / "quarantine"
    if kind == "file":
        quarantine.write_text("mine")
    else:
        quarantine.mkdir()
    for path in packs(built):
        if kind == "full":
            (quarantine / path.name).write_bytes(b"older")
        shutil.copyfile(path, quarantine.with_name("copy"))  # else the output would be damaged with it
        quarantine.with_name("copy").replace(path)
        flip(path, random.Random(1))
    build_right_or_refused(built, clean)


def test_a_cache_that_is_a_file_is_an_error_in_words(site):
    site.cache.write_text("mine")
    check_refused(site.run(), ".mergecache")
    assert site.cache.read_text() == "mine"
    assert not site.build.exists()


def test_a_cache_without_its_folders_and_tags_is_made_whole(built, clean):
    built.turn_to(2)
    for name in ("CACHEDIR.TAG", ".gitignore", "build.lock"):
        (built.cache / name).unlink()
    (built.cache / "staging").rmdir()
    built.report()
    built.check_done(clean[2])
    assert (built.cache / "CACHEDIR.TAG").exists()


@pytest.mark.parametrize("moment", [0, 4, -1])
def test_a_cache_removed_during_the_build_is_an_error_in_words_or_no_harm(built, clean, moment):
    built.turn_to(2)
    prelude = f"""
import shutil
import mergepipe.engine.run as run
import mergepipe.engine.schedule as schedule
jobs = 0

def job(task, scratch):
    global jobs
    if jobs == {moment}:
        shutil.rmtree({str(built.cache)!r})
    jobs += 1
    return original(task, scratch)

def check(self):
    if {moment} < 0:
        shutil.rmtree({str(built.cache)!r})
    return original_check(self)

original, schedule.run_job = schedule.run_job, job
original_check, run.SourceIndex.check_unchanged = run.SourceIndex.check_unchanged, check
"""
    result = built.run("build", "-j", "1", prelude=prelude)
    if result.code != 0:
        check_refused(result, ".mergecache")
    built.check_between(clean[1], clean[2])
    built.report()
    built.check_done(clean[2])
    assert built.litter() == []
