"""Coefficients: rounded and summed as numpy does in float32, without numpy."""

import functools
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.operators.numerics import normaliser, ordered_sum, rounded

reals = st.floats(allow_nan=False, allow_infinity=False)


@given(reals)
def test_rounding_is_that_of_numpy(value):
    with np.errstate(over="ignore"):
        assert rounded([value], "float32") == (float(np.float32(value)),)
    assert rounded([value], "float64") == (value,)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=12))
def test_sums_round_after_every_addition(values):
    total = np.float32(0)
    with np.errstate(all="ignore"):
        for value in values:
            total = np.float32(total + np.float32(value))
    assert ordered_sum(values, "float32") == float(total) or np.isnan(total)
    with np.errstate(all="ignore"):
        assert ordered_sum(values, "float64") == functools.reduce(operator.add, values, 0.0)


@given(st.lists(st.floats(2**-20, 2**20, width=32), min_size=1, max_size=8))
def test_positive_weights_always_have_a_usable_sum(weights):
    assert normaliser(weights, "float32") == pytest.approx(sum(weights), rel=1e-5)
