"""Inputs and checks that the tests of the operators that pick elements share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from support.operators import merge
from support.reference import same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mergepipe.operators.contract import Operator

Array = Any
SHAPES = ((), (1,), (0,), (23,), (4, 6), (5, 1), (1, 7), (0, 3), (2, 3, 5))
CUTS = ((1 << 18, 1 << 16), (6, 4), (1, 1), (12, 5))
"""Elements of a block and of a tile."""


def inputs(seed: int, count: int, shape: tuple[int, ...], kind: str, work: str = "float32") -> list[Array]:
    """Return a base and ``count`` experts.

    ``coarse`` values are few and far between, so that magnitudes tie and many deltas are zero; ``near`` ones differ
    from the base by about 1e-3; ``wide`` ones have magnitudes from subnormal to large.
    """
    random = np.random.default_rng(seed)
    if kind == "coarse":
        return [(random.integers(-3, 4, shape) / 8).astype(work) for _ in range(count + 1)]
    if kind == "wide":
        exponents = [random.integers(-44, 12, shape) for _ in range(count + 1)]
        return [(random.standard_normal(shape) * 10.0**e).astype(work) for e in exponents]
    base = random.standard_normal(shape).astype(work)
    changes = [random.standard_normal(shape) * 1e-3 * random.integers(0, 2, shape) for _ in range(count)]
    return [base, *((base + change).astype(work) for change in changes)]


cases = st.builds(
    inputs,
    seed=st.integers(0, 1000),
    count=st.integers(1, 5),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(["coarse", "near", "wide"]),
    work=st.sampled_from(["float32", "float64"]),
)


def whole(operator: Operator, base: Array, experts: Sequence[Array | None], **params: Any) -> Array:
    """Return the merge, after checking that neither the cutting nor the search for zero deltas changes it."""
    results = [
        merge(operator, base, experts, block_elements=block, tile=tile, find_zeros=find, **params)
        for block, tile in CUTS
        for find in (True, False)
    ]
    for other in results[1:]:
        assert same_bits(results[0], other, zero_signs=False)
    return results[0]


def stored(base: Array, experts: Sequence[Array]) -> tuple[list[None], list[Array]]:
    """Return the experts as stored deltas, which give back the experts' values exactly for ``coarse`` inputs."""
    return [None for _ in experts], [expert - base for expert in experts]
