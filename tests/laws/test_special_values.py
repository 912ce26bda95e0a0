"""Special values: double rounding, subnormals, signed zeros, overflow, NaN and infinity."""

import ml_dtypes
import numpy as np
import pytest
from support.projects import SmallProject
from support.reference import same_bits

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.errors import OperatorError, PlanError


def linear_of(tmp_path, *tensors, weights=None, **recipe):
    """Return a project that merges tensors `x` of sources e0, e1, ... linearly."""
    project = SmallProject(tmp_path)
    for number, tensor in enumerate(tensors):
        project.add_source(f"e{number}", {"x": tensor})
    experts = [{"source": f"e{n}", "weight": w} for n, w in enumerate(weights or [1.0] * len(tensors))]
    project.set_output("m", {"operator": "linear", "experts": experts} | recipe)
    return project


@pytest.mark.parametrize("written", ["bfloat16", "float16", "float32"])
def test_float64_results_are_rounded_once(tmp_path, written):
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}[written]
    half = 2.0**-bits
    values = [1 + half + 2.0**-45, 1 + half - 2.0**-45, 1 + half, 1 + 3 * half, 1 + 3 * half - 2.0**-45]
    values += [-value for value in values] + [value * 2.0**-9 for value in values]
    project = linear_of(tmp_path, np.array(values), write={"dtype": written})
    project.build()
    project.check("m")


def test_rows_beyond_the_common_ones_are_rounded_once_as_well(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("base", {"wte.weight": np.full((4, 2), 1 + 2.0**-8 + 2.0**-40)})
    project.add_source("e", {"wte.weight": np.ones((2, 2), np.float32)})
    recipe = {"operator": "linear", "base": "base", "experts": ["e"], "params": {"rows": "common"}}
    project.set_output("m", recipe | {"write": {"dtype": "bfloat16"}})
    project.build()
    project.check("m")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_subnormal_inputs_and_results_keep_their_bits(tmp_path, dtype):
    smallest = np.arange(-40, 40).astype(np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint32)
    values = smallest[smallest < 1000].view(dtype)
    project = linear_of(tmp_path, values, np.flip(values).copy(), weights=[0.3, 0.6], params={"normalize": False})
    project.build()
    assert np.any(project.tensors("m")["x"] != 0)
    project.check("m")


def test_the_sign_of_a_zero_follows_the_arithmetic_of_a_linear_merge(tmp_path):
    zeros = np.float32([0.0, -0.0, 0.0, -0.0])
    project = linear_of(tmp_path, zeros, np.float32([0.0, 0.0, -0.0, -0.0]), weights=[0.5, 0.5])
    project.build()
    assert np.signbit(project.tensors("m")["x"]).tolist() == [False, False, False, True]
    project.check("m")


@pytest.mark.parametrize("operator", ["linear", "passthrough"])
def test_what_is_copied_keeps_every_bit(tmp_path, operator):
    bits = np.arange(0, 2**16, dtype=np.uint16)
    values = bits[np.isfinite(bits.view(np.float16))].view(np.float16)
    project = linear_of(tmp_path, values, operator=operator, experts=["e0"])
    report = project.build_one("m")
    assert report.blocks["copied"] == report.blocks["total"] > 1
    assert project.raw("m")["x"][2] == values.tobytes()


def test_a_delta_of_zero_gives_the_base_bit_for_bit(tmp_path):
    values = np.float32([-0.0, 0.0, 1e-45, -3.5, 2.0**-149])
    project = SmallProject(tmp_path)
    for name in ("base", "e"):
        project.add_source(name, {"x": values, "y": np.float32([1, 2 if name == "e" else 1])})
    project.set_output(
        "m", {"operator": "task_arithmetic", "base": "base", "experts": [{"source": "e", "weight": 0.1}]}
    )
    project.build()
    assert project.raw("m")["x"][2] == values.tobytes()


def test_the_sign_of_a_zero_never_depends_on_the_cache(tmp_path):
    base, expert = np.float32([-0.0, 0.0, 1, 2]), np.float32([-0.0, 0.0, 1, 3])
    project = SmallProject(tmp_path, Geometry(block_elements=2))
    project.add_source("base", {"x": base, "y": base})
    project.add_source("e", {"x": expert, "y": expert})
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e"]})
    project.build()
    cold = project.raw("m")
    project.open().cache_prune(max_bytes=0)
    project.add_source("e", {"x": expert, "y": expert + 1})
    project.build()
    project.add_source("e", {"x": expert, "y": expert})
    project.build()
    assert project.raw("m") == cold


@pytest.mark.parametrize(
    ("dtype", "written", "shown"),
    [
        (np.float16, None, "F16"),
        (np.float32, "float16", "F16"),
        (np.float32, None, "F32"),
        (np.float64, "bfloat16", "BF16"),
    ],
)
def test_a_result_too_large_for_its_dtype_is_an_error_that_names_the_tensor(tmp_path, dtype, written, shown):
    largest = np.array([1, np.finfo(dtype).max], dtype)
    recipe = {"write": {"dtype": written}} if written else {}
    project = linear_of(tmp_path, largest, largest, params={"normalize": False}, **recipe)
    with pytest.raises(OperatorError, match=f"tensor `x` of output `m` has values too large for {shown}") as caught:
        project.build()
    assert caught.value.facts["tensor"] == "x"
    assert not project.folder("m").exists()
    assert not project.lock.exists()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 137])
def test_nan_and_infinity_are_errors_that_name_tensor_and_source(tmp_path, dtype, bad, at):
    good, poor = np.ones((20, 10), dtype), np.ones((20, 10), dtype)
    poor.reshape(-1)[at] = bad
    project = linear_of(tmp_path, good, poor, good, weights=[0.2, 0.3, 0.5])
    with pytest.raises(OperatorError, match="tensor `x` of source `e1` holds NaN or infinity") as caught:
        project.build()
    assert (caught.value.facts["tensor"], caught.value.facts["source"]) == ("x", "e1")
    assert not project.folder("m").exists()


@pytest.mark.parametrize("where", ["base", "e"])
def test_nan_in_a_base_or_in_a_copied_block_is_found_as_well(tmp_path, where):
    project = SmallProject(tmp_path)
    for name in ("base", "e"):
        bad = np.nan if name == where else 1.0
        project.add_source(name, {"same": np.float32([1, 2]), "x": np.float32([bad, 2])})
    project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e"]})
    with pytest.raises(OperatorError, match=f"tensor `x` of source `{where}` holds NaN"):
        project.build()
    project.set_output("m", {"operator": "passthrough", "experts": [where]})
    with pytest.raises(OperatorError, match=f"tensor `x` of source `{where}` holds NaN"):
        project.build()


@pytest.mark.parametrize("written", [None, "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("factor", [1.0, -0.5], ids=["alike", "apart"])
def test_slerp_finds_what_is_not_finite_in_all_that_its_result_depends_on(tmp_path, factor, bad, written):
    project = SmallProject(tmp_path)
    good = np.float32(np.arange(200).reshape(20, 10) - 70.5)
    other = np.where(np.arange(200).reshape(20, 10) % 3, good, good * np.float32(factor))
    for where, t, found in [(where, t, {0.0: "base", 1.0: "e"}.get(t)) for where in ("base", "e") for t in (0, 0.3, 1)]:
        poor = (good if where == "base" else other).copy()
        poor[7, 3] = bad
        project.add_source("base", {"x": poor if where == "base" else good})
        project.add_source("e", {"x": poor if where == "e" else other})
        recipe = {"operator": "slerp", "base": "base", "experts": ["e"], "params": {"t": t}}
        project.set_output("m", recipe | ({"write": {"dtype": written}} if written else {}))
        if found in {None, where}:
            with pytest.raises(OperatorError, match=f"tensor `x` of source `{where}` holds NaN or infinity"):
                project.build()
        else:
            project.build()  # the other end is not looked at


def test_the_build_after_a_repaired_source_succeeds(tmp_path):
    project = linear_of(tmp_path, np.float32([1, np.nan, 3]), np.float32([1, 2, 3]))
    for _ in range(2):
        with pytest.raises(OperatorError, match="source `e0`"):
            project.build()
    project.add_source("e0", {"x": np.float32([1, 5, 3])})
    project.build()
    project.check("m")


def test_an_error_in_one_output_publishes_none_and_keeps_the_work_on_the_others(tmp_path):
    project = linear_of(tmp_path, np.float32([[1] * 8] * 20), np.float32([[2] * 8] * 20))
    project.build()
    before = project.raw("m")
    project.set_output("m", {"operator": "linear", "experts": ["e0", {"source": "e1", "weight": 3.0}]})
    project.add_source("bad", {"y": np.float32([np.nan])})
    project.set_output("n", {"operator": "passthrough", "experts": ["bad"]})
    with pytest.raises(OperatorError, match="source `bad`"):
        project.build(workers=1)
    assert project.raw("m") == before
    assert not project.folder("n").exists()
    report = project.build_one("m")
    assert (report.blocks["computed"], report.blocks["cached"]) == (0, 3)
    project.check("m")


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
def test_non_finite_values_pass_through_where_that_is_allowed(tmp_path, operator):
    base = np.float16([1, 2, np.nan, np.inf, -np.inf, 60000, 0])
    expert = np.float16([1, np.nan, 3, 4, np.inf, 60000, -np.inf])
    project = SmallProject(tmp_path)
    project.add_source("base", {"x": base})
    project.add_source("e", {"x": expert})
    experts = ["e", {"source": "base", "weight": 0.5}]
    params = {"non_finite": "allow", "normalize": False}
    project.set_output("m", {"operator": operator, "base": "base", "experts": experts, "params": params})
    project.build()
    project.check("m")


def test_allowing_non_finite_values_is_part_of_what_a_result_is_known_by(tmp_path):
    project = linear_of(tmp_path, np.float32([np.inf, 1]), np.float32([1, 1]), params={"non_finite": "allow"})
    project.build()
    project.set_output("m", project.outputs["m"] | {"params": {"non_finite": "error"}})
    with pytest.raises(OperatorError, match="source `e0` holds NaN or infinity"):
        project.build()
    assert same_bits(project.tensors("m")["x"], np.float32([np.inf, 1]))  # what was there is still there


def test_a_source_of_weight_zero_is_not_read_whatever_it_holds(tmp_path):
    bad = np.float32([np.nan, np.inf])
    project = linear_of(tmp_path, np.float32([1, 2]), bad, weights=[0.7, 0.0])
    report = project.build_one("m")
    assert (report.expert_bytes["full"], report.expert_bytes["read"], report.index_bytes_read) == (8, 8, 8)
    project.check("m")


def test_a_zero_delta_is_zero_even_where_base_and_expert_are_infinite(tmp_path):
    base = np.float32([1, np.inf, 2, 3, 4, 5, 6, 7])
    expert = base.copy()
    expert[6] = 9
    found = []
    for block in (4, 64):
        project = SmallProject(tmp_path / str(block), Geometry(block_elements=block))
        project.add_source("base", {"x": base})
        project.add_source("e", {"x": expert})
        params = {"non_finite": "allow"}
        project.set_output("m", {"operator": "task_arithmetic", "base": "base", "experts": ["e"], "params": params})
        project.build()
        found.append(project.raw("m"))
    assert found[0] == found[1]


@pytest.mark.parametrize("weights", [[0.5, -0.5], [1e-9, -1e-9 + 1e-17], [0.0, 0.0], [1.0, -0.9999999], [3e38, 3e38]])
def test_weights_whose_sum_cannot_be_divided_by_are_an_error_before_weights_are_read(tmp_path, weights):
    project = linear_of(tmp_path, np.float32([1e-3]), np.float32([1e-3]), weights=weights)
    with pytest.raises(PlanError, match="`x`"):
        project.build()
    assert not (project.cache / "catalog.db").exists()
    project.set_output("m", project.outputs["m"] | {"params": {"normalize": False}})
    project.build()
    project.check("m")
