"""karcher: the centre of checkpoints on the sphere, iterated on their inner products alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.reference_spherical import karcher as reference
from support.reference_spherical import ulps

from mergepipe.operators.registry import operator

KARCHER = operator("karcher")


def checkpoints(count, shape=(60, 50), dtype=np.float32, *, seed=0, apart=0.5):
    generator = np.random.default_rng(seed)
    common, *own = generator.standard_normal((count + 1, *shape))
    return [((1 + index) * (common + apart * array)).astype(dtype) for index, array in enumerate(own)]


shapes = st.sampled_from([(), (1,), (7,), (1000,), (60, 50), (3, 4, 5), (1, 33)])


@given(
    shapes,
    st.integers(1, 6),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.sampled_from([1, 2, 10, 50]),
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 9),
)
def test_it_is_the_reference(shape, count, apart, max_iter, dtype, seed):
    arrays = checkpoints(count, shape, dtype, seed=seed, apart=apart if len(shape) > 1 else 1e-3)
    got = merge(KARCHER, None, arrays, max_iter=max_iter)
    assert got.dtype == dtype
    # The step at which the iteration ends may differ where its length is within rounding of tol: an error below tol^2.
    assert ulps(got, reference(arrays, max_iter=max_iter), *arrays) < (8 if dtype == np.float32 else 1e7)


@pytest.mark.parametrize("apart", [0.1, 1.0, 3.0])
def test_it_converges_to_the_point_with_no_tangent(apart):
    arrays = checkpoints(5, dtype=np.float64, apart=apart)
    got = merge(KARCHER, None, arrays, max_iter=200, tol=1e-7).reshape(-1)
    mean = got / np.linalg.norm(got)
    tangent = np.zeros_like(mean)
    for array in arrays:
        unit = array.reshape(-1) / np.linalg.norm(array)
        cosine = unit @ mean
        tangent += np.arccos(cosine) / np.sqrt(1 - cosine**2) * (unit - cosine * mean)
    assert np.linalg.norm(tangent) < 1e-6
    assert np.linalg.norm(got) == pytest.approx(np.mean([np.linalg.norm(array) for array in arrays]), rel=1e-12)


@given(st.integers(1, 70_000))
def test_tiles_do_not_change_a_bit(tile):
    arrays = checkpoints(3)
    want = merge(KARCHER, None, arrays, block_elements=500)
    assert same_bits(merge(KARCHER, None, arrays, block_elements=500, tile=tile), want)


def test_blocks_change_at_most_the_last_bits():
    arrays = checkpoints(3)
    assert ulps(merge(KARCHER, None, arrays, block_elements=70), merge(KARCHER, None, arrays), *arrays) <= 1


def test_a_single_checkpoint_is_copied():
    arrays = checkpoints(1)
    run = Run(KARCHER, None, arrays, tensor_params(KARCHER, [{}], {}))
    assert not KARCHER.reduces(run.prepared, run.facts)
    assert KARCHER.copied_input(run.prepared, (True,)) == 0
    assert same_bits(run.result(), arrays[0])


def test_the_base_counts_where_it_is_listed_and_not_otherwise():
    base, *experts = checkpoints(3)
    want = merge(KARCHER, None, experts)
    assert same_bits(merge(KARCHER, base, experts), want)
    listed = merge(KARCHER, base, [*experts, base], base_expert=2)
    assert same_bits(listed, merge(KARCHER, None, [*experts, base]))
    assert ulps(listed, reference([*experts, base]), base, *experts) < 8


@pytest.mark.parametrize("count", [1, 2])
def test_checkpoints_without_a_direction_count_in_the_mean_length_alone(count):
    arrays = checkpoints(2)
    zeros = [np.zeros_like(arrays[0])] * count
    got = merge(KARCHER, None, [*zeros, *arrays])
    assert ulps(got, reference([*zeros, *arrays]), *arrays) < 8
    assert not merge(KARCHER, None, [*zeros, *zeros]).any()


@pytest.mark.parametrize("factor", [1.0, 0.3, 3.0])
def test_opposite_checkpoints_begin_and_end_at_the_first(factor):
    first = checkpoints(1, dtype=np.float64)[0]
    got = merge(KARCHER, None, [first, -factor * first])
    assert got == pytest.approx((1 + factor) / 2 * first, rel=1e-12)


def test_a_checkpoint_shorter_than_tol_has_no_direction():
    arrays = checkpoints(2, dtype=np.float64)
    short = checkpoints(1, dtype=np.float64, seed=1)[0]
    short *= 1e-6 / np.linalg.norm(short)
    got = merge(KARCHER, None, [*arrays, short])
    assert got == pytest.approx(reference([*arrays, short]), rel=1e-9)
    assert got == pytest.approx(reference([*arrays, np.zeros_like(short)]), rel=1e-6)


def test_equal_checkpoints_are_their_own_mean_to_the_last_bits():
    (first,) = checkpoints(1)
    assert ulps(merge(KARCHER, None, [first] * 5), first.astype(np.float64)) <= 4


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_make_it_the_mean(value):
    arrays = checkpoints(3)
    arrays[1][3, 4] = value
    got = merge(KARCHER, None, arrays, non_finite="allow")
    assert np.array_equal(got[3, 4], np.float32(value), equal_nan=True)
    rest = np.isfinite(arrays[1])
    assert ulps(got[rest], np.mean(np.float64(arrays), axis=0)[rest], *(array[rest] for array in arrays)) <= 3


def test_the_largest_float32_values_do_not_overflow():
    arrays = [array * np.float32(1e37) for array in checkpoints(3)]
    assert ulps(merge(KARCHER, None, arrays), reference(arrays), *arrays) < 8


def test_an_empty_tensor_has_no_mean():
    assert merge(KARCHER, None, [np.zeros((0, 4), np.float32)] * 3).shape == (0, 4)


def test_the_reduction_changes_only_with_the_rounded_coefficients():
    arrays = checkpoints(3, (600, 50))
    params = tensor_params(KARCHER, [{}] * 3, {})
    key = Run(KARCHER, None, arrays, params).reduction().key
    arrays[1][0, 0] = np.nextafter(arrays[1][0, 0], np.float32(9))
    assert Run(KARCHER, None, arrays, params).reduction().key == key
    arrays[1][0] += 1
    assert Run(KARCHER, None, arrays, params).reduction().key != key
