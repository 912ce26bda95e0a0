"""The tests' own writer and reader of checkpoints agree with the safetensors library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file, save_file
from support.checkpoints import (
    as_dtype,
    random_tensors,
    read_checkpoint,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)

SHAPES = {"b": (3, 4), "a": (), "empty": (0, 2), "c": (5,)}


@pytest.mark.parametrize("dtype", ["float32", "F16", "float64", "int64"])
def test_the_library_reads_what_is_written(tmp_path, dtype):
    tensors = random_tensors(7, SHAPES, dtype)
    loaded = load_file(write_safetensors(tmp_path / "new" / "x.safetensors", tensors))
    assert set(loaded) == set(tensors)
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_what_the_library_writes_is_read(tmp_path):
    tensors = random_tensors(7, SHAPES)
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in tensors.items()}


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_dtypes_of_ml_dtypes_are_written_and_read(tmp_path, dtype):
    tensors = random_tensors(7, SHAPES, dtype)
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    listed = dict(deserialize(path.read_bytes()))
    for name, array in read_safetensors(path).items():
        assert listed[name]["dtype"] == dtype
        assert array.dtype == as_dtype(dtype)
        assert array.tobytes() == tensors[name].tobytes() == bytes(listed[name]["data"])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_checkpoint_reads_back_whatever_its_shards(tmp_path, shards):
    tensors = random_tensors(3, SHAPES, "bfloat16")
    raw = {"packed": ("F4", (4,), b"\x12\x34")}
    write_checkpoint(
        tmp_path / "m", {**tensors}, shards=shards, config={"model_type": "llama"}, side_files={"sub/a.txt": "é"}
    )
    assert {name: array.tobytes() for name, array in read_checkpoint(tmp_path / "m").items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == shards
    assert (tmp_path / "m" / "sub" / "a.txt").read_bytes() == "é".encode()
    assert write_checkpoint(tmp_path / "raw", raw).is_dir()


def test_random_tensors_are_the_same_for_the_same_seed():
    first, again, other = (random_tensors(seed, SHAPES) for seed in (1, 1, 2))
    assert first["b"].tobytes() == again["b"].tobytes() != other["b"].tobytes()


def test_dtypes_go_by_every_name():
    for name in ("BF16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert as_dtype(name) == np.dtype(ml_dtypes.bfloat16)
    assert as_dtype("float32") == as_dtype("F32") == np.dtype(np.float32)
