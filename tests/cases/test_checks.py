"""What the harness finds in an output folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.cases.checks import Context
from support.cases.errors import CaseError, CheckError
from support.cases.outcome import output_problems
from support.cases.samples import tensor, write_model
from support.cases.state import kept_lock, kept_output, litter, take_snapshot
from support.cases.tensors import INDEX, Tensor, checkpoint_problems, read_checkpoint, write_safetensors


@pytest.fixture
def out(tmp_path):
    """Return an output folder: `w` float32, `h` float16, `i` int64."""
    return write_model(tmp_path / "out", w=tensor([[1, 2], [3, 0]]), h=tensor([0.5, 0], "F16"), i=tensor([1, 2], "I64"))


def problems(out, *, earlier=(), base=None, **expected):
    context = Context(case=out.parent, out=out, base=base, earlier=earlier)
    return list(output_problems({"outcome": "success", **expected}, context))


def write_expected(out, file="expected.safetensors", **changes):
    tensors = {**read_checkpoint(out), **changes}
    write_safetensors(out.parent / file, {name: t for name, t in tensors.items() if t is not None})
    return file


def shard(out, first=("w",)):
    """Split the output in two files with an index."""
    tensors = read_checkpoint(out)
    (out / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n in first},
        "model-00002-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in first},
    }
    for file, part in parts.items():
        write_safetensors(out / file, part)
    index = {
        "metadata": {"total_size": sum(len(t.data) for t in tensors.values())},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return index


def test_equal_tensors_pass_and_others_are_named(out):
    assert not problems(out, tensors=write_expected(out), tolerance="bit_exact")
    (problem,) = problems(out, tensors=write_expected(out, w=tensor([[1, 2], [3, 4]])))
    assert problem.startswith("w: 1 of 4 values differ; at [1, 1] it is 0.0, expected 4.0")


@pytest.mark.parametrize(
    ("want", "fine"),
    [([[1, 2], [3, 1e-3]], True), ([[1, 2], [3, 2e-3]], False), ([[1, 2], [3, np.nan]], False)],
)
def test_values_are_compared_by_tolerance(out, want, fine):
    tolerance = {"rtol": 0.0, "atol": 1.5e-3}
    assert fine is not bool(problems(out, tensors=write_expected(out, w=tensor(want)), tolerance=tolerance))


def test_a_tolerance_compares_across_float_dtypes_and_bit_exact_does_not(out):
    file = write_expected(out, w=tensor([[1, 2], [3, 0]], "BF16"))
    assert not problems(out, tensors=file)
    assert problems(out, tensors=file, tolerance="bit_exact") == ["w: the dtype is F32, expected BF16"]


def test_integers_are_compared_exactly_whatever_the_tolerance(out):
    tolerance = {"rtol": 1.0, "atol": 10.0}
    assert problems(out, tensors=write_expected(out, i=tensor([1, 3], "I64")), tolerance=tolerance)
    assert problems(out, tensors=write_expected(out, i=tensor([1, 2])), tolerance=tolerance)


def test_zeros_of_other_sign_differ_only_bit_for_bit(out):
    file = write_expected(out, w=tensor([[1, 2], [3, -0.0]]))
    assert not problems(out, tensors=file)
    assert "the first byte that differs is 15 of 16" in problems(out, tensors=file, tolerance="bit_exact")[0]


def test_missing_extra_and_misshapen_tensors_are_named(out):
    file = write_expected(out, w=tensor([1, 2, 3, 0]), h=None, more=tensor([1]))
    assert problems(out, tensors=file) == [
        "more: missing from the output",
        "h: not expected in the output",
        "w: the shape is [2, 2], expected [4]",
    ]


def test_optional_and_unchecked_names(out):
    file = write_expected(out, h=None, i=None, w=tensor([[9, 9], [9, 9]]))
    assert not problems(out, tensors=file, optional_names=["h", "i"], unchecked_values=["w"])
    assert problems(out, tensors=file, optional_names=["h", "i"], unchecked_values=["w", "absent"])


def test_one_of_wants_all_tensors_of_the_same_file(out):
    fits = write_expected(out, "a.safetensors")
    other = write_expected(out, "b.safetensors", w=tensor([[1, 2], [3, 4]]))
    half = write_expected(out, "c.safetensors", h=tensor([1, 0], "F16"))
    assert not problems(out, one_of=[other, fits])
    assert len(problems(out, one_of=[other, half])) == 2


def test_an_extra_that_is_kept_must_be_kept_bit_for_bit(out):
    kept = write_expected(out, "extras.safetensors", w=None, h=None, absent=tensor([1]))
    halved = write_expected(out, "halved.safetensors", w=None, h=None, i=tensor([0, 1], "I64"))
    assert not problems(out, if_present_bit_exact=kept)
    assert problems(out, if_present_bit_exact=halved)


def test_bit_exact_names_are_checked_beside_a_tolerance(out):
    file = write_expected(out, w=tensor([[1, 2], [3, 1e-9]]))
    assert not problems(out, tensors=file, bit_exact_names=["h", "i"])
    assert problems(out, tensors=file, bit_exact_names=["w"])
    assert problems(out, tensors=file, bit_exact_names=["absent"]) == ["absent: not in the output"]


PASSING_AND_FAILING = [
    ("names_exact", ["w", "h", "i"], ["w", "h"]),
    ("names_absent", ["v"], ["w"]),
    ("names_present", ["w"], ["v"]),
    ("dtypes", {"h": "F16"}, {"h": "BF16"}),
    ("dtypes", {"w": "F32"}, {"absent": "F32"}),
    ("shapes", {"w": [2, 2]}, {"w": [4]}),
    ("nonzero_count", {"w": 3, "h": 1}, {"w": 4}),
    ("allowed_values", [0, 0.5, 1, 2, 3], [0, 1, 2, 3]),
    ("kept_fraction", {"w": [0.7, 0.8]}, {"w": [0.8, 0.9]}),
    ("must_differ", [["w", "h"]], [["w", "w"]]),
    ("config", {"hidden_size": 4, "rope": {"theta": 10000}}, {"rope": {"theta": 1}}),
    ("config", {"tie_word_embeddings": False}, {"tie_word_embeddings": 0}),
    ("config_any_of", [{"dtype": "float32"}, {"torch_dtype": "float32"}], [{"dtype": "float32"}]),
    ("config_absent", ["quantization_config"], ["hidden_size"]),
    ("total_size", 36, 40),
    ("files_present", ["model.safetensors", "*.json"], ["*.index.json"]),
    ("files_absent", ["model-*-of-*.safetensors"], ["config*"]),
]


@pytest.mark.parametrize(("key", "passing", "failing"), PASSING_AND_FAILING)
def test_a_check_passes_and_fails(out, key, passing, failing):
    assert problems(out, **{key: passing}) == []
    assert problems(out, **{key: failing})


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_finite(tmp_path, value):
    assert not problems(write_model(tmp_path / "a", w=tensor([1.0])), finite=True)
    out = write_model(tmp_path / "b", w=tensor([1.0, value], "BF16"))
    assert problems(out, finite=True) == ["w: holds nan or infinity"]


def test_side_files_are_compared_with_the_base(out, tmp_path):
    base = write_model(tmp_path / "base", w=tensor([1]))
    (base / "README.md").write_text("theirs", encoding="utf-8")
    (out / "README.md").write_text("ours", encoding="utf-8")
    assert not problems(out, base=base, files_same_as_base=["config.json"], files_not_from_base=["README.md", "x.pt"])
    assert problems(out, base=base, files_same_as_base=["README.md"])
    assert problems(out, base=base, files_not_from_base=["config.json"])
    with pytest.raises(CaseError):
        problems(out, files_same_as_base=["config.json"])


def test_runs_are_compared_bit_for_bit(out):
    same = read_checkpoint(out)
    other = {**same, "w": tensor([[1, 2], [3, -0.0]])}
    assert not problems(out, earlier=[other, same], bit_equal_to_run=1, differs_from_run=0)
    assert problems(out, earlier=[other, same], bit_equal_to_run=0)
    assert problems(out, earlier=[other, same], differs_from_run=1)
    assert problems(out, earlier=[None], bit_equal_to_run=0)
    with pytest.raises(CaseError):
        problems(out, bit_equal_to_run=0)


def test_a_sharded_output_is_read_through_its_index(out):
    file = write_expected(out)
    shard(out)
    assert not problems(out, tensors=file, tolerance="bit_exact", total_size=36)


def test_an_index_must_tell_the_true_size(out):
    index = shard(out)
    index["metadata"]["total_size"] = 35
    (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert problems(out, total_size=36) == [f"{INDEX}: total_size is 35, expected 36"]


def test_an_index_must_put_tensors_where_they_are(out):
    index = shard(out)
    index["weight_map"]["w"] = "model-00002-of-00002.safetensors"
    index["weight_map"]["h"] = "model-00001-of-00002.safetensors"
    (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckError, match="disagree"):
        read_checkpoint(out)
    assert any("disagree" in problem for problem in problems(out, names_exact=["w", "h", "i"]))


def test_absent_shards_stale_shards_and_broken_files_make_an_output_partial(out):
    shard(out)
    assert not list(checkpoint_problems(out))
    write_safetensors(out / "model.safetensors", {"w": tensor([1])})
    assert any("does not name" in problem for problem in checkpoint_problems(out))
    (out / "model.safetensors").unlink()
    first = out / "model-00001-of-00002.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    assert any("does not open" in problem for problem in checkpoint_problems(out))
    first.unlink()
    assert any("absent files" in problem for problem in checkpoint_problems(out))


def test_an_output_without_weights_or_with_two_sets_is_not_whole(out):
    write_safetensors(out / "other.safetensors", {"w": tensor([1])})
    assert any("no index" in problem for problem in problems(out))
    (out / "other.safetensors").unlink()
    (out / "model.safetensors").unlink()
    assert problems(out) == ["there is no safetensors file in the output"]


def test_an_absent_output_is_a_problem(tmp_path):
    assert problems(tmp_path / "nowhere") == ["there is no output folder `nowhere`"]


def test_bytes_that_do_not_fit_the_shape_are_found(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"w": Tensor(dtype="F32", shape=(3,), data=b"12345678")})
    with pytest.raises(CheckError, match="8 bytes"):
        read_checkpoint(tmp_path)


def test_a_snapshot_tells_litter_changed_outputs_and_changed_locks(out):
    root = out.parent
    (root / ".mergecache").mkdir()
    before = take_snapshot(root, out)
    (root / ".mergecache" / "pack").write_bytes(b"1")
    assert [*litter(before, take_snapshot(root, out)), *kept_output(before, take_snapshot(root, out))] == []
    (root / ".out.staging").mkdir()
    (out / "config.json").write_text("{}", encoding="utf-8")
    (root / "Mergefile.lock").write_text("x", encoding="utf-8")
    after = take_snapshot(root, out)
    assert list(litter(before, after)) == ["the build left `.out.staging` behind"]
    assert list(kept_output(before, after)) == ["the build failed and changed the earlier output: ['config.json']"]
    assert list(kept_lock(before, after)) == ["`Mergefile.lock` was changed: absent before, 1 bytes after"]
    out.rename(root / "elsewhere")
    assert list(kept_output(before, take_snapshot(root, out))) == ["the earlier output is gone"]
