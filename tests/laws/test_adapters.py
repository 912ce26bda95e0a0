"""Adapters as experts and as bases: exact values, factors read once, nothing recomputed that did not change."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from support.adapters import PREFIX, add_adapter, delta_of, embedding_factors, exact_delta, factors
from support.checkpoints import random_tensors, read_checkpoint, read_safetensors, write_safetensors
from support.cli import run_mergepipe
from support.every_operator import RECIPES
from support.projects import Messages, Reads, SmallProject, edit_tensor
from support.quick import every
from support.reference import assert_same_tensors, round_to

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.errors import MergepipeError
from mergepipe.lockfile.reader import read_lock

Q, K = "model.layers.0.q", "model.layers.1.k"
QW, KW, EMBED, HEAD, NORM = f"{Q}.weight", f"{K}.weight", "model.embed_tokens.weight", "lm_head.weight", "norm.weight"
SHAPES = {EMBED: (20, 8), QW: (24, 16), KW: (24, 16), NORM: (8,), HEAD: (20, 8)}
CODE = factors(5, Q, 24, 16) | factors(6, K, 24, 16)
SCALING = 1.5  # lora_alpha 3, r 2
CONFIG = {"model_type": "tiny", "tie_word_embeddings": False}


@pytest.fixture
def project(tmp_path):
    """Return a project with a base, an expert, and an adapter on the base for two of five tensors."""
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "other")):
        side_files = {"tokenizer.json": name}
        project.add_source(name, random_tensors(seed, SHAPES, "BF16"), config=CONFIG, side_files=side_files)
    add_adapter(project, "code", CODE)
    return project


def merged(project, experts=("code",), operator="task_arithmetic", base="base", **more):
    recipe = {"operator": operator, "experts": list(experts)} | ({"base": base} if base else {}) | more
    project.set_output("m", recipe)


def wide(project, source):
    tensors = read_checkpoint(project.root / project.sources[source])
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def deltas(tensors=CODE, scaling=SCALING):
    return {f"{module}.weight": delta_of(tensors, module, scaling) for module in (Q, K)}


def check(project, expected, dtype="BF16"):
    """Assert that the output holds these float32 values, rounded once."""
    got = project.tensors("m")
    assert_same_tensors(got, {name: round_to(array, dtype) for name, array in expected.items()}, zero_signs=False)


def factor_bytes(tensors=CODE):
    return sum(array.nbytes for array in tensors.values())


# --- values -------------------------------------------------------------------------------------------------------


def test_an_adapter_is_added_to_its_base(project):
    merged(project)
    project.build()
    base = wide(project, "base")
    check(project, base | {name: base[name] + delta for name, delta in deltas().items()})


def test_a_weight_scales_the_delta(project):
    merged(project, [{"source": "code", "weight": 0.3}, {"source": "other", "weight": -0.7}], params={"lambda": 0.9})
    project.build()
    base, other = wide(project, "base"), wide(project, "other")
    expected = {}
    for name, array in base.items():
        total = np.float32(-0.7) * (other[name] - array)
        if name in deltas():
            total = np.float32(0.3) * deltas()[name] + total
        expected[name] = array + np.float32(0.9) * total
    check(project, expected)


@pytest.mark.parametrize("operator", ["passthrough", "linear"])
def test_the_value_of_an_adapter_is_the_merged_checkpoint(project, operator):
    merged(project, operator=operator, base=None)
    project.build()
    base = wide(project, "base")
    check(project, base | {name: base[name] + delta for name, delta in deltas().items()})
    raw, before = project.raw("m"), {n: a.tobytes() for n, a in read_checkpoint(project.root / "models/base").items()}
    assert all(raw[name][2] == before[name] for name in (EMBED, NORM, HEAD)), "what is left alone is copied"


def test_an_average_is_one_of_values(project):
    merged(project, ["code", "other"], operator="linear", base=None)
    project.build()
    base, other = wide(project, "base"), wide(project, "other")
    value = base | {name: base[name] + delta for name, delta in deltas().items()}
    check(project, {name: (value[name] + other[name]) / np.float32(2) for name in base})


def test_on_another_checkpoint_than_the_base_the_delta_is_from_the_base(project):
    merged(project, base="other")
    project.build()
    base, other = wide(project, "base"), wide(project, "other")
    value = base | {name: base[name] + delta for name, delta in deltas().items()}
    check(project, {name: other[name] + (value[name] - other[name]) for name in base})


def test_an_adapter_can_be_the_base(project):
    merged(project, ["other"], base="code", params={"lambda": 0.5})
    project.build()
    base, other = wide(project, "base"), wide(project, "other")
    value = base | {name: base[name] + delta for name, delta in deltas().items()}
    check(project, {name: value[name] + np.float32(0.5) * (other[name] - value[name]) for name in base})


def test_several_adapters_on_one_base_are_summed(project):
    math = factors(7, K, 24, 16, rank=3)
    add_adapter(project, "math", math, r=3, lora_alpha=6)
    merged(project, ["code", "math"])
    project.build()
    base, second = wide(project, "base"), delta_of(math, K, 2.0)
    check(project, base | {QW: base[QW] + deltas()[QW], KW: base[KW] + (deltas()[KW] + second)})


def test_whole_tensors_embeddings_and_biases(project):
    embedding = embedding_factors(8, "model.embed_tokens", 20, 8)
    whole = random_tensors(9, {f"{PREFIX}lm_head.modules_to_save.default.weight": (20, 8)})
    add_adapter(project, "code", CODE | embedding | whole, use_rslora=True, modules_to_save=["lm_head"])
    merged(project, write={"dtype": "float32"})
    project.build()
    base, scaling = wide(project, "base"), 3 / 2**0.5
    a, b = embedding.values()
    added = {f"{module}.weight": delta_of(CODE, module, scaling) for module in (Q, K)}
    added[EMBED] = exact_delta(a, b, scaling).astype(np.float32).T
    expected = base | {name: base[name] + delta for name, delta in added.items()}
    (expected[HEAD],) = whole.values()
    got = project.tensors("m")
    # Bit for bit but for the whole tensor, which goes through its difference from the base.
    assert_same_tensors({n: a for n, a in got.items() if n != HEAD}, {n: a for n, a in expected.items() if n != HEAD})
    np.testing.assert_allclose(got[HEAD], expected[HEAD], rtol=1e-6, atol=1e-6)


def test_transposed_layers(project):
    tensors = factors(5, Q, 16, 24)
    add_adapter(project, "code", tensors, fan_in_fan_out=True)
    merged(project)
    project.build()
    base = wide(project, "base")
    check(project, base | {QW: base[QW] + delta_of(tensors, Q, SCALING).T})


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_factors_of_any_dtype(project, dtype):
    tensors = factors(5, Q, 24, 16, dtype=dtype)
    add_adapter(project, "code", tensors)
    merged(project, write={"dtype": "float32"})
    project.build()
    base = wide(project, "base")
    delta = exact_delta(*tensors.values(), SCALING)
    if dtype == "F64":  # wide to the end
        expected = (base[QW].astype(np.float64) + delta).astype(np.float32)
    else:
        expected = base[QW] + delta.astype(np.float32)
    np.testing.assert_array_equal(project.tensors("m")[QW], expected)


def test_the_adapter_of_the_example_family(tmp_path, request):
    family = request.config.rootpath / "examples" / "family"
    project = SmallProject(tmp_path)
    for name in ("base", "lora-python"):
        shutil.copytree(family / name, tmp_path / "models" / name)
        project.sources[name] = f"models/{name}"
    project.adapters["lora-python"] = "base"
    merged(project, ["lora-python"], operator="passthrough", base=None)
    project.build()
    base = wide(project, "base")
    stored = read_safetensors(tmp_path / "models/lora-python/adapter_model.safetensors")
    modules = [name[len(PREFIX) : -len(".lora_A.weight")] for name in stored if name.endswith("lora_A.weight")]
    assert len(modules) == 8
    for module in modules:
        a, b = (stored[f"{PREFIX}{module}.lora_{factor}.weight"].astype(np.float64) for factor in "AB")
        base[f"{module}.weight"] += (2.0 * (b @ a)).astype(np.float32)  # alpha 16, r 8
    check(project, base)


# --- every operator -----------------------------------------------------------------------------------------------


def dyadic(generator, shape, step):
    """Return numbers of so few bits that sums and products of them are exact."""
    return (generator.integers(-6, 7, shape) * step).astype(np.float32)


@pytest.mark.parametrize("name", every(sorted(RECIPES)))
def test_an_adapter_merges_as_the_checkpoint_that_it_stands_for(tmp_path, name):
    generator = np.random.default_rng(3)
    sources = {source: {n: dyadic(generator, s, 1 / 16) for n, s in SHAPES.items()} for source in ("base", "e2", "e3")}
    tensors = {n: dyadic(generator, array.shape, 1 / 4) for n, array in CODE.items()}
    whole = {f"{PREFIX}{HEAD}": dyadic(generator, SHAPES[HEAD], 1 / 16)}
    sources["e1"] = sources["base"] | {n: sources["base"][n] + d for n, d in deltas(tensors, 1.0).items()}
    sources["e1"][HEAD] = whole[f"{PREFIX}{HEAD}"]
    results = []
    for kind in ("checkpoint", "adapter"):
        project = SmallProject(tmp_path / kind)
        for source, content in sources.items():
            project.add_source(source, content)
        if kind == "adapter":
            add_adapter(project, "e1", tensors | whole, lora_alpha=2)
        project.set_output("m", RECIPES[name])
        project.build()
        results.append(project.tensors("m"))
    assert_same_tensors(*results, zero_signs=False)


# --- independence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [16, 40, 1 << 18])
@pytest.mark.parametrize("workers", [1, 4])
def test_blocks_and_threads_change_no_bit(project, elements, workers):
    merged(project, ["other", {"source": "code", "weight": 0.3}])
    project.build()
    expected = project.raw("m")
    other = project.clone(project.root / "clone")
    other.geometry = Geometry(block_elements=elements)
    other.build(workers=workers)
    assert other.raw("m") == expected


def test_the_delta_of_a_large_matrix_is_never_in_memory(tmp_path, monkeypatch):
    # It takes 31 MiB, and lets them go untouched.
    monkeypatch.setattr("mergepipe.engine.run.keep_freed_memory", lambda: None)
    project = SmallProject(tmp_path, geometry=Geometry(block_elements=1 << 14))
    project.add_source("base", {QW: np.zeros((8_000, 512), ml_dtypes.bfloat16)})
    add_adapter(project, "code", factors(5, Q, 8_000, 512))
    merged(project)
    project.build(workers=1, memory=1 << 20)
    shutil.rmtree(project.cache)
    shutil.rmtree(project.folder("m"))
    project.lock.unlink()
    opened = project.open(workers=1, memory=1 << 20)
    tracemalloc.start()
    try:
        opened.build()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000, "the delta in float32 takes 16 MB, the tensor in bfloat16 8 MB"


# --- reads --------------------------------------------------------------------------------------------------------


def test_an_expert_costs_the_bytes_of_its_factors(project):
    merged(project)
    report = project.build_one("m")
    assert report.expert_bytes == {"full": factor_bytes(), "planned": factor_bytes(), "read": factor_bytes()}
    assert report.index_bytes_read == 0


def test_every_factor_is_read_once(project, monkeypatch):
    merged(project)
    file = project.root / "models/code/adapter_model.safetensors"
    reads = Reads(monkeypatch)
    project.build()
    assert sum(stop - start for start, stop in reads.data_ranges(file)) == factor_bytes()


def test_outputs_share_what_they_read_of_an_adapter(project):
    merged(project)
    project.set_output("n", project.outputs["m"] | {"params": {"lambda": 2.0}})
    outputs = project.build().outputs
    assert sum(report.expert_bytes["read"] for report in outputs.values()) == factor_bytes()


def test_an_adapter_of_weight_0_is_no_expert_read(project):
    merged(project, [{"source": "code", "weight": 0.0}, "other"])
    assert project.build_one("m").expert_bytes["read"] == sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
    base, other = wide(project, "base"), wide(project, "other")
    check(project, {name: base[name] + (other[name] - base[name]) for name in base})


def test_the_values_of_an_adapter_cost_its_factors_and_what_is_below(project):
    merged(project, operator="linear", base=None)
    report = project.build_one("m")
    below = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
    assert report.expert_bytes == dict.fromkeys(("full", "planned", "read"), factor_bytes() + below)


def test_reads_of_an_adapter_that_is_the_base_are_base_reads(project):
    merged(project, ["other"], base="code")
    report = project.build_one("m")
    whole = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
    assert (report.expert_bytes["full"], report.expert_bytes["read"]) == (whole, whole)
    assert report.base_bytes_read == factor_bytes() + whole
    assert report.expert_blocks["total"] == report.expert_blocks["read"]


def test_nothing_changed_nothing_read(project, monkeypatch):
    merged(project, ["code", "other"])
    project.build()
    reads = Reads(monkeypatch)
    assert project.build_one("m").state == "unchanged"
    assert reads.data_ranges(project.root / "models/code/adapter_model.safetensors") == []


# --- changes ------------------------------------------------------------------------------------------------------


def blocks_of(name):
    return -(-int(np.prod(SHAPES[name])) // 64)


def test_another_factor_makes_its_tensor_alone_anew(project):
    merged(project)
    project.build()
    file = project.root / "models/code/adapter_model.safetensors"
    edit_tensor(file, f"{PREFIX}{Q}.lora_B.weight", 3, 2.0)
    report = project.build_one("m")
    assert report.blocks["computed"] == blocks_of(QW)
    base = wide(project, "base")
    check(project, base | {name: base[name] + delta for name, delta in deltas(read_safetensors(file)).items()})


def test_another_alpha_makes_the_tensors_that_it_scales_anew(project):
    merged(project)
    project.build()
    (before,) = (s.digest for s in read_lock(project.lock).sources if s.name == "code")
    add_adapter(project, "code", CODE, alpha_pattern={"layers.0.q": 5})
    assert project.open().status().outputs["m"].reasons == ("source `code` changed on disk, or was not read before",)
    report = project.build_one("m")
    assert report.blocks["computed"] == blocks_of(QW)
    base = wide(project, "base")
    check(project, base | {QW: base[QW] + delta_of(CODE, Q, 2.5), KW: base[KW] + deltas()[KW]})
    (after,) = (s.digest for s in read_lock(project.lock).sources if s.name == "code")
    assert after != before


def test_an_alpha_edited_in_place_is_seen(project):
    """The weights' file stays what it is: nothing of it is hashed again, and yet the source is another."""
    merged(project)
    project.build()
    path = project.root / "models/code/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 4}))
    (reason,) = project.open().status().outputs["m"].reasons
    assert reason.startswith("source `code` has other content: b3:")
    with pytest.raises(MergepipeError) as caught:
        project.build(locked=True)
    assert caught.value.exit_status == 3
    project.build()
    base = wide(project, "base")
    check(project, base | {name: base[name] + delta for name, delta in deltas(scaling=2.0).items()})


def test_settings_of_the_training_change_nothing(project):
    merged(project)
    project.build()
    path = project.root / "models/code/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.9, "inference_mode": True}))
    assert project.build_one("m").state == "unchanged"


def test_another_block_of_what_is_below_makes_that_block_anew(project):
    merged(project, operator="passthrough", base=None)
    project.build()
    edit_tensor(project.source_file("base"), QW, 70, 3.0)
    report = project.build_one("m")
    assert report.blocks["computed"] == 1
    base = wide(project, "base")
    check(project, base | {name: base[name] + delta for name, delta in deltas().items()})


# --- records and side files ---------------------------------------------------------------------------------------


def test_the_lock_says_what_an_adapter_is_on(project):
    merged(project, base="other")
    project.build()
    found = {source.name: source for source in read_lock(project.lock).sources}
    assert found["code"].location == {"path": "models/code", "on": "base"}
    assert (found["code"].tensors, found["code"].bytes) == (4, factor_bytes())
    assert "base" in found, "though no output names it"
    assert project.build(locked=True).lock_changed is False


def test_the_manifest_lists_the_factors_and_what_they_are_added_to(project):
    merged(project, operator="passthrough", base=None)
    project.build()
    (tensor,) = (tensor for tensor in project.manifest("m").tensors if tensor.name == QW)
    assert [found.source for found in tensor.inputs] == ["code", "code", "base"]


def test_config_and_tokenizer_are_of_what_is_below(project):
    merged(project, operator="passthrough", base=None)
    project.build()
    assert json.loads((project.folder("m") / "config.json").read_text())["model_type"] == "tiny"
    assert (project.folder("m") / "tokenizer.json").read_text() == "base"


def test_an_adapter_with_a_tokenizer_brings_it_where_it_defines_the_output(project):
    (project.root / "models/base/generation_config.json").write_text("{}")
    (project.root / "models/base/merges.txt").write_text("of the base")
    (project.root / "models/code/tokenizer.json").write_text("code")
    merged(project, operator="passthrough", base=None)
    project.build()
    files = {path.name for path in project.folder("m").iterdir()}
    assert (project.folder("m") / "tokenizer.json").read_text() == "code"
    assert "generation_config.json" in files
    assert "merges.txt" not in files, "a tokenizer is taken whole"
    merged(project)
    project.build()
    assert (project.folder("m") / "tokenizer.json").read_text() == "base"
    merged(project, write={"tokenizer": "code"})
    project.build()
    assert (project.folder("m") / "tokenizer.json").read_text() == "code"


def test_plan_shows_the_adapter(project):
    merged(project)
    result = run_mergepipe(["plan"], project.root)
    assert "code: an adapter on `base`: adds to 2 of 5 tensors" in result.stdout
    planned = json.loads(run_mergepipe(["plan", "--json"], project.root).stdout)["outputs"]["m"]
    assert planned["expert_bytes"]["full"] == factor_bytes()
    planned = project.open().plan().outputs["m"].experts
    assert {name: expert.planned for name, expert in planned.items()} == {"code": factor_bytes()}


# --- errors -------------------------------------------------------------------------------------------------------


def refused(project):
    result = run_mergepipe(["build"], project.root)
    assert (result.code, project.folder("m").exists()) == (2, False)
    return result.stderr


def test_an_adapter_without_on_is_an_error_with_a_hint(project):
    merged(project)
    project.adapters.clear()
    project.save()
    stderr = refused(project)
    assert "source `code`: `models/code` is a LoRA adapter" in stderr
    assert 'on = "..."' in stderr


def test_on_for_a_whole_checkpoint_is_an_error(project):
    merged(project, ["other"])
    project.adapters["other"] = "base"
    project.save()
    assert "source `other`: `models/other` is no LoRA adapter" in refused(project)


def test_what_cannot_be_read_below_is_the_one_error(project):
    merged(project, base="other")
    shutil.rmtree(project.root / "models/base")
    stderr = refused(project)
    assert stderr.count("error:") == 1
    assert "source `base`" in stderr


def test_a_factor_that_is_not_finite_names_tensor_and_source(project):
    bad = {name: array.copy() for name, array in CODE.items()}
    bad[f"{PREFIX}{Q}.lora_A.weight"][1, 5] = np.nan
    write_safetensors(project.root / "models/code/adapter_model.safetensors", bad)
    merged(project)
    messages = Messages()
    with pytest.raises(MergepipeError) as caught:
        project.build(reporter=messages)
    assert f"`{QW}`" in caught.value.message
    assert "`code`" in caught.value.message
