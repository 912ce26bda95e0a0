"""`verify --rebuild-sample` makes blocks again by the path of a build, and finds those that are not what it makes."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import add_adapter, factors
from support.budgets import percent
from support.checkpoints import random_tensors
from support.every_operator import RECIPES
from support.projects import TINY, Messages, SmallProject, edit_tensor, skip_flushing

from mergepipe.cache.layout import CacheLayout
from mergepipe.digest import content_digest, source_digest, tensor_digest
from mergepipe.errors import MergepipeError, StorageError
from mergepipe.lockfile.manifest import parse_manifest, render_manifest
from mergepipe.lockfile.manifest_records import ManifestTensor
from mergepipe.project.verify import VerifyOptions, verify_directories
from mergepipe.project.verify_rebuild import choose_blocks

SHAPES = {f"model.layers.{n}.w": (16, 16) for n in range(2)} | {"model.v": (70,), "model.s": (), "q.weight": (16, 16)}
BLOCKS = 16  # of 64 elements: 4 and 4, 2, 1, 4, and 1 of the buffer


@pytest.fixture
def project(tmp_path, monkeypatch):
    skip_flushing(monkeypatch)
    project = SmallProject(tmp_path / "project")
    for seed, (name, dtype) in enumerate([("base", "bfloat16"), ("e1", "float32"), ("e2", "bfloat16")]):
        tensors = dict(random_tensors(seed, SHAPES, dtype)) | {"ids": np.arange(10)}
        project.add_source(name, tensors)
    return project


def output(project, operator, **recipe):
    project.set_output("m", {"operator": operator, "base": "base", "experts": ["e1", "e2"]} | recipe)
    project.build()
    return project


def sampled(project, percent=100.0, name="m", seed=None, **options):
    report = project.open(**options).verify([name], VerifyOptions(sample=percent, seed=seed))
    return report.outputs[0], list(report.problems)


FAMILIES = {
    "sums": ("task_arithmetic", {"params": {"lambda": 0.7}}),
    "random": ("dare_ties", {"params": {"density": 0.5, "seed": 3}}),
    "thresholds": ("ties", {"params": {"density": 0.4}}),
    "angles": ("slerp", {"experts": ["e1"], "params": {"t": 0.3}}),
    "budget": ("ties", {"params": {"density": 0.4}, "budget": {"expert_reads": "50%", "precision": "blocks"}}),
}


def check_all(project):
    found, problems = sampled(project)
    assert problems == []
    assert found.sample.blocks == found.sample.total == sum(len(t.blocks) // 32 for t in project.manifest("m").tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_comes_out_as_the_manifest_says(project, family):
    operator, recipe = FAMILIES[family]
    output(project, operator, **recipe)
    check_all(project)
    if family in ("thresholds", "budget"):
        shutil.rmtree(project.cache)
        check_all(project)


def test_slices_come_out_as_well(project):
    slices = [{"source": "e1", "layers": "0..2"}, {"source": "e2", "layers": "1..2"}]
    project.set_output("m", {"operator": "passthrough", "slices": slices})
    project.build()
    check_all(project)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["warm", "gone"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_operator_is_made_again(project, name, cache):
    project.add_source("e3", dict(random_tensors(9, SHAPES)) | {"ids": np.arange(10)})
    project.set_output("m", RECIPES[name])
    project.build()
    if cache == "gone":
        shutil.rmtree(project.cache)
    check_all(project)


@pytest.mark.parametrize("cache", ["warm", "gone"])
def test_outputs_made_from_outputs_and_from_adapters_come_out_as_well(project, cache):
    add_adapter(project, "lora", factors(5, "q", 16, 16), target_modules=["q"])
    project.set_output("hidden", {"operator": "linear", "experts": ["e1", "e2"], "publish": False})
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["hidden", {"source": "lora", "weight": 0.5}]}
    project.set_output("m", recipe)
    project.build()
    if cache == "gone":
        shutil.rmtree(project.cache)
    assert sampled(project)[1] == []


def forge(project, tensor, block):
    """Give a block another digest in a manifest that is whole in itself, and in the lock."""
    path = project.folder("m") / "mergepipe.json"
    manifest = parse_manifest(path.read_bytes(), path)
    number = [t.name for t in manifest.tensors].index(tensor)
    old = manifest.tensors[number]
    blocks = old.blocks[: 32 * block] + content_digest(b"other") + old.blocks[32 * (block + 1) :]
    tensors = [*manifest.tensors]
    tensors[number] = replace(old, blocks=blocks)
    locked = [*manifest.output.tensors]
    locked[number] = replace(locked[number], digest=tensor_digest(old.dtype, old.shape, blocks))
    digest = source_digest((t.name, t.digest) for t in locked)
    output = replace(manifest.output, tensors=tuple(locked), digest=digest)
    path.write_bytes(render_manifest(replace(manifest, tensors=tuple(tensors), output=output)))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_block_that_comes_out_otherwise_is_named(project, workers):
    output(project, "ties", params={"density": 0.4})
    forge(project, "model.layers.1.w", 2)
    _, problems = sampled(project, workers=workers)
    (found,) = [problem for problem in problems if problem.kind == "rebuild"]
    assert found.what == "made again from the sources, tensor `model.layers.1.w`: block 2 of 4 differs (rows 8 to 11)"


def test_a_source_that_changed_is_named_and_its_blocks_prove_nothing(project):
    output(project, "task_arithmetic")
    edit_tensor(project.source_file("e1"), "model.layers.0.w", 3, 8.0)
    found, problems = sampled(project)
    assert [(p.kind, p.facts) for p in problems] == [("source", {"source": "e1", "tensor": "model.layers.0.w"})]
    assert found.sample.blocks == BLOCKS - 4


def test_what_is_made_again_follows_from_the_manifest_and_not_from_the_mergefile(project):
    output(project, "ties", params={"density": 0.4}, budget={"expert_reads": "50%", "precision": "blocks"})
    project.set_output("m", project.outputs["m"] | {"params": {"density": 0.9}, "budget": percent(10)})
    check_all(project)


def test_a_copy_is_made_again_with_sources_from_elsewhere(project, tmp_path):
    project.set_output("hidden", {"operator": "linear", "experts": ["e1", "e2"], "publish": False})
    output(project, "task_arithmetic", experts=["hidden", "e2"])
    shutil.copytree(project.folder("m"), tmp_path / "copy")
    places = {name: (project.root / path).rename(tmp_path / name) for name, path in project.sources.items()}
    shutil.rmtree(project.root)
    with pytest.raises(MergepipeError, match="base"):
        verify_directories([tmp_path / "copy"], VerifyOptions(sample=10), geometry=TINY)
    options = VerifyOptions(sample=100, sources=places)
    report = verify_directories([tmp_path / "copy"], options, geometry=TINY, workers=2)
    assert (list(report.problems), report.outputs[0].sample.blocks) == ([], BLOCKS)
    edit_tensor(places["e2"] / "model.safetensors", "model.layers.0.w", 3, 8.0)
    report = verify_directories([tmp_path / "copy"], options, geometry=TINY, workers=2)
    assert {problem.kind for problem in report.problems} == {"source"}


@pytest.mark.parametrize("made", [False, True])
def test_where_no_cache_can_be_written_a_temporary_one_is_used(project, monkeypatch, made):
    output(project, "linear")
    if not made:
        shutil.rmtree(project.cache)
    access, create = os.access, CacheLayout.create

    def refuse(layout):
        if layout.root.is_relative_to(project.root):
            raise StorageError(f"cannot create the cache directory `{layout.root}`: Read-only file system")
        create(layout)

    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    monkeypatch.setattr(CacheLayout, "create", refuse)
    messages = Messages()
    found, problems = sampled(project, reporter=messages)
    assert (problems, found.sample.blocks) == ([], BLOCKS)
    assert any("a temporary one is used" in note for note in messages.notes)
    assert project.cache.exists() == made


def test_the_sample_follows_from_the_output_and_the_seed_and_its_bytes_are_reported(project):
    output(project, "linear")
    messages = Messages()
    found, _ = sampled(project, 25, reporter=messages)
    assert (found.sample.blocks, found.sample.total) == (4, BLOCKS)
    assert sampled(project, 25)[0].sample == found.sample
    assert sampled(project, 25, seed=found.sample.seed)[0].sample == found.sample
    ((total, done),) = [(total, done) for phase, total, done, _ in messages.phases if phase == "rebuilding"]
    assert done == total == found.sample.bytes


def named(count):
    facts = {"dtype": "F32", "shape": (count,), "decision": "merge", "parameters": None, "inputs": ()}
    return ManifestTensor(name=f"t{count}", blocks=bytes(32 * count), **facts)


@given(st.sets(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 2**32), st.data())
def test_a_larger_sample_has_the_blocks_of_a_smaller_one(counts, seed, data):
    tensors = [named(count) for count in sorted(counts)]
    small, large = sorted(data.draw(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))))
    first, second = (
        {(name, block) for name, blocks in choose_blocks(tensors, share, seed).items() for block in blocks}
        for share in (small, large)
    )
    assert first <= second
    total = sum(counts)
    assert len(first) == min(total, max(1, -(-total * small // 100)))
