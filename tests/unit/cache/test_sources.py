"""What a run knows of its sources: from the catalog, from what it read, and never more than it checked."""

import os

import pytest
from blake3 import blake3
from support.checkpoints import random_tensors, write_checkpoint
from support.projects import TINY

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.digest import source_digest, tensor_digest
from mergepipe.errors import SourceChangedError

SHAPES = {"a": (16, 16), "b": (5,)}
BLOCK = 64 * 4  # bytes of a block of float32


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, TINY.block_elements, create=True)
    yield catalog
    catalog.close()


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "e1", random_tensors(0, SHAPES), shards=2)


def index_of(catalog, **folders):
    checkpoints = {name: open_checkpoint(path, label=name) for name, path in folders.items()}
    return SourceIndex(catalog, checkpoints, TINY), checkpoints


def read(index, checkpoints, source, *names):
    """Give the index the digests of these tensors, as a run that read them would."""
    index.settle([source])
    for name in names:
        info = checkpoints[source].tensors[name]
        data = checkpoints[source].files[info.file].path.read_bytes()[info.offset :][: info.nbytes]
        blocks = b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
        index.add(source, info, blocks)


def test_everything_is_cold_before_it_is_read(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    assert [info.name for info in index.cold("e1")] == ["a", "b"]
    assert index.digest("e1") is None
    info = checkpoints["e1"].tensors["a"]
    assert index.tensor("e1", info) is None
    assert index.blocks("e1", info) is None


def test_what_was_read_is_known_at_once_and_by_the_next_run_once_it_is_flushed(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a", "b")
    digest = index.digest("e1")
    pairs = [(n, index.tensor("e1", info)) for n, info in checkpoints["e1"].tensors.items()]
    assert digest == source_digest(pairs)
    info = checkpoints["e1"].tensors["a"]
    assert index.tensor("e1", info) == tensor_digest("F32", (16, 16), index.blocks("e1", info))
    other, _ = index_of(catalog, e1=folder)
    assert other.digest("e1") is None
    index.flush()
    other, _ = index_of(catalog, e1=folder)
    assert other.digest("e1") == digest
    assert other.blocks("e1", info) == index.blocks("e1", info)
    assert other.cold("e1") == ()


def test_a_source_is_known_when_its_last_tensor_is(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a")
    assert index.digest("e1") is None
    assert [info.name for info in index.cold("e1")] == ["b"]
    read(index, checkpoints, "e1", "b")
    assert index.digest("e1") is not None


def test_a_source_has_one_digest_however_it_is_sharded(catalog, folder, tmp_path):
    other = write_checkpoint(tmp_path / "other", dict(reversed(random_tensors(0, SHAPES).items())), config={"x": 1})
    index, checkpoints = index_of(catalog, e1=folder, other=other)
    for source in checkpoints:
        read(index, checkpoints, source, "a", "b")
    assert index.digest("e1") == index.digest("other")


def test_two_names_of_one_file_are_known_together(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder, again=folder)
    read(index, checkpoints, "again", "a", "b")
    assert index.cold("e1") == ()
    assert index.digest("e1") == index.digest("again")


def test_a_file_that_changed_since_its_header_was_read_is_not_recorded(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a", "b")
    os.utime(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(SourceChangedError, match="source `e1`"):
        index.flush()
    assert catalog.count("files") == 0


def test_a_file_that_changed_is_forgotten(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a", "b")
    index.flush()
    index.check_unchanged()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceChangedError, match="00002"):
        index.check_unchanged()
    assert catalog.count("files") == 1


def test_forgetting_a_file_makes_its_tensors_cold_in_this_run_as_well(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a", "b")
    index.flush()
    assert index.digest("e1") is not None
    index.forget(folder / "model-00001-of-00002.safetensors")
    assert [info.name for info in index.cold("e1")] == ["a"]
    assert index.digest("e1") is None
    index.flush()  # nothing of it comes back
    other, _ = index_of(catalog, e1=folder)
    assert [info.name for info in other.cold("e1")] == ["a"]


def test_a_tensor_whose_row_vanished_is_cold_again(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    read(index, checkpoints, "e1", "a", "b")
    index.flush()
    other, _ = index_of(catalog, e1=folder)
    assert other.digest("e1") is not None
    catalog.forget_file(folder / "model-00001-of-00002.safetensors")
    info = checkpoints["e1"].tensors["a"]
    assert other.blocks("e1", info) is None
    assert other.tensor("e1", info) is None
    assert other.digest("e1") is None


def known_output(path, index_name="stage"):
    """Return a checkpoint as a source that was made here, with the digests that a build knows of it."""
    checkpoint = open_checkpoint(path, label=index_name)
    blocks = {}
    for info in checkpoint.tensors.values():
        data = checkpoint.files[info.file].path.read_bytes()[info.offset :][: info.nbytes]
        blocks[info.name] = b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
    digests = {name: tensor_digest(checkpoint.tensors[name].dtype, SHAPES[name], blocks[name]) for name in blocks}
    return checkpoint, digests, blocks


def test_an_output_of_the_project_is_known_without_being_read(catalog, folder):
    index, _ = index_of(catalog)
    checkpoint, digests, blocks = known_output(folder)
    index.add_known("stage", checkpoint, digests, blocks)
    assert index.cold("stage") == ()
    assert index.digest("stage") == source_digest(digests.items())
    for name, info in checkpoint.tensors.items():
        assert index.tensor("stage", info) == digests[name]
        assert index.blocks("stage", info) == blocks[name]
    index.flush()
    assert catalog.count("files") == catalog.count("tensors") == 0  # it is not recorded as a source that was read


def test_of_an_output_that_is_not_made_yet_nothing_is_known(catalog, folder):
    index, _ = index_of(catalog)
    checkpoint, digests, blocks = known_output(folder)
    index.add_known("stage", checkpoint, {}, {})
    assert index.digest("stage") is None
    assert [info.name for info in index.cold("stage")] == ["a", "b"]
    index.add_known("stage", checkpoint, digests, {})  # the content by a record, without the blocks
    assert index.digest("stage") == source_digest(digests.items())
    index.add_known("stage", checkpoint, digests, blocks)
    assert index.blocks("stage", checkpoint.tensors["a"]) == blocks["a"]


def test_the_files_of_an_output_may_be_linked_or_gone_without_being_a_changed_source(catalog, folder, tmp_path):
    other = write_checkpoint(tmp_path / "e2", random_tensors(1, SHAPES))
    index, _ = index_of(catalog, e2=other)
    checkpoint, digests, blocks = known_output(folder)
    index.add_known("stage", checkpoint, digests, blocks)
    for file in checkpoint.files:
        file.path.unlink()
    index.check_unchanged()
    os.utime(other / "model.safetensors")
    with pytest.raises(SourceChangedError, match="e2"):
        index.check_unchanged()


def test_a_file_of_an_output_that_is_forgotten_can_be_made_known_again(catalog, folder):
    index, _ = index_of(catalog)
    checkpoint, digests, blocks = known_output(folder)
    index.add_known("stage", checkpoint, digests, blocks)
    index.forget(checkpoint.files[0].path)
    assert index.digest("stage") is None
    index.add_known("stage", checkpoint, digests, blocks)
    assert index.digest("stage") == source_digest(digests.items())


# --- tensors that are not read whole ------------------------------------------------------------------------------


def digests(*names):
    return b"".join(blake3(name.encode()).digest() for name in names)


def test_samples_and_single_blocks_are_known_to_the_next_run_and_pin_the_tensor(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    info = checkpoints["e1"].tensors["a"]  # four blocks
    levels = bytes([255, 0, 0, 255])
    assert index.samples("e1", info) is None
    assert index.pins("e1", info, levels) is None
    index.settle(["e1"])
    index.add_samples("e1", info, digests("s0", "s1", "s2", "s3"))
    assert index.pins("e1", info, levels) is None  # the blocks that are read are not known yet
    index.add_blocks("e1", info, digests("b0") + bytes(64) + digests("b3"))
    index.flush()
    again, _ = index_of(catalog, e1=folder)
    assert again.pins("e1", info, levels) == digests("b0", "s1", "s2", "b3")
    assert again.pins("e1", info, bytes([255, 255, 0, 0])) is None
    assert again.tensor("e1", info) is None
    assert again.partial("e1", info, levels) != again.partial("e1", info, bytes(4))


def test_blocks_that_were_read_before_are_not_forgotten(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    info = checkpoints["e1"].tensors["a"]
    index.settle(["e1"])
    index.add_samples("e1", info, digests("s0", "s1", "s2", "s3"))
    index.add_blocks("e1", info, digests("b0") + bytes(96))
    index.add_blocks("e1", info, bytes(96) + digests("b3"))
    assert index.read_blocks("e1", info) == digests("b0") + bytes(64) + digests("b3")


def test_a_tensor_that_was_read_whole_gives_every_block(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    info = checkpoints["e1"].tensors["a"]
    read(index, checkpoints, "e1", "a")
    index.add_samples("e1", info, digests("s0", "s1", "s2", "s3"))
    blocks = index.blocks("e1", info)
    expected = blocks[:32] + digests("s1") + blocks[64:96] + digests("s3")
    assert index.pins("e1", info, bytes([255, 0, 255, 0])) == expected


def test_a_fingerprint_needs_samples_of_every_tensor_and_follows_from_them_alone(catalog, folder, tmp_path):
    index, checkpoints = index_of(catalog, e1=folder)
    tensors = checkpoints["e1"].tensors
    index.settle(["e1"])
    index.add_samples("e1", tensors["a"], digests("s0", "s1", "s2", "s3"))
    assert index.fingerprint("e1") is None
    assert [info.name for info in index.unsampled("e1")] == ["b"]
    index.add_samples("e1", tensors["b"], digests("t0"))
    fingerprint = index.fingerprint("e1")
    whole = write_checkpoint(tmp_path / "whole", random_tensors(0, SHAPES))
    other, found = index_of(catalog, e1=whole)
    other.settle(["e1"])
    for name, samples in (("b", digests("t0")), ("a", digests("s0", "s1", "s2", "s3"))):
        other.add_samples("e1", found["e1"].tensors[name], samples)
    assert other.fingerprint("e1") == fingerprint
    other.add_samples("e1", found["e1"].tensors["b"], digests("t1"))
    assert other.fingerprint("e1") != fingerprint


def test_a_file_that_changed_takes_its_samples_along(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    info = checkpoints["e1"].tensors["a"]
    index.settle(["e1"])
    index.add_samples("e1", info, digests("s0", "s1", "s2", "s3"))
    index.flush()
    index.forget(checkpoints["e1"].files[info.file].path)
    assert index.samples("e1", info) is None
    assert index_of(catalog, e1=folder)[0].samples("e1", info) is None


def test_a_damaged_row_of_samples_counts_as_absent(catalog, folder):
    index, checkpoints = index_of(catalog, e1=folder)
    info = checkpoints["e1"].tensors["a"]
    index.settle(["e1"])
    index.add_samples("e1", info, digests("s0", "s1", "s2", "s3"))
    index.flush()
    with catalog.transaction() as db:
        db.execute("UPDATE samples SET samples = ?", (digests("x", "s1", "s2", "s3"),))
    assert index_of(catalog, e1=folder)[0].samples("e1", info) is None
