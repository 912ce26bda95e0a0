"""Law 8: damaged packs, staged shards and outputs never end up in a new output."""

import os
import shutil

import pytest
from support.checkpoints import random_tensors
from support.projects import Messages, SmallProject, data_start, edit_tensor

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.engine.finish import ShardFinisher
from mergepipe.errors import StorageError
from mergepipe.fsio.identity import FileIdentity

SHAPES = {"model.layers.0.a": (16, 16), "model.layers.0.b": (16, 16), "model.v": (64,)}
BLOCKS = 9


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1")):
        project.add_source(name, random_tensors(seed, SHAPES))
    experts = [{"source": "e1", "weight": 0.5}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    project.build()
    return project


def the_pack(project):
    (pack,) = (project.cache / "packs").iterdir()
    return pack


def flip(path, position=None):
    """Flip one bit of a file, in place; by default in the middle of its data."""
    path.chmod(0o644)
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek((data_start(path) + size) // 2 if position is None else position)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def with_shards_of(project, size):
    """Ask for another shard size: every block is copied from a pack then."""
    project.set_output("m", project.outputs["m"] | {"write": {"shard_size": size}})


def quarantined(project):
    folder = project.cache / "quarantine"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_flipped_bit_in_a_pack_is_found_when_blocks_are_copied_from_it(project):
    pack = the_pack(project)
    (project.folder("m") / "model.safetensors").unlink()  # it is the same file
    flip(pack)
    with_shards_of(project, 1000)
    messages = Messages()
    report = project.build_one("m", reporter=messages)
    project.check("m")
    assert report.blocks["computed"] >= 1
    assert len(messages.warnings) == 1
    assert pack.stem[:16] in messages.warnings[0]
    assert quarantined(project) == [pack.name]
    assert not pack.exists()


def test_a_flipped_bit_in_a_pack_is_found_when_it_would_be_used_whole(project):
    flip(the_pack(project))
    shutil.rmtree(project.folder("m"))
    messages = Messages()
    project.build("m", reporter=messages)
    project.check("m")
    assert len(quarantined(project)) == 1
    assert project.build_one("m").state == "unchanged"


def test_a_flipped_bit_in_an_output_is_repaired_and_does_not_reach_the_pack_unnoticed(project):
    path = project.folder("m") / "model.safetensors"
    flip(path)
    assert project.open().status().outputs["m"].state == "stale"
    project.build()
    project.check("m")
    with_shards_of(project, 1000)
    project.build()
    project.check("m")


def test_an_edit_that_sets_the_mtime_back_is_found(project):
    path = project.folder("m") / "model.safetensors"
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    project.build()
    project.check("m")


@pytest.mark.parametrize("when", ["before the change", "after it"])
def test_a_flipped_bit_in_a_pack_is_found_when_a_change_is_taken_back(project, when):
    first, pack = project.outputs["m"], the_pack(project)
    changed = first | {"experts": [{"source": "e1", "weight": 0.25}]}
    before = pack.stat()
    for recipe, time in ((changed, "before the change"), (first, "after it")):
        if when == time:
            flip(pack)
            os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))
        project.set_output("m", recipe)
        project.build()
        project.check("m")
    assert quarantined(project) == [pack.name]


def test_a_flipped_bit_in_the_header_of_a_pack_is_found(project):
    pack = the_pack(project)
    shutil.rmtree(project.folder("m"))
    flip(pack, position=20)
    project.build()
    project.check("m")
    assert quarantined(project) == [pack.name]


@pytest.mark.parametrize("size", [0, 7, 700, -1])
@pytest.mark.parametrize("shard_size", [10**9, 1000])
def test_a_truncated_pack_is_a_miss(project, size, shard_size):
    pack = the_pack(project)
    shutil.rmtree(project.folder("m"))
    pack.chmod(0o644)
    os.truncate(pack, pack.stat().st_size - 1 if size < 0 else size)
    with_shards_of(project, shard_size)
    project.build()
    project.check("m")


def test_a_pack_with_bytes_behind_its_end_is_not_used_whole(project):
    pack = the_pack(project)
    shutil.rmtree(project.folder("m"))
    pack.chmod(0o644)
    with pack.open("ab") as file:
        file.write(b"more")
    project.build()
    project.check("m")
    path = project.folder("m") / "model.safetensors"
    assert path.stat().st_size == data_start(path) + 4 * 576


@pytest.mark.parametrize("shard_size", [10**9, 1000])
def test_a_pack_that_is_gone_is_a_miss(project, shard_size):
    the_pack(project).unlink()
    shutil.rmtree(project.folder("m"))
    with_shards_of(project, shard_size)
    report = project.build_one("m")
    assert report.blocks["computed"] == BLOCKS
    project.check("m")
    assert project.build_one("m").state == "unchanged"


def test_a_pack_that_cannot_be_a_file_is_a_miss(project):
    pack = the_pack(project)
    pack.unlink()
    pack.mkdir()
    shutil.rmtree(project.folder("m"))
    project.build()
    project.check("m")


def test_one_damaged_pack_of_several_leaves_the_others_in_use(project):
    with_shards_of(project, 1000)
    project.build()
    packs = {path.name for path in (project.cache / "packs").iterdir()}
    damaged = next(path for path in (project.cache / "packs").iterdir() if path.stat().st_size < 1000)
    shutil.rmtree(project.folder("m"))
    flip(damaged)
    project.build()
    project.check("m")
    assert quarantined(project) == [damaged.name]
    assert packs - {damaged.name} <= {path.name for path in (project.cache / "packs").iterdir()}


def test_damage_is_warned_of_once_and_shown_until_it_is_pruned(project):
    flip(the_pack(project))
    shutil.rmtree(project.folder("m"))
    with_shards_of(project, 400)  # several shards, all copied from the one pack
    messages = Messages()
    project.build("m", reporter=messages)
    assert len(messages.warnings) == 1
    opened = project.open()
    assert opened.cache_info().quarantined_bytes > 0
    opened.cache_prune()
    assert opened.cache_info().quarantined_bytes == 0
    project.check("m")


@pytest.mark.parametrize("order", [("m", "n"), ("n", "m")])
def test_a_pack_that_rotted_silently_is_never_published_once_it_is_found_out(project, order):
    """One output would link the pack whole, the other copies from it and finds out."""
    whole = project.outputs.pop("m")
    recipes = {"m": whole, "n": whole | {"write": {"shard_size": 1000}}}
    for name in order:
        project.set_output(name, recipes[name])
    pack = the_pack(project)
    shutil.rmtree(project.folder("m"))
    flip(pack)
    catalog = Catalog(CacheLayout(project.cache), project.geometry.block_elements, create=True)
    catalog.record_pack_identity(pack.stem, FileIdentity.at(pack))  # as if the disk had flipped it
    catalog.close()
    try:
        project.build()
    except StorageError:
        assert not project.folder("m").exists()
        project.build()
    for name in order:
        project.check(name)


class StoppedError(Exception):
    """A build that ends after the merge and before any shard is finished."""


def stop_before_finishing(project, monkeypatch):
    """Leave everything of a build of `m` in staging."""

    def stop(*_):
        raise StoppedError

    project.open().cache_prune(max_bytes=0)
    shutil.rmtree(project.folder("m"))
    with monkeypatch.context() as patch:
        patch.setattr(ShardFinisher, "finish", stop)
        with pytest.raises(StoppedError):
            project.build()
    (staged,) = (project.cache / "staging").glob("*.safetensors")
    return staged


def test_what_an_unfinished_build_left_is_used(project, monkeypatch):
    stop_before_finishing(project, monkeypatch)
    report = project.build_one("m")
    assert (report.blocks["cached"], report.blocks["computed"], report.expert_bytes["read"]) == (BLOCKS, 0, 0)
    project.check("m")
    assert not list((project.cache / "staging").glob("*.safetensors"))


def test_a_flipped_bit_in_staging_is_found(project, monkeypatch):
    flip(stop_before_finishing(project, monkeypatch))
    report = project.build_one("m")
    assert (report.blocks["cached"], report.blocks["computed"]) == (BLOCKS - 1, 1)
    project.check("m")


@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_a_staged_shard_of_another_size_is_not_used(project, monkeypatch, size):
    os.truncate(stop_before_finishing(project, monkeypatch), size)
    report = project.build_one("m")
    assert report.blocks["computed"] == BLOCKS
    project.check("m")


def test_a_staged_shard_that_is_gone_is_made_again(project, monkeypatch):
    stop_before_finishing(project, monkeypatch).unlink()
    assert project.build_one("m").blocks["computed"] == BLOCKS
    project.check("m")


def test_a_staged_block_of_other_inputs_is_not_used(project, monkeypatch):
    stop_before_finishing(project, monkeypatch)
    edit_tensor(project.source_file("e1"), "model.layers.0.a", 70, 8.0)
    report = project.build_one("m")
    assert (report.blocks["cached"], report.blocks["computed"]) == (BLOCKS - 1, 1)
    project.check("m")


def test_a_build_stopped_twice_keeps_what_both_made(project, monkeypatch):
    stop_before_finishing(project, monkeypatch)
    edit_tensor(project.source_file("e1"), "model.layers.0.a", 70, 8.0)
    with monkeypatch.context() as patch:
        patch.setattr(ShardFinisher, "finish", lambda *_: (_ for _ in ()).throw(StoppedError))
        with pytest.raises(StoppedError):
            project.build()
    report = project.build_one("m")
    assert (report.blocks["cached"], report.blocks["computed"]) == (BLOCKS, 0)
    project.check("m")
