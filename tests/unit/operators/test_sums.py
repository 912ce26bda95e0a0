"""Exact sums: equal to those of fractions, whatever the order and the range."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.operators import Run, tensor_params

from mergepipe.operators.registry import operators
from mergepipe.operators.sums import MagnitudeSum, encode_sum, exact_sum, finite_sum, total_of, units

finite = st.sampled_from(["float32", "float64"]).flatmap(
    lambda work: arrays(
        work, st.integers(0, 60), elements=st.floats(allow_nan=False, allow_infinity=False, width=int(work[5:]))
    )
)


def fraction_sum(values):
    return sum((Fraction(float(value)) for value in values), Fraction(0))


@given(finite)
def test_the_sum_is_that_of_fractions(values):
    assert exact_sum(values) == fraction_sum(values) * 2**1074
    assert finite_sum(values) == fraction_sum(np.abs(values)) * 2**1074


@given(finite, st.randoms(use_true_random=False))
def test_order_and_cutting_do_not_matter(values, random):
    order = list(range(values.size))
    random.shuffle(order)
    shuffled = values[order]
    half = values.size // 2
    assert exact_sum(shuffled[:half]) + exact_sum(shuffled[half:]) == exact_sum(values)


@pytest.mark.parametrize("work", ["float32", "float64"])
@pytest.mark.parametrize("spread", [0, 3, 12, 100])
def test_large_arrays_of_any_range_are_summed_exactly(work, spread):
    rng = np.random.default_rng(1)
    scale = np.exp2(rng.integers(-spread, spread + 1, 70_000).astype(np.float64))
    values = (rng.standard_normal(70_000) * scale).astype(work)
    assert exact_sum(values) == fraction_sum(values) * 2**1074


@given(st.lists(st.one_of(st.integers(0, 2**70), st.integers(0, 2**2100)), max_size=5))
def test_what_is_encoded_adds_up(totals):
    assert total_of([encode_sum(total) for total in totals]) == sum(totals)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_a_whole_number_of_units(value):
    assert Fraction(units(value), 2**1074) == Fraction(value)


def test_what_is_not_finite_does_not_count():
    assert finite_sum(np.float32([1, -np.inf, np.nan, -2, np.inf])) == units(3.0)


@given(finite, st.integers(1, 20), st.integers(1, 7), st.booleans())
def test_the_sums_of_blocks_add_up_to_that_of_the_tensor(values, block, tile, bounded):
    operator = operators()["task_arithmetic"]
    if not values.size:
        return
    params = tensor_params(operator, [{}], {})
    run = Run(operator, np.zeros_like(values), [values], params, block_elements=block, tile=tile)
    low, high = np.sort(np.abs(values))[[0, -1]]
    unsigned = f"u{values.dtype.itemsize}"
    bounds = {"above": int(low.view(unsigned)), "below": int(high.view(unsigned))} if bounded else {}
    inside = values[(np.abs(values) > low) & (np.abs(values) < high)] if bounded else values
    numbers = run.values(MagnitudeSum(slots=(0, 1), **bounds))
    assert total_of(numbers) == fraction_sum(np.abs(inside)) * 2**1074
