"""Computing one block: tiles, aliases, widening and the one rounding."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import as_dtype, random_tensors
from support.projects import SmallProject
from support.reference import linear, round_to, same_bits, task_arithmetic
from unit.plan.helpers import plan

from mergepipe.engine.kernel import Scratch, all_finite, compute_block, convert, measure_block, typed
from mergepipe.engine.limits import TILE_ELEMENTS
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.operators.gram import GramOfDeltas, GramOfValues
from mergepipe.operators.magnitudes import Magnitudes
from mergepipe.operators.sums import MagnitudeSum

MERGEABLE = ("F64", "F32", "F16", "BF16")


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """Return a function from (operator, dtypes of base and experts, weights, written) to the recipe of a tensor."""
    made = {}

    def recipe(operator, dtypes, weights, written="float32"):
        key = (operator, dtypes, weights, written)
        if key not in made:
            project = SmallProject(tmp_path_factory.mktemp("project"))
            for number, dtype in enumerate(dtypes):
                name = f"e{number}" if number else "base"
                project.add_source(name, random_tensors(number, {"x": (4,)}, as_dtype(dtype)))
            name = "scale" if operator == "passthrough" else "weight"
            experts = [{"source": f"e{n}", name: weight} for n, weight in enumerate(weights, 1)]
            given_ = {"operator": operator, "base": "base", "experts": experts, "write": {"dtype": written}}
            project.set_output("m", given_)
            found = plan(project)
            made[key] = TensorRecipe.of(found.tensors[0], found.geometry)
        return made[key]

    return recipe


def values(dtype, count, seed):
    return np.random.default_rng(seed).standard_normal(count).astype(as_dtype(dtype))


def compute(recipe, arrays, aliases, written, count, tile=TILE_ELEMENTS):
    out = np.empty(count, as_dtype(written))
    compute_block(recipe, 0, arrays, aliases, None, out, Scratch(tile))
    return out


@pytest.mark.parametrize("tile", [1, 7, 100, 1000, 4096])
@pytest.mark.parametrize("dtypes", [("F32", "F32", "F32"), ("BF16", "F16", "BF16"), ("F64", "F32", "F16")])
def test_the_result_does_not_depend_on_where_tiles_begin(recipes, tile, dtypes):
    count = 1003 if tile > 1 else 50
    arrays = [values(dtype, count, seed) for seed, dtype in enumerate(dtypes)]
    got = compute(recipes("task_arithmetic", dtypes, (0.3, -0.7)), arrays, (0, 1, 2), "F32", count, tile)
    want = round_to(task_arithmetic(arrays[0], arrays[1:], (0.3, -0.7)), "F32")
    assert same_bits(got, want)


def test_an_alias_stands_for_the_values_of_an_earlier_slot(recipes):
    dtypes = ("F32",) * 4
    base, first = values("F32", 200, 0), values("F32", 200, 1)
    got = compute(recipes("linear", dtypes, (0.3, 0.5, 0.2)), [None, first, None, base], (None, 1, 1, 3), "F32", 200)
    assert same_bits(got, linear([first, first, base], (0.3, 0.5, 0.2)))


def test_a_slot_without_an_alias_is_a_zero_delta(recipes):
    dtypes = ("F32",) * 3
    base, expert = values("F32", 200, 0), values("F32", 200, 1)
    got = compute(recipes("task_arithmetic", dtypes, (0.3, 0.5)), [base, None, expert], (0, None, 2), "F32", 200)
    assert same_bits(got, task_arithmetic(base, [None, expert], (0.3, 0.5)))


def test_inputs_longer_than_the_output_are_cut(recipes):
    base, expert = values("F32", 300, 0), values("F32", 250, 1)
    got = compute(recipes("task_arithmetic", ("F32", "F32"), (0.3,)), [base, expert], (0, 1), "F32", 200)
    assert same_bits(got, task_arithmetic(base[:200], [expert[:200]], (0.3,)))


def test_the_inputs_are_not_written_to(recipes):
    base, expert = values("F32", 300, 0), values("F32", 300, 1)
    copies = base.copy(), expert.copy()
    compute(recipes("task_arithmetic", ("F32", "F32"), (0.3,)), [base, expert], (0, 1), "F32", 300)
    assert same_bits(base, copies[0])
    assert same_bits(expert, copies[1])


@pytest.mark.parametrize("kind", [GramOfValues, GramOfDeltas, Magnitudes, MagnitudeSum])
@pytest.mark.parametrize("aliases", [(0, 1), (0, 0)])
@pytest.mark.parametrize("dtypes", [("BF16", "BF16"), ("F16", "BF16"), ("BF16", "F32")])
def test_statistics_do_not_depend_on_the_dtype_that_values_are_stored_in(recipes, kind, aliases, dtypes):
    arrays = [values(dtype, 4, seed) for seed, dtype in enumerate(dtypes)]
    copies = [array.copy() for array in arrays]
    stored = measure_block(recipes("linear", dtypes, (1.0,)), kind(slots=(0, 1)), 0, arrays, aliases, Scratch())
    assert all(map(same_bits, arrays, copies))
    wide = [array.astype(np.float32) for array in arrays]
    recipe = recipes("linear", ("F32", "F32"), (1.0,))
    assert measure_block(recipe, kind(slots=(0, 1)), 0, wide, aliases, Scratch()) == stored


def test_the_buffers_of_a_worker_carry_nothing_from_block_to_block(recipes):
    recipe, scratch = recipes("task_arithmetic", ("BF16", "BF16"), (0.3,)), Scratch()
    for seed in range(4):
        count = (400, 17, 400, 3)[seed]
        base, expert = values("BF16", count, seed), values("BF16", count, seed + 10)
        out = np.empty(count, np.float32)
        compute_block(recipe, 0, [base, expert], (0, 1), None, out, scratch)
        assert same_bits(out, task_arithmetic(base, [expert], (0.3,)))


@pytest.mark.parametrize("target", MERGEABLE)
@pytest.mark.parametrize("source", MERGEABLE)
def test_conversion_rounds_once(source, target):
    size = as_dtype(source).itemsize
    bits = np.random.default_rng(0).integers(0, 256, 4000 * size, np.uint8).view(as_dtype(source))
    array = np.concatenate([bits, values(source, 1000, 1)])
    out = np.empty(array.size, as_dtype(target))
    convert(array, out)
    assert same_bits(out, round_to(array, target))


@given(st.lists(st.floats(width=64), min_size=1, max_size=50), st.integers(-60, -40))
def test_float64_goes_to_bfloat16_in_one_rounding(numbers, tiny):
    array = np.array(numbers)
    with np.errstate(all="ignore"):
        near_ties = (array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)) * (1 + 2.0**-8 + 2.0**tiny)
        array = np.concatenate([array, near_ties, -near_ties])
    out = np.empty(array.size, ml_dtypes.bfloat16)
    convert(array, out)
    assert same_bits(out, round_to(array, "BF16"))


@pytest.mark.parametrize("dtype", MERGEABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 50, 99])
def test_one_value_that_is_not_finite_is_found(dtype, bad, at):
    array = np.full(100, np.finfo(as_dtype(dtype)).max if dtype != "BF16" else 3.38e38).astype(as_dtype(dtype))
    assert all_finite(array, Scratch())
    array[at] = bad
    assert not all_finite(array, Scratch())


@pytest.mark.parametrize("dtype", MERGEABLE)
def test_nothing_is_finite(dtype):
    assert all_finite(np.empty(0, as_dtype(dtype)), Scratch())


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_pattern_is_judged_as_numpy_does(dtype):
    for pattern in np.arange(2**16, dtype=np.uint16).reshape(-1, 16):
        array = pattern.view(as_dtype(dtype))
        assert all_finite(array, Scratch()) == bool(np.isfinite(array.astype(np.float32)).all())


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_values_of_any_size_among_one_another_are_judged_as_numpy_does(dtype):
    rng = np.random.default_rng(0)
    for size in (2, 3, 40) * 200:
        array = rng.integers(0, 2**16, size, dtype=np.uint16).view(as_dtype(dtype))
        wide = array.astype(np.float32)
        assert all_finite(array, Scratch(32)) == bool(np.isfinite(wide).all())
        assert all_finite(array[np.isfinite(wide)], Scratch(32))


def test_typed_views_share_memory():
    buffer = bytearray(16)
    view = typed(memoryview(buffer), "BF16")
    view[0] = 1.0
    assert buffer[:2] == b"\x80\x3f"


def test_scratch_buffers_grow_and_are_reused():
    scratch = Scratch()
    first = scratch.buffer("a", 10)
    first[:] = b"x" * 10
    assert scratch.buffer("a", 4).tobytes() == b"xxxx"
    assert len(scratch.buffer("a", 100)) == 100
    assert len(scratch.buffer("b", 0)) == 0
    assert scratch.tile("t", "float32", 10).base is scratch.tile("t", "float32", 20).base
    assert scratch.tile("t", "float64", 10).dtype == np.float64
    assert scratch.tile("t", "float64", TILE_ELEMENTS + 5).shape == (TILE_ELEMENTS + 5,)
