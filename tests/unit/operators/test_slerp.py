"""slerp: the arc between two checkpoints, its ends bit for bit, and the line where there is no angle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.reference_spherical import slerp as reference
from support.reference_spherical import ulps

from mergepipe.errors import OperatorError
from mergepipe.operators.registry import operator

SLERP = operator("slerp")


def pair(shape=(60, 50), dtype=np.float32, *, near=False, seed=0):
    generator = np.random.default_rng(seed)
    base = generator.standard_normal(shape)
    other = base * near + generator.standard_normal(shape) * (0.02 if near else 1.0) + 0.3 * base
    return base.astype(dtype), other.astype(dtype)


shapes = st.sampled_from([(), (1,), (7,), (1000,), (60, 50), (3, 4, 5), (2, 3, 4, 5), (1, 33), (33, 1)])


@given(
    shapes, st.floats(-0.5, 1.5, width=32), st.sampled_from([np.float32, np.float64]), st.booleans(), st.integers(0, 9)
)
def test_it_is_the_reference(shape, t, dtype, near, seed):
    base, other = pair(shape, dtype, near=near, seed=seed)
    got = merge(SLERP, base, [other], t=t)
    assert got.dtype == dtype
    assert got.shape == shape
    assert ulps(got, reference(base, other, t), base, other) < (4 if dtype == np.float32 else 40)


@pytest.mark.parametrize(("t", "which"), [(0.0, 0), (1.0, 1), (1e-60, 0), (1 - 1e-12, 1)])
@pytest.mark.parametrize("find_zeros", [True, False])
def test_the_ends_are_copies_and_the_other_checkpoint_is_not_read(t, which, find_zeros):
    arrays = pair()
    run = Run(SLERP, arrays[0], [arrays[1]], tensor_params(SLERP, [{}], {"t": t}), find_zeros=find_zeros)
    assert run.prepared.live == (bool(which),)
    assert not SLERP.reduces(run.prepared, run.facts)
    assert SLERP.copied_input(run.prepared, (True,)) == which - 1
    assert SLERP.copied_input(run.prepared, (False,)) == -1
    assert same_bits(run.result(), arrays[which])


@given(st.integers(1, 9), st.integers(1, 70_000), st.booleans())
def test_neither_tiles_nor_what_is_known_to_be_zero_change_a_bit(seed, tile, near):
    base, other = pair((40, 50), near=near, seed=seed)
    other[10:30] = base[10:30]
    want = merge(SLERP, base, [other], t=0.3, block_elements=500)
    got = merge(SLERP, base, [other], t=0.3, block_elements=500, tile=tile, find_zeros=False)
    assert same_bits(got, want)


def test_blocks_change_at_most_the_last_bits():
    base, other = pair()
    want = merge(SLERP, base, [other], t=0.3)
    assert ulps(merge(SLERP, base, [other], t=0.3, block_elements=70), want, base, other) <= 1


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("base_expert", [0, 1])
def test_the_base_may_be_listed_in_either_place(base_expert, near):
    base, other = pair(near=near)
    experts = [base, other] if base_expert == 0 else [other, base]
    assert same_bits(merge(SLERP, base, experts, t=0.3, base_expert=base_expert), merge(SLERP, base, [other], t=0.3))


def test_one_other_checkpoint_is_needed_and_no_more():
    base, other = pair()
    for experts, base_expert in ([base], 0), ([other, other], None):
        with pytest.raises(OperatorError, match="slerp"):
            merge(SLERP, base, experts, t=0.3, base_expert=base_expert)


@given(st.floats(-0.5, 1.5, width=32))
def test_equal_checkpoints_stay_as_they_are(t):
    base, _ = pair()
    for find_zeros in (True, False):
        assert same_bits(merge(SLERP, base, [base.copy()], t=t, find_zeros=find_zeros), base)
    assert same_bits(merge(SLERP, base, [None], t=t), base)  # an expert without the tensor


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_a_vector_without_a_direction_is_interpolated_linearly(size):
    base, other = pair()
    tiny = (other * size).astype(np.float32)
    assert ulps(merge(SLERP, base, [tiny], t=0.25), 0.75 * base.astype(np.float64), base) <= 1
    assert ulps(merge(SLERP, tiny, [base], t=0.25), 0.25 * base.astype(np.float64), base) <= 1


@pytest.mark.parametrize(("cosine", "linear"), [(0.9994, False), (0.9996, True), (-0.9994, False), (-0.9996, True)])
def test_the_angle_counts_up_to_a_cosine_of_0_9995(cosine, linear):
    base = np.zeros(1000)
    other = base.copy()
    base[0], other[:2] = 1.0, (cosine, np.sqrt(1 - cosine**2))
    angle = np.arccos(cosine)
    weights = (0.75, 0.25) if linear else np.sin([0.75 * angle, 0.25 * angle]) / np.sin(angle)
    got = merge(SLERP, base, [other], t=0.25)
    assert got == pytest.approx(weights[0] * base + weights[1] * other, rel=1e-12)


def test_opposite_checkpoints_are_interpolated_linearly():
    base, _ = pair()
    assert ulps(merge(SLERP, base, [-base], t=0.25), 0.5 * base.astype(np.float64), base) <= 1


@pytest.mark.parametrize("near", [True, False])
def test_a_stored_delta_is_the_same_as_the_checkpoint_that_it_makes(near):
    base, other = (np.round(array * 256).astype(np.float32) / 256 for array in pair(near=near))  # sums are exact
    got = merge(SLERP, base, [None], t=0.3, deltas=[other - base])
    assert same_bits(got, merge(SLERP, base, [other], t=0.3))


def test_squares_of_the_largest_float32_values_do_not_overflow():
    base, other = pair()
    got = merge(SLERP, base * np.float32(2e37), [other * np.float32(2e37)], t=0.3)
    assert ulps(got, reference(base * np.float32(2e37), other * np.float32(2e37), 0.3), base * 2e37, other * 2e37) < 4


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_leave_the_other_elements_finite(value):
    base, other = pair()
    other[3, 4] = value
    got = merge(SLERP, base, [other], t=0.25, non_finite="allow")
    assert np.array_equal(got[3, 4], np.float32(value), equal_nan=True)
    line = 0.75 * base.astype(np.float64) + 0.25 * other
    others = np.isfinite(other)
    assert ulps(got[others], line[others], base[others], other[others]) <= 2


def test_float64_values_whose_squares_overflow_are_interpolated_linearly():
    base, other = (array * 1e300 for array in pair(dtype=np.float64))
    assert ulps(merge(SLERP, base, [other], t=0.25), 0.75 * base + 0.25 * other, base, other) <= 2


def test_an_empty_tensor_needs_no_angle():
    assert merge(SLERP, np.zeros((0, 4), np.float32), [np.zeros((0, 4), np.float32)], t=0.3).shape == (0, 4)


def test_the_reduction_changes_only_with_the_rounded_weights():
    base, other = pair((600, 50))
    params = tensor_params(SLERP, [{}], {"t": 0.3})
    key = Run(SLERP, base, [other], params).reduction().key
    moved = other.copy()
    moved[0, 0] = np.nextafter(moved[0, 0], np.float32(9))
    assert Run(SLERP, base, [moved], params).reduction().key == key
    moved[0] += 1
    assert Run(SLERP, base, [moved], params).reduction().key != key
