"""The reference that the other tests compare with: checked against IEEE arithmetic done in other ways."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from support.reference import evaluate, linear, parameters, round_to, same_bits, task_arithmetic


def random_bits(dtype, count=20_000):
    return np.random.default_rng(0).integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_rounding_to_float16_is_that_of_numpy(source):
    with np.errstate(all="ignore"):
        values = np.concatenate([random_bits(source), (random_bits(np.float16).astype(source) * source(1.0003))])
        assert same_bits(round_to(values, "F16"), values.astype(np.float16))


def test_rounding_to_float32_is_that_of_numpy():
    with np.errstate(all="ignore"):
        values = np.concatenate([random_bits(np.float64), random_bits(np.float32).astype(np.float64) * (1 + 2.0**-30)])
        assert same_bits(round_to(values, "F32"), values.astype(np.float32))


def test_rounding_of_float32_to_bfloat16_is_that_of_ml_dtypes():
    with np.errstate(all="ignore"):
        values = random_bits(np.float32)
        assert same_bits(round_to(values, "BF16"), values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rounding_takes_the_nearest_value_and_the_even_one_of_two(dtype):
    generator = np.random.default_rng(1)
    values = generator.standard_normal(200) * 10.0 ** generator.integers(-1, 3, 200)
    values = values[np.abs(values) > 2.0**-14]  # normal numbers of every dtype
    bits = {"BF16": 8, "F16": 11, "F32": 24}[dtype]
    for value in [*values, 1 + 2.0**-bits, 1 + 3 * 2.0**-bits, 1 + 2.0**-bits + 2.0**-45]:
        (rounded,) = round_to(np.array([value]), dtype).astype(np.float64)
        step = Fraction(2) ** (int(np.frexp(value)[1]) - bits)
        error = abs(Fraction(float(rounded)) - Fraction(value))
        assert error <= step / 2
        assert error < step / 2 or (Fraction(float(rounded)) / step) % 2 == 0


def test_sums_round_after_every_step():
    one, tiny = np.float32([1]), np.float32([2**-25])
    assert linear([one, tiny, tiny, tiny, tiny], [1.0] * 5, normalize=False) == one  # a wider sum is above one
    assert linear([tiny, tiny, tiny, tiny, one], [1.0] * 5, normalize=False) > one
    assert linear([np.float64([1]), tiny, tiny], [1.0] * 3, normalize=False).dtype == np.float64


def test_deltas_are_weighted_summed_divided_scaled_and_added_in_that_order():
    base, first, second = (np.float32([x]) for x in (1.1, 2.3, -0.7))
    f = np.float32
    total = f(f(first - base) * f(0.3)) + f(f(second - base) * f(-0.1))
    want = base + f(f(f(total) / f(f(0.3) + f(-0.1))) * f(0.9))
    assert task_arithmetic(base, [first, second], [0.3, -0.1], normalize=True, scale=0.9) == want


def test_rules_beat_what_stands_beside_an_expert_and_later_rules_beat_earlier_ones():
    recipe = {
        "operator": "linear",
        "params": {"weight": 2.0},
        "rules": [
            {"match": "*.w", "params": {"weight": 3.0}, "experts": {"b": {"weight": 4.0}}},
            {"match": ["x.*", "*.v"], "layers": "1..2", "params": {"weight": [5.0, 7.0]}},
        ],
    }
    experts = [{"source": "a"}, {"source": "b", "weight": 2.5}]

    def weights(name):
        return [column["weight"] for column in parameters(recipe, experts, name, 2)[1]]

    assert weights("layers.0.other") == [2.0, 2.5]
    assert weights("layers.0.w") == [3.0, 4.0]
    assert weights("layers.1.v") == [7.0, 7.0]
    assert weights("layers.0.v") == [2.0, 2.5]


def test_rows_beyond_the_common_ones_are_those_of_the_base():
    checkpoints = {"base": {"wte.weight": np.float32([[1, 1], [2, 2], [3, 3]])}, "e": {"wte.weight": np.ones((2, 2))}}
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e"], "write": {"dtype": "float16"}}
    (array,) = evaluate(recipe, checkpoints).values()
    assert array.dtype == np.float16
    assert array.tolist() == [[1, 1], [1, 1], [3, 3]]
