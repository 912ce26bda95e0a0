"""Budgets in levels together with what else a project may have: sources, outputs, stages and layers of all kinds.

Each project is built cold, then from its packs alone, and then with packs that are gone: with the same bytes, within
the budget, and no farther from the full read than the bound says.
"""

import shutil

import ml_dtypes
import numpy as np
import pytest
from laws.test_levels import GEOMETRY, budget, distance, files, packs
from support.adapters import factors, write_adapter
from support.budgets import EXACT, with_budget
from support.projects import SmallProject

BF16 = ml_dtypes.bfloat16
SHAPES = {f"model.layers.{layer}.mlp.up_proj.weight": (256, 96) for layer in range(3)} | {"model.norm.weight": (64,)}
NAMES = ("base", "e1", "e2")


def tensors(seed=0, shapes=None, *, near=None, dtype=BF16, spread=0.004):
    """Return tensors of their own, or near those of another model."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in (shapes or SHAPES).items():
        start = rng.normal(0, 0.02, shape) if near is None else np.asarray(near[name], np.float64)
        found[name] = (start + (rng.normal(0, spread, shape) if near else 0)).astype(np.float32).astype(dtype)
    return found


@pytest.fixture
def project(tmp_path):
    """Return a project with a base and two experts, and no output yet."""
    project = SmallProject(tmp_path / "project", GEOMETRY)
    base = tensors()
    project.add_sources({"base": base, "e1": tensors(1, near=base), "e2": tensors(2, near=base)})
    return project


def recipe(*experts, base="base", weight=0.5, **more):
    table = [{"source": name, "weight": weight} for name in experts or ("e1", "e2")]
    return {"operator": "task_arithmetic", "base": base, "experts": table, "write": {"dtype": "float32"}} | more


def forget_results(project):
    with project.open()._writing() as (catalog, _):
        for name, _ in catalog.pack_names():
            catalog.drop_pack(name)


def check(project, share=25, outputs=("m",), used=None, adapters=0):
    """Build outputs in levels in all ways; return the reports of the first build."""
    for name in outputs:
        with_budget(project, {"expert_reads": "100%"}, name)
    project.build()
    full = {name: project.tensors(name) for name in outputs}
    shutil.rmtree(project.root / "build")
    shutil.rmtree(project.cache)
    project.lock.unlink()
    for name in outputs:
        with_budget(project, budget(share), name)
    report = project.build()
    for name in outputs:
        one = report.outputs[name]
        most = (one.expert_bytes["full"] - adapters) * share / 100 + adapters  # adapters are read whole
        assert one.expert_bytes["read"] <= one.expert_bytes["planned"] <= most
        assert one.bound.kind == "certified"
        assert distance(full[name], project.tensors(name)) <= one.bound.absolute * (1 + 1e-5) + 1e-4
        assert any(0 < level < EXACT for t in project.manifest(name).tensors for level in t.levels or b"")
    assert not [path for path in packs(project) if path.name.startswith(".")]
    want = {name: files(project, name) for name in outputs}
    for lost in ("packs", "progressive"):
        shutil.rmtree(project.root / "build")
        forget_results(project)
        shutil.rmtree(project.cache / lost)
        again = project.build()
        assert {name: files(project, name) for name in outputs} == want
        reads = [one.index_bytes_read for one in again.outputs.values()]
        assert not any(reads) or lost == "progressive"
    assert used is None or len(packs(project)) == used
    return report


def test_an_expert_that_is_given_twice_is_coded_once(project):
    project.sources["twin"] = project.sources["e1"]
    project.set_output("m", recipe("e1", "twin", "e2"))
    check(project, used=2 * 3)


FIRST = "model.layers.0.mlp.up_proj.weight"


def test_experts_that_share_content_share_packs(project):
    """The content of a file counts, whatever its name: here a copy, and a model of which one layer is the other's."""
    shutil.copytree(project.root / "models/e1", project.root / "models/copy")
    project.sources["copy"] = "models/copy"
    base = tensors()
    mixed = tensors(3, near=base) | {FIRST: tensors(2, near=base)[FIRST]}
    project.add_source("mixed", mixed)
    project.set_output("m", recipe("e1", "copy", "e2", "mixed"))
    check(project, used=3 + 3 + 2)


def test_outputs_over_several_bases_have_codes_against_each(project):
    project.add_source("other", tensors(9, near=tensors()))
    project.set_output("m", recipe())
    project.set_output("n", recipe(base="other", weight=0.25))
    check(project, outputs=("m", "n"), used=2 * 3 * 2)


def test_slices_code_against_the_tensor_of_the_layer_that_they_take(project):
    parts = [{"layers": "0..1", "experts": ["e1", "e2"]}, {"layers": "1..3", "experts": ["e2"]},
             {"layers": "1..2", "experts": ["e1"]}]  # fmt: skip
    more = {"slices": parts, "write": {"dtype": "float32"}}
    project.set_output("m", {"operator": "task_arithmetic", "base": "base"} | more)
    check(project)


@pytest.mark.parametrize("stored", [True, False])
def test_tied_embeddings_are_coded_once(tmp_path, stored):
    shapes = {"model.embed_tokens.weight": (300, 64), "model.layers.0.mlp.up_proj.weight": (256, 96)}
    project = SmallProject(tmp_path / "project", GEOMETRY)
    base = tensors(0, shapes)
    sources = {"base": base, "e1": tensors(1, shapes, near=base), "e2": tensors(2, shapes, near=base)}
    if stored:
        sources = {name: one | {"lm_head.weight": one["model.embed_tokens.weight"]} for name, one in sources.items()}
    project.add_sources(sources, config={"model_type": "tiny", "tie_word_embeddings": True})
    project.set_output("m", recipe())
    check(project, used=2 * 2)


def test_adapters_stand_beside_experts_in_levels(project):
    name = "model.layers.0.mlp.up_proj"
    write_adapter(project.root / "models/lora", factors(1, name, 256, 96), target_modules=["up_proj"])
    project.sources["lora"], project.adapters["lora"] = "models/lora", "base"
    project.set_output("m", recipe("e1", "lora", "e2"))
    check(project, 30, used=2 * 3, adapters=4 * 2 * (256 + 96))


@pytest.mark.parametrize("dtypes", [("F32", "BF16", "F16"), ("BF16", "F32", "F64"), ("F64", "F16", "BF16")])
def test_experts_and_bases_of_different_dtypes(tmp_path, dtypes):
    kinds = {"BF16": BF16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    project = SmallProject(tmp_path / "project", GEOMETRY)
    base = tensors()
    near = [base, tensors(1, near=base), tensors(2, near=base)]
    project.add_sources({
        name: {key: array.astype(np.float32).astype(kinds[dtype]) for key, array in one.items()}
        for name, one, dtype in zip(NAMES, near, dtypes, strict=True)
    })  # fmt: skip
    project.set_output("m", recipe())
    check(project, used=2 * 3)


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("role", ["expert", "base"])
def test_an_output_may_be_the_source_of_another(project, publish, role):
    stage = recipe("e1", weight=1.0, write={"dtype": "bfloat16"}, publish=publish)
    final = recipe("stage", "e2") if role == "expert" else recipe("e1", "e2", base="stage")
    project.outputs = {"stage": stage, "m": final}
    project.save()
    check(project, 30)


def test_a_stage_and_its_user_may_both_have_budgets(project):
    project.outputs["stage"] = recipe("e1", weight=1.0, budget=budget(40))
    project.set_output("m", recipe("stage", "e2", budget=budget(30)))
    project.build()
    want = files(project), files(project, "stage")
    other = project.clone(project.root.parent / "other")
    other.build(workers=1)
    assert (files(other), files(other, "stage")) == want
    assert {one.state for one in project.build().outputs.values()} == {"unchanged"}


def test_an_expert_of_which_the_base_is_a_copy(project):
    project.sources["same"] = project.sources["base"]
    project.set_output("m", recipe("e1", "same", "e2"))
    check(project, used=2 * 3)  # of what equals the base nothing is read
