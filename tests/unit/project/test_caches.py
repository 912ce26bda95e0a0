"""A cache directory on its own: what is damaged is found and taken out of use, and what is needed is never pruned."""

import json
import os
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import random_tensors
from support.projects import TINY, Messages, SmallProject, skip_flushing

from mergepipe.cache.database import seal
from mergepipe.errors import CacheError, LockError, MergefileError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.project.caches import open_cache
from mergepipe.project.facts import encode_files, known_output

SHAPES = {"a.weight": (24, 16), "b.weight": (16, 16), "empty": (0, 4), "c": (70,)}


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_flushing(monkeypatch)
        yield


@pytest.fixture
def project(tmp_path):
    """Return a built project with two outputs, one of which has a budget that was measured."""
    return made(tmp_path / "one")


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    """Return such a project for several tests; each leaves it built, with a sound cache."""
    return made(tmp_path_factory.mktemp("mended"))


def made(root, seed=0, cache=None):
    project = SmallProject(root)
    for number, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed + number, SHAPES))
    experts = [{"source": "e1", "weight": 0.5}, {"source": "e2", "weight": 0.25}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    project.set_output(
        "n",
        {"operator": "task_arithmetic", "base": "base", "experts": experts}
        | {"budget": {"expert_reads": "40%", "stats": "sample"}},
    )
    project.build(**({"cache_dir": cache} if cache else {}))
    return project


def cache_of(project, **options):
    return open_cache(project.cache, lock_path=project.lock, geometry=TINY, workers=2, **options)


def packs(cache):
    return sorted((cache / "packs").iterdir())


def change(project, *statements):
    with sqlite3.connect(project.cache / "catalog.db") as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def flip(path, at=-5):
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(b"\xa5\x5a")


def kinds(check):
    return [problem.kind for problem in check.problems]


def everything(root):
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if path.name != "build.lock"
    }


def check_repaired(project, expected):
    """Check that a build makes what was there before, and that the cache is sound then."""
    project.build()
    assert {name: project.raw(name) for name in expected} == expected
    assert cache_of(project).verify().ok


# --- verify -------------------------------------------------------------------------------------------------------


def test_a_sound_cache_is_found_sound_and_nothing_is_written(project):
    reporter = Messages()
    before = everything(project.cache)
    check = cache_of(project, reporter=reporter).verify()
    assert (check.ok, check.catalog, check.problems) == (True, "sound", ())
    assert check.packs.checked == len(packs(project.cache)) == 2
    assert check.packs.bytes == sum(path.stat().st_size for path in packs(project.cache))
    assert min(check.rows[table] for table in ("files", "tensors", "samples", "packs", "results", "published")) > 0
    assert everything(project.cache) == before
    ((phase, total, _, ended),) = reporter.phases
    assert (phase, total, ended) == ("checking packs", check.packs.bytes, True)


DAMAGE = {
    "a flipped bit": flip,
    "a flipped header": lambda path: flip(path, 20),
    "cut": lambda path: (path.chmod(0o644), os.truncate(path, path.stat().st_size - 1)),
    "empty": lambda path: (path.chmod(0o644), os.truncate(path, 0)),
    "a link": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another pack": lambda path: (path.unlink(), shutil.copyfile(next(path.parent.iterdir()), path)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack_is_quarantined_and_made_again(mended, damage):
    expected = {name: mended.raw(name) for name in ("m", "n")}
    shutil.rmtree(mended.root / "build")  # else the outputs are damaged with it
    path = packs(mended.cache)[0]
    DAMAGE[damage](path)
    told = cache_of(mended).verify(dry_run=True)
    assert os.path.lexists(path), "a dry run leaves everything"
    check = cache_of(mended).verify()
    assert kinds(check) == kinds(told) == ["pack"]
    assert (check.packs.damaged, check.packs.missing) == (1, 0)
    assert check.problems[0].where == f"packs/{path.name}"
    assert not os.path.lexists(path)
    assert os.path.lexists(mended.cache / "quarantine" / path.name)
    assert cache_of(mended).verify().ok
    check_repaired(mended, expected)


def test_a_pack_that_rotted_unnoticed_takes_the_output_with_which_it_is_one_file_to_be_made_again(project):
    """No time of the file tells: what the catalog has of pack and output is what they look like now."""
    expected = {"m": project.raw("m")}
    shard = project.folder("m") / "model.safetensors"
    path = next(path for path in packs(project.cache) if path.samefile(shard))
    flip(path)
    with project.open()._writing() as (catalog, _):
        known, published = known_output(catalog, project.folder("m")), catalog.published(project.folder("m"))
        files = [replace(file, identity=FileIdentity.at(project.folder("m") / file.name)) for file in known.files]
        catalog.record_published(project.folder("m"), replace(published, files=encode_files(tuple(files))))
        catalog.record_pack_identity(path.stem, FileIdentity.at(path))
    assert project.open().status().outputs["m"].state == "up-to-date", "nobody notices"
    check = cache_of(project).verify()
    assert kinds(check) == ["pack"]
    assert check.problems[0].facts["linked"]
    assert "an output that is the same file" in check.problems[0].what
    assert project.open().status().outputs["m"].state == "stale"
    check_repaired(project, expected)


def test_packs_that_are_gone_are_forgotten_and_those_that_nobody_knows_are_no_problem(project):
    expected = {name: project.raw(name) for name in ("m", "n")}
    shutil.rmtree(project.root / "build")
    packs(project.cache)[0].unlink()
    shutil.copyfile(packs(project.cache)[0], project.cache / "packs/stray")
    check = cache_of(project).verify()
    assert kinds(check) == ["missing"]
    packed = check.packs
    assert (packed.checked, packed.missing, packed.unknown, packed.foreign) == (1, 1, 0, 1)
    assert cache_of(project).verify().ok
    check_repaired(project, expected)


ROWS = {
    "files": "UPDATE files SET inode = inode + 1 WHERE id = (SELECT min(id) FROM files)",
    "tensors": "UPDATE tensors SET digest = zeroblob(32) WHERE rowid = (SELECT min(rowid) FROM tensors)",
    "blocks": "UPDATE tensors SET blocks = zeroblob(length(blocks)) WHERE length(blocks) > 32",
    "samples": "UPDATE samples SET samples = zeroblob(32) WHERE rowid = (SELECT min(rowid) FROM samples)",
    "results": "UPDATE results SET offset = offset + 8 WHERE rowid = (SELECT min(rowid) FROM results)",
    "statistics": "UPDATE statistics SET data = zeroblob(length(data)) WHERE id = (SELECT min(id) FROM statistics)",
    "published": "UPDATE published SET record = x'00'",
    "measured": "INSERT OR REPLACE INTO measured VALUES ('seconds:x', -1)",
    "staged": "INSERT INTO staged VALUES ('s', 't', zeroblob(32), zeroblob(64))",
    "packs": "INSERT INTO packs VALUES ('../../x', 1, 1, 1, 1, 1)",
    "text": "UPDATE results SET tensor = CAST(x'ff' AS TEXT) WHERE rowid = (SELECT min(rowid) FROM results)",
    "types": "UPDATE tensors SET blocks = 'text', name = 7 WHERE rowid = (SELECT min(rowid) FROM tensors)",
}


@pytest.mark.parametrize("table", ROWS)
def test_a_damaged_row_is_found_and_dropped(request, table):
    mended = request.getfixturevalue("project" if table == "samples" else "mended")
    expected = {name: mended.raw(name) for name in ("m", "n")}
    change(mended, ROWS[table])
    told = cache_of(mended).verify(dry_run=True)
    check = cache_of(mended).verify()
    assert check.problems == told.problems
    assert "rows" in kinds(check)
    assert check.catalog == "repaired"
    shown = {"blocks": "tensors", "text": "results", "types": "tensors"}.get(table, table)
    assert all(problem.facts["table"] == shown for problem in check.problems if problem.kind == "rows")
    assert cache_of(mended).verify().ok
    check_repaired(mended, expected)


def sealed_again(project, column, value):
    """Change a column of a result, and seal the row as if it had been written so."""
    with sqlite3.connect(project.cache / "catalog.db") as db:
        ((number,),) = db.execute("SELECT max(rowid) FROM results").fetchall()
        db.execute(f"UPDATE results SET {column} = ? WHERE rowid = ?", (value, number))
        columns = "key, output, tensor, dtype, shape, recipe, digest, block_keys, block_digests, pack, offset"
        row = db.execute(f"SELECT {columns} FROM results WHERE rowid = ?", (number,)).fetchone()
        db.execute("UPDATE results SET seal = ? WHERE rowid = ?", (seal(*row), number))
    db.close()


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("offset", 8, "does not say what lies in its pack"),
        ("digest", bytes(32), "does not hash to its digest"),
        ("block_keys", b"", "has lists of the wrong length"),
        ("dtype", "F7", "fails its checksum"),
        ("shape", "2,x", "fails its checksum"),
    ],
)
def test_a_result_must_say_what_lies_in_its_pack(mended, column, value, why):
    sealed_again(mended, column, value)
    (problem,) = cache_of(mended).verify().problems
    assert (problem.facts["table"], problem.facts["count"]) == ("results", 1)
    assert why in problem.what
    assert cache_of(mended).verify().ok
    shutil.rmtree(mended.root / "build")
    mended.build()  # a result with other keys lies there anew
    assert cache_of(mended).verify().ok


LOST = {
    "garbage": lambda path: path.write_bytes(b"no database" * 1000),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "without a table": lambda path: None,
}


@pytest.mark.parametrize("damage", LOST)
def test_a_catalog_that_is_none_is_set_aside(mended, damage):
    expected = {name: mended.raw(name) for name in ("m", "n")}
    (mended.cache / "catalog.db.unusable").unlink(missing_ok=True)
    LOST[damage](mended.cache / "catalog.db")
    if damage == "without a table":
        change(mended, "DROP TABLE samples")
    told = cache_of(mended).verify(dry_run=True)
    assert not (mended.cache / "catalog.db.unusable").exists()
    check = cache_of(mended).verify()
    assert kinds(check) == kinds(told) == ["catalog"]
    assert check.catalog == "damaged"
    assert (mended.cache / "catalog.db.unusable").exists()
    assert cache_of(mended).verify().packs.unknown == 2
    check_repaired(mended, expected)


def test_no_cache_and_half_a_cache_are_sound(project):
    (project.cache / "catalog.db").unlink()
    check = cache_of(project).verify()
    assert (check.ok, check.catalog, check.packs.checked, check.packs.unknown) == (True, "missing", 2, 0)
    shutil.rmtree(project.cache / "packs")
    assert cache_of(project).verify().ok
    shutil.rmtree(project.cache)
    for report in (cache_of(project).verify(), cache_of(project).prune(0), cache_of(project).info()):
        json.dumps(report.as_json())
    assert not project.cache.exists(), "looking after nothing makes nothing"


def test_a_pack_that_was_touched_is_recorded_as_it_is_now_and_that_is_no_use_of_it(project):
    path = packs(project.cache)[0]
    os.utime(path, ns=(1, 1))
    with project.open()._reading() as catalog:
        before = dict(catalog.pack_names())
    assert cache_of(project).verify().ok
    with project.open()._reading() as catalog:
        assert catalog.pack_identity(path.stem) == FileIdentity.at(path)
        assert dict(catalog.pack_names()) == before


def test_a_directory_that_is_no_cache_is_not_touched(tmp_path):
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs/letter.txt").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")
    cache = open_cache(tmp_path, geometry=TINY)
    for command in (cache.info, cache.prune, cache.verify):
        with pytest.raises(CacheError, match="is not a cache of mergepipe"):
            command()
    (tmp_path / "CACHEDIR.TAG").write_text("of another tool")
    with pytest.raises(CacheError, match="is not a cache of mergepipe"):
        cache.prune(max_bytes=0)
    assert len(everything(tmp_path)) == 4


# --- what is needed -------------------------------------------------------------------------------------------------


def test_packs_that_no_lock_names_go_and_others_stay(project):
    project.build()
    needed = packs(project.cache)
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    project.build()
    assert len(packs(project.cache)) == 3
    told = cache_of(project).prune(unreferenced=True, dry_run=True)
    assert len(packs(project.cache)) == 3
    done = cache_of(project).prune(unreferenced=True)
    assert done.packs == told.packs
    ((file, _, reason),) = done.packs
    assert reason == "unreferenced"
    assert file in {path.name for path in needed}
    assert done.locks == (str(project.lock),)
    assert {output.state for output in project.build().outputs.values()} == {"unchanged"}


def test_what_another_lock_names_is_kept_where_it_is_told(project):
    shutil.copyfile(project.lock, project.root / "earlier.lock")
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.5}})
    project.build()
    assert cache_of(project).prune(unreferenced=True, keep=[project.root / "earlier.lock"]).removed == 0
    assert cache_of(project).prune(unreferenced=True).removed == 1


def test_outputs_that_are_still_there_keep_their_packs_without_a_lock(project):
    project.lock.unlink()
    (project.root / "empty").mkdir()
    (project.root / "empty/Mergefile.lock").write_text(empty_lock(project))
    shutil.rmtree(project.folder("n"))
    kept = {path.name for path in packs(project.cache) if path.stat().st_nlink == 2}
    done = cache_of(project).prune(unreferenced=True, keep=[project.root / "empty"])
    assert done.missing_locks == (str(project.lock),)
    assert {path.name for path in packs(project.cache)} == kept


def empty_lock(project):
    project.lock.parent.joinpath("none").mkdir()
    other = SmallProject(project.root / "none")
    other.add_source("e", random_tensors(9, {"w": (4, 4)}))
    other.set_output("o", {"operator": "passthrough", "experts": ["e"]})
    other.build()
    return other.lock.read_text()


def test_projects_that_share_a_cache_keep_one_anothers_packs(tmp_path):
    cache = tmp_path / "shared"
    first, second = made(tmp_path / "first", cache=cache), made(tmp_path / "second", seed=50, cache=cache)
    shutil.rmtree(second.root / "build")  # nothing but its lock needs its packs
    before = packs(cache)
    shared = open_cache(cache, lock_path=first.lock, geometry=TINY)
    done = shared.prune(unreferenced=True)
    assert (done.removed, packs(cache)) == (0, before)
    assert set(done.locks) == {str(first.lock), str(second.lock)}
    assert second.build(cache_dir=cache).outputs["m"].blocks["computed"] == 0
    shutil.rmtree(second.root)
    assert shared.prune(unreferenced=True).removed == 2


def test_pruning_for_one_project_leaves_the_outputs_of_another_untouched(tmp_path):
    """Their files lose a link each; nothing of them is hashed for that."""
    cache = tmp_path / "shared"
    first, second = made(tmp_path / "first", cache=cache), made(tmp_path / "second", seed=50, cache=cache)
    open_cache(cache, lock_path=first.lock, geometry=TINY).prune(0)
    for project in (first, second):
        states = [output.state for output in project.open(cache_dir=cache).status().outputs.values()]
        assert states == ["up-to-date"] * 2


def test_a_lock_that_cannot_be_read_stops_pruning_before_anything_goes(tmp_path):
    cache = tmp_path / "shared"
    first, second = made(tmp_path / "first", cache=cache), made(tmp_path / "second", seed=50, cache=cache)
    second.lock.write_text("<<<<<<< ours\n")
    (cache / "staging/left").write_text("of a killed build")
    with pytest.raises(LockError, match="which packs are needed is not known") as caught:
        open_cache(cache, lock_path=first.lock, geometry=TINY).prune(unreferenced=True)
    note = caught.value.hint.partition("delete `")[2].partition("`")[0]
    assert (cache / note).is_file(), "the hint names the note of that project"
    assert (cache / "staging/left").exists()
    (cache / note).unlink()
    shutil.rmtree(second.root / "build")
    assert open_cache(cache, lock_path=first.lock, geometry=TINY).prune(unreferenced=True).removed == 2


def test_without_any_lock_nothing_goes(project):
    project.lock.unlink()
    with pytest.raises(MergefileError, match="no lock says which packs"):
        cache_of(project).prune(unreferenced=True)
    with pytest.raises(MergefileError, match="there is no lock"):
        cache_of(project).prune(unreferenced=True, keep=["nowhere.lock"])
    assert len(packs(project.cache)) == 2


def test_a_project_that_moves_with_its_cache_is_still_known(project, tmp_path):
    (note,) = (project.cache / "projects").iterdir()
    assert note.read_bytes() == b"Mergefile.lock"
    shutil.move(project.root, tmp_path / "moved")
    moved = SmallProject(tmp_path / "moved", outputs=project.outputs, sources=project.sources)
    assert cache_of(moved).prune(unreferenced=True).locks == (str(moved.lock),)
    moved.build()
    assert len(list((moved.cache / "projects").iterdir())) == 1
    assert Path(cache_of(moved).info().path) == moved.cache
