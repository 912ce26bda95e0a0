"""arcee_fusion: the expert's elements whose change is important, the base's elsewhere."""

from __future__ import annotations

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
from mergepipe.operators.influence import Influence, additive
from mergepipe.operators.numerics import rounded
from mergepipe.operators.partners import only_expert
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature
from mergepipe.values import dataclass

# The divergences of shorter rows are computed again where they are needed: kept, they would not be small.
_KEPT_ROW = 64


@dataclass(frozen=True, kw_only=True)
class FusionPrepared(Prepared):
    """Which expert is an input, and the work dtype, in which the threshold is computed."""

    expert: int
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The threshold of a tensor, whether its rows differ in divergence, and the divergences where they were kept."""

    threshold: float
    several_rows: bool = False
    known: Array | None = None

    def reduction(self) -> Reduction:
        """Return it as a reduction; the divergences need no key: a block's follow from its content."""
        return Reduction(value=self, key=record_digest("arcee_fusion", self.threshold))


class ArceeFusion(Operator):
    """The base with those elements of one expert whose change is important, compared with the tensor's others.

    An element's importance is ``|x - base|`` times the divergence of its row (of the last dimension):
    ``sum p log(p / q)`` with ``p = softmax(x) + 1e-8`` and ``q = softmax(base) + 1e-8``, computed in float64 (see
    `mergepipe.operators.divergence`) and rounded once to the work dtype. The threshold is
    ``median + 1.5 (q3 - q1)`` of the importances of all elements; a quantile is the element at index
    ``floor(quantile (n - 1))`` of their ascending order. Elements at the threshold and above are taken:
    ``base + (x - base)``.

    A tensor of one row (any 1-D tensor) has the same factor everywhere, which chooses nothing: there the importance is
    ``|x - base|``.
    """

    signature: ClassVar = OperatorSignature(
        name="arcee_fusion",
        summary="take the expert's elements whose change is important",
        base=BasePolicy.REQUIRED,
        max_experts=2,  # the base may be listed too
        params=(),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "p = softmax(x) + 1e-8, q = softmax(base) + 1e-8, along the rows of the last dimension",
            "importance = |x - base| sum(p log(p / q))",
            "threshold = median + 1.5 (q3 - q1) of the importances of the tensor",
            "y = base + (x - base) (importance >= threshold)",
        ),
        source="Arcee Fusion, as published in mergekit",
        locality=(
            "A changed block is measured again; the other blocks of the tensor are computed again only where the "
            "threshold came out different."
        ),
        passes=(2, 4),
        statistics="per block: the divergence of each row, and a table of the importances (the exact quantiles)",
        edge_cases=(
            "In a tensor of one row the importance is |x - base|: a common factor chooses nothing.",
            "Where three quarters of the elements do not differ the threshold is 0, and every element is taken.",
            "The base may be listed beside the expert; it changes nothing.",
            "NaN in an element passes through; of the rest of its row nothing is taken (`non_finite` is `allow`).",
        ),
        differences=(
            "mergekit computes divergences in float32: those of small changes are rounding, some of them negative.",
            "Run in float64, mergekit takes the same elements.",
            "Above a million elements mergekit takes the quantiles of a random sample, here of all.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return which expert is an input; see `Operator.prepare`."""
        expert = only_expert(params, "arcee_fusion")
        coefficients = tuple(1.0 if index == expert else 0.0 for index in range(len(params.experts)))
        return FusionPrepared(coefficients=coefficients, expert=expert, work=work)

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether there are several rows; see `Operator.rowwise`."""
        return facts.rows > 1

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether there is anything to choose; see `Operator.reduces`."""
        return facts.elements > 0

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the threshold; see `Operator.reduce`."""
        from mergepipe.operators.divergence import Divergences, Importances, joined
        from mergepipe.operators.magnitudes import Magnitudes, select

        assert isinstance(prepared, FusionPrepared)
        if not slots[prepared.expert + 1]:
            yield ()
            return Fusion(threshold=0.0).reduction()
        inputs = (0, prepared.expert + 1)
        known = None
        if facts.rows > 1 and facts.row_elements >= _KEPT_ROW:
            rows = Divergences(slots=inputs)
            values = yield (rows,)
            known = joined(values[rows], prepared.work)
        statistic = Importances(slots=inputs, known=known) if facts.rows > 1 else Magnitudes(slots=inputs)
        last = facts.elements - 1
        ascending = (last // 4, last // 2, 3 * last // 4)
        found = yield from select({statistic: tuple(facts.elements - place for place in ascending)})
        first, median, third = (selection.value for selection in found[statistic])
        (span,) = rounded((third - first,), prepared.work)
        (margin,) = rounded((1.5 * span,), prepared.work)
        (threshold,) = rounded((median + margin,), prepared.work)
        return Fusion(threshold=threshold, several_rows=facts.rows > 1, known=known).reduction()

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return those of the selection, and one where rows are looked at before; see `Operator.rounds`."""
        from mergepipe.operators.magnitudes import most_rounds

        assert isinstance(prepared, FusionPrepared)
        before = facts.rows > 1 and facts.row_elements >= _KEPT_ROW
        return before + most_rounds(prepared.work, facts.elements)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the base with the important elements of the expert; see `Operator.apply`."""
        assert isinstance(prepared, FusionPrepared)
        index = prepared.expert
        if reduction is None or not inputs.has(index):
            out = inputs.scratch(2)
            out[...] = inputs.base
            return out
        fusion: Fusion = reduction.value
        if fusion.several_rows:
            from mergepipe.operators.divergence import importance

            size = importance(inputs, index, fusion.known)
        else:
            size = inputs.delta(index, 0)
            inputs.xp.abs(size, out=size)
        out = inputs.delta(index, 2)
        out *= size >= fusion.threshold  # a product, so that NaN stays
        out += inputs.base
        return out

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return 1 for the expert: additive. See `Operator.influence`.

        An element is the base or moves by its delta. The threshold is that of the full read, and the divergence of a
        row depends on that row alone; so what is read of the expert gives what it gives in the full read.
        """
        return additive(prepared.coefficients, base=None)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where the delta is zero; see `Operator.copied_input`."""
        return None if any(present) else -1
