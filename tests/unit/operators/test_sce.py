"""sce: exactly the elements that vary most, weights from what was selected, signs that agree; and what is kept."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_select
from support.operators import Run, merge, tensor_params
from support.quick import examples
from support.reference import same_bits
from support.selections import cases, inputs, stored, whole

from mergepipe.operators.sce import Sce
from mergepipe.operators.spread import ALL, Spread, Squares, variance

SCE = Sce()
shares = st.sampled_from([1.0, 0.999, 0.5, 0.3, 0.1, 0.01])


def run(base, experts, *, share=1.0, base_expert=None, **options):
    params = tensor_params(SCE, [{}] * len(experts), {"select_topk": share}, base_expert=base_expert)
    return Run(SCE, base, experts, params, **options)


def assert_near(got, want, base, experts):
    """Assert equality within the last bits of weights, which are ratios of sums, times deltas."""
    size = np.abs(base) + np.max(np.abs(reference_select.deltas(base, experts)), axis=0)
    assert (np.abs(got - want) <= 16 * np.finfo(want.dtype).eps * size).all()


@settings(max_examples=examples(60))
@given(cases, shares)
def test_it_is_the_reference_however_the_tensor_is_cut(arrays, share):
    base, *experts = arrays
    if base.dtype == np.float32:  # float64 sums hide behind the rounding of the weights
        got = whole(SCE, base, experts, select_topk=share)
        assert same_bits(got, reference_select.sce(base, experts, share), zero_signs=False)
    else:
        for block in (1 << 18, 6):
            got = merge(SCE, base, experts, select_topk=share, block_elements=block, find_zeros=False)
            assert_near(got, reference_select.sce(base, experts, share), base, experts)


@settings(max_examples=examples(60))
@given(cases, shares.filter(lambda share: share < 1), st.sampled_from([1, 5, 1 << 18]))
def test_exactly_the_elements_that_vary_most_are_selected_and_of_equal_ones_the_first(arrays, share, block):
    base, *experts = arrays
    want = reference_select.most_varying(np.stack(reference_select.deltas(base, experts)), share).reshape(-1)
    one = run(base, experts, share=share, block_elements=block)
    if not one.facts.elements or len(experts) == 1:
        return
    chosen = one.reduction().value
    assert chosen.nothing == (not want.any())
    got = np.zeros(want.shape, bool)
    if not chosen.nothing:
        for number in range(one.facts.blocks):
            for tile in one._tiles(number, range(len(arrays)), rowwise=False):
                variances = variance(tile, range(len(experts)), len(experts))
                if variances is not None:
                    got[tile.start : tile.start + tile.shape[0]] = chosen.selected.mask(tile, variances)
    assert got.tolist() == want.tolist()


@given(cases, st.integers(0, 3))
def test_the_variance_is_that_of_numpy_and_zero_deltas_count_found_or_not(arrays, absent):
    base, *experts = arrays
    one = run(base, [*experts, *[base] * absent], find_zeros=True)
    changes = np.stack(reference_select.deltas(base, [*experts, *[base] * absent]))
    want = reference_select.variances(changes)
    for tile in one._tiles(0, range(len(experts) + absent + 1), rowwise=False):
        got = variance(tile, range(len(experts) + absent), len(experts) + absent)
        assert same_bits(np.zeros_like(want) if got is None else got.reshape(want.shape), want)


@settings(max_examples=examples(60))
@given(cases, shares)
def test_the_sums_are_the_squares_of_what_is_selected(arrays, share):
    base, *experts = arrays
    if not base.size or len(experts) == 1:
        return
    one = run(base, experts, share=share, block_elements=7)
    chosen = one.reduction().value
    if chosen.nothing:
        return
    slots = tuple(range(len(arrays)))
    statistic = Squares(slots=slots, experts=len(experts), selected=chosen.selected)
    blocks = [struct.unpack(f"<{len(experts)}d", block) for block in one.values(statistic)]
    changes = reference_select.deltas(base, experts)
    mask = reference_select.most_varying(np.stack(changes), share) if share < 1 else np.ones(base.shape, bool)
    for sums, change in zip(zip(*blocks, strict=True), changes, strict=True):
        want = math.fsum((change.astype(np.float64) ** 2)[mask].reshape(-1))
        assert sum(sums) == pytest.approx(want, rel=1e-13, abs=0)


def test_the_number_selected_is_the_truncated_share_of_those_that_vary():
    base, *experts = inputs(1, 3, (100,), "near")
    varying = np.count_nonzero(np.var(np.stack(experts) - base, axis=0))
    assert 50 < varying < 100
    for share in (0.5, 0.3, 0.07, 1.0 / varying):
        changed = merge(SCE, base, experts, select_topk=share) != base
        assert changed.sum() == int(varying * share)


@pytest.mark.parametrize("share", [1e-4, 0.009])
def test_a_share_of_less_than_one_element_selects_nothing(share):
    base, *experts = inputs(2, 3, (100,), "near")
    one = run(base, experts, share=share)
    assert same_bits(one.result(), base)
    assert {type(statistic) for statistic, _ in one.measured} == {Spread}


def test_weights_are_mean_squares_and_equal_where_these_are_small():
    base = np.zeros(4, np.float64)
    experts = [np.float64([3.0, 0, 0, 0]), np.float64([0, 1.0, 0, 0])]
    assert run(base, experts).reduction().value.weights == (0.9, 0.1)
    small = [expert * 1e-4 for expert in experts]
    assert run(base, small).reduction().value.weights == (0.5, 0.5)
    # Only what is selected counts: here the first element.
    assert run(base, experts, share=0.5).reduction().value.weights == (1.0, 0.0)


def test_what_disagrees_with_the_sum_is_erased_and_the_rest_averaged():
    base = np.zeros(3, np.float64)
    experts = [np.float64([4.0, -4.0, 1.0]), np.float64([-2.0, 2.0, 1.0]), np.float64([2.0, 1.0, -2.0])]
    first, second, third = run(base, experts).reduction().value.weights
    want = [(4 * first + 2 * third) / (first + third), -4.0, (first + second) / (first + second)]
    assert np.allclose(merge(SCE, base, experts), want, rtol=1e-15)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_base_among_the_experts_is_none_of_them(share):
    base, *experts = inputs(3, 3, (60,), "near")
    got = merge(SCE, base, [experts[0], base, *experts[1:]], base_expert=1, select_topk=share)
    assert same_bits(got, merge(SCE, base, experts, select_topk=share))
    assert same_bits(merge(SCE, base, [base], base_expert=0, select_topk=share), base)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_absent_expert_is_a_zero_delta(share):
    base, *experts = inputs(4, 3, (60,), "near")
    for place in range(4):
        listed = list(experts)
        listed.insert(place, None)
        want = list(experts)
        want.insert(place, base)
        got = merge(SCE, base, listed, select_topk=share)
        assert same_bits(got, merge(SCE, base, want, select_topk=share, find_zeros=False), zero_signs=False)
    assert same_bits(merge(SCE, base, [None, None], select_topk=share), base)


def test_one_expert_is_taken_whole_without_a_statistic_and_not_read_where_only_variance_selects():
    base, expert = inputs(5, 1, (60,), "coarse")
    one = run(base, [expert])
    assert same_bits(one.result(), expert, zero_signs=False)
    assert not one.measured
    assert SCE.prepare(run(base, [expert], share=0.5).params, "float32").live == (False,)
    assert same_bits(merge(SCE, base, [expert], select_topk=0.5), base)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_stored_deltas_are_as_good_as_the_experts(share):
    base, *experts = inputs(6, 3, (60,), "coarse")
    none, deltas = stored(base, experts)
    got = merge(SCE, base, none, deltas=deltas, select_topk=share)
    assert same_bits(got, merge(SCE, base, experts, select_topk=share), zero_signs=False)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_what_is_not_finite_passes_through_and_leaves_the_rest_alone(share):
    base, *experts = inputs(7, 2, (60,), "near")
    base[7] = experts[0][7] = experts[1][7] = np.inf
    plain = merge(SCE, base, experts, select_topk=share, non_finite="allow", find_zeros=False)
    assert plain[7] == np.inf
    experts[0][5] = np.nan
    got = merge(SCE, base, experts, select_topk=share, non_finite="allow", find_zeros=False)
    assert np.isnan(got[5])
    assert np.isfinite(np.delete(got, [5, 7])).all()
    assert np.allclose(np.delete(got, [5, 7]), np.delete(plain, [5, 7]), rtol=1e-2)


def test_every_expert_is_measured_alone_where_nothing_is_selected():
    base, *experts = inputs(8, 3, (60,), "near")
    asked = [{s.digest() + bytes(s.slots) for s, _ in measured(base, few).measured} for few in (experts, experts[:2])]
    assert asked[1] < asked[0]


def measured(base, experts, **options):
    one = run(base, experts, **options)
    one.reduction()
    return one


def test_blocks_keep_their_keys_where_their_share_of_the_equal_variances_stays():
    # Twelve elements of equal variance in three blocks; six of them are selected: four, two and none.
    base = np.zeros(12, np.float32)
    experts = [np.ones(12, np.float32), -np.ones(12, np.float32)]
    chosen = measured(base, experts, share=0.5, block_elements=4).reduction()
    assert chosen.value.selected.taken == (ALL, 2, 0)
    assert len(set(chosen.block_keys)) == 3
    statistic = Squares(slots=(0, 1, 2), experts=2, selected=chosen.value.selected)
    assert [statistic.block_settings(block) for block in range(3)] == [(ALL,), (2,), (0,)]
    # An element more in the last block: as many are selected, and nothing changes for the others.
    more = [np.append(expert, np.float32(0)) for expert in experts]
    wider = measured(np.zeros(13, np.float32), more, share=0.5, block_elements=4).reduction()
    assert [wider.digest(block) for block in range(3)] == [chosen.digest(block) for block in range(3)]


def test_inputs_are_never_written_to():
    base, *experts = inputs(9, 3, (60,), "near")
    copies = [array.copy() for array in (base, *experts)]
    merge(SCE, base, experts, select_topk=0.5)  # the driver's tiles are read-only
    assert all(same_bits(a, b) for a, b in zip((base, *experts), copies, strict=True))
