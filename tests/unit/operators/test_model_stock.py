"""model_stock: how far from the base to the mean, from the angles between deltas, whole or row by row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.reference_spherical import model_stock as reference
from support.reference_spherical import ulps

from mergepipe.errors import OperatorError
from mergepipe.operators.registry import operator

STOCK = operator("model_stock")


def checkpoints(count, shape=(60, 50), dtype=np.float32, *, seed=0, size=0.1):
    generator = np.random.default_rng(seed)
    base, common, *own = generator.standard_normal((count + 2, *shape))
    return base.astype(dtype), [(base + size * (common + array)).astype(dtype) for array in own]


def from_deltas(base, experts, *, filter_wise):
    """Return the reference for deltas that are rounded to the work dtype, as ours are."""
    deltas = [expert - base for expert in experts]
    return reference(np.zeros_like(base), deltas, filter_wise=filter_wise) + base.astype(np.float64)


shapes = st.sampled_from([(), (1,), (7,), (1000,), (60, 50), (3, 4, 5), (2, 3, 4, 5), (33, 1), (1, 33), (5, 700)])


@given(shapes, st.integers(2, 6), st.booleans(), st.sampled_from([np.float32, np.float64]), st.integers(0, 9))
def test_it_is_the_reference(shape, count, filter_wise, dtype, seed):
    base, experts = checkpoints(count, shape, dtype, seed=seed)
    got = merge(STOCK, base, experts, filter_wise=filter_wise)
    assert got.dtype == dtype
    assert got.shape == shape
    want = from_deltas(base, experts, filter_wise=filter_wise)
    # where opposing deltas leave little in the denominator, the step is long and its rounding with it
    assert ulps(got, want, base, *experts, 50 * (want - base)) < (8 if dtype == np.float32 else 300)


@given(st.booleans(), st.integers(1, 70_000), st.sampled_from([(60, 50), (3, 4, 250), (3000,)]))
def test_neither_tiles_nor_what_is_known_to_be_zero_change_a_bit(filter_wise, tile, shape):
    base, experts = checkpoints(3, shape)
    experts[1].reshape(-1)[:1500] = base.reshape(-1)[:1500]
    want = merge(STOCK, base, experts, filter_wise=filter_wise, block_elements=500)
    got = merge(STOCK, base, experts, filter_wise=filter_wise, block_elements=500, tile=tile, find_zeros=False)
    assert same_bits(got, want, zero_signs=False)


def test_blocks_change_at_most_the_last_bits():
    base, experts = checkpoints(3)
    want = merge(STOCK, base, experts)
    assert ulps(merge(STOCK, base, experts, block_elements=70), want, base, *experts) <= 1


def test_filters_need_no_statistics_and_a_changed_row_changes_no_other():
    base, experts = checkpoints(3)
    run = Run(STOCK, base, experts, tensor_params(STOCK, [{}] * 3, {"filter_wise": True}))
    assert STOCK.rowwise(run.prepared, run.facts)
    assert not STOCK.reduces(run.prepared, run.facts)
    want = run.result()
    experts[1][7] += 1
    got = Run(STOCK, base, experts, run.params).result()
    assert list(np.flatnonzero((got != want).any(axis=1))) == [7]


@pytest.mark.parametrize("shape", [(500,), (1,), (), (1, 500)])
@pytest.mark.parametrize("block_elements", [100, 1 << 18])
def test_a_tensor_of_one_row_is_one_filter(shape, block_elements):
    base, experts = checkpoints(3, shape)
    got = merge(STOCK, base, experts, filter_wise=True, block_elements=block_elements)
    assert same_bits(got, merge(STOCK, base, experts, block_elements=block_elements))


@pytest.mark.parametrize("filter_wise", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_the_base_among_the_experts_does_not_count(filter_wise, at):
    base, experts = checkpoints(3)
    got = merge(STOCK, base, [*experts[:at], base, *experts[at:]], base_expert=at, filter_wise=filter_wise)
    assert same_bits(got, merge(STOCK, base, experts, filter_wise=filter_wise))


def test_two_experts_are_needed_beside_the_base():
    base, experts = checkpoints(1)
    with pytest.raises(OperatorError, match="two experts"):
        merge(STOCK, base, [*experts, base], base_expert=1)


@pytest.mark.parametrize("filter_wise", [True, False])
def test_opposite_deltas_have_no_estimate_and_give_the_base(filter_wise):
    base, (expert,) = checkpoints(1)
    base, expert = (np.round(array * 256).astype(np.float32) / 256 for array in (base, expert))
    got = merge(STOCK, base, [expert, base - (expert - base)], filter_wise=filter_wise)
    assert same_bits(got, base, zero_signs=False)


@pytest.mark.parametrize("filter_wise", [True, False])
def test_equal_deltas_give_the_expert(filter_wise):
    base, (expert,) = checkpoints(1)
    got = merge(STOCK, base, [expert] * 3, filter_wise=filter_wise)
    assert ulps(got, expert.astype(np.float64), base) <= 4


@pytest.mark.parametrize("filter_wise", [True, False])
@pytest.mark.parametrize("find_zeros", [True, False])
def test_no_change_is_the_base(filter_wise, find_zeros):
    base, _ = checkpoints(1)
    got = merge(STOCK, base, [base.copy(), base.copy()], filter_wise=filter_wise, find_zeros=find_zeros)
    assert same_bits(got, base)
    assert same_bits(merge(STOCK, base, [None, None], filter_wise=filter_wise), base)


@pytest.mark.parametrize("filter_wise", [True, False])
def test_a_delta_of_zero_counts_with_a_cosine_of_zero(filter_wise):
    base, experts = checkpoints(2)
    got = merge(STOCK, base, [*experts, base.copy()], filter_wise=filter_wise)
    assert ulps(got, from_deltas(base, [*experts, base], filter_wise=filter_wise), base, *experts) < 6
    assert same_bits(merge(STOCK, base, [*experts, None], filter_wise=filter_wise), got)


@pytest.mark.parametrize("filter_wise", [True, False])
def test_short_deltas_have_their_cosine_reduced_as_in_mergekit(filter_wise):
    base, experts = checkpoints(3, (4, 25), np.float64, size=1e-5)
    got = merge(STOCK, base, experts, filter_wise=filter_wise)
    assert ulps(got, reference(base, experts, filter_wise=filter_wise), base) < 100


@pytest.mark.parametrize("filter_wise", [True, False])
def test_stored_deltas_are_the_deltas(filter_wise):
    base, experts = checkpoints(3)
    base, *experts = (np.round(array * 256).astype(np.float32) / 256 for array in (base, *experts))
    deltas = [expert - base for expert in experts]
    got = merge(STOCK, base, [None] * 3, deltas=deltas, filter_wise=filter_wise)
    assert same_bits(got, merge(STOCK, base, experts, filter_wise=filter_wise))


@pytest.mark.parametrize(("filter_wise", "rows"), [(True, 3), (False, slice(None))])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_leave_the_mean(filter_wise, rows, value):
    base, experts = checkpoints(3)
    want = merge(STOCK, base, experts, filter_wise=filter_wise)
    experts[1][3, 4] = value
    got = merge(STOCK, base, experts, filter_wise=filter_wise, non_finite="allow")
    assert np.array_equal(got[3, 4], np.float32(value), equal_nan=True)
    mean = np.zeros(base.shape, bool)
    mean[rows] = True
    assert same_bits(got[~mean], want[~mean])
    mean &= np.isfinite(experts[1])
    assert ulps(got[mean], np.mean(np.float64(experts), axis=0)[mean], base[mean], experts[1][mean]) <= 4


def test_the_largest_float32_values_do_not_overflow():
    base, experts = checkpoints(3)
    base, *experts = (array * np.float32(1e37) for array in (base, *experts))
    assert ulps(merge(STOCK, base, experts), from_deltas(base, experts, filter_wise=False), base, *experts) < 6


@pytest.mark.parametrize("filter_wise", [True, False])
def test_an_empty_tensor_needs_no_angle(filter_wise):
    empty = np.zeros((0, 4), np.float32)
    assert merge(STOCK, empty, [empty, empty], filter_wise=filter_wise).shape == (0, 4)


def test_the_reduction_changes_only_with_the_rounded_share():
    base, experts = checkpoints(3, (600, 50))
    params = tensor_params(STOCK, [{}] * 3, {})
    key = Run(STOCK, base, experts, params).reduction().key
    experts[1][0, 0] = np.nextafter(experts[1][0, 0], np.float32(9))
    assert Run(STOCK, base, experts, params).reduction().key == key
    experts[1][0] += 1
    assert Run(STOCK, base, experts, params).reduction().key != key
