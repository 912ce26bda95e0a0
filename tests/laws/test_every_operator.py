"""Laws 1, 2, 5 and 6 for every operator: the same bits however the work is cut, and only what changed is done again."""

import shutil
import sqlite3

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import as_dtype, random_tensors
from support.every_operator import QUICK, RECIPES
from support.projects import TINY, SmallProject
from support.quick import every, examples
from support.reference import assert_same_tensors

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.engine import job
from mergepipe.errors import OperatorError
from mergepipe.operators.registry import operators

SHAPES = {
    "model.embed_tokens.weight": (30, 8),
    "model.layers.0.attn.weight": (12, 16),
    "model.layers.0.conv.weight": (6, 4, 3),
    "model.layers.1.attn.weight": (12, 16),
    "model.layers.1.mlp.weight": (5, 100),
    "model.norm.weight": (75,),
    "model.scale": (),
    "model.empty": (0, 4),
}
NAMES = every(sorted(RECIPES))
# For what takes several builds of each recipe: one for each way in which the blocks of a tensor hang together.
APART = every(sorted(RECIPES), ["linear", "slerp", "nuslerp-columns", "ties", "della", "sce", "arcee_fusion"])


def family(dtype="bfloat16", *, seed=0):
    """Return the tensors of a base and three experts: some blocks equal the base's, many magnitudes are equal."""
    rng = np.random.default_rng(seed)
    base = random_tensors(seed, SHAPES)
    found = {"base": base}
    for number in (1, 2, 3):
        expert = {}
        for name, array in base.items():
            delta = rng.integers(-6, 7, array.shape) / 16 * (rng.random(array.shape) < 0.8)
            expert[name] = np.asarray(array.astype(np.float32) + delta, np.float32)
        expert["model.layers.0.attn.weight"][:4] = base["model.layers.0.attn.weight"][:4]
        found[f"e{number}"] = expert
    # Values of few bits are the same in every dtype, so that the dtype of the files cannot matter.
    return {
        source: {n: np.round(np.asarray(a, np.float32) * 16).clip(-100, 100).__truediv__(16).astype(as_dtype(dtype))
                 for n, a in tensors.items()}
        for source, tensors in found.items()
    }  # fmt: skip


def make(root, name, *, dtype="bfloat16", shards=1, geometry=TINY, sources=None):
    project = SmallProject(root, geometry)
    project.add_sources(sources or family(dtype), shards=shards)
    project.set_output("m", RECIPES[name] | {"write": {"dtype": "float32"}})
    return project


def same(project, other):
    """Assert equal bits; the sign of a zero may depend on which blocks were found to equal the base's."""
    assert_same_tensors(project.tensors("m"), other.tensors("m"), zero_signs=False)


def result(project):
    return project.raw("m"), project.lock.read_text()


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Return a function from a recipe's name to its project, built in a fresh cache, and what came out."""
    made = {}

    def build(name):
        if name not in made:
            project = make(tmp_path_factory.mktemp("clean") / "project", name)
            project.build()
            made[name] = project, result(project)
        return made[name]

    return build


def test_every_operator_has_a_recipe_here():
    assert set(RECIPES) > QUICK
    assert {recipe["operator"] for recipe in RECIPES.values()} == set(operators())


@pytest.mark.parametrize("name", NAMES)
def test_the_merge_does_something(clean, name):
    project, (raw, _) = clean(name)
    sources = [project.root / path for path in project.sources.values()]
    assert len(sources) == 4
    changed = [tensor for tensor in raw if "weight" in tensor and raw[tensor] != raw["model.empty"]]
    assert len(changed) == 6


@pytest.mark.parametrize("name", APART)
def test_threads_memory_and_sharding_do_not_matter(tmp_path, clean, name):
    _, want = clean(name)
    for number, (workers, memory, shards) in enumerate([(1, None, 3), (5, 1, 1), (2, 5000, 2)]):
        project = make(tmp_path / str(number), name, shards=shards)
        project.build(workers=workers, memory=memory)
        assert result(project) == want


@pytest.mark.parametrize("name", APART)
def test_the_size_of_blocks_does_not_matter_to_the_output(tmp_path, clean, name):
    first, _ = clean(name)
    for elements in (1, 7, 100, 2**18):
        project = make(tmp_path / str(elements), name, geometry=Geometry(block_elements=elements))
        project.build()
        same(project, first)


@pytest.mark.parametrize("name", APART)
def test_the_dtype_of_the_files_does_not_matter_where_the_values_are_the_same(tmp_path, clean, name):
    first, _ = clean(name)
    for dtype in ("float32", "float16"):
        project = make(tmp_path / dtype, name, dtype=dtype)
        project.build()
        same(project, first)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_build_reads_no_weights_and_writes_nothing(clean, name):
    project, want = clean(name)
    report = project.build_one("m")
    assert (report.state, report.expert_bytes["read"], report.base_bytes_read, report.index_bytes_read) == (
        "unchanged",
        0,
        0,
        0,
    )
    assert result(project) == want


@pytest.mark.parametrize("name", NAMES)
def test_the_first_build_reads_each_byte_once(tmp_path, name):
    project = make(tmp_path, name)
    report = project.build_one("m")
    used = {e if isinstance(e, str) else e["source"] for e in project.outputs["m"]["experts"]}
    used |= {project.outputs["m"]["base"]} if "base" in project.outputs["m"] else set()
    stored = sum(array.nbytes for source, tensors in family().items() if source in used for array in tensors.values())
    assert report.expert_bytes["read"] + report.base_bytes_read + report.index_bytes_read == stored


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_any_change_of_an_expert_the_output_is_that_of_a_clean_build(tmp_path_factory, name, data):
    root = tmp_path_factory.mktemp("project")
    sources = family()
    project = make(root / "one", name, sources=sources)
    project.build()
    for _ in range(data.draw(st.integers(1, 2))):
        tensor = data.draw(st.sampled_from([n for n, a in sources["e1"].items() if a.size]))
        source = data.draw(st.sampled_from(["e1", "base"] if "base" in project.outputs["m"] else ["e1"]))
        array = np.array(sources[source][tensor])
        array.reshape(-1)[data.draw(st.integers(0, array.size - 1))] += 1
        sources[source] = sources[source] | {tensor: array}
        project.add_source(source, sources[source])
        report = project.build_one("m")
        assert report.state == "built"
    other = make(root / "two", name, sources=sources)
    other.build()
    assert result(project) == result(other)
    shutil.rmtree(root)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_tensor_leaves_the_others_alone(tmp_path, name):
    sources = family()
    project = make(tmp_path, name, sources=sources)
    blocks = project.build_one("m").blocks["total"]
    array = sources["e1"]["model.layers.1.mlp.weight"].copy()
    array[1, 7] += 1
    project.add_source("e1", sources["e1"] | {"model.layers.1.mlp.weight": array})
    report = project.build_one("m")
    # The row is a block of its own, and the tensor has five; a reduction may reach all of them.
    assert 1 <= report.blocks["computed"] + report.blocks["copied"] <= 5
    assert report.blocks["cached"] >= blocks - 5




@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("slerp", {"t": 0.4}),
        ("ties", {"normalize": True, "rescale": "l1"}),
        ("ramplus_tl", {"epsilon": 0.2, "alpha": 0.3}),
    ],
)
def test_a_changed_parameter_takes_no_statistics_again(tmp_path, name, params, monkeypatch):
    project = make(tmp_path, name)
    project.build()
    monkeypatch.setattr("mergepipe.engine.job.measure_block", None)
    project.outputs["m"] = project.outputs["m"] | {"params": params}
    project.save()
    report = project.build_one("m")
    assert report.state == "built"
    assert report.index_bytes_read == 0


def test_a_changed_density_takes_no_statistics_again(tmp_path, monkeypatch):
    project = make(tmp_path, "ties")
    project.outputs["m"]["params"] = {"rescale": False}
    project.save()
    project.build()
    monkeypatch.setattr("mergepipe.engine.job.measure_block", None)
    for expert in project.outputs["m"]["experts"]:
        expert["density"] = 0.45
    project.save()
    report = project.build_one("m")
    assert report.state == "built"
    assert report.index_bytes_read == 0


@pytest.mark.parametrize("name", ["slerp", "ties", "sce", "multislerp", "model_stock"])
def test_a_changed_block_is_measured_alone(tmp_path, name, monkeypatch):
    sources = family()
    project = make(tmp_path, name, sources=sources)
    project.build()
    array = sources["e1"]["model.layers.1.mlp.weight"].copy()
    array[1, 7] += 1
    project.add_source("e1", sources["e1"] | {"model.layers.1.mlp.weight": array})
    measured = []


    original = job.measure_block

    def recording(recipe, statistic, block, *arguments):
        measured.append((recipe.tensor.name, statistic.name, block))
        return original(recipe, statistic, block, *arguments)

    monkeypatch.setattr("mergepipe.engine.job.measure_block", recording)
    project.build()
    first = measured[0][1]
    assert {(tensor, block) for tensor, kind, block in measured if kind == first} == {("model.layers.1.mlp.weight", 1)}


@pytest.mark.parametrize("name", ["nuslerp", "karcher", "linear"])
def test_without_a_base_common_rows_are_merged_as_if_there_were_no_others(tmp_path, name):
    rng = np.random.default_rng(0)
    weight = "model.embed_tokens.weight"
    long, short = (rng.standard_normal((rows, 16)).astype(np.float32) for rows in (22, 14))
    project = SmallProject(tmp_path)
    for source, array in {"long": long, "cut": long[:14], "short": short}.items():
        project.add_source(source, {weight: array})
    project.set_output("m", {"operator": name, "experts": ["long", "short"], "params": {"rows": "common"}})
    project.set_output("cut-m", {"operator": name, "experts": ["cut", "short"]})
    project.build()
    merged = project.tensors("m")[weight]
    np.testing.assert_array_equal(merged[:14], project.tensors("cut-m")[weight])
    np.testing.assert_array_equal(merged[14:], long[14:])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_in_an_input_stop_the_build_wherever_they_are(tmp_path, name, value):
    for number, element in enumerate([(0, 3), (2, 50), (4, 99)]):
        sources = family("float32")
        sources["e1"]["model.layers.1.mlp.weight"][element] = value
        project = make(tmp_path / str(number), name, sources=sources)
        told = r"`model\.layers\.1\.mlp\.weight` of source `e1` holds NaN or infinity"
        with pytest.raises(OperatorError, match=told):
            project.build()
        assert not project.folder("m").exists()


@pytest.mark.parametrize("name", ["ties", "sce", "dare_ties"])
def test_many_experts_keep_their_statistics_beside_one_another(tmp_path, name, monkeypatch):
    sources = family()
    rng = np.random.default_rng(1)
    for number in range(4, 10):
        sources[f"e{number}"] = {n: np.asarray(a + rng.integers(-3, 4, a.shape) / 16).astype(a.dtype)
                                 for n, a in sources["base"].items()}  # fmt: skip
    project = SmallProject(tmp_path)
    for source, tensors in sources.items():
        project.add_source(source, tensors)
    experts = [{"source": f"e{n}"} | ({} if name == "sce" else {"density": 0.4}) for n in range(1, 10)]
    params = {"select_topk": 0.4} if name == "sce" else {"lambda": 0.5, "rescale": "l1"}
    project.set_output("m", {"operator": name, "base": "base", "experts": experts, "params": params})
    project.build()
    measured = []
    original = job.measure_block

    def recording(recipe, statistic, block, *arguments):
        measured.append((recipe.tensor.name, statistic.slots, block))
        return original(recipe, statistic, block, *arguments)

    monkeypatch.setattr("mergepipe.engine.job.measure_block", recording)
    if name != "sce":
        project.outputs["m"]["params"] = params | {"lambda": 0.7}
        project.save()
        assert project.build_one("m").state == "built"
        assert measured == []
    array = sources["e5"]["model.layers.1.mlp.weight"].copy()
    array[1, 7] += 1
    project.add_source("e5", sources["e5"] | {"model.layers.1.mlp.weight": array})
    project.build()
    assert {tensor for tensor, _, _ in measured} == {"model.layers.1.mlp.weight"}
    if name == "ties":  # thresholds of the other experts stay, and so do their sums
        assert {slots for _, slots, _ in measured} == {(0, 5)}


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_sums_over_masks_belong_to_the_place_of_a_block_not_to_its_number(tmp_path, name):
    rng = np.random.default_rng(0)
    recipe = RECIPES[name] | {"params": {"rescale": "l1"}}
    # Blocks of 60, 60, 48 and of 64, 64, 48 elements: the last ones are equal, and lie in different places.
    tall = {source: rng.standard_normal(168).astype(np.float32) for source in ("base", "e1", "e2", "e3")}
    wide = {source: np.concatenate([rng.standard_normal(128), array[120:]]).astype(np.float32)
            for source, array in tall.items()}  # fmt: skip

    def build(root, values, shape):
        project = SmallProject(root)
        for source, array in values.items():
            project.add_source(source, {"w": array.reshape(shape)})
        project.set_output("m", recipe)
        project.build()
        return project.tensors("m")["w"]

    build(tmp_path / "one", tall, (14, 12))
    want = build(tmp_path / "clean", wide, (11, 16))
    np.testing.assert_array_equal(build(tmp_path / "one", wide, (11, 16)), want)


@pytest.mark.parametrize("name", every(sorted(RECIPES)))
def test_shorter_tiles_where_memory_is_limited_change_no_bit(tmp_path, name):
    rng = np.random.default_rng(7)
    shapes = {"model.layers.0.mlp.weight": (301, 500), "model.long": (2, 70_001)}
    sources = {"base": {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}}
    for number in (1, 2, 3):
        sources[f"e{number}"] = {
            n: (a + rng.standard_normal(a.shape).astype(np.float32) * 0.01).astype(np.float32)
            for n, a in sources["base"].items()
        }
    builds = []
    for number, memory in enumerate((None, 256 << 20)):
        project = make(tmp_path / str(number), name, sources=sources, geometry=Geometry(block_elements=1 << 17))
        project.build(memory=memory)
        catalog = sqlite3.connect(project.cache / "catalog.db")
        rows = catalog.execute("SELECT * FROM statistics ORDER BY 1, 2, 3").fetchall()
        catalog.close()
        builds.append((project.raw("m"), rows))
    assert builds[0] == builds[1]
