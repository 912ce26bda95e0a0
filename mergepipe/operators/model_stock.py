"""Model stock: between the base and the mean of the experts, as the angles between their deltas say."""

from __future__ import annotations

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
from mergepipe.operators.gram import NO_ANGLE, copied, gram_of_experts
from mergepipe.operators.influence import Influence, additive
from mergepipe.operators.numerics import rounded
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass

# Products of norms are taken as at least this, and denominators below it as zero. Source: mergekit 0.1.5.
LEAST_PRODUCT = 1e-6
SINGULAR = 1e-6


@dataclass(frozen=True, kw_only=True)
class ModelStockPrepared(Prepared):
    """Whether each row has its own angle, and the work dtype."""

    filter_wise: bool
    work: str

    def by_row(self, facts: TensorFacts) -> bool:
        """Return whether rows of a tensor of this shape are taken one by one; a 1-D tensor is one row."""
        return self.filter_wise and facts.rows > 1

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that are not the base."""
        return tuple(index for index, live in enumerate(self.live) if live)


class ModelStock(Operator):
    """The base moved towards the mean of the experts: ``base + t / N * sum(delta_i)``.

    The share t follows from the mean cosine between the deltas, which are taken in float64 from the Gram matrix of
    the deltas; ``t / N`` is rounded to the work dtype, and deltas are added left to right. Row by row (`filter_wise`)
    no statistics are needed: tiles hold whole rows.
    """

    signature: ClassVar = OperatorSignature(
        name="model_stock",
        summary="between the base and the mean of the experts, as the angles between their deltas say",
        base=BasePolicy.REQUIRED,
        min_experts=2,
        params=(
            ParamSpec(
                name="filter_wise",
                kind=ParamKind.FLAG,
                default=False,
                doc="Whether each row of the last dimension has its own angle.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "d_i = x_i - base; c = the mean over all pairs of d_i . d_j / max(|d_i| |d_j|, 1e-6)",
            "t = N c / (1 + (N - 1) c)",
            "result = base + t / N * sum(d_i) = t mean(x_i) + (1 - t) base",
        ),
        source="Jang et al. 2024, Model Stock, equation 7",
        locality=(
            "A changed block is read again for its inner products, those of other blocks are kept; the other blocks "
            "are computed again only where t / N, rounded, has changed. With filter_wise the changed block alone."
        ),
        passes=(1, 2),
        statistics=(
            "per block the inner products of the N deltas (N (N + 1) / 2 float64 numbers); none with filter_wise"
        ),
        edge_cases=(
            "The base among the experts does not count; two others are needed.",
            "Where |1 + (N - 1) c| < 1e-6 there is no estimate, and the result is the base.",
            "t is not kept within [0, 1]: opposing deltas give negative values.",
            "A delta of zeros has cosine 0 with every other, and counts in N.",
            "With filter_wise a 1-D tensor is one row.",
            NO_ANGLE + "the mean of the experts (t = 1), of the whole tensor or of the row.",
        ),
        differences=("mergekit adds t mean(x_i) and (1 - t) base, each rounded: results differ by last bits.",),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True
    widens: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return which experts count; see `Operator.prepare`.

        Raises
        ------
        OperatorError
            If fewer than two are left beside the base.
        """
        count = len(params.experts) - (params.base_expert is not None)
        if count < 2:
            raise OperatorError(
                "model_stock needs two experts beside the base: the angle between them says how far to go",
                hint="list another expert; the base among the experts does not count",
                expected=2,
                got=count,
            )
        return ModelStockPrepared(
            coefficients=tuple(0.0 if index == params.base_expert else 1.0 for index in range(len(params.experts))),
            filter_wise=bool(params.values["filter_wise"]),
            work=work,
        )

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether rows are taken one by one; see `Operator.rowwise`."""
        assert isinstance(prepared, ModelStockPrepared)
        return prepared.by_row(facts)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether the angle spans blocks; see `Operator.reduces`."""
        assert isinstance(prepared, ModelStockPrepared)
        return facts.elements > 0 and not prepared.by_row(facts)

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return ``t / N``; see `Operator.reduce`."""
        assert isinstance(prepared, ModelStockPrepared)
        del facts
        gram = yield from gram_of_experts(prepared.experts, slots)
        (share,) = rounded((float(_share(gram)),), prepared.work)
        return Reduction(value=share, key=record_digest("model_stock", share))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the base plus a share of the sum of deltas; see `Operator.apply`."""
        assert isinstance(prepared, ModelStockPrepared)
        present = [index for index in prepared.experts if inputs.has(index)]
        if not present or (reduction is not None and reduction.value == 0):
            return copied(inputs, inputs.base)
        if reduction is None:
            from mergepipe.operators.vectors import gram_of_rows

            shares = _share(gram_of_rows(inputs, prepared.experts)).astype(prepared.work)
        total = inputs.delta(present[0], 0)
        for index in present[1:]:
            total += inputs.delta(index, 1)
        if reduction is not None:
            total *= reduction.value
        else:
            total.reshape(-1, inputs.row_elements)[...] *= shares[:, None]
        total += inputs.base
        return total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return ``t / N`` of the full read, exactly: additive; none row by row. See `Operator.influence`.

        With the share given the result is linear in the deltas. Row by row it is made from the rows of the block
        itself: without one of the deltas it is another, and next to a singular angle there is no limit to the
        difference.
        """
        assert isinstance(prepared, ModelStockPrepared)
        if prepared.by_row(facts):
            count = len(prepared.experts)
            return Influence(factors=tuple(abs(value) / count for value in prepared.coefficients), kind="none")
        share = 0.0 if reduction is None else reduction.value
        return additive((share if live else 0.0 for live in prepared.live), linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where no delta is left; see `Operator.copied_input`."""
        return None if any(present) else -1


def _share(gram: Array) -> Array:
    """Return ``t / N`` from inner products of the deltas, float64 ``(N, N)`` or ``(N, N, rows)``."""
    import numpy as np

    count = len(gram)
    finite = np.isfinite(gram).all(axis=(0, 1))
    gram = np.where(finite, gram, 1.0)
    norms = [np.sqrt(gram[index, index]) for index in range(count)]
    total = np.zeros(gram.shape[2:])
    for first in range(count):
        for second in range(first + 1, count):
            product = np.maximum(norms[first] * norms[second], LEAST_PRODUCT)
            total = total + np.clip(gram[first, second] / product, -1.0, 1.0)
    cosine = total / (count * (count - 1) // 2)
    below = 1.0 + (count - 1) * cosine
    singular = np.abs(below) < SINGULAR
    share = np.where(singular, 0.0, cosine / np.where(singular, 1.0, below))
    return np.where(finite, share, 1.0 / count)
