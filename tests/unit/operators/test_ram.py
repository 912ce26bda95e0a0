"""ram and ramplus_tl: unique changes whole (and stronger), shared ones averaged, counted once per content."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import reference_select
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.selections import cases, inputs, stored, whole

from mergepipe.operators.ram import ChangeCounts, Ram, RamPlus

RAM, PLUS = Ram(), RamPlus()
thresholds = st.sampled_from([1e-5, 0.125, 1e-3, 2.0])


@given(cases, thresholds | st.just(0.0))
def test_ram_is_the_reference_bit_for_bit_however_the_tensor_is_cut(arrays, epsilon):
    base, *experts = arrays
    got = whole(RAM, base, experts, epsilon=epsilon)
    assert same_bits(got, reference_select.ram(base, experts, epsilon), zero_signs=False)


@given(cases, thresholds, st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([0.0, 0.2, 50.0]))
def test_ramplus_is_the_reference_bit_for_bit_however_the_tensor_is_cut(arrays, epsilon, r, alpha):
    base, *experts = arrays
    got = whole(PLUS, base, experts, epsilon=epsilon, r=r, alpha=alpha)
    assert same_bits(got, reference_select.ramplus(base, experts, r, alpha, epsilon), zero_signs=False)


@given(cases, thresholds, st.integers(1, 9))
def test_the_counts_of_the_blocks_add_up_to_those_of_the_tensor(arrays, epsilon, block_elements):
    base, *experts = arrays
    slots = tuple(range(len(arrays)))
    statistic = ChangeCounts(slots=slots, epsilon=float(base.dtype.type(epsilon)))
    run = Run(PLUS, base, experts, tensor_params(PLUS, [{}] * len(experts), {}), block_elements=block_elements)
    total = np.zeros(2 * len(experts), np.int64)
    for numbers in run.values(statistic):
        total += struct.unpack(f"<{total.size}q", numbers)
    want = reference_select.change_counts(base, experts, epsilon)
    assert total.reshape(-1, 2).tolist() == [list(pair) for pair in want]


def test_what_one_expert_changed_is_added_whole_and_what_several_changed_is_averaged():
    base = np.float32([1, 1, 1, 1])
    experts = [np.float32([2, 1, 3, 1]), np.float32([1, 1, 2, 1.5])]
    assert merge(RAM, base, experts).tolist() == [2, 1, 2.5, 1.5]


def test_a_change_of_the_threshold_exactly_is_none():
    base, expert = np.zeros(3, np.float32), np.float32([0.25, -0.25, np.nextafter(np.float32(0.25), np.float32(1))])
    assert merge(RAM, base, [expert], epsilon=0.25).tolist() == [0, 0, float(expert[2])]


def test_unique_changes_grow_with_the_share_of_shared_ones():
    base = np.zeros(10, np.float32)
    first = np.float32([1, 1, 1, 1, 1, 0, 0, 0, 0, 0])  # two alone, three shared: ratio 1.5
    second = np.float32([0, 0, 1, 1, 1, 1, 1, 1, 1, 1])  # five alone, three shared: 0.6
    got = merge(PLUS, base, [first, second], r=0.5, alpha=1.0)
    assert np.allclose(got, [1.5, 1.5, 1, 1, 1, 1.3, 1.3, 1.3, 1.3, 1.3])


def test_an_expert_that_shares_all_its_changes_has_the_largest_factor():
    base = np.zeros(3, np.float32)
    run = Run(PLUS, base, [np.float32([1, 1, 0]), np.float32([1, 1, 1])], tensor_params(PLUS, [{}, {}], {}))
    assert run.reduction().value == (float(np.float32(1.02)), float(np.float32(1.02)))


def test_other_strengths_take_no_other_counts_and_another_threshold_does():
    base, *experts = inputs(1, 3, (60,), "near")

    def asked(**params):
        run = Run(PLUS, base, experts, tensor_params(PLUS, [{}] * 3, params), block_elements=16)
        return run.reduction(), {(statistic, statistic.digest()) for statistic, _ in run.measured}

    plain, strong, limited, finer = asked(), asked(r=0.7), asked(alpha=0.01), asked(epsilon=1e-4)
    assert plain[1] == strong[1] == limited[1] != finer[1]
    assert len({plain[0].key, strong[0].key, limited[0].key}) == 3


def test_equal_factors_give_equal_keys_though_the_content_differs():
    base, *experts = inputs(2, 2, (60,), "near")
    scaled = [base + (expert - base) * 2 for expert in experts]
    first, second = (Run(PLUS, base, x, tensor_params(PLUS, [{}, {}], {})).reduction() for x in (experts, scaled))
    assert first.key == second.key


@pytest.mark.parametrize("params", [{"r": 0.0}, {"alpha": 0.0}])
def test_where_nothing_is_made_stronger_nothing_is_counted(params):
    base, *experts = inputs(3, 3, (60,), "near")
    run = Run(PLUS, base, experts, tensor_params(PLUS, [{}] * 3, params))
    assert same_bits(run.result(), merge(RAM, base, experts))
    assert not run.measured


def test_one_expert_shares_with_nobody_and_is_not_counted():
    base, expert = inputs(4, 1, (60,), "near")
    for experts in ([expert], [expert, None]):
        run = Run(PLUS, base, experts, tensor_params(PLUS, [{}] * len(experts), {}))
        assert same_bits(run.result(), merge(RAM, base, [expert]))
        assert not run.measured


@pytest.mark.parametrize("operator", [RAM, PLUS], ids=["ram", "ramplus_tl"])
def test_the_base_among_the_experts_and_an_absent_expert_change_nothing(operator):
    base, *experts = inputs(5, 3, (60,), "coarse")
    alone = merge(operator, base, experts)
    assert same_bits(merge(operator, base, [experts[0], base, *experts[1:]], base_expert=1), alone)
    assert same_bits(merge(operator, base, [experts[0], None, *experts[1:]]), alone)
    assert same_bits(merge(operator, base, [base], base_expert=0), base)


@pytest.mark.parametrize("operator", [RAM, PLUS], ids=["ram", "ramplus_tl"])
def test_stored_deltas_are_as_good_as_the_experts(operator):
    base, *experts = inputs(6, 3, (60,), "coarse")
    none, deltas = stored(base, experts)
    params = {"r": 2.0} if operator is PLUS else {}
    got = merge(operator, base, none, deltas=deltas, **params)
    want = merge(operator, base, experts, **params)
    assert same_bits(got, want, zero_signs=False)


def test_equal_infinities_are_no_change_and_not_a_number_passes_through():
    base = np.float32([np.inf, 1, 1, 1])
    experts = [np.float32([np.inf, np.inf, np.nan, 2]), np.float32([np.inf, 1, 2, 4])]
    got = merge(RAM, base, experts, non_finite="allow", find_zeros=False)
    assert got[0] == np.inf
    assert got[1] == np.inf
    assert np.isnan(got[2])
    assert got[3] == 3


def test_a_changed_block_of_ram_changes_that_block_alone_and_of_ramplus_is_counted_alone():
    base, *experts = inputs(7, 2, (64,), "near")
    other = [experts[0].copy(), experts[1]]
    other[0][32:48] += 0.5
    first, second = (merge(RAM, base, x, block_elements=16) for x in (experts, other))
    differs = np.flatnonzero(first != second)
    assert set(differs // 16) == {2}
    runs = [Run(PLUS, base, x, tensor_params(PLUS, [{}, {}], {}), block_elements=16) for x in (experts, other)]
    statistic = ChangeCounts(slots=(0, 1, 2), epsilon=float(np.float32(1e-5)))
    counted = [run.values(statistic) for run in runs]
    assert [a == b for a, b in zip(*counted, strict=True)] == [True, True, False, True]
