"""Packs: adopted once, used whole only while they are what they were, put aside when they are not."""

import os

import pytest
from support.checkpoints import random_tensors, write_safetensors
from support.projects import TINY

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.packs import PackStore, hash_shard
from mergepipe.cache.records import Result
from mergepipe.errors import StorageError
from mergepipe.fsio.identity import FileIdentity

SHAPES = {"a": (16, 16), "b": (5,), "c": (), "d": (0, 3)}


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, TINY.block_elements, create=True)
    yield catalog
    catalog.close()


@pytest.fixture
def packs(catalog):
    return PackStore(catalog, TINY)


def staged_shard(catalog, seed=0):
    """Write a shard into staging; return it with its digest as a name."""
    path = catalog.layout.staging / f"staged-{seed}.safetensors"
    write_safetensors(path, random_tensors(seed, SHAPES))
    return path, hash_shard(path, TINY).hex()


def result(name):
    return Result(
        key=b"k" * 32,
        output="m",
        tensor="a",
        dtype="F32",
        shape=(16, 16),
        recipe=b"r" * 32,
        digest=b"d" * 32,
        block_keys=b"",
        block_digests=b"",
        pack=name,
        offset=0,
    )


@pytest.fixture
def name(catalog, packs):
    """Adopt a pack with a result; return its name."""
    staged, name = staged_shard(catalog)
    packs.adopt(staged, name, [result(name)])
    return name


def test_an_adopted_shard_is_read_only_under_its_name_and_recorded(catalog, packs, name):
    path = packs.path(name)
    assert path.stat().st_mode & 0o777 == 0o444
    assert list(catalog.layout.staging.iterdir()) == []
    assert catalog.pack_identity(name) == FileIdentity.at(path)
    assert catalog.result(b"k" * 32).pack == name
    assert packs.usable(name)


def test_what_cannot_be_adopted_is_not_recorded(catalog, packs, tmp_path):
    with pytest.raises(StorageError):
        packs.adopt(tmp_path / "missing.safetensors", "00", [result("00")])
    assert catalog.count("packs") == catalog.count("results") == 0


def test_a_pack_whose_identity_holds_is_usable_without_being_read(packs, name, monkeypatch):
    monkeypatch.setattr("mergepipe.cache.packs.hash_shard", lambda *_: pytest.fail("it was hashed"))
    assert packs.usable(name)


def test_a_pack_that_was_linked_or_touched_is_hashed_once(catalog, packs, name, tmp_path, monkeypatch):
    (tmp_path / "link").hardlink_to(packs.path(name))
    assert packs.usable(name)
    monkeypatch.setattr("mergepipe.cache.packs.hash_shard", lambda *_: pytest.fail("it was hashed again"))
    assert packs.usable(name)


def test_refreshing_a_pack_after_a_link_saves_hashing_it(packs, name, tmp_path, monkeypatch):
    (tmp_path / "link").hardlink_to(packs.path(name))
    packs.refresh(name)
    monkeypatch.setattr("mergepipe.cache.packs.hash_shard", lambda *_: pytest.fail("it was hashed"))
    assert packs.usable(name)


def test_refreshing_a_pack_that_is_gone_does_nothing(catalog, packs, name):
    packs.path(name).unlink()
    packs.refresh(name)
    assert not packs.usable(name)


def test_a_pack_with_another_content_is_quarantined_and_its_results_forgotten(catalog, packs, name):
    path = packs.path(name)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not packs.usable(name)
    assert catalog.result(b"k" * 32) is None
    assert (catalog.layout.quarantine / path.name).read_bytes() == data
    assert not path.exists()


def test_a_pack_that_is_gone_is_forgotten(catalog, packs, name):
    packs.path(name).unlink()
    assert not packs.usable(name)
    assert catalog.pack_identity(name) is None
    assert catalog.result(b"k" * 32) is None


def test_a_file_that_no_record_names_is_not_used(catalog, packs):
    staged, name = staged_shard(catalog)
    staged.rename(packs.path(name))  # as after a kill between the rename and the record
    assert not packs.usable(name)
    assert packs.path(name).exists()


def test_adopting_the_same_content_again_keeps_one_pack(catalog, packs, name):
    staged, again = staged_shard(catalog)
    assert again == name
    packs.adopt(staged, name, [result(name)])
    assert catalog.count("packs") == 1
    assert packs.usable(name)


# --- the digest of a shard ----------------------------------------------------------------------------------------


def test_every_byte_of_a_shard_is_part_of_its_digest(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", random_tensors(0, SHAPES))
    data, digest = path.read_bytes(), hash_shard(path, TINY)
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert hash_shard(path, TINY) != digest


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_file_that_is_cut_has_no_digest(tmp_path, size):
    path = write_safetensors(tmp_path / "x.safetensors", random_tensors(0, SHAPES))
    os.truncate(path, path.stat().st_size - 1 if size < 0 else size)
    assert hash_shard(path, TINY) is None


def test_what_cannot_be_opened_has_no_digest(tmp_path):
    assert hash_shard(tmp_path / "missing", TINY) is None
    assert hash_shard(tmp_path, TINY) is None
