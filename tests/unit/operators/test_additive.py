"""The additive operators: formulas, order of operations, and what they need not compute."""

import array_api_compat.numpy as xp
import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by name then
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reference import linear, same_bits, task_arithmetic

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import BlockInputs, TensorParams
from mergepipe.operators.registry import operators

COMMON = {"missing": "error", "rows": "equal", "non_finite": "error", "numerics": "float32"}


def params(weights, *, key="weight", base_expert=None, **values):
    defaults = COMMON | {"normalize": False, "lambda": 1.0}
    experts = tuple({key: float(weight)} for weight in weights)
    return TensorParams(values=defaults | values, experts=experts, base_expert=base_expert)


def inputs(base, experts, work="float32", *, non_finite=False):
    arrays = [np.full(base.shape, np.nan, work) for _ in range(4)]
    return BlockInputs(
        xp=xp,
        base=base,
        experts=tuple(experts),
        shape=base.shape,
        dtype=np.dtype(work),
        non_finite=non_finite,
        scratch=lambda number: arrays[number],
    )


def apply(name, base, experts, given_params, work="float32", **options):
    operator = operators()[name]
    prepared = operator.prepare(given_params, work)
    present = [array if live else None for array, live in zip(experts, prepared.live, strict=True)]
    with np.errstate(all="ignore"):
        return operator.apply(inputs(base, present, work, **options), prepared)


def arrays(count, work="float32", size=500, seed=0):
    generator = np.random.default_rng(seed)
    return [
        (generator.standard_normal(size) * 10.0 ** generator.integers(-9, 9, size)).astype(work) for _ in range(count)
    ]


finite = st.floats(-10, 10, width=32).filter(lambda value: value == 0 or abs(value) > 1e-4)


@given(st.lists(finite, min_size=1, max_size=6), st.sampled_from(["float32", "float64"]), st.booleans())
def test_linear_is_the_reference(weights, work, normalize):
    total = sum(map(abs, weights))
    normalize = normalize and abs(sum(weights)) > 1e-3 * total
    base, *experts = arrays(len(weights) + 1, work)
    got = apply("linear", base, experts, params(weights, normalize=normalize), work)
    if any(weights):
        assert same_bits(got, linear(experts, weights, normalize=normalize))
    else:
        assert not got.any()


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0.5, 1), (0.5, 1, 1), (1,)])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("non_finite", [False, True])
def test_a_weight_of_one_gives_what_the_product_gives_and_writes_to_no_input(weights, stored, non_finite):
    base, *experts = [array.astype(stored) for array in arrays(len(weights) + 1)]
    for place, expert in enumerate(experts):
        expert[:4] = (0.0, -0.0, 1e-45, -1e-40)  # zeros and subnormal numbers
        expert[4 + place] = 0.0
        if non_finite:
            expert[20 + place], expert[40] = np.nan, np.inf
    before = [expert.copy() for expert in experts]
    got = apply("linear", base, experts, params(weights), non_finite=non_finite)
    wide = [expert.astype(np.float32) for expert in experts]
    with np.errstate(all="ignore"):
        expected = wide[0] * np.float32(weights[0])
        for expert, weight in zip(wide[1:], weights[1:], strict=True):
            expected = expected + expert * np.float32(weight)
    assert same_bits(got, expected)
    assert all(same_bits(expert, kept) for expert, kept in zip(experts, before, strict=True))


@given(st.lists(finite, min_size=1, max_size=6), finite, st.sampled_from(["float32", "float64"]), st.booleans())
def test_task_arithmetic_is_the_reference(weights, scale, work, normalize):
    normalize = normalize and abs(sum(weights)) > 1e-3 * sum(map(abs, weights))
    base, *experts = arrays(len(weights) + 1, work)
    got = apply("task_arithmetic", base, experts, params(weights, normalize=normalize, **{"lambda": scale}), work)
    assert same_bits(got, task_arithmetic(base, experts, weights, normalize=normalize, scale=scale))


@given(finite)
def test_passthrough_is_one_product(scale):
    base, expert = arrays(2)
    got = apply("passthrough", base, [expert], params([scale], key="scale"))
    assert same_bits(got, expert * np.float32(scale) if scale else np.zeros_like(expert))


@pytest.mark.parametrize("name", ["linear", "task_arithmetic", "passthrough"])
def test_inputs_are_never_written_to(name):
    base, *experts = arrays(2 if name == "passthrough" else 4)
    copies = [array.copy() for array in (base, *experts)]
    key = "scale" if name == "passthrough" else "weight"
    apply(name, base, experts, params([0.5] * len(experts), key=key, normalize=True, **{"lambda": 0.3}))
    assert all(same_bits(a, b) for a, b in zip((base, *experts), copies, strict=True))


@pytest.mark.parametrize("name", ["linear", "task_arithmetic"])
def test_one_array_may_stand_for_several_experts(name):
    base, expert, other = arrays(3)
    weights = [0.3, 0.7, -0.2]
    got = apply(name, base, [expert, other, expert], params(weights))
    want = linear if name == "linear" else lambda x, w, normalize: task_arithmetic(base, x, w, normalize=normalize)
    assert same_bits(got, want([expert, other, expert], weights, normalize=False))


def test_an_absent_expert_of_task_arithmetic_is_a_zero_delta_that_still_counts_in_the_divisor():
    base, expert = arrays(2)
    got = apply("task_arithmetic", base, [None, expert], params([3.0, 1.0], normalize=True))
    assert same_bits(got, task_arithmetic(base, [None, expert], [3.0, 1.0], normalize=True))


def test_the_base_among_the_experts_counts_in_no_divisor():
    base, expert = arrays(2)
    got = apply("task_arithmetic", base, [base, expert], params([3.0, 0.5], normalize=True, base_expert=0))
    assert same_bits(got, task_arithmetic(base, [expert], [0.5], normalize=True))
    got = apply("task_arithmetic", base, [base], params([3.0], normalize=True, base_expert=0))
    assert same_bits(got, base)


def test_a_delta_of_infinities_is_zero_where_the_values_are_equal():
    base = np.float32([np.inf, -np.inf, np.inf, np.nan, 1])
    expert = np.float32([np.inf, -np.inf, 1, np.nan, np.inf])
    got = apply("task_arithmetic", base, [expert], params([0.5]), non_finite=True)
    assert got[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(got[2:4]).all()
    assert got[4] == np.inf


# --- prepare ------------------------------------------------------------------------------------------------------


def prepared(name, given_params, work="float32"):
    return operators()[name].prepare(given_params, work)


def test_coefficients_are_rounded_to_the_work_dtype():
    assert prepared("linear", params([0.1])).coefficients == (float(np.float32(0.1)),)
    assert prepared("linear", params([0.1]), "float64").coefficients == (0.1,)
    assert prepared("task_arithmetic", params([1.0], **{"lambda": 0.1})).scale == float(np.float32(0.1))


def test_a_weight_that_rounds_to_zero_is_no_input():
    assert prepared("linear", params([1e-50, 1.0])).live == (False, True)
    assert prepared("linear", params([1e-50, 1.0]), "float64").live == (True, True)


def test_a_lambda_of_zero_leaves_no_input():
    assert prepared("task_arithmetic", params([0.5, 1.0], **{"lambda": 0.0})).live == (False, False)


def test_the_divisor_is_summed_in_expert_order_in_the_work_dtype():
    weights = [1.0, 2.0**-24, 2.0**-24, 2.0**-24]
    assert prepared("linear", params(weights, normalize=True)).divisor == 1.0
    assert prepared("linear", params(weights[::-1], normalize=True)).divisor > 1.0
    assert prepared("linear", params(weights, normalize=True), "float64").divisor == sum(weights)


@pytest.mark.parametrize("name", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("weights", [[0.0], [1.0, -1.0], [1.0, -0.9999999], [0.1, 0.2, -0.3], [3e38, 3e38]])
def test_weights_that_cannot_be_divided_by_are_refused(name, weights):
    with pytest.raises(OperatorError) as caught:
        prepared(name, params(weights, normalize=True))
    assert caught.value.hint
    assert prepared(name, params(weights)).divisor == 1.0


def test_weights_of_both_signs_that_do_not_cancel_are_allowed():
    assert prepared("linear", params([1.0, -0.999], normalize=True)).divisor == pytest.approx(0.001, rel=1e-4)


# --- what is copied -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "normalize", "present", "copied"),
    [
        ([1.0], False, (True,), 0),
        ([1.0], True, (True,), 0),
        ([2.0], True, (True,), None),
        ([0.5], False, (True,), None),
        ([0.0, 1.0], True, (False, True), 1),
        ([1.0, 1.0], True, (True, True), None),
        ([1.0, 0.0], False, (False, False), None),
    ],
)
def test_linear_copies_the_only_expert_that_enters_with_factor_one(weights, normalize, present, copied):
    operator = operators()["linear"]
    assert operator.copied_input(operator.prepare(params(weights, normalize=normalize), "float32"), present) == copied


def test_task_arithmetic_copies_the_base_where_no_delta_is_left():
    operator = operators()["task_arithmetic"]
    ready = operator.prepare(params([0.5, 0.5]), "float32")
    assert operator.copied_input(ready, (False, False)) == -1
    assert operator.copied_input(ready, (True, False)) is None


@pytest.mark.parametrize(("scale", "copied"), [(1.0, 0), (0.5, None), (-1.0, None)])
def test_passthrough_copies_where_its_scale_is_one(scale, copied):
    operator = operators()["passthrough"]
    assert operator.copied_input(operator.prepare(params([scale], key="scale"), "float32"), (True,)) == copied
