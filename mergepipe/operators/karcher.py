"""The Karcher mean of checkpoints: their Riemannian centre on the sphere."""

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
from mergepipe.operators.gram import NO_ANGLE, copied, gram_of_values
from mergepipe.operators.influence import Influence, additive, excess
from mergepipe.operators.numerics import rounded, weighted_sum
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass


@dataclass(frozen=True, kw_only=True)
class KarcherPrepared(Prepared):
    """How far to iterate, and the work dtype."""

    max_iter: int
    tol: float
    work: str


class Karcher(Operator):
    """The point of the sphere with the least sum of squared angles to all checkpoints, times their mean norm.

    The mean, the tangents and every step are linear combinations of the checkpoints, so the iteration runs on their
    coefficients with the float64 Gram matrix alone: one pass over the weights, however many steps it takes. The
    result is the sum of the checkpoints with the last coefficients, rounded to the work dtype, left to right.
    """

    signature: ClassVar = OperatorSignature(
        name="karcher",
        summary="the Karcher mean: the point of the sphere nearest to all checkpoints, with their mean norm",
        base=BasePolicy.OPTIONAL,
        params=(
            ParamSpec(
                name="max_iter",
                kind=ParamKind.INTEGER,
                default=10,
                low=1.0,
                doc="The largest number of steps.",
            ),
            ParamSpec(
                name="tol",
                kind=ParamKind.REAL,
                default=1e-5,
                low=0.0,
                low_open=True,
                gradient=True,
                doc="The length of a step at which the iteration ends; shorter vectors have no direction.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "n_i = |x_i|; u_i = x_i / n_i for the K checkpoints with n_i > tol; u = sum(u_i) / |sum(u_i)|",
            "repeat: c_i = u . u_i; a_i = arccos c_i; T = sum(a_i / sin a_i * (u_i - c_i u)) / K",
            "u <- cos |T| u + sin |T| T / |T|, until |T| < tol or max_iter steps are done",
            "result = sum(n_i) / N * u",
        ),
        source="Karcher 1977, Riemannian center of mass; as in mergekit's karcher",
        locality=(
            "A changed block is read again for its inner products, those of other blocks are kept; the other blocks "
            "are computed again only where the coefficients, rounded, have changed."
        ),
        passes=(1, 2),
        statistics="per block the inner products of the N checkpoints (N (N + 1) / 2 float64 numbers)",
        edge_cases=(
            "A single checkpoint is the result, bit for bit.",
            "The base is a checkpoint like any other where it is listed among the experts, otherwise it has no part.",
            (
                "A checkpoint whose norm is at most tol has no direction; it counts in the mean norm. "
                "Where that holds for all, the result is zero."
            ),
            "Directions whose sum is shorter than tol: the iteration begins at the first.",
            "A direction within tol of u, or of its opposite, has no part in a step.",
            NO_ANGLE + "the mean of the checkpoints.",
        ),
        differences=(
            (
                "mergekit takes angles from float32 cosines, which resolve 3e-4: nearly parallel ones then have no "
                "part in a step. Here they are float64."
            ),
            "mergekit averages in a base that is not listed; here it must be listed.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = False
    widens: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the limits of the iteration; every expert is an input. See `Operator.prepare`."""
        return KarcherPrepared(
            coefficients=(1.0,) * len(params.experts),
            max_iter=int(params.values["max_iter"]),
            tol=params.number("tol"),
            work=work,
        )

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether there is anything to average; see `Operator.reduces`."""
        return facts.elements > 0 and len(prepared.coefficients) > 1

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return every checkpoint's coefficient; see `Operator.reduce`."""
        assert isinstance(prepared, KarcherPrepared)
        del facts, slots
        count = len(prepared.coefficients)
        gram = yield from gram_of_values(range(1, count + 1))
        value = rounded(_coefficients(gram, prepared.max_iter, prepared.tol), prepared.work)
        return Reduction(value=value, key=record_digest("karcher", value))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the linear combination of the checkpoints; see `Operator.apply`."""
        if reduction is None:
            return copied(inputs, inputs.value(0, 1))
        total = weighted_sum(inputs, reduction.value, deltas=False)
        return copied(inputs, None) if total is None else total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the coefficients of the full read, exactly: additive, as they are given. See `Operator.influence`.

        An omitted checkpoint counts as the base, with the coefficient that it has.
        """
        coefficients = prepared.coefficients if reduction is None else reduction.value
        return additive(coefficients, base=excess(coefficients), linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return a single checkpoint; see `Operator.copied_input`."""
        return 0 if present == (True,) else None


def _coefficients(gram: Array, max_iter: int, tol: float) -> list[float]:
    """Return the factors of the checkpoints from their inner products, float64 ``(N, N)``."""
    import numpy as np

    count = len(gram)
    if not np.isfinite(gram).all():
        return [1.0 / count] * count
    norms = np.sqrt(np.diagonal(gram))
    valid = np.flatnonzero(norms > tol)
    factors = np.zeros(count)
    if valid.size:
        units = gram[np.ix_(valid, valid)] / norms[valid, None] / norms[valid]
        length = float(np.add.reduce(norms)) / count
        factors[valid] = length * _mean(units, max_iter, tol) / norms[valid]
    return [float(factor) for factor in factors]


def _mean(units: Array, max_iter: int, tol: float) -> Array:
    """Return the Karcher mean's coefficients of unit vectors, from their cosines, float64 ``(K, K)``."""
    import numpy as np

    from mergepipe.operators.angles import arccosine, cosine, sine

    def times(vector: Array) -> Array:
        return np.add.reduce(units * vector, axis=1)

    def norm(vector: Array) -> float:
        return math.sqrt(max(float(np.add.reduce(vector * times(vector))), 0.0))

    share = 1.0 / len(units)
    mean = np.full(len(units), share)
    if norm(mean) < tol:
        mean = np.zeros(len(units))
        mean[0] = 1.0
    mean = mean / norm(mean)
    for _ in range(max_iter):
        cosines = np.clip(times(mean), -1.0, 1.0)
        angles = arccosine(cosines)
        used = (angles >= tol) & (angles <= math.pi - tol)
        factors = np.where(used, share * angles / np.where(used, sine(angles), 1.0), 0.0)
        tangent = factors - float(np.add.reduce(factors * cosines)) * mean
        step = norm(tangent)
        if step < tol:
            break
        turned = np.array(step)
        mean = float(cosine(turned)) * mean + float(sine(turned)) / step * tangent
        mean = mean / norm(mean)
    return mean
