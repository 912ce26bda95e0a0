"""nuslerp: arcs between whole tensors, rows and columns, of values and of deltas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.reference_spherical import nuslerp as reference
from support.reference_spherical import ulps

from mergepipe.errors import OperatorError
from mergepipe.operators.arcs import ColumnProducts
from mergepipe.operators.registry import operator

NUSLERP = operator("nuslerp")
FLAGS = {
    None: {"nuslerp_flatten": True, "nuslerp_row_wise": False},
    -1: {"nuslerp_flatten": False, "nuslerp_row_wise": False},
    0: {"nuslerp_flatten": False, "nuslerp_row_wise": True},
}


def three(shape=(60, 50), dtype=np.float32, *, seed=0, size=0.1):
    generator = np.random.default_rng(seed)
    base, first, second = (generator.standard_normal(shape) for _ in range(3))
    return tuple(a.astype(dtype) for a in (base, base + size * first, base + size * (0.5 * first + second)))


def merged(arrays, weights, axis=None, *, based=True, **options):
    given = [{"weight": weight} for weight in weights]
    base, first, second = arrays
    return merge(NUSLERP, base if based else None, [first, second], given, **FLAGS[axis], **options)


def error(got, arrays, weights, axis, *, based):
    base, first, second = arrays
    want = reference(first, second, weights, base if based else None, axis=axis)
    return ulps(got, want, *arrays)


shapes = st.sampled_from([(), (1,), (7,), (1000,), (60, 50), (3, 4, 5), (2, 3, 4, 5), (33, 1), (2, 1, 9), (5, 700)])
weights = st.sampled_from([(1.0, 1.0), (1.0, 3.0), (0.2, 0.3), (-0.5, 2.0), (1.0, -1.0), (5.0, 0.0)])
axes = st.sampled_from([None, -1, 0])
dtypes = st.sampled_from([np.float32, np.float64])


@given(shapes, weights, axes, st.booleans(), dtypes, st.integers(0, 9))
def test_it_is_the_reference(shape, pair, axis, based, dtype, seed):
    arrays = three(shape, dtype, seed=seed)
    got = merged(arrays, pair, axis, based=based)
    assert got.dtype == dtype
    assert got.shape == shape
    vectors = [array - arrays[0] if based else array for array in arrays[1:]]  # the deltas are rounded
    want = reference(*vectors, pair, axis=axis) + (arrays[0].astype(np.float64) if based else 0)
    allowed = 6 if dtype == np.float32 else 60
    if axis == 0:  # sums are kept as float32; next to opposite vectors that is magnified
        allowed += 4 * (1 + least_cosine(*vectors)) ** -1.5 * np.finfo(np.float32).eps / np.finfo(dtype).eps
    assert ulps(got, want, *arrays) < allowed


def least_cosine(first, second):
    """Return the least cosine between columns of two arrays."""
    first, second = (np.float64(array).reshape(array.shape[0] if array.ndim else 1, -1) for array in (first, second))
    with np.errstate(all="ignore"):
        cosines = (first * second).sum(0) / np.sqrt((first**2).sum(0) * (second**2).sum(0))
    return min(0, np.min(cosines[cosines > -1 + 2.0**-21], initial=0))


@given(axes, st.booleans(), st.integers(1, 5000), st.sampled_from([(40, 50), (3, 4, 5), (30, 3, 7), (2000,)]))
def test_neither_tiles_nor_what_is_known_to_be_zero_change_a_bit(axis, based, tile, shape):
    arrays = three(shape)
    arrays[2].reshape(-1)[: arrays[2].size // 2] = arrays[0].reshape(-1)[: arrays[2].size // 2]
    want = merged(arrays, (1, 2), axis, based=based, block_elements=150 if axis != 0 else 500)
    got = merged(
        arrays, (1, 2), axis, based=based, block_elements=150 if axis != 0 else 500, tile=tile, find_zeros=False
    )
    assert same_bits(got, want, zero_signs=False)


@pytest.mark.parametrize("axis", [None, -1, 0])
def test_blocks_change_at_most_the_last_bits(axis):
    arrays = three((90, 20))
    want = merged(arrays, (1, 2), axis)
    assert ulps(merged(arrays, (1, 2), axis, block_elements=140), want, *arrays) <= 2


def test_rows_need_no_statistics_and_a_changed_row_changes_no_other():
    arrays = three()
    run = Run(NUSLERP, None, list(arrays[1:]), tensor_params(NUSLERP, [{}, {}], FLAGS[-1]))
    assert not NUSLERP.reduces(run.prepared, run.facts)
    assert NUSLERP.rowwise(run.prepared, run.facts)
    want = run.result()
    arrays[1][7] += 1
    got = Run(NUSLERP, None, list(arrays[1:]), run.params).result()
    assert list(np.flatnonzero((got != want).any(axis=1))) == [7]


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("shape", [(500,), (1,), ()])
def test_a_tensor_of_one_dimension_is_one_vector(axis, shape):
    arrays = three(shape)
    for block_elements in (100, 1 << 18):
        options = {"block_elements": block_elements}
        assert same_bits(merged(arrays, (1, 2), axis, **options), merged(arrays, (1, 2), **options))


@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_an_expert_without_weight_is_not_read_and_the_other_is_copied(axis, based, which):
    arrays = three()
    pair = (0.0, 2.0) if which else (2.0, 0.0)
    params = tensor_params(NUSLERP, [{"weight": weight} for weight in pair], FLAGS[axis])
    run = Run(NUSLERP, arrays[0] if based else None, list(arrays[1:]), params)
    assert run.prepared.live == (which == 0, which == 1)
    assert not NUSLERP.reduces(run.prepared, run.facts)
    assert NUSLERP.copied_input(run.prepared, run.prepared.live) == which
    assert same_bits(run.result(), arrays[1 + which])


def test_weights_that_cancel_mean_one_half():
    arrays = three()
    assert same_bits(merged(arrays, (1, -1)), merged(arrays, (3, 3)))


def test_the_base_is_not_one_of_the_two():
    base, first, _ = three()
    with pytest.raises(OperatorError, match="base"):
        merge(NUSLERP, base, [base, first], base_expert=0)


@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("find_zeros", [True, False])
def test_a_delta_of_zero_is_orthogonal_to_every_other(axis, find_zeros):
    base, first, _ = three()
    got = merged((base, base.copy(), first), (1, 1), axis, find_zeros=find_zeros)
    want = base.astype(np.float64) + np.sin(np.pi / 4) * (first - base).astype(np.float64)
    assert ulps(got, want, base, first) <= 2
    assert same_bits(merge(NUSLERP, base, [None, first], **FLAGS[axis]), got)  # an expert without the tensor


@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("size", [1e-6, 3e-8])
def test_short_vectors_have_their_cosine_reduced_as_in_mergekit(axis, size):
    common, first, second = np.random.default_rng(0).standard_normal((3, 5, 5)) / 5
    arrays = None, size * (common + first), size * (common + second)
    got = merged(arrays, (1, 1), axis, based=False)
    assert got == pytest.approx(reference(*arrays[1:], (1, 1), axis=axis), rel=1e-5)


@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("find_zeros", [True, False])
def test_no_change_is_the_base(axis, find_zeros):
    base, _, _ = three()
    assert same_bits(merged((base, base.copy(), base.copy()), (1, 1), axis, find_zeros=find_zeros), base)
    assert same_bits(merge(NUSLERP, base, [None, None], **FLAGS[axis]), base)


@pytest.mark.parametrize("axis", [None, -1, 0])
@pytest.mark.parametrize("factor", [1.0, 2.0, -1.0, -3.0])
def test_parallel_and_opposite_vectors_are_interpolated_linearly(axis, factor):
    _, first, _ = three()
    second = first * np.float32(factor)
    got = merged((None, first, second), (3, 1), axis, based=False)
    assert ulps(got, 0.75 * first.astype(np.float64) + 0.25 * second, first, second) <= 1


@pytest.mark.parametrize("axis", [None, -1, 0])
def test_stored_deltas_are_the_deltas(axis):
    base, first, second = (np.round(array * 256).astype(np.float32) / 256 for array in three())
    deltas = [first - base, second - base]
    got = merge(NUSLERP, base, [None, None], deltas=deltas, **FLAGS[axis])
    assert same_bits(got, merged((base, first, second), (1, 1), axis))


@pytest.mark.parametrize(("axis", "spoilt"), [(None, (slice(None), slice(None))), (-1, 3), (0, (slice(None), 4))])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_make_their_vector_linear(axis, spoilt, value):
    arrays = three()
    want = merged(arrays, (3, 1), axis, based=False)
    arrays[2][3, 4] = value
    got = merged(arrays, (3, 1), axis, based=False, non_finite="allow")
    assert np.array_equal(got[3, 4], np.float32(value), equal_nan=True)
    line = 0.75 * arrays[1].astype(np.float64) + 0.25 * arrays[2]
    linear = np.zeros(got.shape, bool)
    linear[spoilt] = True
    assert same_bits(got[~linear], want[~linear])
    linear &= np.isfinite(arrays[2])
    assert ulps(got[linear], line[linear], arrays[1][linear], arrays[2][linear]) <= 1


@pytest.mark.parametrize("axis", [None, -1, 0])
def test_the_largest_float32_values_do_not_overflow(axis):
    arrays = tuple(array * np.float32(2e37) for array in three())
    assert error(merged(arrays, (1, 2), axis, based=False), arrays, (1, 2), axis, based=False) < 6


@pytest.mark.parametrize(
    ("shape", "block_elements"), [((20, 30), 30), ((6, 4, 5), 5), ((3, 7, 5), 15), ((2, 3, 4, 5), 10)]
)
def test_columns_of_which_a_block_holds_a_row_or_less_are_merged_like_any_others(shape, block_elements):
    arrays = three(shape)
    params = tensor_params(NUSLERP, [{}, {}], FLAGS[0])
    run = Run(NUSLERP, arrays[0], list(arrays[1:]), params, block_elements=block_elements)
    vectors = [array - arrays[0] for array in arrays[1:]]
    magnified = 4 * (1 + least_cosine(*vectors)) ** -1.5
    assert ulps(run.result(), merge(NUSLERP, *arrays[:1], list(arrays[1:]), **FLAGS[0]), *arrays) <= 2 + magnified
    numbers = run.values(run.measured[0][0])
    assert {len(number) for number in numbers} == {8 + 24 * block_elements}


def test_the_sums_of_columns_are_smaller_than_the_block():
    arrays = three((300, 1024))
    run = Run(NUSLERP, arrays[0], list(arrays[1:]), tensor_params(NUSLERP, [{}, {}], FLAGS[0]))
    run.result()
    statistic, block = run.measured[0]
    numbers = statistic.measure(run._tiles(block, statistic.slots, rowwise=False))
    assert len(numbers) == 8 + 24 * 1024


def test_the_sums_of_columns_depend_on_where_the_block_lies():
    half = np.random.default_rng(0).standard_normal((3, 2, 3, 5)).astype(np.float32)
    arrays = np.concatenate([half, half], axis=2)  # blocks of 15 elements are equal, columns are 30
    run = Run(NUSLERP, None, list(arrays[1:]), tensor_params(NUSLERP, [{}, {}], FLAGS[0]), block_elements=15)
    statistic = ColumnProducts(slots=(1, 2), columns=30)
    first, second, *_ = run.values(statistic)
    assert first != second
    assert statistic.positional


def test_an_empty_tensor_needs_no_angle():
    empty = np.zeros((0, 4), np.float32)
    for axis in FLAGS:
        assert merged((empty, empty, empty), (1, 1), axis).shape == (0, 4)
