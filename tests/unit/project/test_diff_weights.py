"""The distances of `diff --tensors`: right for every dtype, of the right weights, in bounded memory."""

from __future__ import annotations

import math
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import as_dtype, raw_tensor, safetensors_bytes
from support.projects import Messages, SmallProject, edit_tensor, skip_flushing
from support.quick import examples

from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry, grid
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.digest import content_digest, tensor_digest
from mergepipe.lockfile.reader import read_lock
from mergepipe.project import diff_numbers
from mergepipe.project.diff import diff
from mergepipe.project.diff_numbers import TensorStream, WeightsError, distance
from mergepipe.project.diff_weights import Weights

DTYPES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "I16",
    "U16",
    "I32",
    "U32",
    "I64",
    "U64",
    "BOOL",
]


def nothing(count: int) -> None:
    """Count no progress."""


def digest_of(tensor, geometry: Geometry = GEOMETRY_1) -> bytes:
    dtype, shape, data = raw_tensor(tensor)
    layout = grid(dtype, tuple(shape), geometry)
    blocks = (data[slice(*layout.byte_range(block))] for block in range(layout.count))
    return tensor_digest(dtype, tuple(shape), b"".join(map(content_digest, blocks)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensors")


def stream(folder: Path, name: str, tensor, *, geometry: Geometry = GEOMETRY_1, digest: bytes | None = None):
    """Return a tensor in a file of its own, as one that may be read."""
    path = folder / f"{name}.safetensors"
    path.write_bytes(safetensors_bytes({"other": np.zeros(3, np.float32), "t": tensor}))
    fd = os.open(path, os.O_RDONLY)
    (info,) = [t for t in read_header(fd, path, path.stat().st_size, label="test").tensors if t.name == "t"]
    digest = digest or digest_of(tensor, geometry)
    return TensorStream(fd=fd, path=path, info=info, digest=digest, geometry=geometry)


def compared(folder: Path, old, new, **options):
    """Return the distance of two arrays."""
    streams = [stream(folder, name, array, **options) for name, array in (("old", old), ("new", new))]
    try:
        return distance(streams[:1], streams[1:], nothing)
    finally:
        for opened in streams:
            os.close(opened.fd)


def values(dtype: str, seed: int, shape=(7, 5)):
    numbers = np.random.default_rng(seed).normal(size=shape) * 3
    return (numbers > 0 if dtype == "BOOL" else np.abs(numbers) if dtype[0] == "U" else numbers).astype(as_dtype(dtype))


def check(found, old, new):
    x, y = (array.astype(np.float64).ravel() for array in (old, new))
    assert found.relative_l2 == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert found.max_abs == np.max(np.abs(y - x))
    assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert (found.norm_old, found.norm_new) == pytest.approx((np.linalg.norm(x), np.linalg.norm(y)), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_the_numbers_of_numpy(folder, dtype):
    old, new = values(dtype, 1), values(dtype, 2)
    check(compared(folder, old, new), old, new)


def test_other_dtypes_are_compared_by_value(folder):
    old, new = values("F32", 1), values("F32", 1).astype(as_dtype("BF16"))
    found = compared(folder, old, new)
    check(found, old, new)
    assert found.dtypes == ("F32", "BF16")
    assert 0 < found.relative_l2 < 2**-8


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
@given(st.lists(st.integers(0, 6), max_size=3), st.integers(1, 40), st.integers(1, 17))
def test_pieces_and_blocks_do_not_matter(folder, shape, block, chunk):
    old, new = values("F16", 1, shape), values("BF16", 2, shape)
    before = diff_numbers.CHUNK_ELEMENTS
    diff_numbers.CHUNK_ELEMENTS = chunk
    try:
        found = compared(folder, old, new, geometry=Geometry(block_elements=block))
    finally:
        diff_numbers.CHUNK_ELEMENTS = before
    if old.size:
        check(found, old, new)
    else:
        assert (found.relative_l2, found.max_abs, found.cosine) == (0.0, 0.0, None)


def test_zero_and_numbers_that_are_not_finite(folder):
    zero, one = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert (compared(folder, zero, one).relative_l2, compared(folder, zero, one).cosine) == (None, None)
    assert compared(folder, one, zero).relative_l2 == 1.0
    assert compared(folder, zero, zero).relative_l2 == 0.0
    found = compared(folder, one, np.array([1, np.nan, np.inf, 1], np.float32))
    assert math.isnan(found.max_abs)
    assert math.isnan(found.relative_l2)
    assert math.isinf(compared(folder, one, np.array([1, 1, -np.inf, 1], np.float32)).max_abs)


def test_shapes_that_differ_are_named(folder):
    with pytest.raises(WeightsError, match=r"the shapes differ: 2 x 3 and 3 x 2"):
        compared(folder, np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))


def test_a_dtype_without_numbers_is_named(folder):
    with pytest.raises(WeightsError, match="no numbers for the dtype F4"):
        compared(folder, ("F4", (4,), b"ab"), ("F4", (4,), b"cd"))


def test_weights_that_are_not_those_of_the_record_give_no_numbers(folder):
    right, wrong = values("F32", 1), values("F32", 2)
    streams = [stream(folder, "right", right), stream(folder, "wrong", wrong, digest=digest_of(right))]
    with pytest.raises(WeightsError, match="holds other weights than the record says"):
        distance(streams[:1], streams[1:], nothing)
    assert distance(streams[:1], streams[::-1], nothing).max_abs == 0.0, "the other file is tried"


def test_memory_does_not_grow_with_the_tensor(folder):
    array = np.zeros((1, 4_000_000), np.float16)  # one row, one block: 8 MB
    array[0, ::7] = 1.0
    streams = [stream(folder, name, array) for name in ("a", "b")]
    tracemalloc.start()
    distance(streams[:1], streams[1:], nothing)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * diff_numbers.CHUNK_ELEMENTS * 2


# --- where weights are -----------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a project of two experts with an output that was built twice, the second time with other weights."""
    skip_flushing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    project = SmallProject(tmp_path, geometry=GEOMETRY_1)
    shapes = {"model.layers.0.a.weight": (6, 4), "model.layers.1.a.weight": (6, 4), "norm.weight": (4,)}
    for seed, name in enumerate(("base", "math")):
        found = np.random.default_rng(seed)
        project.add_source(name, {n: found.normal(size=shape).astype(np.float32) for n, shape in shapes.items()})
    rule = {"match": "*.layers.1.*", "experts": {"math": {"weight": 0.5}}}
    project.set_output("merged", {"operator": "task_arithmetic", "base": "base", "experts": ["math"]})
    project.build()
    shutil.copy(project.lock, tmp_path / "old.lock")
    shutil.copytree(project.folder("merged"), tmp_path / "old")
    project.set_output("merged", project.outputs["merged"] | {"rules": [rule]})
    project.build()
    return project


def numbers(old: str, new: str, **options):
    return diff(old, new, tensors=True, **options).numbers["merged"]


def check_merged(project, found):
    (tensor,) = found.tensors
    assert tensor.name == "model.layers.1.a.weight"
    old, new = (np.asarray(values[tensor.name]) for values in (read(project.root / "old"), project.tensors("merged")))
    check(tensor.distance, old, new)
    assert found.missing == {}


def read(folder: Path):
    from support.checkpoints import read_checkpoint

    return read_checkpoint(folder)


def test_former_weights_come_from_the_cache(project):
    check_merged(project, numbers("old.lock", "Mergefile.lock"))


def test_weights_come_from_output_directories(project):
    shutil.rmtree(project.cache)
    check_merged(project, numbers("old", "build/merged"))
    check_merged(project, numbers("old/mergepipe.json", "Mergefile.lock"))


def test_progress_is_told_in_bytes(project):
    messages = Messages()
    numbers("old", "build/merged", reporter=messages)
    assert messages.phases == [("comparing merged", 2 * 6 * 4 * 4, 2 * 6 * 4 * 4, True)]


def test_says_which_weights_are_not_available(project):
    shutil.rmtree(project.cache)
    found = numbers("old.lock", "Mergefile.lock")
    assert found.tensors == ()
    assert found.missing == {
        "old": "`build/merged` holds another build, and the cache has no pack of `model.safetensors`"
    }
    shutil.rmtree(project.folder("merged"))
    found = numbers("old.lock", "Mergefile.lock", cache_dir=project.root / "elsewhere")
    assert found.missing["new"] == "`build/merged` is not there, and the cache has no pack of `model.safetensors`"
    assert set(found.as_json()["missing"]) == {"old", "new"}


def test_files_without_any_of_the_tensors_are_told_once(project):
    shutil.rmtree(project.cache)
    path = project.root / "old" / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    found = numbers("old", "Mergefile.lock")
    assert (found.tensors, found.missing) == ((), {"old": diff_numbers.NOT_THERE})


def test_an_output_that_was_edited_gives_no_numbers(project):
    shutil.rmtree(project.cache)
    path = project.folder("merged") / "model.safetensors"
    path.chmod(0o644)
    edit_tensor(path, "model.layers.1.a.weight", 3, 9.0)
    (tensor,) = numbers("old", "Mergefile.lock").tensors
    assert tensor.distance is None
    assert tensor.problem == f"`{path}` holds other weights than the record says"


def test_a_file_that_is_cut_is_missing(project):
    shutil.rmtree(project.cache)
    path = project.root / "old" / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-4])
    assert numbers("old", "Mergefile.lock").missing["old"].startswith("`model.safetensors` in `old` is missing or has")


def test_without_weights_nothing_is_read(project, monkeypatch):
    monkeypatch.setattr(diff_numbers.TensorStream, "chunks", None)
    assert diff("old.lock", "Mergefile.lock").numbers is None


def test_a_record_does_not_lead_out_of_a_directory(project):
    shutil.rmtree(project.cache)
    entry = read_lock(project.lock).outputs[0]
    outside = replace(entry, shards=tuple(replace(shard, name="../merged/model.safetensors") for shard in entry.shards))
    places = Weights(directory=project.folder("merged"), root=None, packs=None)
    assert [len(paths) for paths in places.shards(entry)] == [1]
    assert places.shards(outside) == [[]]


def test_a_project_compares_its_own_records(project):
    check_merged(project, project.open().diff("old.lock", tensors=True).numbers["merged"])
