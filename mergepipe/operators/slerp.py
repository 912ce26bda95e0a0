"""Spherical interpolation between the base and one other checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mergepipe.digest import record_digest
from mergepipe.operators.contract import (
    Array,
    BlockInputs,
    Operator,
    Prepared,
    Reducing,
    Reduction,
    TensorFacts,
    TensorParams,
)
from mergepipe.operators.gram import NO_ANGLE, combination, copied, gram_of_values
from mergepipe.operators.influence import Influence, additive, excess
from mergepipe.operators.numerics import rounded
from mergepipe.operators.partners import only_expert
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass

# |cos| above this means linear interpolation. Source: mergekit's default, as in Shoemake's implementations.
COLINEAR = 0.9995
# A norm up to this counts as that of a zero vector, which has no direction.
ZERO_NORM = 1e-8


@dataclass(frozen=True, kw_only=True)
class SlerpPrepared(Prepared):
    """Where to interpolate: ``t`` as given, the position of the other checkpoint, and the work dtype."""

    t: float
    other: int
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """What the result is made of, rounded to the work dtype.

    Attributes
    ----------
    base, other
        The factors of the two checkpoints' values; ``base`` is None where ``other`` is the factor of the delta.
    """

    base: float | None
    other: float


class Slerp(Operator):
    """The point at ``t`` of the arc from the base (t = 0) to the other checkpoint (t = 1), each tensor one vector.

    The cosine comes from three float64 inner products; both weights are computed in float64 and rounded to the work
    dtype; the result is two products and one sum. Where the angle is unusable the result is ``base + t * delta``,
    which leaves elements that are equal in both as they are.
    """

    signature: ClassVar = OperatorSignature(
        name="slerp",
        summary="spherical interpolation from the base (t = 0) to one other checkpoint (t = 1)",
        base=BasePolicy.REQUIRED,
        max_experts=2,  # the base may be listed too
        params=(
            ParamSpec(
                name="t",
                kind=ParamKind.REAL,
                gradient=True,
                doc="Where between the base (0) and the other checkpoint (1); values outside extrapolate.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "c = (base . x) / (|base| |x|), over the whole tensor; a = arccos c",
            "result = sin((1 - t) a) / sin a * base + sin(t a) / sin a * x",
            "where |c| > 0.9995, or a norm is at most 1e-8: result = base + t (x - base)",
        ),
        source="Shoemake 1985, Animating rotation with quaternion curves",
        locality=(
            "A changed block is read again for its inner products, those of other blocks are kept; the other blocks "
            "are computed again only where the two weights, rounded, have changed. At t = 0 and t = 1 the result is a "
            "copy of one checkpoint, and the other is not read."
        ),
        passes=(1, 2),
        statistics="per block the inner products of base and x (3 float64 numbers)",
        edge_cases=(
            "t = 0 and t = 1 give the checkpoints bit for bit.",
            "The base may be listed among the experts, in either order; it changes nothing.",
            NO_ANGLE + "(1 - t) base + t x.",
        ),
        differences=(
            "mergekit takes a zero vector as orthogonal to everything; here the interpolation is linear.",
            "The cosine is float64 instead of float32, so the weights differ by their last bits.",
            "The linear case is written base + t (x - base) instead of (1 - t) base + t x: it differs by last bits.",
        ),
    )
    version: ClassVar = 1
    shows_non_finite: ClassVar = True
    uses_base: ClassVar = True
    widens: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return t; the other checkpoint is an input unless t is 0. See `Operator.prepare`."""
        other = only_expert(params, "slerp")
        t = params.number("t")
        (share,) = rounded((t,), work)
        coefficients = tuple(share if index == other else 0.0 for index in range(len(params.experts)))
        return SlerpPrepared(coefficients=coefficients, t=t, other=other, work=work)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether the angle matters; see `Operator.reduces`."""
        return facts.elements > 0 and not _is_end(prepared)

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the two weights; see `Operator.reduce`."""
        assert isinstance(prepared, SlerpPrepared)
        del facts
        if slots[prepared.other + 1]:
            gram = yield from gram_of_values((0, prepared.other + 1))
            blend = _blend(gram, prepared)
        else:  # the tensor is the base's
            yield ()
            blend = Blend(base=None, other=prepared.coefficients[prepared.other])
        return Reduction(value=blend, key=record_digest("slerp", blend.base, blend.other))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the weighted sum of the two; see `Operator.apply`."""
        assert isinstance(prepared, SlerpPrepared)
        if reduction is None:
            at_other = prepared.coefficients[prepared.other] == 1
            return copied(inputs, inputs.value(prepared.other, 1) if at_other else inputs.base)
        blend: Blend = reduction.value
        if blend.base is None:
            return combination(inputs, [blend.other if value else 0.0 for value in prepared.coefficients])
        total, term = inputs.scratch(0), inputs.scratch(1)
        inputs.xp.multiply(inputs.base, blend.base, out=total)
        inputs.xp.multiply(inputs.value(prepared.other, 1), blend.other, out=term)
        total += term
        return total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the weight of the other checkpoint in the full read, exactly: additive. See `Operator.influence`.

        With both weights given, the result is linear in the other's value: leaving it out (taking the base in its
        place) moves the result by its weight times the delta.
        """
        assert isinstance(prepared, SlerpPrepared)
        weight, base = prepared.coefficients[prepared.other], 0.0
        if reduction is not None:
            blend: Blend = reduction.value
            weight = blend.other
            base = 0.0 if blend.base is None else excess((blend.base, blend.other))
        return additive((weight if value else 0.0 for value in prepared.coefficients), base=base, linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base at t = 0, the other checkpoint at t = 1; see `Operator.copied_input`."""
        assert isinstance(prepared, SlerpPrepared)
        if not _is_end(prepared):
            return None
        return prepared.other if prepared.live[prepared.other] and present[prepared.other] else -1


def _is_end(prepared: Prepared) -> bool:
    assert isinstance(prepared, SlerpPrepared)
    return prepared.coefficients[prepared.other] in {0.0, 1.0}


def _blend(gram: Array, prepared: SlerpPrepared) -> Blend:
    """Return the weights for inner products of base and other, float64 ``(2, 2)``."""
    import numpy as np

    from mergepipe.operators.angles import arc_weights

    t = prepared.t
    if not np.isfinite(gram).all():
        first, second = rounded((1.0 - t, t), prepared.work)
        return Blend(base=first, other=second)
    norms = math.sqrt(gram[0, 0]), math.sqrt(gram[1, 1])
    cosine = gram[0, 1] / (norms[0] * norms[1]) if min(norms) > ZERO_NORM else 1.0
    if abs(cosine) > COLINEAR:
        return Blend(base=None, other=rounded((t,), prepared.work)[0])
    weights = arc_weights(np.array(cosine), t, np.array(False))
    first, second = rounded((float(weights[0]), float(weights[1])), prepared.work)
    return Blend(base=first, other=second)
