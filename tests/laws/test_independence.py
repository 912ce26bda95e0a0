"""Law 2: outputs, plans and the lock depend on nothing but the Mergefile and the sources' content."""

import shutil

import pytest
from support.checkpoints import as_dtype, random_tensors
from support.projects import TINY, SmallProject

from mergepipe.checkpoints.geometry import Geometry

SHAPES = {f"model.layers.{n}.{part}": (12, 16) for n in range(3) for part in ("attn.weight", "mlp.weight")} | {
    "model.embed_tokens.weight": (30, 8),
    "model.norm.weight": (75,),
    "model.scale": (),
    "model.empty": (0, 4),
}


def tensors(seed, dtype):
    """Return a fine-tune: half of the tensors as in the base."""
    base, own = (random_tensors(number, SHAPES) for number in (0, seed))
    changed = {name: own[name] if "layers" in name or seed % 2 else base[name] for name in SHAPES}
    return {name: array.astype(as_dtype(dtype)) for name, array in changed.items()}


def make(root, *, shards=(1, 1, 1), order=("sum", "mean", "copy"), geometry=TINY):
    """Return a project of three outputs over a base and two experts."""
    project = SmallProject(root, geometry)
    for number, (name, dtype) in enumerate([("base", "bfloat16"), ("e1", "float32"), ("e2", "float16")]):
        project.add_source(name, tensors(number, dtype), shards=shards[number], config={"torch_dtype": "bfloat16"})
    write = {"shard_size": 700}
    recipes = {
        "sum": {
            "operator": "task_arithmetic",
            "base": "base",
            "experts": [{"source": "e1", "weight": [0.2, 0.7]}, {"source": "e2", "weight": -0.4}],
            "params": {"lambda": 0.9},
            "rules": [{"match": "*.attn.*", "experts": {"e2": {"weight": 0.3}}}],
            "write": write,
        },
        "mean": {"operator": "linear", "base": "base", "experts": ["e1", "e2"], "write": {"dtype": "float16"}},
        "copy": {"operator": "passthrough", "experts": [{"source": "e2", "scale": 0.5}], "write": write},
    }
    for name in order:
        project.set_output(name, recipes[name])
    return project


def result(project):
    """Return everything that must be the same: weights and side files as bytes, plan digests, the lock's text."""
    files = {
        str(path.relative_to(project.root)): path.read_bytes()
        for name in sorted(project.outputs)
        for path in sorted(project.folder(name).iterdir())
        if path.name != "mergepipe.json"  # it has the measured costs
    }
    plans = {name: plan.digest for name, plan in project.open().plan().outputs.items()}
    return files, dict(sorted(plans.items())), project.lock.read_text()


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Build everything once, in a fresh cache; return what came out."""
    project = make(tmp_path_factory.mktemp("clean") / "project")
    project.build()
    for name in project.outputs:
        project.check(name)
    return result(project)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("memory", [None, 1, 4096])
def test_workers_and_memory_do_not_matter(tmp_path, clean, workers, memory):
    project = make(tmp_path)
    project.build(workers=workers, memory=memory)
    assert result(project) == clean


@pytest.mark.parametrize("shards", [(2, 1, 3), (1, 5, 1), (8, 8, 8)])
def test_the_sharding_of_the_sources_does_not_matter(tmp_path, clean, shards):
    project = make(tmp_path, shards=shards)
    project.build()
    assert result(project) == clean


def test_sharding_a_source_anew_changes_nothing_and_computes_nothing(tmp_path, clean):
    project = make(tmp_path)
    project.build()
    project.add_source("e1", tensors(1, "float32"), shards=4, config={"torch_dtype": "bfloat16"})
    report = project.build()
    assert not report.lock_changed
    assert all(output.blocks["computed"] == output.blocks["copied"] == 0 for output in report.outputs.values())
    assert result(project) == clean


@pytest.mark.parametrize("order", [("copy", "mean", "sum"), ("mean", "copy", "sum")])
def test_the_order_of_outputs_in_the_mergefile_does_not_matter(tmp_path, clean, order):
    project = make(tmp_path, order=order)
    project.build()
    assert result(project) == clean


@pytest.mark.parametrize("order", [("copy", "mean", "sum"), ("sum", "mean", "copy")])
def test_outputs_built_one_by_one_are_those_built_together(tmp_path, clean, order):
    project = make(tmp_path)
    for name in order:
        project.build(name)
    assert result(project) == clean


def test_outputs_built_in_pairs_after_a_change_are_those_built_together(tmp_path, clean):
    project = make(tmp_path)
    project.add_source("e1", tensors(5, "float32"), config={"torch_dtype": "bfloat16"})
    project.build("sum", "copy")
    project.add_source("e1", tensors(1, "float32"), config={"torch_dtype": "bfloat16"})
    project.build("mean", "copy")
    project.build()
    assert result(project) == clean


def test_an_output_removed_and_declared_again_leaves_no_trace(tmp_path, clean):
    project = make(tmp_path)
    project.build()
    recipe = project.outputs.pop("mean")
    project.save()
    project.build()
    assert "mean" not in project.lock.read_text()
    project.set_output("mean", recipe)
    project.build()
    assert result(project) == clean


def test_a_warm_cache_of_another_state_of_the_project_does_not_matter(tmp_path, clean):
    project = make(tmp_path)
    recipe = project.outputs["sum"]
    project.set_output("sum", recipe | {"params": {"lambda": 0.1}})
    project.add_source("e2", tensors(7, "float16"), config={"torch_dtype": "bfloat16"})
    project.build()
    assert result(project) != clean
    project.set_output("sum", recipe)
    project.add_source("e2", tensors(2, "float16"), config={"torch_dtype": "bfloat16"})
    project.build()
    assert result(project) == clean


@pytest.mark.parametrize("keep", [0, 4000])
@pytest.mark.parametrize("output_stays", [False, True])
def test_a_pruned_cache_does_not_matter(tmp_path, clean, keep, output_stays):
    project = make(tmp_path)
    project.build()
    pruned = project.open().cache_prune(max_bytes=keep)
    assert pruned.removed > 0
    assert pruned.kept_bytes <= keep
    if not output_stays:
        shutil.rmtree(project.root / "build")
    project.build()
    assert result(project) == clean


@pytest.mark.parametrize("lost", ["packs", "catalog.db", "."])
def test_a_cache_that_lost_parts_does_not_matter(tmp_path, clean, lost):
    project = make(tmp_path)
    project.build()
    path = project.cache / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    shutil.rmtree(project.root / "build" / "sum")
    project.build()
    assert result(project) == clean


@pytest.mark.parametrize("garbage", [b"", b"not a database" * 100])
def test_a_catalog_that_cannot_be_read_does_not_matter(tmp_path, clean, garbage):
    project = make(tmp_path)
    project.build()
    (project.cache / "catalog.db").write_bytes(garbage)
    project.build()
    assert result(project) == clean


def test_another_cache_directory_does_not_matter(tmp_path, clean):
    project = make(tmp_path / "project")
    project.build(cache_dir=tmp_path / "elsewhere")
    assert not project.cache.exists()
    assert result(project) == clean
    assert project.build(cache_dir=tmp_path / "elsewhere").outputs["sum"].state == "unchanged"


def test_a_project_that_moved_is_unchanged(tmp_path, clean):
    project = make(tmp_path / "here")
    project.build()
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copy2)
    moved = SmallProject(tmp_path / "there", sources=project.sources, outputs=project.outputs)
    moved.build()
    assert result(moved) == clean


def test_the_lock_without_results_of_another_machine_is_completed_not_rewritten(tmp_path, clean):
    project = make(tmp_path / "first")
    project.build()
    other = project.clone(tmp_path / "second")
    shutil.copy(project.lock, other.lock)
    report = other.build(locked=True)
    assert not report.lock_changed
    assert result(other) == clean


@pytest.mark.parametrize("block", [1, 5, 16, 17, 100, 2**18])
def test_the_tensors_do_not_depend_on_the_size_of_blocks(tmp_path, clean, block):
    project = make(tmp_path, geometry=Geometry(block_elements=block))
    project.build()
    files = {name: data for name, data in result(project)[0].items() if name.endswith(".safetensors")}
    assert files == {name: data for name, data in clean[0].items() if name.endswith(".safetensors")}


def test_one_cache_serves_several_block_sizes(tmp_path, clean):
    project = make(tmp_path)
    for block in (16, 64, 16, 64):
        project.geometry = Geometry(block_elements=block)
        assert {report.state for report in project.build().outputs.values()} == {"built"}
        project.check("sum")
        norm = next(tensor for tensor in project.manifest("sum").tensors if tensor.name == "model.norm.weight")
        assert len(norm.blocks) == 32 * -(-75 // block)
    assert result(project) == clean
