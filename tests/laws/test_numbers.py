"""Outputs equal an independent float32 evaluation bit for bit, whatever the dtypes, shapes, parameters and rules."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import as_dtype, random_tensors
from support.projects import SmallProject
from support.quick import examples
from support.reference import parameters

from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry

DTYPES = ("BF16", "F16", "F32", "F64")
WRITTEN = (None, "bfloat16", "float16", "float32", "float64")
SHAPES = {
    "model.embed_tokens.weight": (10, 12),
    "model.layers.0.mlp.weight": (9, 16),
    "model.layers.0.norm.weight": (13,),
    "model.layers.1.mlp.weight": (9, 16),
    "model.layers.1.norm.weight": (13,),
    "model.scale": (),
    "model.one": (1, 1),
    "model.deep": (2, 3, 4, 5),
    "model.empty": (0, 7),
    "model.none": (0,),
}


def family(project, dtypes, *, scale=1.0):
    """Add a base and one expert for each further dtype: base plus a tenth of noise, some blocks as in the base."""
    base = random_tensors(0, SHAPES, "float64", scale=scale)
    for number, dtype in enumerate(dtypes):
        noise = random_tensors(number, SHAPES, "float64", scale=0.1 * scale)
        tensors = {name: base[name] + noise[name] for name in SHAPES} if number else dict(base)
        if number:
            tensors["model.layers.0.mlp.weight"][:4] = base["model.layers.0.mlp.weight"][:4]
        name = f"e{number}" if number else "base"
        project.add_source(name, {name: array.astype(as_dtype(dtype)) for name, array in tensors.items()})
    return project


def in_every_dtype(project, recipe):
    """Declare one output for each dtype that may be written, build them, and check each."""
    for written in WRITTEN:
        project.set_output(f"m-{written}", recipe | ({"write": {"dtype": written}} if written else {}))
    project.build()
    for name in project.outputs:
        project.check(name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_the_reference_in_every_pair_of_dtypes(tmp_path, dtype):
    experts = [{"source": "e1", "weight": 0.3}, {"source": "e2", "weight": 0.9}]
    recipe = {"operator": "linear", "base": "base", "experts": experts}
    in_every_dtype(family(SmallProject(tmp_path), [dtype, dtype, dtype]), recipe)


@pytest.mark.parametrize("dtype", DTYPES)
def test_task_arithmetic_equals_the_reference_in_every_pair_of_dtypes(tmp_path, dtype):
    experts = [{"source": "e1", "weight": 0.3}, {"source": "e2", "weight": -0.9}]
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": experts, "params": {"lambda": 0.7}}
    in_every_dtype(family(SmallProject(tmp_path), [dtype, dtype, dtype]), recipe)


@pytest.mark.parametrize("expert", ["e1", {"source": "e1", "scale": -0.3}], ids=["copied", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_passthrough_equals_the_reference_in_every_pair_of_dtypes(tmp_path, dtype, expert):
    in_every_dtype(family(SmallProject(tmp_path), [dtype, dtype]), {"operator": "passthrough", "experts": [expert]})


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("dtypes", [("BF16", "F16", "F32"), ("F32", "BF16", "BF16"), ("F16", "F64", "BF16")])
def test_sources_of_different_dtypes_merge_in_the_widest_arithmetic_that_one_of_them_needs(tmp_path, operator, dtypes):
    project = family(SmallProject(tmp_path), dtypes)
    project.set_output("m", {"operator": operator, "base": "base", "experts": ["e1", {"source": "e2", "weight": 1.7}]})
    project.build()
    project.check("m")


def test_rules_and_gradients_reach_exactly_the_tensors_that_they_match(tmp_path):
    project = family(SmallProject(tmp_path), ["F32"] * 3)
    recipe = {
        "operator": "task_arithmetic",
        "base": "base",
        "experts": [{"source": "e1", "weight": [0.1, 0.9]}, "e2"],
        "params": {"lambda": [1.0, 0.5], "weight": 0.4},
        "rules": [
            {"match": "*.norm.*", "params": {"normalize": True}, "experts": {"e2": {"weight": -0.2}}},
            {"layers": "1..2", "params": {"lambda": 0.25}},
            {"match": ["model.scale", "*.deep"], "params": {"weight": 2.0}},
        ],
    }
    project.set_output("m", recipe)
    project.build()
    project.check("m")


def test_a_base_among_the_experts_is_averaged_by_linear_and_no_delta_for_task_arithmetic(tmp_path):
    project = family(SmallProject(tmp_path), ["F32"] * 2)
    experts = [{"source": "base", "weight": 0.25}, {"source": "e1", "weight": 0.5}]
    project.set_output("average", {"operator": "linear", "base": "base", "experts": experts})
    project.set_output("sum", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    normal = {"operator": "task_arithmetic", "base": "base", "experts": experts, "params": {"normalize": True}}
    project.set_output("mean", normal)
    project.build()
    for name in project.outputs:
        project.check(name)


def test_the_base_among_the_experts_and_an_expert_that_lacks_a_tensor_are_different_things(tmp_path):
    """One counts in the divisor and the other does not, although neither is read."""
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, {"x": (8,), "y": (2,)}))
    project.add_source("e1", random_tensors(1, {"x": (8,), "y": (2,)}))
    project.add_source("lacking", random_tensors(2, {"y": (2,)}))
    for name, other in (("with-base", "base"), ("with-lacking", "lacking")):
        experts = [{"source": other, "weight": 0.5}, {"source": "e1", "weight": 0.5}]
        params = {"normalize": True, "missing": "base"}
        project.set_output(name, {"operator": "task_arithmetic", "base": "base", "experts": experts, "params": params})
    for name in project.outputs:
        project.build(name)
        project.check(name)


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_an_expert_that_lacks_a_tensor_stands_for_the_base_where_that_is_asked_for(tmp_path, operator, dtype):
    project = family(SmallProject(tmp_path), [dtype, "F32", "F32"])
    tensors = random_tensors(7, SHAPES, "float32")
    del tensors["model.layers.0.mlp.weight"], tensors["model.scale"]
    project.add_source("e1", tensors)
    experts = [{"source": "e1", "weight": 0.4}, {"source": "e2", "weight": 0.3}]
    recipe = {"operator": operator, "base": "base", "experts": experts, "params": {"missing": "base"}}
    project.set_output("m", recipe | {"write": {"dtype": "float64"}})
    project.build()
    project.check("m")


def test_an_expert_of_weight_zero_has_no_part_in_the_arithmetic_not_even_by_its_dtype(tmp_path):
    project = family(SmallProject(tmp_path), ["F32", "F32", "F64"])
    experts = [{"source": "e1", "weight": 0.7}, {"source": "e2", "weight": 0.0}, {"source": "base", "weight": 0.6}]
    project.set_output("m", {"operator": "linear", "experts": experts, "write": {"dtype": "float64"}})
    project.build()
    project.check("m")


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("rows", [(8, 8), (8, 11), (11, 8), (13, 12), (1, 10), (10, 4)])
def test_common_rows_are_merged_and_the_bases_other_rows_are_kept(tmp_path, operator, rows):
    project = SmallProject(tmp_path, Geometry(block_elements=12))  # three rows of four in a block
    names = ("model.embed_tokens.weight", "lm_head.weight")
    project.add_source("base", random_tensors(0, dict.fromkeys(names, (10, 4)), "bfloat16"))
    for number, count in enumerate(rows, 1):
        project.add_source(f"e{number}", random_tensors(number, dict.fromkeys(names, (count, 4)), "float32"))
    experts = [{"source": "e1", "weight": 0.6}, {"source": "e2", "weight": 0.4}]
    recipe = {"operator": operator, "base": "base", "experts": experts, "params": {"rows": "common"}}
    project.set_output("own", recipe)
    project.set_output("wide", recipe | {"write": {"dtype": "float32"}})
    project.build()
    project.check("own")
    project.check("wide")


@pytest.mark.parametrize("rows", [8, 10, 13])
def test_a_single_expert_with_other_rows_is_copied_as_far_as_its_rows_go(tmp_path, rows):
    project = SmallProject(tmp_path, Geometry(block_elements=12))
    project.add_source("base", random_tensors(0, {"wte.weight": (10, 4)}))
    project.add_source("e1", random_tensors(1, {"wte.weight": (rows, 4)}))
    recipe = {"operator": "linear", "base": "base", "experts": ["e1"], "params": {"rows": "common"}}
    project.set_output("m", recipe)
    report = project.build_one("m")
    project.check("m")
    assert report.blocks["computed"] == (1 if rows == 8 else 0)  # only a block of two origins is put together


def test_blocks_jobs_and_tiles_of_the_default_sizes_give_the_same_numbers(tmp_path):
    project = SmallProject(tmp_path, GEOMETRY_1)
    shapes = {"model.layers.0.w": (2100, 700), "model.layers.0.v": (600_001,), "model.layers.0.wide": (2, 300_000)}
    for seed, (name, dtype) in enumerate([("base", "bfloat16"), ("e1", "bfloat16"), ("e2", "float32")]):
        project.add_source(name, random_tensors(seed, shapes, dtype))
    experts = [{"source": "e1", "weight": 0.3}, {"source": "e2", "weight": 0.8}]
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": experts})
    report = project.build_one("m")
    assert report.blocks["total"] == 6 + 3 + 2
    project.check("m", zero_signs=False)


def test_passthrough_of_a_larger_vocabulary_keeps_all_of_its_own_rows(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("base", random_tensors(0, {"wte.weight": (10, 4)}))
    project.add_source("e1", random_tensors(1, {"wte.weight": (13, 4)}))
    project.set_output("m", {"operator": "passthrough", "base": "base", "experts": ["e1"]})
    project.build()
    assert project.tensors("m")["wte.weight"].shape == (13, 4)
    project.check("m")


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "passthrough"])
def test_tensors_that_cannot_be_merged_are_copied_byte_for_byte(tmp_path, operator):
    buffers = {
        "ids": np.arange(300).reshape(3, 100),
        "mask": np.arange(70) % 3 == 0,
        "bytes": np.arange(0, 200, dtype=np.uint8),
        "fp8": np.linspace(-4, 4, 90).astype(ml_dtypes.float8_e4m3fn).reshape(9, 10),
        "other8": np.linspace(-4, 4, 90).astype(ml_dtypes.float8_e5m2),
        "counter": np.array(7, np.int32),
        "complex": np.ones((3,), np.complex64),
        "no_ids": np.zeros((0,), np.int64),
    }
    project = SmallProject(tmp_path)
    for number, name in enumerate(("base", "e1")):
        project.add_source(name, {**buffers, "w": np.float32([number + 1, 2])})
    recipe = {"operator": operator, "base": "base", "experts": ["e1"], "write": {"dtype": "float16"}}
    project.set_output("m", recipe)
    report = project.build_one("m")
    project.check("m")
    assert report.blocks["computed"] == 1
    assert report.expert_bytes["full"] == 8


def test_four_bit_tensors_are_copied_byte_for_byte(tmp_path):
    raw = ("F4", (6, 10), bytes(range(30)))
    project = SmallProject(tmp_path, Geometry(block_elements=8))
    project.add_source("e1", {"packed": raw})
    project.add_source("e2", {"packed": raw})
    project.set_output("m", {"operator": "linear", "experts": ["e1", "e2"]})
    report = project.build_one("m")
    data = (project.folder("m") / "model.safetensors").read_bytes()
    assert data.endswith(raw[2])
    assert report.blocks == {"total": 4, "computed": 0, "cached": 0, "copied": 4}


# --- properties ---------------------------------------------------------------------------------------------------

weights = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-3, 3.0]),
    st.floats(-2, 2, allow_nan=False, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6),
)
gradients = st.one_of(weights, st.lists(weights, min_size=1, max_size=3))
shapes = st.one_of(
    st.tuples(st.integers(0, 9), st.integers(0, 17)),
    st.tuples(st.integers(0, 40)),
    st.just(()),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
)


@st.composite
def recipes(draw):
    """Draw (shapes, dtypes of base and experts, recipe, seed, block elements)."""
    count = draw(st.integers(1, 4))
    operator = draw(st.sampled_from(["linear", "task_arithmetic", "task_arithmetic", "passthrough"]))
    count = 1 if operator == "passthrough" else count
    key = "scale" if operator == "passthrough" else "weight"
    values = draw(st.lists(gradients, min_size=count, max_size=count))
    experts = [{"source": f"e{number}", key: value} for number, value in enumerate(values)]
    recipe = {"operator": operator, "base": "base", "experts": experts, "params": {"non_finite": "allow"}}
    if operator == "task_arithmetic":
        recipe["params"]["lambda"] = draw(gradients)
    if operator != "passthrough":
        recipe["params"]["normalize"] = draw(st.booleans())
    if draw(st.booleans()):
        special = {f"e{draw(st.integers(0, count - 1))}": {key: draw(weights)}}
        recipe["rules"] = [{"match": draw(st.sampled_from(["*0.w", "t.*", "*"])), "experts": special}]
    written = draw(st.sampled_from(WRITTEN))
    if written:
        recipe["write"] = {"dtype": written}
    names = ("t.layers.0.w", "t.layers.1.w", "t.layers.2.w", "t.outer")
    return (
        {name: draw(shapes) for name in names},
        draw(st.lists(st.sampled_from(DTYPES), min_size=count + 1, max_size=count + 1)),
        recipe,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([1, 7, 16, 64])),
    )


def safe_to_normalise(recipe, names):
    """Return whether no tensor's weights, by whose sum it is divided, sum to nearly zero."""
    for name in names:
        outer, columns = parameters(recipe, recipe["experts"], name, 3)
        values = [column["weight"] for column in columns if outer.get("normalize")]
        if values and abs(sum(values)) <= 1e-3 * sum(map(abs, values)):
            return False
    return True


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(drawn=recipes().filter(lambda drawn: safe_to_normalise(drawn[2], drawn[0])))
def test_any_recipe_over_any_dtypes_equals_the_reference(tmp_path_factory, drawn):
    shapes, dtypes, recipe, seed, block = drawn
    generator = np.random.default_rng(seed)
    project = SmallProject(tmp_path_factory.mktemp("project"), Geometry(block_elements=block))
    base = {name: np.asarray(generator.standard_normal(shape)) for name, shape in shapes.items()}
    for number, dtype in enumerate(dtypes):
        tensors = {}
        for name, array in base.items():
            moved = array + 0.1 * generator.standard_normal(array.shape)
            equal = generator.random(array.shape[:1]) < 0.4 if array.ndim else np.asarray(False)
            same = equal.reshape(equal.shape + (1,) * (array.ndim - 1)) if array.ndim else equal
            tensors[name] = np.where(same | (number == 0), array, moved).astype(as_dtype(dtype))
        project.add_source(f"e{number - 1}" if number else "base", tensors)
    project.set_output("m", recipe)
    project.build()
    # A delta of zero contributes nothing, and a zero that it would have added may have the other sign.
    project.check("m", zero_signs=recipe["operator"] != "task_arithmetic")
