"""multislerp: the mean direction of several vectors with their mean length, from inner products alone."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.operators import Run, merge, tensor_params
from support.reference import same_bits
from support.reference_spherical import multislerp as reference
from support.reference_spherical import ulps

from mergepipe.errors import OperatorError
from mergepipe.operators.registry import operator

MULTI = operator("multislerp")


def checkpoints(count, shape=(60, 50), dtype=np.float32, *, seed=0, size=0.1):
    generator = np.random.default_rng(seed)
    base, common, *own = generator.standard_normal((count + 2, *shape))
    return base.astype(dtype), [(base + size * (0.5 * common + array)).astype(dtype) for array in own]


def merged(base, experts, weights, **options):
    return merge(MULTI, base, experts, [{"weight": weight} for weight in weights], **options)


shapes = st.sampled_from([(), (1,), (7,), (1000,), (60, 50), (3, 4, 5), (1, 33)])
weight_lists = st.lists(st.floats(-1, 3, width=32).filter(lambda w: w == 0 or abs(w) > 1e-2), min_size=1, max_size=6)


@given(shapes, weight_lists, st.booleans(), st.booleans(), st.sampled_from([np.float32, np.float64]), st.integers(0, 9))
def test_it_is_the_reference_with_its_tangents(shape, weights, based, normalize, dtype, seed):
    assume(abs(sum(weights)) > 0.3 * sum(map(abs, weights)) > 0)
    base, experts = checkpoints(len(weights), shape, dtype, seed=seed)
    vectors = [expert - base if based else expert for expert in experts]  # deltas are rounded
    live = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if weight or len(weights) == 1]
    units = [weight * vector / np.linalg.norm(vector) for vector, weight in live]
    mean = np.linalg.norm(sum(units)) / sum(abs(weight) for _, weight in live)
    assume(len(weights) == 1 or mean > 0.1)  # what nearly cancels is magnified
    got = merged(base if based else None, experts, weights, normalize_weights=normalize)
    if len(weights) == 1:
        assert same_bits(got, experts[0])
        return
    if len(live) == 1:  # the reference knows nothing of an expert that is not read
        share = 1.0 if normalize else abs(live[0][1])
        want = share * live[0][0].astype(np.float64)
    else:
        want = reference([v for v, _ in live], [w for _, w in live], normalize=normalize)
    want = want + (base if based else 0)
    scaled = [weight * expert for expert, weight in zip(experts, weights, strict=True)]
    assert ulps(got, want, base, *experts, *scaled) < (8 if dtype == np.float32 else 200) / mean


@given(st.booleans(), st.integers(1, 70_000))
def test_neither_tiles_nor_what_is_known_to_be_zero_change_a_bit(based, tile):
    base, experts = checkpoints(3)
    experts[1][10:30] = base[10:30]
    want = merged(base if based else None, experts, (1, 2, 3), block_elements=500)
    got = merged(base if based else None, experts, (1, 2, 3), block_elements=500, tile=tile, find_zeros=False)
    assert same_bits(got, want, zero_signs=False)


def test_blocks_change_at_most_the_last_bits():
    base, experts = checkpoints(3)
    want = merged(base, experts, (1, 2, 3))
    assert ulps(merged(base, experts, (1, 2, 3), block_elements=70), want, base, *experts) <= 1


@pytest.mark.parametrize("based", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.3, -2.0])
@pytest.mark.parametrize("beside", [True, False])
def test_a_lone_expert_is_copied_whatever_its_weight(based, weight, beside):
    base, (expert,) = checkpoints(1)
    experts, given = ([base, expert], [{"weight": 3.0}, {"weight": weight}]) if beside else ([expert], [{}])
    base_expert = 0 if beside else None
    params = tensor_params(MULTI, given, {}, base_expert=base_expert)
    run = Run(MULTI, base if based else None, experts, params)
    assert not MULTI.reduces(run.prepared, run.facts)
    assert MULTI.copied_input(run.prepared, run.prepared.live) == len(experts) - 1
    assert same_bits(run.result(), expert)


@pytest.mark.parametrize("at", [0, 2])
def test_the_base_among_the_experts_changes_nothing(at):
    base, experts = checkpoints(3)
    listed = [*experts[:at], base, *experts[at:]]
    weights = [1.0, 2.0, 3.0]
    got = merged(base, listed, [*weights[:at], 7.0, *weights[at:]], base_expert=at)
    assert same_bits(got, merged(base, experts, weights))


def test_an_expert_of_weight_zero_is_not_read():
    base, experts = checkpoints(3)
    params = tensor_params(MULTI, [{"weight": w} for w in (1.0, 0.0, 2.0)], {})
    run = Run(MULTI, base, experts, params)
    assert run.prepared.live == (True, False, True)
    want = merged(base, experts[::2], (1, 2))
    assert same_bits(run.result(), want)
    assert {statistic.slots for statistic, _ in run.measured} == {(0, 1, 3)}


def test_weights_that_cancel_are_refused_before_weights_are_read():
    with pytest.raises(OperatorError, match="sum to"):
        MULTI.prepare(tensor_params(MULTI, [{"weight": 1.0}, {"weight": -1.0}], {}), "float32")


def test_without_any_weight_the_base_is_left():
    base, experts = checkpoints(2)
    assert same_bits(merged(base, experts, (0, 0), normalize_weights=False), base)
    assert not merged(None, experts, (0, 0), normalize_weights=False).any()


@pytest.mark.parametrize("factor", [-1.0, -3.0, -0.7])
def test_two_directions_that_cancel_are_added_up(factor):
    _, (first, _) = checkpoints(2)
    second = first * np.float32(factor)
    got = merged(None, [first, second], (1, 1))
    assert ulps(got, (first.astype(np.float64) + second) / 2, first, second) <= 1


def test_more_directions_that_cancel_are_an_error_with_its_numbers():
    generator = np.random.default_rng(0)
    first, second = generator.standard_normal((2, 60, 50)).astype(np.float32)
    with pytest.raises(OperatorError, match="cancel") as caught:
        merged(None, [first, -first, second, -second], (1, 1, 2, 2))
    assert caught.value.facts["elements"] == 3000
    assert caught.value.facts["weights"] == [1 / 6, 1 / 6, 1 / 3, 1 / 3]
    assert caught.value.hint


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("find_zeros", [True, False])
def test_no_change_is_the_base(count, find_zeros):
    base, _ = checkpoints(1)
    experts = [base.copy() for _ in range(count)]
    assert same_bits(merged(base, experts, [1.0] * count, find_zeros=find_zeros), base)
    assert same_bits(merged(base, [None] * count, [1.0] * count), base)


def test_a_delta_of_zero_counts_in_the_mean_length_alone():
    base, experts = checkpoints(2)
    got = merged(base, [*experts, base.copy()], (1, 1, 2))
    vectors = [expert - base for expert in (*experts, base)]
    assert ulps(got, reference(vectors, (1, 1, 2)) + base, base, *experts) < 6
    assert same_bits(merged(base, [*experts, None], (1, 1, 2)), got)


def test_equal_experts_are_their_own_mean_to_the_last_bits():
    _, (expert,) = checkpoints(1)
    assert ulps(merged(None, [expert] * 4, (1, 2, 3, 4)), expert.astype(np.float64)) <= 4


def test_stored_deltas_are_the_deltas():
    base, experts = checkpoints(3)
    base, *experts = (np.round(array * 256).astype(np.float32) / 256 for array in (base, *experts))
    deltas = [expert - base for expert in experts]
    assert same_bits(merged(base, [None] * 3, (1, 2, 3), deltas=deltas), merged(base, experts, (1, 2, 3)))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_make_it_linear(value):
    base, experts = checkpoints(3)
    experts[1][3, 4] = value
    got = merged(base, experts, (1, 2, 1), non_finite="allow")
    assert np.array_equal(got[3, 4], np.float32(value), equal_nan=True)
    want = np.average(np.float64(experts), axis=0, weights=(1, 2, 1))
    rest = np.isfinite(experts[1])
    assert ulps(got[rest], want[rest], base[rest], *(expert[rest] for expert in experts)) <= 2


def test_a_large_eps_shortens_the_result_as_the_formula_says():
    base, experts = checkpoints(3)
    vectors = [expert - base for expert in experts]
    got = merged(base, experts, (1, 2, 1), eps=0.3)
    assert ulps(got, reference(vectors, (1, 2, 1), eps=0.3) + base, base, *experts) < 6


def test_an_empty_tensor_has_no_direction_and_no_error():
    empty = np.zeros((0, 4), np.float32)
    assert merged(None, [empty] * 3, (1, 1, 1)).shape == (0, 4)
