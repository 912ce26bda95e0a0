"""Sources that change: replaced without a trace, changed just now, changed while they are read."""

import os
import shutil
import sqlite3
import time

import numpy as np
import pytest
from support.checkpoints import random_tensors, safetensors_bytes
from support.projects import SmallProject, edit_tensor, snapshot

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.records import SourceFile, TensorDigests
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.digest import content_digest, tensor_digest
from mergepipe.engine import files, job
from mergepipe.engine.finish import ShardFinisher
from mergepipe.errors import MergepipeError, SourceChangedError, SourceError
from mergepipe.fsio.identity import FileIdentity

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.0.b": (16, 16), "model.v": (64,)}
A = "model.layers.0.a"


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, SHAPES))
    experts = [{"source": "e1", "weight": 0.5}, "e2"]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    return project


def other_bytes(seed=9):
    return safetensors_bytes(random_tensors(seed, SHAPES), {"format": "pt"})


# --- replaced without a trace -------------------------------------------------------------------------------------


def replace_by_rename(path, data):
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


def replace_in_place(path, data):
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("replace", [replace_by_rename, replace_in_place])
@pytest.mark.parametrize("source", ["base", "e1"])
def test_other_bytes_under_the_same_size_and_mtime_are_noticed(project, replace, source):
    project.build()
    path = project.source_file(source)
    before = path.stat()
    replace(path, other_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert project.open().status().outputs["m"].state == "stale"
    assert project.build_one("m").state == "built"
    project.check("m")


def test_a_checkpoint_swapped_for_another_by_renaming_its_folder_is_noticed(project, tmp_path):
    project.build()
    folder = project.source_file("e1").parent
    (tmp_path / "old").mkdir()
    folder.rename(tmp_path / "old/e1")
    (project.source_file("e2").parent).rename(folder)
    (tmp_path / "old/e1").rename(project.source_file("e2").parent)
    assert project.build_one("m").state == "built"
    project.check("m")


def test_a_link_that_points_elsewhere_is_noticed(project, tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_FOLLOW_LINKS", "1")
    path = project.source_file("e1")
    store = tmp_path / "store"
    store.mkdir()
    for name, data in (("one", path.read_bytes()), ("two", other_bytes())):
        (store / name).write_bytes(data)
    os.utime(store / "two", ns=((store / "one").stat().st_mtime_ns,) * 2)
    path.unlink()
    path.symlink_to(store / "one")
    project.build()
    path.unlink()
    path.symlink_to(store / "two")
    assert project.build_one("m").state == "built"
    project.check("m")


# --- changed just now ---------------------------------------------------------------------------------------------


def coarse(monkeypatch):
    """Let timestamps look as on a file system that keeps seconds."""

    def whole_seconds(status):
        second = 1_000_000_000
        times = [stamp // second * second for stamp in (status.st_mtime_ns, status.st_ctime_ns)]
        return FileIdentity(status.st_size, *times, status.st_ino)

    monkeypatch.setattr(FileIdentity, "of", staticmethod(whole_seconds))


def test_a_change_within_the_granularity_of_timestamps_is_noticed(project, monkeypatch):
    coarse(monkeypatch)
    for value in (5.0, 6.0, 7.0):  # in one second, for most of them
        edit_tensor(project.source_file("e1"), A, 3, value)
        project.build()
        project.check("m")


def test_a_file_with_coarse_timestamps_is_trusted_once_it_is_old_enough(project, monkeypatch):
    coarse(monkeypatch)
    project.build()
    assert project.build_one("m").index_bytes_read > 0  # read within two seconds of the last change
    monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 3_000_000_000)
    assert project.build_one("m").index_bytes_read > 0
    assert project.build_one("m").index_bytes_read == 0


def test_a_file_written_just_now_is_trusted_by_the_next_build(project):
    edit_tensor(project.source_file("e1"), A, 3, 5.0)
    project.build()
    assert project.build_one("m").index_bytes_read == 0


def test_a_file_from_the_future_is_trusted(project):
    future = time.time_ns() + 10**15
    os.utime(project.source_file("e1"), ns=(future, future))
    project.build()
    assert project.build_one("m").index_bytes_read == 0


# --- changed while it is read -------------------------------------------------------------------------------------


def append(path):
    with path.open("ab") as file:
        file.write(b"more")


def during_reading(monkeypatch, path, change, after=2):
    """Call ``change`` once, after that many reads of a file."""
    original = files.pread_into
    seen = []

    def reading(fd, buffer, offset, *, path: object, wanted=path):
        original(fd, buffer, offset, path=path)
        if path == wanted:
            seen.append(offset)
            if len(seen) == after:
                change()

    monkeypatch.setattr(files, "pread_into", reading)


CHANGES = {
    "edit": lambda path: edit_tensor(path, A, 255, 77.0),
    "touch": lambda path: os.utime(path),
    "truncate": lambda path: os.truncate(path, 600),
    "append": append,
    "replace": lambda path: replace_by_rename(path, other_bytes()),
    "remove": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", ["first build", "later build"])
def test_a_file_that_changes_while_it_is_read_stops_the_build_and_nothing_is_recorded(
    project, monkeypatch, change, state
):
    path, original = project.source_file("e1"), project.source_file("e1").read_bytes()
    if state == "later build":
        project.build()
        edit_tensor(path, A, 0, 50.0)
    before = snapshot(project.root / "build") if state == "later build" else None
    lock = project.lock.read_bytes() if project.lock.exists() else None
    with monkeypatch.context() as patch:
        during_reading(patch, path, lambda: CHANGES[change](path))
        with pytest.raises(SourceChangedError) as caught:
            project.build(workers=1)
    assert caught.value.exit_status == 1
    assert str(path) in caught.value.message
    assert (snapshot(project.root / "build") if state == "later build" else None) == before
    assert (project.lock.read_bytes() if project.lock.exists() else None) == lock
    with sqlite3.connect(project.cache / "catalog.db") as catalog:
        known = [os.fsdecode(row[0]) for row in catalog.execute("SELECT path FROM files")]
    catalog.close()
    assert not any(name.endswith("e1/model.safetensors") for name in known)
    path.unlink(missing_ok=True)
    path.write_bytes(original)
    project.build()
    project.check("m")


def test_a_file_that_goes_on_changing_gives_the_right_output_when_it_stops(project, monkeypatch):
    path = project.source_file("base")
    for round_ in range(3):
        with monkeypatch.context() as patch:
            during_reading(patch, path, lambda n=round_: edit_tensor(path, A, n, 30.0 + n), after=round_ + 1)
            with pytest.raises(SourceChangedError, match="source `base`"):
                project.build()
    project.build()
    project.check("m")


def test_a_file_that_changes_after_it_was_read_and_before_the_end_is_found(project, monkeypatch):
    original = ShardFinisher.finish

    def finish(self, *arguments):
        edit_tensor(project.source_file("e2"), A, 9, 3.0)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFinisher, "finish", finish)
        with pytest.raises(SourceChangedError, match="source `e2`"):
            project.build()
    assert not project.folder("m").exists()
    assert not project.lock.exists()
    project.build()
    project.check("m")


def test_a_file_that_changes_between_its_header_and_its_data_is_found(project, monkeypatch):
    original = job.run_job

    def run(*arguments):
        if project.source_file("e1").stat().st_mtime_ns > 0:
            os.utime(project.source_file("e1"), ns=(0, 0))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("mergepipe.engine.schedule.run_job", run)
        with pytest.raises(SourceChangedError, match="source `e1`"):
            project.build()
    project.build()
    project.check("m")


def test_a_source_that_is_gone_is_an_error_and_leaves_the_output(project):
    project.build()
    before = snapshot(project.folder("m"), project.lock)
    shutil.move(project.source_file("e1"), project.root / "aside")
    with pytest.raises(SourceError):
        project.build()
    assert snapshot(project.folder("m"), project.lock) == before
    shutil.move(project.root / "aside", project.source_file("e1"))
    assert project.build_one("m").state == "unchanged"


# --- a catalog that is wrong about a file -------------------------------------------------------------------------


def teach(project, source, tensors):
    """Let the catalog take a source's file, as it is now, for one that holds these tensors."""
    (file,) = open_checkpoint(project.root / project.sources[source], label=source).files
    digests = []
    for name, array in tensors.items():
        data = array.tobytes()
        blocks = b"".join(content_digest(data[at : at + 256]) for at in range(0, len(data), 256))
        digests.append(TensorDigests(name=name, digest=tensor_digest("F32", array.shape, blocks), blocks=blocks))
    catalog = Catalog(CacheLayout(project.cache), project.geometry.block_elements, create=True)
    catalog.forget_file(file.path)
    known = SourceFile(path=file.path, identity=file.identity, header=file.header_digest)
    catalog.record_tensors(known, time.time_ns() + 10**10, digests)
    catalog.close()


@pytest.mark.parametrize("source", ["base", "e1"])
def test_a_digest_that_does_not_fit_the_bytes_stops_one_build_and_not_the_next(project, source):
    project.build()
    teach(project, source, random_tensors(9, SHAPES))
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.3}})
    with pytest.raises(SourceChangedError, match=f"source `{source}`"):
        project.build()
    project.build()
    project.check("m")


def test_bytes_that_rotted_under_an_unchanged_identity_never_pass_as_what_they_were(project):
    project.build()
    edit_tensor(project.source_file("e1"), A, 70, 1234.0)
    teach(project, "e1", random_tensors(1, SHAPES))
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.3}})
    with pytest.raises(SourceChangedError, match="source `e1`"):
        project.build()
    project.build()
    project.check("m")


@pytest.mark.parametrize("column", ["blocks", "digest", "seal"])
def test_a_damaged_row_of_the_catalog_costs_a_hash_and_nothing_else(project, column):
    project.build()
    with sqlite3.connect(project.cache / "catalog.db") as catalog:
        catalog.execute(f"UPDATE tensors SET {column} = CAST(zeroblob(length({column})) AS BLOB)")
    catalog.close()
    project.set_output("m", project.outputs["m"] | {"params": {"lambda": 0.3}})
    project.build()
    project.check("m")


def test_errors_of_two_sources_are_told_one_way_or_the_other_and_mended_together(project, monkeypatch):
    paths = [project.source_file(name) for name in ("e1", "e2")]
    with monkeypatch.context() as patch:
        during_reading(patch, paths[0], lambda: [edit_tensor(path, A, 1, 8.0) for path in paths])
        with pytest.raises(MergepipeError):
            project.build()
    project.build()
    project.check("m")
    assert np.isfinite(project.tensors("m")[A]).all()
