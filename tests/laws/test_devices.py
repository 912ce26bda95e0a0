"""The law of devices: the same operators on torch arrays give the same bits as on numpy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.reference import linear, round_to, same_bits, task_arithmetic

from mergepipe.operators.contract import BlockInputs, TensorParams
from mergepipe.operators.registry import operators

torch = pytest.importorskip("torch")
xp = pytest.importorskip("array_api_compat.torch")

COMMON = {"missing": "error", "rows": "equal", "non_finite": "error", "numerics": "float32"}


def tensor_params(operator, weights, *, normalize=False, scale=1.0, non_finite="error"):
    key = "scale" if operator == "passthrough" else "weight"
    values = COMMON | {"normalize": normalize, "lambda": scale, "non_finite": non_finite}
    return TensorParams(values=values, experts=tuple({key: weight} for weight in weights))


def on_torch(operator, base, experts, params, work):
    """Apply an operator to torch tensors and return the result as a numpy array."""
    method = operators()[operator]
    prepared = method.prepare(params, work)
    wide = torch.float64 if work == "float64" else torch.float32
    block = BlockInputs(
        xp=xp,
        base=torch.tensor(base, dtype=wide) if method.uses_base else None,
        experts=tuple(
            torch.tensor(array, dtype=wide) if live else None
            for array, live in zip(experts, prepared.live, strict=True)
        ),
        shape=base.shape,
        dtype=wide,
        non_finite=params.values["non_finite"] == "allow",
        scratch=lambda number: torch.empty(base.shape, dtype=wide),
    )
    return method.apply(block, prepared).numpy()


def values(seed, count, work):
    """Return values of many magnitudes, zeros of both signs and subnormal ones among them."""
    generator = np.random.default_rng(seed)
    array = generator.standard_normal(count) * 10.0 ** generator.integers(-44, 20, count)
    array[:4] = [0.0, -0.0, 1e-45, -3e-42]
    return array.astype(work)


numbers = st.floats(-4, 4, width=32).filter(lambda value: abs(value) > 1e-3)


@settings(max_examples=examples(60))
@given(
    operator=st.sampled_from(["linear", "task_arithmetic", "passthrough"]),
    work=st.sampled_from(["float32", "float64"]),
    weights=st.lists(numbers, min_size=1, max_size=5),
    scale=numbers | st.just(0.0),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_torch_gives_the_bits_of_the_reference(operator, work, weights, scale, normalize, seed):
    weights = weights[:1] if operator == "passthrough" else weights
    if abs(sum(weights)) <= 1e-3 * sum(map(abs, weights)):
        normalize = False
    base, *experts = (values(seed + number, 3000, work) for number in range(len(weights) + 1))
    got = on_torch(operator, base, experts, tensor_params(operator, weights, normalize=normalize, scale=scale), work)
    if operator == "task_arithmetic":
        want = task_arithmetic(base, experts, weights, normalize=normalize, scale=scale)
    else:
        want = linear(experts, weights, normalize=normalize and operator == "linear")
    assert got.dtype == want.dtype
    assert same_bits(got, want)


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic"])
def test_torch_passes_non_finite_values_through_as_numpy_does(operator):
    base = np.float32([1, np.nan, np.inf, -np.inf, np.inf, 5])
    experts = [np.float32([np.nan, 1, np.inf, 2, -np.inf, 7]), np.float32([1, 1, np.inf, np.inf, 3, np.inf])]
    params = tensor_params(operator, [0.5, -2.0], non_finite="allow")
    got = on_torch(operator, base, experts, params, "float32")
    if operator == "linear":
        assert same_bits(got, linear(experts, [0.5, -2.0], normalize=False))
    else:
        assert same_bits(got, task_arithmetic(base, experts, [0.5, -2.0]))


@pytest.mark.parametrize("operator", ["linear", "task_arithmetic", "passthrough"])
def test_torch_without_any_expert_left_gives_the_base_or_zeros(operator):
    base = np.float32([1, 2, 3])
    got = on_torch(operator, base, [np.float32([4, 5, 6])], tensor_params(operator, [0.0]), "float32")
    assert got.tolist() == ([1, 2, 3] if operator == "task_arithmetic" else [0, 0, 0])


@pytest.mark.parametrize(("name", "kind"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_torch_rounds_float32_to_the_output_dtype_as_the_cpu_does(name, kind):
    array = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    array = array[~np.isnan(array)]
    rounded = torch.tensor(array).to(getattr(torch, kind)).to(torch.float32).numpy()
    assert same_bits(rounded, np.asarray(round_to(array, name), dtype=np.float32))
