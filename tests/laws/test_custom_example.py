"""The example of custom operators: it builds as its guide says, and what it merges is what it claims."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.cli import run_mergepipe
from support.reference import assert_same_tensors

import mergepipe
from mergepipe.checkpoints.geometry import Geometry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom-operator"
GUIDE = (ROOT / "docs" / "guides" / "custom-operators.md").read_text(encoding="utf-8")
OUTPUTS = ("middle", "same-lengths", "bounded")
BUILD = ["build", "--allow-custom"]


def copy(folder):
    """Copy the example and the checkpoints that it merges; return its folder."""
    for name in ("family", "custom-operator"):
        ignored = shutil.ignore_patterns("build", ".mergecache", "*.lock", "__pycache__")
        shutil.copytree(ROOT / "examples" / name, folder / name, ignore=ignored)
    return folder / "custom-operator"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder of the example, built by the command line."""
    folder = copy(tmp_path_factory.mktemp("examples"))
    result = run_mergepipe(BUILD, folder)
    assert result.code == 0, result.text
    return folder


def tensors(folder):
    """Return the tensors of a checkpoint as float32."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def family():
    names = {"base": "base", "python": "expert-python", "legal": "expert-legal", "c": "expert-c"}
    return {name: tensors(ROOT / "examples" / "family" / folder) for name, folder in names.items()}


def close(array, want):
    """Assert equality up to the rounding to bfloat16, and to last bits of float32."""
    np.testing.assert_allclose(array, want, rtol=2**-8 + 2**-20, atol=1e-8)


def test_nothing_runs_unless_it_is_allowed(tmp_path):
    folder = copy(tmp_path)
    result = run_mergepipe(["build"], folder)
    assert result.code == 2
    assert "the code of `ops.py:median` would run" in result.stderr
    assert not (folder / "build").exists()
    assert run_mergepipe(["plan"], folder, {"MERGEPIPE_ALLOW_CUSTOM": "1"}).code == 0


def test_a_second_build_has_nothing_to_do(built):
    outputs = json.loads(run_mergepipe([*BUILD, "--json"], built).stdout)["outputs"]
    assert {name: output["state"] for name, output in outputs.items()} == dict.fromkeys(OUTPUTS, "unchanged")
    assert run_mergepipe([*BUILD, "--locked"], built).code == 0


def test_the_function_takes_the_median(built, family):
    for name, array in tensors(built / "build" / "middle").items():
        base = family["base"][name]
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        pull = np.float32(0.5 + 0.5 * layer / 3)
        middle = np.median([family[source][name] for source in ("python", "legal", "c")], axis=0)
        close(array, base + pull * (middle - base))


def test_rows_keep_their_lengths(built, family):
    changed = 0
    for name, array in tensors(built / "build" / "same-lengths").items():
        base = family["base"][name]
        python, legal = (family[source][name] - base for source in ("python", "legal"))
        merged = base + np.float32(0.6) * python + np.float32(0.4) * legal
        for row, start, got in zip(*map(np.atleast_2d, (merged, base, array)), strict=True):
            length = np.linalg.norm(row)
            close(got, row * (np.linalg.norm(start) / length) if length else row)
        changed += not np.array_equal(array, base)
    assert changed == 39


def test_updates_are_shortened_where_they_are_too_long(built, family):
    shortened = 0
    for name, array in tensors(built / "build" / "bounded").items():
        base = family["base"][name].astype(np.float64)
        python, legal = (family[source][name] - base for source in ("python", "legal"))
        update = 0.6 * python + 0.4 * legal
        factor = min(1.0, 0.1 * np.linalg.norm(base) / np.linalg.norm(update))
        shortened += factor < 1
        np.testing.assert_allclose(array, base + factor * update, rtol=2**-8 + 2**-20, atol=1e-7)
    assert shortened == 12, "the example shows both"


def test_blocks_and_threads_do_not_matter(built, tmp_path):
    folder = copy(tmp_path)
    options = {"allow_custom": True, "workers": 5, "geometry": Geometry(block_elements=1000)}
    mergepipe.open(folder / "Mergefile.toml", **options).build()
    for name in OUTPUTS:
        assert_same_tensors(tensors(folder / "build" / name), tensors(built / "build" / name))


def test_a_changed_share_measures_nothing_again(tmp_path, monkeypatch):
    folder = copy(tmp_path)
    mergepipe.open(folder / "Mergefile.toml", allow_custom=True).build(["bounded"])
    monkeypatch.setattr("mergepipe.engine.job.measure_block", None)
    text = (folder / "Mergefile.toml").read_text()
    assert "share = 0.1" in text
    (folder / "Mergefile.toml").write_text(text.replace("share = 0.1", "share = 0.05"))
    report = mergepipe.open(folder / "Mergefile.toml", allow_custom=True).build(["bounded"]).outputs["bounded"]
    assert (report.state, report.index_bytes_read) == ("built", 0)


@pytest.mark.parametrize(
    ("tensor", "others"),
    [("model.layers.0.mlp.up_proj.weight", 0), ("model.layers.3.mlp.up_proj.weight", 25)],
    ids=["not shortened", "shortened"],
)
def test_the_other_blocks_are_computed_again_where_the_factor_changed(tmp_path, tensor, others):
    folder = copy(tmp_path)
    options = {"allow_custom": True, "geometry": Geometry(block_elements=960)}  # 256 rows of 96 are 26 blocks
    mergepipe.open(folder / "Mergefile.toml", **options).build(["bounded"])
    path = folder.parent / "family" / "expert-python" / "model.safetensors"
    weights = load_file(path)
    weights[tensor][0] *= 2
    save_file(weights, path, {"format": "pt"})
    report = mergepipe.open(folder / "Mergefile.toml", **options).build(["bounded"]).outputs["bounded"]
    assert report.blocks["computed"] == 1 + others


def test_the_code_is_in_lock_and_manifest(built):
    lock = (built / "Mergefile.lock").read_text()
    for name, operator in zip(OUTPUTS, ("median", "keep_lengths", "bounded_update"), strict=True):
        digest = json.loads((built / "build" / name / "mergepipe.json").read_text())["output"]["code"][operator]
        assert f'code.{operator} = "{digest}"' in lock


# --- the guide --------------------------------------------------------------------------------------------------------


def blocks(language):
    return [part.partition("```")[0] for part in GUIDE.split(f"```{language}\n")[1:]]


def test_the_code_in_the_guide_is_that_of_the_example():
    code = (EXAMPLE / "ops.py").read_text(encoding="utf-8")
    shown = blocks("python")
    assert len(shown) == 3
    assert [text for text in shown if text not in code] == []


def test_the_mergefile_in_the_guide_is_that_of_the_example():
    mergefile = (EXAMPLE / "Mergefile.toml").read_text(encoding="utf-8")
    shown = [text for text in blocks("toml") if "entry-points" not in text]
    assert len(shown) == 3
    assert [text for text in shown if text not in mergefile] == []
