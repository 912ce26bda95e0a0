"""nearswap: the expert's elements where they are near the base's, fading with the distance. Block-local."""

from __future__ import annotations

from typing import ClassVar

from mergepipe.operators.contract import (
    Array,
    BlockInputs,
    Operator,
    Prepared,
    Reduction,
    TensorFacts,
    TensorParams,
)
from mergepipe.operators.influence import Influence, additive
from mergepipe.operators.numerics import rounded
from mergepipe.operators.partners import only_expert
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec

NEAREST = 1e-6
"""Distances below this one count as this one."""


class NearSwap(Operator):
    """The base moved towards one expert, whole where they are near: ``w x + (1 - w) base``.

    ``w = min(t / max(|x - base|, 1e-6), 1)``, element by element: the expert's element bit for bit where it is at most
    ``t`` away (``t >= 1e-6``), a share of the difference of magnitude ``t`` beyond. Division, products and the
    addition are rounded on their own. Where the expert equals the base the result is the base's element bit for bit,
    whatever ``t``; ``t = 0`` is the base, and the expert is not read.

    Source: alchemonaut's NearSwap, as published with QuartetAnemoi-70B. mergekit 0.1.5 computes ``w`` as a product of
    ``t`` with the rounded reciprocal, and may be off by one rounding where the expert equals the base.
    """

    signature: ClassVar = OperatorSignature(
        name="nearswap",
        summary="take the expert's elements where they are near the base's, less of them beyond",
        base=BasePolicy.REQUIRED,
        max_experts=2,  # the base may be listed too
        params=(
            ParamSpec(
                name="t",
                kind=ParamKind.REAL,
                low=0.0,
                gradient=True,
                doc="The difference up to which the expert's element is taken whole; beyond it the base moves by `t`.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=("w = min(t / max(|x - base|, 1e-6), 1)", "y = w x + (1 - w) base"),
        source="NearSwap by alchemonaut (QuartetAnemoi-70B)",
        locality="A changed block of the expert or of the base is computed again, and no other.",
        edge_cases=(
            "Where the expert equals the base the result is the base, bit for bit.",
            "Up to a distance of t (t at least 1e-6) the result is the expert's element, bit for bit.",
            "t = 0 gives the base; the expert is not read.",
            "The base may be listed beside the expert; it changes nothing.",
            "An infinite element of the expert beside a finite one of the base gives NaN (`non_finite` is `allow`).",
        ),
        differences=(
            "mergekit multiplies t by the rounded reciprocal of the distance: w may differ in the last bit.",
            "With 0 < t < 1e-6 mergekit may change elements that are equal by one rounding.",
            "A negative t, which mergekit takes as 0, is refused.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return ``t`` as the scale, and which expert is an input; see `Operator.prepare`."""
        expert = only_expert(params, "nearswap")
        (distance,) = rounded((params.number("t"),), work)
        read = 1.0 if distance else 0.0
        coefficients = tuple(read if index == expert else 0.0 for index in range(len(params.experts)))
        return Prepared(coefficients=coefficients, scale=distance)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return ``w x + (1 - w) base``; see `Operator.apply`."""
        index = next((i for i, live in enumerate(prepared.live) if live and inputs.has(i)), None)
        if index is None:
            out = inputs.scratch(0)
            out[...] = inputs.base
            return out
        xp, t = inputs.xp, prepared.scale
        apart = inputs.delta(index, 0)
        xp.abs(apart, out=apart)
        # With `t` of at least 1e-6 equal elements have w = 1 and come out exactly by themselves (but not infinities).
        equal = apart == 0 if t < NEAREST or inputs.non_finite else None
        if t < NEAREST:
            xp.maximum(apart, xp.asarray(NEAREST, dtype=inputs.dtype), out=apart)
        share = inputs.scratch(1)
        share[...] = t
        share /= apart  # division by zero gives infinity, which is clamped
        xp.minimum(share, xp.asarray(1.0, dtype=inputs.dtype), out=share)
        out = apart
        xp.multiply(inputs.value(index, 2), share, out=out)
        share -= 1  # subtracting (w - 1) base is adding (1 - w) base, rounding for rounding
        share *= inputs.base
        out -= share
        return out if equal is None else xp.where(equal, inputs.base, out)

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return 1 for the expert: additive. See `Operator.influence`.

        An element moves by ``w |x - base|`` with ``w`` at most 1, whatever the others do.
        """
        return additive(prepared.coefficients, base=None)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where the delta is zero; see `Operator.copied_input`."""
        return None if any(present) else -1
