"""Barycentric interpolation of several vectors on a sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mergepipe.digest import record_digest
from mergepipe.errors import OperatorError
from mergepipe.operators.additive import WEIGHT
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
from mergepipe.operators.gram import NO_ANGLE, combination, copied, gram_of_experts
from mergepipe.operators.influence import Influence, additive
from mergepipe.operators.numerics import CANCELLATION, normaliser, rounded
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass


@dataclass(frozen=True, kw_only=True)
class MultiSlerpPrepared(Prepared):
    """The weights in float64, normalised if asked for; 0 for the base, which is no vector.

    Attributes
    ----------
    weights
        Per expert.
    eps
        What is added to norms, and below which the mean has no direction.
    lone
        The only expert, if there is one alone: it is the result.
    work
        The work dtype.
    """

    weights: tuple[float, ...]
    eps: float
    lone: int | None
    work: str

    @property
    def live_indices(self) -> tuple[int, ...]:
        """The experts that are inputs."""
        return tuple(index for index, live in enumerate(self.live) if live)


class MultiSlerp(Operator):
    """The weighted mean direction of several vectors, with the weighted mean of their lengths.

    The published formula takes the tangents of all directions at their mean m, adds them up with their weights, and
    follows the sum back to the sphere. That sum is zero, whatever the inputs: it is ``sum(w_i u_i) - (sum(w_i u_i) .
    m) m`` and m is the direction of ``sum(w_i u_i)``; what other implementations carry on with is rounding. So the
    result is a linear combination, whose coefficients need norms and ``|sum(w_i u_i)|`` alone, both from one Gram
    matrix.
    """

    signature: ClassVar = OperatorSignature(
        name="multislerp",
        summary="barycentric interpolation of checkpoints on a sphere, of their deltas where there is a base",
        base=BasePolicy.OPTIONAL,
        params=(
            ParamSpec(
                name="normalize_weights",
                kind=ParamKind.FLAG,
                default=True,
                doc="Whether to divide the weights by their sum.",
            ),
            ParamSpec(
                name="eps",
                kind=ParamKind.REAL,
                default=1e-8,
                low=0.0,
                low_open=True,
                gradient=True,
                doc="What is added to norms before dividing by them.",
            ),
            WEIGHT,
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "v_i = x_i - base, or x_i without a base; n_i = |v_i|; u_i = v_i / (n_i + eps)",
            "m = sum(w_i u_i) / |sum(w_i u_i)|",
            "result = base + cos(eps) sum(w_i n_i) m",
        ),
        source="Goddard 2025, Multi-SLERP (mergekit)",
        locality=(
            "A changed block is read again for its inner products, those of other blocks are kept; the other blocks "
            "are computed again only where the coefficients, rounded, have changed."
        ),
        passes=(1, 2),
        statistics="per block the inner products of the N experts' vectors (N (N + 1) / 2 float64 numbers)",
        edge_cases=(
            "A single expert is the result, bit for bit, whatever its weight.",
            "An expert of weight 0 is not read and does not count.",
            "Two vectors whose weighted directions cancel: base + w_0 v_0 + w_1 v_1; more than two: an error.",
            "Vectors that are all zero give the base (zeros without one).",
            "The base among the experts is no vector: its weight counts neither in the sum nor in the lengths.",
            NO_ANGLE + "base + sum(w_i v_i).",
        ),
        differences=(
            "mergekit computes the sum of the tangents, which is zero, in float32 and adds the rounding that is left.",
            (
                "Directions cancel where |sum(w_i u_i)| is at most 1e-6 sum |w_i|, or eps; mergekit compares with eps "
                "alone, which is below what float32 resolves."
            ),
            "mergekit stops where all vectors of more than two experts are zero, as those of frozen tensors are.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True
    widens: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the weights; see `Operator.prepare`.

        Raises
        ------
        OperatorError
            If the weights are to be normalised and cancel.
        """
        experts = [index for index in range(len(params.experts)) if index != params.base_expert]
        weights = [weight if index in experts else 0.0 for index, weight in enumerate(params.column("weight"))]
        lone = experts[0] if len(experts) == 1 else None
        if lone is not None:
            weights[lone] = 1.0
        elif params.values["normalize_weights"] and experts:
            normaliser([weights[index] for index in experts], "float64")  # refuses weights that cancel
            total = math.fsum(weights)
            weights = [weight / total for weight in weights]
        return MultiSlerpPrepared(
            coefficients=rounded(weights, work),
            weights=tuple(weights),
            eps=params.number("eps"),
            lone=lone,
            work=work,
        )

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether directions are averaged; see `Operator.reduces`."""
        assert isinstance(prepared, MultiSlerpPrepared)
        return facts.elements > 0 and prepared.lone is None and any(prepared.live)

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return every expert's coefficient; see `Operator.reduce`.

        Raises
        ------
        OperatorError
            If more than two directions cancel.
        """
        assert isinstance(prepared, MultiSlerpPrepared)
        experts = prepared.live_indices
        gram = yield from gram_of_experts(experts, slots)
        found = _coefficients(gram, [prepared.weights[index] for index in experts], prepared.eps, facts)
        by_expert = dict(zip(experts, rounded(found, prepared.work), strict=True))
        value = tuple(by_expert.get(index, 0.0) for index in range(len(prepared.coefficients)))
        return Reduction(value=value, key=record_digest("multislerp", value))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the linear combination of the deltas and the base; see `Operator.apply`."""
        assert isinstance(prepared, MultiSlerpPrepared)
        if reduction is not None:
            return combination(inputs, reduction.value)
        lone = prepared.lone
        return copied(inputs, inputs.base if lone is None or not inputs.has(lone) else inputs.value(lone, 1))

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the coefficients of the full read, exactly: additive, as they are given. See `Operator.influence`."""
        assert isinstance(prepared, MultiSlerpPrepared)
        if reduction is not None:
            return additive(reduction.value, linear=True)
        lone = (1.0 if index == prepared.lone else 0.0 for index in range(len(prepared.coefficients)))
        return additive(lone, linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return a lone expert, and the base where no delta is left; see `Operator.copied_input`."""
        assert isinstance(prepared, MultiSlerpPrepared)
        return prepared.lone if any(present) else -1


def _coefficients(gram: Array, weights: Sequence[float], eps: float, facts: TensorFacts) -> tuple[float, ...]:
    """Return the factors of the vectors from their inner products, float64 ``(N, N)``, and weights, none of them 0."""
    import numpy as np

    from mergepipe.operators.angles import cosine

    if not np.isfinite(gram).all() or not gram.any():
        return tuple(weights)
    factors = np.array(weights)
    norms = np.sqrt(np.diagonal(gram))
    shares = factors / (norms + eps)
    square = float(np.add.reduce(np.add.reduce(gram * shares[:, None] * shares, axis=1)))
    size = math.sqrt(max(square, 0.0))
    if size <= max(eps, CANCELLATION * sum(map(abs, weights))):
        if len(weights) <= 2:
            return tuple(weights)
        raise OperatorError(
            f"the weighted directions of {len(weights)} experts cancel: their sum has length {size:.2g}, so there is "
            "no mean direction",
            hint="give the experts other weights (weight 0 leaves one out), or merge this tensor by another operator",
            elements=facts.elements,
            weights=list(weights),
            length=size,
        )
    length = float(np.add.reduce(factors * norms)) * float(cosine(np.array(eps)))
    return tuple((length / size * shares).tolist())
