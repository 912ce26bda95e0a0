"""Operators that drop elements of deltas: the slow references bit for bit, exact counts, masks, elections, edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_sparse
from support.operators import Run, facts_of, merge, tensor_params
from support.quick import every
from support.reference import same_bits

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import TensorFacts
from mergepipe.operators.masks import mask_key, random_words
from mergepipe.operators.ranking import ascending
from mergepipe.operators.registry import operators
from mergepipe.operators.sparsifiers import ByMagnitude, ByRank
from mergepipe.operators.sparsify import KeptSum, MagnitudeBits

KINDS = {
    "ties": "largest",
    "breadcrumbs": "between",
    "breadcrumbs_ties": "between",
    "dare_linear": "random",
    "dare_ties": "random",
    "della": "ranked",
    "della_linear": "ranked",
}
NAMES = sorted(KINDS)
ELECTING = {"ties", "breadcrumbs_ties", "dare_ties", "della"}
SHAPES = [(), (1,), (7,), (60,), (5, 8), (3, 1), (1, 9), (2, 3, 5), (0,), (0, 4), (40, 30)]


def same(one, other):
    """Return whether values are equal, whatever the sign of a zero."""
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other, equal_nan=True)


@st.composite
def merges(draw):
    """Draw an operator, arrays and parameters; deltas are full of equal magnitudes and zeros, or have none."""
    name = draw(st.sampled_from(NAMES))
    shape, work = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float32", "float64"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 4))
    arrays = []
    for _ in range(count + 1):
        values = rng.standard_normal(shape)
        kind = draw(st.sampled_from(["any", "few", "sparse"]))
        values = np.round(values * 2) / 4 if kind == "few" else values
        arrays.append(np.asarray(np.where(rng.random(shape) < 0.7, 0, values) if kind == "sparse" else values, work))
    base = arrays[0]
    experts = [np.asarray(base + array * draw(st.booleans()), work) for array in arrays[1:]]
    given = [
        {
            "weight": draw(st.sampled_from([1.0, 0.5, 0.3, -0.4, 2.0, 0.0])),
            "density": draw(st.sampled_from([0.5, 0.35, 0.8, 0.21, 1.0] + [0.01] * (KINDS[name] != "ranked"))),
            **({"gamma": draw(st.sampled_from([0.0, 0.01, 0.1, 0.6]))} if KINDS[name] == "between" else {}),
            **({"epsilon": draw(st.sampled_from([0.0, 0.1, 0.19]))} if KINDS[name] == "ranked" else {}),
        }
        for _ in range(count)
    ]
    params = {
        "normalize": draw(st.booleans()),
        "rescale": draw(st.sampled_from([False, "l1", "density"])),
        "lambda": draw(st.sampled_from([1.0, 0.7])),
    }
    if KINDS[name] in ("random", "ranked"):
        params["seed"] = draw(st.integers(0, 3))
    if name not in ELECTING and abs(sum(own["weight"] for own in given)) < 1e-3:
        params["normalize"] = False
    return name, base, experts, given, params


def want(name, base, experts, given, params):
    with np.errstate(all="ignore"):
        return reference_sparse.merged(
            KINDS[name],
            base,
            experts,
            given,
            elects=name in ELECTING,
            normalize=params["normalize"],
            rescale=params["rescale"],
            scale=params["lambda"],
            seed=params.get("seed", 0),
        )


@settings(deadline=None)
@given(merges(), st.sampled_from([4, 16, 64, 1000]), st.sampled_from([3, 8, 64, 1 << 16]), st.booleans())
def test_the_merge_is_that_of_the_reference_however_it_is_cut(case, block, tile, find_zeros):
    name, base, experts, given, params = case
    got = merge(
        operators()[name], base, experts, given, block_elements=block, tile=tile, find_zeros=find_zeros, **params
    )
    assert same(got, want(*case))


@settings(deadline=None)
@given(merges(), st.integers(0, 3))
def test_a_delta_may_be_stored_as_one(case, which):
    name, base, experts, given, params = case
    which = min(which, len(experts) - 1)
    exact = np.asarray(np.round((experts[which] - base) * 8) / 8, base.dtype)
    base = np.asarray(np.round(base * 8) / 8, base.dtype)
    experts = [*experts[:which], np.asarray(base + exact, base.dtype), *experts[which + 1 :]]
    stored = [exact if index == which else None for index in range(len(experts))]
    left = [None if index == which else expert for index, expert in enumerate(experts)]
    got = merge(operators()[name], base, left, given, deltas=stored, block_elements=16, **params)
    assert same(got, want(name, base, experts, given, params))


@pytest.mark.parametrize("name", every(NAMES, ("ties", "breadcrumbs", "dare_linear", "della")))
def test_large_tensors_of_any_values_are_merged_alike(name):
    """Several tiles and blocks, coarse tables, all digits of the ranks."""
    rng = np.random.default_rng(3)
    base = rng.standard_normal((300, 128)).astype(np.float32)
    experts = [(base + 0.01 * rng.standard_normal(base.shape)).astype(np.float32) for _ in range(2)]
    given = [{"weight": 0.6, "density": 0.4}, {"weight": 0.3, "density": 0.7}]
    params = {"normalize": False, "rescale": "l1", "lambda": 1.0}
    if KINDS[name] == "between":
        given = [own | {"gamma": 0.01} for own in given]
    if KINDS[name] == "ranked":
        given = [own | {"epsilon": 0.15} for own in given]
    expected = want(name, base, experts, given, params)
    for block, tile in [(1 << 13, 1000), (1 << 18, 1 << 14)]:
        got = merge(operators()[name], base, experts, given, block_elements=block, tile=tile, **params)
        assert same(got, expected)


# --- what is kept -------------------------------------------------------------------------------------------------


def kept(name, delta, **params):
    """Return which elements of a delta are kept, on a base of zeros, without rescaling."""
    delta = np.float32(delta)
    got = merge(operators()[name], np.zeros_like(delta), [delta], rescale=False, normalize=False, **params)
    assert set(got.reshape(-1).tolist()) <= {*delta.reshape(-1).tolist(), 0.0}
    return got


def test_ties_keeps_exactly_k_elements_the_first_ones_among_equals():
    assert kept("ties", [4, 3, -3, 3, 1, 0, 0, 0], density=0.25).tolist() == [4, 3, 0, 0, 0, 0, 0, 0]
    assert kept("ties", [0, 0, 0, 5, 0, 0, 0, 0], density=0.5).tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    assert kept("ties", [7], density=0.1).tolist() == [7]
    assert not kept("ties", [0] * 8, density=0.5).any()


@pytest.mark.parametrize(
    ("density", "gamma", "expected"),
    [
        (0.5, 0.0, [0, 0, 0, 0, 0, 6, 7, 8, 9, 10]),
        (0.5, 0.2, [0, 0, 0, 4, 5, 6, 7, 8, 0, 0]),
        (0.5, 0.19, [0, 0, 0, 0, 5, 6, 7, 8, 9, 0]),
        (0.8, 0.6, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]),
        (0.01, 0.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 10]),
        (0.01, 0.99, [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (1.0, 0.5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_breadcrumbs_drops_the_largest_then_keeps_k(density, gamma, expected):
    assert kept("breadcrumbs", range(1, 11), density=density, gamma=gamma).tolist() == expected


def test_breadcrumbs_keeps_the_first_of_equal_magnitudes_at_both_thresholds():
    delta = [2, 3, -3, 1, -2, 3, 1, 2]
    assert kept("breadcrumbs", delta, density=0.5, gamma=0.25).tolist() == [2, 3, 0, 0, -2, 0, 0, 2]
    assert kept("breadcrumbs", delta, density=0.25, gamma=0.25).tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert kept("breadcrumbs", [5] * 8, density=0.25, gamma=0.25).tolist() == [5, 5, 0, 0, 0, 0, 0, 0]


@given(st.integers(0, 10**10), st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_max=True))
def test_the_counts_of_kept_and_dropped_elements_fit(elements, density, gamma):
    sparsifier = ByMagnitude(density=density, gamma=gamma)
    facts = TensorFacts(elements=elements, rows=1, row_elements=elements, columns=elements, blocks=1)
    if sparsifier.keeps_all(facts):
        assert density == 1 or int(density * elements) == elements or elements <= 1
        return
    dropped, left = sparsifier.counts(elements)
    assert left == max(1, int(density * elements)) < elements
    assert dropped == min(int(gamma * elements), elements - left) >= 0


@pytest.mark.parametrize("name", ["dare_linear", "della_linear"])
def test_random_masks_keep_the_density_and_depend_on_tensor_and_seed(name):
    delta = np.ones((256, 256), np.float32)
    epsilon = {"epsilon": 0.1} if "della" in name else {}
    first = kept(name, delta, density=0.25, seed=7, **epsilon)
    assert abs(first.mean() - 0.25) < 0.01
    assert same_bits(first, kept(name, delta, density=0.25, seed=7, **epsilon))
    assert (first != kept(name, delta, density=0.25, seed=8, **epsilon)).mean() > 0.3
    operator = operators()[name]
    params = tensor_params(operator, [{}], {"density": 0.25, "rescale": False, **epsilon, "seed": 7}, tensor="other")
    other = Run(operator, np.zeros_like(delta), [delta], params).result()
    assert (first != other).mean() > 0.3


def test_della_keeps_large_magnitudes_more_often_within_each_row():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2000, 101)) * np.exp2(rng.integers(-20, 20, (2000, 1)))
    delta = rows.astype(np.float32)
    mask = kept("della_linear", delta, density=0.5, epsilon=0.3) != 0
    by_rank = np.take_along_axis(mask, np.argsort(np.abs(delta), axis=1), axis=1).mean(axis=0)
    expected = 0.2 + 0.6 * np.arange(101) / 100
    assert np.abs(by_rank - expected).max() < 4.5 * math.sqrt(0.25 / 2000)


def test_della_divides_by_each_elements_own_probability():
    delta = np.full((4000, 5), 1, np.float32)
    got = merge(operators()["della_linear"], np.zeros_like(delta), [delta], density=0.5, epsilon=0.2, rescale="density")
    for column, probability in enumerate((0.3, 0.4, 0.5, 0.6, 0.7)):
        assert np.unique(got[:, column]) == pytest.approx([0, 1 / probability])
        assert got[:, column].mean() == pytest.approx(1, abs=0.12)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1 + 2**-20, 2.0, 2**-140]), min_size=6, max_size=6), min_size=1))
def test_rows_are_ranked_stably(rows):
    for work in ("float32", "float64"):
        bits = np.array(rows, work).view(f"u{np.dtype(work).itemsize}")
        expected = np.argsort(bits, axis=1, kind="stable") + 6 * np.arange(len(rows))[:, None]
        assert np.array_equal(ascending(bits), expected)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_few_long_patterns_among_short_ones_are_ranked_stably(rows):
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 40, (rows, 5000), dtype=np.uint32) << np.uint32(16)
    places = rng.choice(bits.size, bits.size // 100, replace=False)
    bits.reshape(-1)[places] |= rng.integers(1, 4, places.size, dtype=np.uint32)
    expected = np.argsort(bits, axis=1, kind="stable") + 5000 * np.arange(rows)[:, None]
    assert np.array_equal(ascending(bits), expected)


# --- rescaling ----------------------------------------------------------------------------------------------------


def deltas(shape=(64, 64), *, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELECTING])
def test_l1_keeps_the_sum_of_magnitudes(name):
    delta = deltas()
    epsilon = {"epsilon": 0.1} if "della" in name else {}
    got = merge(operators()[name], np.zeros_like(delta), [delta], density=0.3, rescale="l1", **epsilon)
    assert np.abs(got).sum(dtype=float) == pytest.approx(np.abs(delta).sum(dtype=float), rel=1e-6)
    assert 0 < (got != 0).mean() < 0.4


@pytest.mark.parametrize("name", ["ties", "breadcrumbs", "dare_linear"])
def test_density_divides_by_the_share_that_is_kept(name):
    delta = np.ones(4096, np.float32)
    got = merge(operators()[name], np.zeros_like(delta), [delta], density=0.25, rescale="density", normalize=False)
    assert set(got.tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rescale", ["l1", "density"])
def test_a_density_of_one_is_neither_dropped_from_nor_rescaled_and_needs_no_statistics(name, rescale):
    operator, delta = operators()[name], deltas()
    params = tensor_params(operator, [{}], {"rescale": rescale, "density": 1.0})
    run = Run(operator, np.zeros_like(delta), [delta], params)
    assert same(run.result(), delta)
    assert not run.measured
    assert not operator.reduces(run.prepared, run.facts)
    assert not operator.rowwise(run.prepared, run.facts)


@pytest.mark.parametrize("density", [0.5, 0.5 - 2**-33, 0.5 + 2**-32, 0.3, 2**-32])
@pytest.mark.parametrize("work", ["float32", "float64"])
def test_what_a_mask_drops_is_plus_zero_and_what_it_keeps_is_as_it_was(density, work):
    values = np.tile(np.array([1.5, -1.5, -0.0, 1e-45, -np.inf, np.nan, 3e38, -2.0], work), 512)
    base = np.zeros_like(values)
    operator = operators()["dare_linear"]
    params = tensor_params(operator, [{}], {"rescale": False, "density": density, "non_finite": "allow"})
    driver = Run(operator, base, [values], params)
    key = driver.prepared.sparsifiers[0].key
    mask = random_words(key, 0, values.size).astype(np.float64) / 2.0**32 < density
    want = np.where(mask, values - base, values.dtype.type(0)) + base
    assert same_bits(driver.result(), want)


def test_next_to_nothing_is_not_rescaled():
    delta = np.full(1000, 1e-11, np.float32)
    got = merge(operators()["dare_linear"], np.zeros_like(delta), [delta], density=0.5, rescale="l1")
    assert set(got.tolist()) == {0.0, float(np.float32(1e-11))}


def test_the_factor_of_l1_does_not_depend_on_the_blocks():
    delta = (deltas((1000,)) * np.exp2(np.random.default_rng(1).integers(-30, 30, 1000))).astype(np.float32)
    results = [
        merge(operators()["ties"], np.zeros_like(delta), [delta], density=0.3, rescale="l1", block_elements=block)
        for block in (1, 7, 100, 5000)
    ]
    assert all(same_bits(results[0], other) for other in results)


# --- election -----------------------------------------------------------------------------------------------------


def elected(columns, weights, **params):
    """Return the merge of one element per column, with every density 1."""
    experts = [np.float32(row) for row in zip(*columns, strict=True)]
    given = [{"weight": weight} for weight in weights]
    return merge(operators()["ties"], np.zeros_like(experts[0]), experts, given, **params).tolist()


def test_the_elected_sign_is_that_of_the_weighted_sum_and_zero_counts_as_plus():
    columns = [(3, -1, -1), (1, -2, -2), (1, -1, 0), (0, 0, 0), (-2, 1, 0), (1, 1, -3)]
    assert elected(columns, [1, 1, 1]) == [3, -2, 1, 0, -2, -3]
    assert elected([(1, 1, -3)], [1, 1, 0.5]) == [1]


def test_a_zero_does_not_count_in_the_divisor():
    assert elected([(4, 0), (4, 2)], [1, 1]) == [4, 3]


def test_a_negative_weight_turns_the_vote_around():
    assert elected([(1, 4)], [1, -1], normalize=False) == [-4]
    assert elected([(1, 4)], [1, -1]) == [4]


def test_agreeing_weights_of_both_signs_that_cancel_do_not_divide():
    assert elected([(1, -4)], [1, -1]) == [5]
    near = elected([(1, 1, -1)], [0.1, 0.2, -0.3])
    assert near == [pytest.approx(0.6)]
    assert elected([(1, 0)], [1e-9, -1]) == [1]


def test_the_base_among_the_experts_has_no_vote():
    delta = deltas()
    params = {"density": 0.5}
    alone = merge(operators()["ties"], np.zeros_like(delta), [delta], **params)
    listed = merge(operators()["ties"], np.zeros_like(delta), [np.zeros_like(delta), delta], base_expert=0, **params)
    assert same(alone, listed)
    for name in ("breadcrumbs", "dare_linear"):
        operator = operators()[name]
        given = tensor_params(operator, [{"weight": 9.0}, {"weight": 0.5}], {"normalize": True}, base_expert=0)
        assert operator.prepare(given, "float32").divisor == 0.5


# --- parameters and shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(NAMES) - ELECTING))
def test_weights_that_cancel_are_refused_where_their_sum_is_the_divisor(name):
    operator = operators()[name]
    params = tensor_params(operator, [{"weight": 1.0}, {"weight": -1.0}], {"normalize": True})
    with pytest.raises(OperatorError, match="nearly zero"):
        operator.prepare(params, "float32")


@pytest.mark.parametrize(("density", "epsilon"), [(0.1, 0.1), (0.1, 0.2), (0.9, 0.1), (0.9, 0.15)])
def test_della_needs_probabilities_between_0_and_1(density, epsilon):
    for name in ("della", "della_linear"):
        operator = operators()[name]
        params = tensor_params(operator, [{}], {"density": density, "epsilon": epsilon})
        with pytest.raises(OperatorError, match="keep probabilities") as caught:
            operator.prepare(params, "float32")
        assert "epsilon" in caught.value.hint


@pytest.mark.parametrize("name", ["ties", "dare_linear"])
def test_a_density_that_cannot_be_divided_by_is_refused(name):
    operator = operators()[name]
    params = tensor_params(operator, [{}], {"density": 1e-40, "rescale": "density"})
    with pytest.raises(OperatorError, match="too small") as caught:
        operator.prepare(params, "float32")
    assert "larger `density`" in caught.value.hint
    assert operator.prepare(params, "float64").factors == (1e40,)


def test_a_long_vector_in_several_blocks_is_ranked_as_one_row():
    operator = operators()["della_linear"]
    params = tensor_params(operator, [{}], {"density": 0.5, "rescale": False})
    prepared = operator.prepare(params, "float32")
    facts = facts_of((1000,), 100)
    assert operator.reduces(prepared, facts)
    assert not operator.reduces(prepared, facts_of((1000,)))
    assert operator.rowwise(prepared, facts_of((1000,)))
    delta = deltas((1000,))
    results = [
        merge(operator, np.zeros_like(delta), [delta], density=0.5, rescale=False, block_elements=block)
        for block in (64, 100, 1000)
    ]
    assert all(same_bits(results[0], other) for other in results)
    run = Run(operator, np.zeros_like(delta), [delta], params, block_elements=100)
    run.result()
    assert {type(statistic) for statistic, _ in run.measured} == {MagnitudeBits}


def test_a_vector_too_long_to_be_ranked_is_refused_before_weights_are_read():
    operator = operators()["della"]
    prepared = operator.prepare(tensor_params(operator, [{}], {"density": 0.5}), "float32")
    operator.check(prepared, facts_of((1 << 24,)))
    operator.check(prepared, facts_of((1 << 20, 1 << 10)))
    with pytest.raises(OperatorError, match="too long") as caught:
        operator.check(prepared, facts_of(((1 << 24) + 1,)))
    assert "density = 1" in caught.value.hint
    whole = operator.prepare(tensor_params(operator, [{}], {"density": 1.0}), "float32")
    operator.check(whole, facts_of(((1 << 24) + 1,)))


def test_a_row_of_one_element_is_kept_with_the_density():
    sparsifier = ByRank(density=0.3, epsilon=0.2, key=mask_key(0, "layers.0.w", "expert0"))
    delta = np.ones((5000, 1), np.float32)
    got = kept("della_linear", delta, density=sparsifier.density, epsilon=sparsifier.epsilon)
    assert got.mean() == pytest.approx(0.3, abs=0.03)


def test_infinite_and_nan_deltas_pass_through_where_they_are_kept():
    base = np.zeros(8, np.float32)
    delta = np.float32([np.inf, 1, 2, -np.inf, 3, np.nan, 4, 5])
    got = merge(operators()["ties"], base, [delta], density=0.5, non_finite="allow", normalize=False)
    assert np.isinf(got[[0, 3]]).all()
    assert np.isnan(got[5])
    assert got[[1, 2, 4, 6, 7]].tolist() == [0, 0, 0, 0, 5]
    got = merge(operators()["dare_linear"], base, [delta], density=0.5, rescale="l1", non_finite="allow")
    dropped = kept("dare_linear", np.ones(8), density=0.5) == 0
    assert not got[dropped].any()
    assert np.isfinite(got[~dropped & np.isfinite(delta)]).all()


# --- what a change costs ------------------------------------------------------------------------------------------


def reduction_of(name, delta, **params):
    operator = operators()[name]
    given = tensor_params(operator, [{}], {"normalize": False, **params})
    run = Run(operator, np.zeros_like(delta), [delta], given, block_elements=1024)
    return run.reduction(), run


def keys(reduction, blocks):
    return [reduction.digest(block) for block in range(blocks)]


def test_a_change_that_leaves_the_threshold_leaves_all_other_blocks():
    delta = np.round(deltas() * 8) / 8
    first, run = reduction_of("ties", delta, density=0.3)
    changed = delta.copy()
    changed[0, 0] = 100 if abs(changed[0, 0]) > 1.5 else 0
    second, _ = reduction_of("ties", changed, density=0.3)
    assert keys(first, run.facts.blocks) == keys(second, run.facts.blocks)


def test_one_equal_element_fewer_changes_only_blocks_that_keep_another_number_of_them():
    delta = np.ones((64, 64), np.float32)
    delta[0, 0] = 2
    first, run = reduction_of("ties", delta, density=0.5)
    delta[0, 1] = 0  # one fewer in the first block, so that the third keeps one
    second, _ = reduction_of("ties", delta, density=0.5)
    same_keys = [a == b for a, b in zip(keys(first, run.facts.blocks), keys(second, run.facts.blocks), strict=True)]
    assert same_keys == [True, True, False, True]


def test_the_seed_and_the_density_are_part_of_a_masked_sum_and_the_expert_is_not():
    operator = operators()["dare_linear"]
    digests = set()
    for params in ({"seed": 1}, {"seed": 2}, {"density": 0.6}):
        prepared = operator.prepare(tensor_params(operator, [{}], {"density": 0.5, **params}), "float32")
        digests.add(KeptSum(slots=(0, 1), sparsifier=prepared.sparsifiers[0]).digest())
        digests.add(KeptSum(slots=(0, 2), sparsifier=prepared.sparsifiers[0]).digest())
    assert len(digests) == 3


def test_another_density_needs_no_other_statistics_where_tables_are_complete():
    delta = np.round(deltas() * 64) / 64
    measured = [set(reduction_of("ties", delta, density=density)[1].measured) for density in (0.1, 0.5, 0.9)]
    assert measured[0] == measured[1] == measured[2]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_never_written_to(name):
    delta = deltas()
    base, expert = deltas(seed=1), deltas(seed=1) + delta
    copies = base.copy(), expert.copy()
    density = {"density": 0.5}
    merge(operators()[name], base, [expert, expert], [density, density], rescale="l1")
    assert same_bits(base, copies[0])
    assert same_bits(expert, copies[1])
