"""Operators that pick or swap elements give the same bits on torch arrays as on numpy's."""

import pytest
from support.operators import Run, tensor_params
from support.reference import same_bits
from support.selections import inputs

from mergepipe.operators.contract import BlockInputs
from mergepipe.operators.registry import operator

torch = pytest.importorskip("torch")
xp = pytest.importorskip("array_api_compat.torch")


@pytest.mark.parametrize("work", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "count", "params"),
    [
        ("nearswap", 1, {"t": 1e-4}),
        ("nearswap", 1, {"t": 1e-7}),
        ("ram", 4, {"epsilon": 1e-3}),
        ("ramplus_tl", 4, {"epsilon": 1e-3, "r": 0.7}),
        ("sce", 4, {}),
        ("arcee_fusion", 1, {}),
    ],
)
def test_bits_do_not_depend_on_the_namespace(name, count, params, work):
    base, *experts = inputs(1, count, (400,), "near", work)
    method = operator(name)
    run = Run(method, base, experts, tensor_params(method, [{}] * count, params))
    reduction = run.reduction() if method.reduces(run.prepared, run.facts) else None
    dtype = torch.float64 if work == "float64" else torch.float32
    arrays = {}
    block = BlockInputs(
        xp=xp,
        base=torch.tensor(base),
        experts=tuple(torch.tensor(expert) for expert in experts),
        shape=base.shape,
        dtype=dtype,
        non_finite=False,
        scratch=lambda number: arrays.setdefault(number, torch.full(base.shape, float("nan"), dtype=dtype)),
        row_elements=400,
    )
    assert same_bits(method.apply(block, run.prepared, reduction).numpy(), run.result())
