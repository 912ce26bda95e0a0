"""Generalised task arithmetic: drop elements of the deltas, weight them, elect a sign or not, add them to the base.

For each expert ``delta_i = x_i - base``; a sparsifier sets elements of it to zero; what is kept is multiplied by one
factor (`rescale`), then by the weight. The terms are added up in expert order, all of them or those that agree with the
elected sign; `normalize` divides by the sum of the weights that took part, `lambda` multiplies the result, and
the base is added. Every step is rounded once to the work dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from mergepipe.digest import record_digest
from mergepipe.errors import OperatorError
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
from mergepipe.operators.influence import ROOT_OF_2, Influence, additive
from mergepipe.operators.numerics import normaliser, rounded
from mergepipe.operators.sparsifiers import AtRandom, ByMagnitude, ByRank, Sparsifier
from mergepipe.values import dataclass

# Where a sign is elected, every expert's term needs a scratch array at the same time.
MOST_ELECTING = 90


@dataclass(frozen=True, kw_only=True)
class SparsePrepared(Prepared):
    """Weights and sparsifiers.

    Attributes
    ----------
    sparsifiers
        What is kept of each expert's delta, in expert order.
    factors
        What the kept elements are multiplied by, where that is known without statistics.
    rescale
        `"l1"`, `"density"` or False.
    normalize
        Whether to divide by the weights that agree; `divisor` has what is the same for every element.
    work
        The work dtype.
    """

    sparsifiers: tuple[Sparsifier, ...]
    factors: tuple[float, ...]
    rescale: object
    normalize: bool
    work: str


class SparseTaskArithmetic(Operator):
    """What the methods of this family have in common; each says what is kept, and whether a sign is elected.

    Attributes
    ----------
    elects
        Whether only terms count that agree with the elected sign.
    """

    version: ClassVar = 1
    uses_base: ClassVar = True
    widens: ClassVar = True
    elects: ClassVar[bool]

    def sparsifier(self, params: TensorParams, index: int) -> Sparsifier:
        """Return what is kept of an expert's delta."""
        raise NotImplementedError

    def prepare(self, params: TensorParams, work: str) -> SparsePrepared:
        """Return weights, divisor, scale and sparsifiers; see `Operator.prepare`."""
        weights = rounded(params.column("weight"), work)
        (scale,) = rounded((params.number("lambda"),), work)
        normalize, rescale = bool(params.values["normalize"]), params.values["rescale"]
        # The base among the experts is a zero delta: it has no vote, adds nothing and counts in no divisor.
        counted = [weight for index, weight in enumerate(weights) if index != params.base_expert]
        divisor = normaliser(counted, work) if normalize and not self.elects and counted else 1.0
        sparsifiers = tuple(self.sparsifier(params, index) for index in range(len(weights)))
        return SparsePrepared(
            coefficients=tuple(
                0.0 if index == params.base_expert or scale == 0 else weight for index, weight in enumerate(weights)
            ),
            divisor=divisor,
            scale=scale,
            sparsifiers=sparsifiers,
            factors=tuple(_made_up(s, work) if rescale == "density" else 1.0 for s in sparsifiers),
            rescale=rescale,
            normalize=normalize,
            work=work,
        )

    def check(self, prepared: Prepared, facts: TensorFacts) -> None:
        """See `Operator.check`."""
        for _, sparsifier in _dropping(prepared, facts):
            if isinstance(sparsifier, ByRank):
                sparsifier.check(facts)

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether ranks within rows are needed; see `Operator.rowwise`."""
        dropping = _dropping(prepared, facts)
        return not facts.splits_row and any(isinstance(sparsifier, ByRank) for _, sparsifier in dropping)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether statistics decide what is kept or what makes up for it; see `Operator.reduces`."""
        assert isinstance(prepared, SparsePrepared)
        dropping = _dropping(prepared, facts)
        return any(prepared.rescale == "l1" or sparsifier.needs_statistics(facts) for _, sparsifier in dropping)

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return bounds, ranks and factors of the experts' deltas; see `Operator.reduce`."""
        from mergepipe.operators.sparsify import reduce_kept

        assert isinstance(prepared, SparsePrepared)
        wanted = {index: sparsifier for index, sparsifier in _dropping(prepared, facts) if slots[index + 1]}
        found = yield from reduce_kept(wanted, facts, l1=prepared.rescale == "l1", work=prepared.work)
        fields = [
            (index, kept.low.pattern if kept.low else -1, kept.high.pattern if kept.high else -1, kept.factor)
            for index, kept in found.items()
        ]
        in_block = [kept.in_block for kept in found.values() if kept.in_block]
        block_keys = [record_digest("kept", block) for block in zip(*in_block, strict=True)]
        return Reduction(value=found, key=record_digest("sparse", fields), block_keys=block_keys)

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return how often magnitudes, ranks or sums are asked for at most; see `Operator.rounds`."""
        from mergepipe.operators.sparsify import most_rounds

        assert isinstance(prepared, SparsePrepared)
        sparsifiers = [sparsifier for _, sparsifier in _dropping(prepared, facts)]
        return most_rounds(sparsifiers, facts, l1=prepared.rescale == "l1", work=prepared.work)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return ``base + scale * combined``; see `Operator.apply`."""
        assert isinstance(prepared, SparsePrepared)
        total = _combined(inputs, prepared, reduction, elects=self.elects)
        if total is None:
            total = inputs.xp.zeros(inputs.shape, dtype=inputs.dtype)
        if prepared.divisor != 1:
            total /= prepared.divisor
        if prepared.scale != 1:
            total *= prepared.scale
        total += inputs.base
        return total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return what each delta can move, and what the rest can, where a sign is elected. See `Operator.influence`.

        Masks and factors are the full read's and depend on the expert's own delta alone. So a delta that is left out
        is a term of 0, and the other terms are what they are. A term is ``w_i r_i`` times the delta or 0, with r_i the
        largest factor that an element can have.

        Without an election the result is the sum of terms times ``lambda / divisor``: additive, with
        ``|lambda w_i r_i / divisor|``. So it is with one expert, which always agrees with itself.

        With one, let F be the experts that agree in the full read, and B those that do without the omitted deltas. If
        both results have one sign, B is a part of F. If not, F and B have no expert in common.

        - Divided by the weights that agree, and weights of one sign (``mean``): a result is a weighted mean of
          ``r_i d_i`` of one sign, at most the largest of them. Results of one sign differ by at most the largest, of
          two signs by at most ``|r_p d_p| + |r_q d_q|`` of two experts, which is at most ``sqrt(2)`` times the root of
          the sum of all squares.
        - Not divided (``sum``): results of one sign differ by the omitted terms that agree, of two signs by the terms
          of F and of B: by at most the sum of the magnitudes of all terms, and of a block (Minkowski) the sum of
          ``|lambda w_i r_i| n_i``.
        - Divided, and weights of both signs: what agrees may nearly cancel in the divisor. No bound is known.
        """
        assert isinstance(prepared, SparsePrepared)
        reach = [
            abs(prepared.scale) * _largest_factor(prepared, facts, index, reduction) if live else 0.0
            for index, live in enumerate(prepared.live)
        ]
        weighted = [factor * weight for factor, weight in zip(reach, prepared.coefficients, strict=True)]
        if not self.elects:
            dropping = _dropping(prepared, facts)
            sign = math.copysign(1.0, prepared.scale)
            return additive(
                (sign * value / prepared.divisor for value in weighted),
                base=None if dropping else 0.0,
                linear=all(isinstance(sparsifier, AtRandom) for _, sparsifier in dropping),
            )
        return _elected(prepared, reach, weighted)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where no delta is left; see `Operator.copied_input`."""
        return None if any(present) else -1


def _made_up(sparsifier: Sparsifier, work: str) -> float:
    """Return what makes up for a share that is dropped; 1 where each element has a probability of its own."""
    if isinstance(sparsifier, ByRank):
        return 1.0
    (factor,) = rounded((1 / sparsifier.density,), work)
    if not math.isfinite(factor):
        raise OperatorError(
            f"density {sparsifier.density:g} is too small to divide by: {work} cannot hold the quotient",
            hint='set a larger `density`, or `rescale = "l1"` or `false`',
            density=sparsifier.density,
        )
    return factor


def _dropping(prepared: Prepared, facts: TensorFacts) -> list[tuple[int, Sparsifier]]:
    """Return the experts, by index, that are inputs and of whose delta something is dropped."""
    assert isinstance(prepared, SparsePrepared)
    pairs = zip(prepared.live, prepared.sparsifiers, strict=True)
    return [(i, s) for i, (live, s) in enumerate(pairs) if live and not s.keeps_all(facts)]


def _largest_factor(prepared: SparsePrepared, facts: TensorFacts, index: int, reduction: Reduction | None) -> float:
    """Return the largest factor that an element of an expert's delta is multiplied by, its weight aside."""
    sparsifier = prepared.sparsifiers[index]
    kept = reduction.value.get(index) if reduction is not None else None
    if sparsifier.density >= 1 or (kept is None and isinstance(sparsifier, ByMagnitude)):
        return 1.0
    if prepared.rescale != "density":
        return float(kept.factor) if kept is not None else 1.0
    if not isinstance(sparsifier, ByRank):
        return prepared.factors[index]
    least = sparsifier.density if facts.row_elements == 1 else sparsifier.density - sparsifier.epsilon
    return rounded((1 / least,), prepared.work)[0]  # that of the smallest magnitude of a row


def _elected(prepared: SparsePrepared, reach: Sequence[float], weighted: Sequence[float]) -> Influence:
    """Return the influence where a sign is elected: see `SparseTaskArithmetic.influence`."""
    weights = [weight for weight in prepared.coefficients if weight]
    total = math.fsum(map(abs, weights)) if prepared.normalize else 1.0
    factors = tuple(abs(value) / (total or 1.0) for value in weighted)
    if len(weights) <= 1:
        return Influence(factors=factors, kind="additive")
    if not prepared.normalize:
        return Influence(factors=factors, kind="sum", spread=factors)
    if min(weights) < 0 < max(weights):
        return Influence(factors=factors, kind="none")
    return Influence(factors=factors, kind="mean", spread=tuple(ROOT_OF_2 * value for value in reach))


def _combined(
    inputs: BlockInputs, prepared: SparsePrepared, reduction: Reduction | None, *, elects: bool
) -> Array | None:
    from mergepipe.operators.elect import FIRST_TERM, Election

    election = Election(inputs)
    total: Array | None = None
    for index, weight in enumerate(prepared.coefficients):
        if not inputs.has(index):
            continue
        term = inputs.delta(index, election.scratch if elects else FIRST_TERM + (total is not None))
        _drop(inputs, index, term, prepared, reduction)
        if weight != 1:
            term *= weight
        if elects:
            election.add(term, weight)
        elif total is None:
            total = term
        else:
            total += term
    return election.result(normalize=prepared.normalize) if elects else total


def _drop(inputs: BlockInputs, index: int, delta: Array, prepared: SparsePrepared, reduction: Reduction | None) -> None:
    """Drop elements of an expert's delta in place and make up for them."""
    from mergepipe.operators.sparsify import Kept, sparsify

    sparsifier = prepared.sparsifiers[index]
    kept = reduction.value.get(index) if reduction is not None else None
    if sparsifier.density >= 1 or (kept is None and isinstance(sparsifier, ByMagnitude)):
        return  # all is kept, as it is
    by_density = prepared.rescale == "density"
    sparsify(sparsifier, inputs, index, delta, kept or Kept(), by_probability=by_density)
    factor = kept.factor if kept is not None and not by_density else prepared.factors[index]
    if factor != 1:
        delta *= factor
