"""nearswap: the expert's elements where they are near, the base's where nothing differs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference_select
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.selections import cases, inputs, stored, whole

from mergepipe.errors import OperatorError
from mergepipe.operators.nearswap import NearSwap

NEARSWAP = NearSwap()
distances = st.sampled_from([0.0, 1e-9, 3e-7, 1e-6, 1e-4, 0.125, 0.3, 1e30])


@given(cases, distances)
def test_it_is_the_reference_bit_for_bit_however_the_tensor_is_cut(arrays, t):
    base, expert = arrays[:2]
    got = whole(NEARSWAP, base, [expert], t=t)
    assert same_bits(got, reference_select.nearswap(base, expert, t), zero_signs=False)


@given(cases, distances)
def test_up_to_the_distance_the_expert_is_taken_bit_for_bit_and_equal_elements_stay(arrays, t):
    base, expert = arrays[:2]
    got = merge(NEARSWAP, base, [expert], t=t, find_zeros=False)
    distance = np.abs(expert - base)
    near = (distance <= base.dtype.type(t)) & (t >= 1e-6) if t else distance == 0
    assert same_bits(got[near], expert[near], zero_signs=False)
    assert same_bits(got[expert == base], base[expert == base], zero_signs=False)


def test_beyond_the_distance_the_base_moves_by_it():
    base, expert = inputs(1, 1, (500,), "near", "float64")
    got = merge(NEARSWAP, base, [expert], t=1e-4)
    far = np.abs(expert - base) > 1e-4
    assert far.sum() > 100
    assert np.allclose((got - base)[far], np.sign(expert - base)[far] * 1e-4, rtol=1e-9, atol=0)


def test_at_a_distance_of_zero_the_expert_is_not_read_and_the_base_is_the_result():
    base, expert = inputs(2, 1, (40,), "coarse")
    prepared = NEARSWAP.prepare(tensor_params(NEARSWAP, [{}], {"t": 0.0}), "float32")
    assert prepared.live == (False,)
    assert NEARSWAP.copied_input(prepared, (False,)) == -1
    assert same_bits(merge(NEARSWAP, base, [expert], t=0.0), base)


def test_a_distance_too_small_for_the_work_dtype_is_zero():
    params = tensor_params(NEARSWAP, [{}], {"t": 1e-60})
    assert NEARSWAP.prepare(params, "float32").live == (False,)
    assert NEARSWAP.prepare(params, "float64").live == (True,)


@pytest.mark.parametrize("place", [0, 1])
def test_the_base_may_be_listed_beside_the_expert(place):
    base, expert = inputs(3, 1, (40,), "near")
    listed = [expert]
    listed.insert(place, base)
    got = merge(NEARSWAP, base, listed, base_expert=place, t=1e-4)
    assert same_bits(got, merge(NEARSWAP, base, [expert], t=1e-4))


@pytest.mark.parametrize(("count", "base_expert"), [(2, None), (1, 0)])
def test_other_numbers_of_experts_are_refused(count, base_expert):
    params = tensor_params(NEARSWAP, [{}] * count, {"t": 0.1}, base_expert=base_expert)
    with pytest.raises(OperatorError, match="exactly one other checkpoint") as caught:
        NEARSWAP.prepare(params, "float32")
    assert caught.value.hint


@pytest.mark.parametrize("t", [3e-7, 1e-6, 0.2])
def test_a_stored_delta_is_as_good_as_the_expert(t):
    base, expert = inputs(4, 1, (40,), "coarse")
    none, delta = stored(base, [expert])
    got = merge(NEARSWAP, base, none, deltas=delta, t=t)
    assert same_bits(got, merge(NEARSWAP, base, [expert], t=t), zero_signs=False)


@pytest.mark.parametrize("t", [3e-7, 0.2])
def test_equal_infinities_stay_and_not_a_number_passes_through(t):
    base = np.float32([np.inf, -np.inf, np.inf, 1, np.nan, 1])
    expert = np.float32([np.inf, -np.inf, 1, np.inf, np.nan, np.nan])
    got = merge(NEARSWAP, base, [expert], t=t, non_finite="allow", find_zeros=False)
    assert got[:3].tolist() == [np.inf, -np.inf, np.inf]
    assert np.isnan(got[3:]).all()


def test_a_changed_block_changes_that_block_alone():
    base, expert = inputs(5, 1, (64,), "near")
    other = expert.copy()
    other[32:48] += 0.5
    first, second = (merge(NEARSWAP, base, [x], t=1e-3, block_elements=16) for x in (expert, other))
    differs = np.flatnonzero(first != second)
    assert differs.size
    assert ((differs >= 32) & (differs < 48)).all()


def test_inputs_are_never_written_to():
    base, expert = inputs(6, 1, (64,), "near")
    run = Run(NEARSWAP, base, [expert], tensor_params(NEARSWAP, [{}], {"t": 1e-7}))
    run.result()  # the driver's tiles are read-only
    assert same_bits(run.base, base)
