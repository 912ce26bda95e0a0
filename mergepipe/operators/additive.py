"""Additive operators: fixed coefficients times inputs, block-local, without a reduction.

=================  ==================================================  =========================================
operator           formula                                             order of operations
=================  ==================================================  =========================================
linear             sum(w_i x_i) / sum(w_i)                             products summed in expert order, one division
task_arithmetic    base + lambda sum(w_i (x_i - base)) / (1 or sum w)  deltas summed in expert order, divided,
                                                                       scaled, added to the base
passthrough        scale x                                             one product, none where scale is 1
=================  ==================================================  =========================================

Sources: model soups (Wortsman et al. 2022) for linear, Ilharco et al. 2023, equation 2, for task_arithmetic.
Differences from mergekit 0.1.5 (``dtype: float32``) stand in the `reference` of each.
"""

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
from mergepipe.operators.influence import Influence, additive, excess
from mergepipe.operators.numerics import normaliser, ordered_sum, rounded, weighted_sum
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec, Scope

WEIGHT = ParamSpec(
    name="weight",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=1.0,
    gradient=True,
    doc="The expert's weight; an expert of weight 0 is not read.",
)

_LOCAL = "A changed block is computed again, and no other."
_CANCEL = (
    "Where normalize is true, weights that sum to zero (within 1e-6 of the sum of their magnitudes) are an error, "
    "before any checkpoint's weights are read."
)


class Linear(Operator):
    """The weighted average of checkpoints; the base is an input only where it is listed as an expert."""

    signature: ClassVar = OperatorSignature(
        name="linear",
        summary="weighted average of checkpoints: sum(w_i x_i) / sum(w_i)",
        base=BasePolicy.OPTIONAL,
        params=(
            WEIGHT,
            ParamSpec(
                name="normalize",
                kind=ParamKind.FLAG,
                default=True,
                doc="Whether to divide by the sum of the weights.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=("y = sum(w_i x_i) / sum(w_i), without the divisor where normalize is false",),
        source="Wortsman et al. 2022, Model soups",
        locality=_LOCAL,
        edge_cases=(
            "The base takes part only where it is listed among the experts, like any other checkpoint.",
            _CANCEL,
            "A single expert of weight 1 is copied, bit for bit.",
            "Where every weight is 0 and normalize is false, the result is zero.",
        ),
        differences=(
            "mergekit fuses multiplication and addition on the CPU: results differ by last bits.",
            "mergekit divides by a sum of weights that is zero, and gives infinities or NaN.",
            "mergekit makes a base that is not listed one more checkpoint of the average.",
        ),
    )
    version: ClassVar = 1
    shows_non_finite: ClassVar = True
    widens: ClassVar = True
    uses_base: ClassVar = False

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the weights and their sum; see `Operator.prepare`."""
        weights = rounded(params.column("weight"), work)
        divisor = normaliser(weights, work) if params.values["normalize"] else 1.0
        return Prepared(coefficients=weights, divisor=divisor)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return ``sum(w_i x_i) / divisor``; see `Operator.apply`."""
        total = weighted_sum(inputs, prepared.coefficients, deltas=False)
        if total is None:
            return inputs.xp.zeros(inputs.shape, dtype=inputs.dtype)
        if prepared.divisor != 1:
            total /= prepared.divisor
        return total

    def rests_at_base(self, prepared: Prepared) -> bool:
        """Return whether the weights sum to the divisor; see `Operator.rests_at_base`."""
        sums = (ordered_sum(prepared.coefficients, work) for work in ("float32", "float64"))
        return any(total == prepared.divisor for total in sums)

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return ``w_i / divisor``, exactly: additive. See `Operator.influence`.

        An omitted expert counts as the base, so the result moves by ``w_i / divisor (x_i - base)``, and the moves add.
        """
        shares = [weight / prepared.divisor for weight in prepared.coefficients]
        return additive(shares, base=excess(shares), linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the only expert where it enters with factor 1; see `Operator.copied_input`."""
        return _only_unit_input(prepared, present) if prepared.divisor == 1 else None


class TaskArithmetic(Operator):
    """The base plus a weighted sum of task vectors."""

    signature: ClassVar = OperatorSignature(
        name="task_arithmetic",
        summary="base plus weighted task vectors: base + lambda sum(w_i (x_i - base))",
        base=BasePolicy.REQUIRED,
        params=(
            WEIGHT,
            ParamSpec(
                name="normalize",
                kind=ParamKind.FLAG,
                default=False,
                doc="Whether to divide the sum of task vectors by the sum of the weights.",
            ),
            ParamSpec(
                name="lambda",
                kind=ParamKind.REAL,
                default=1.0,
                gradient=True,
                doc="The factor of the sum of task vectors.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "delta_i = x_i - base",
            "y = base + lambda sum(w_i delta_i), divided by sum(w_i) where normalize is true",
        ),
        source="Ilharco et al. 2023, Editing Models with Task Arithmetic, equation 2",
        locality=_LOCAL,
        edge_cases=(
            "The base among the experts is a delta of zero: it adds nothing and counts in no divisor.",
            _CANCEL,
            "lambda 0, or a weight of 0 for every expert, gives the base, bit for bit; the experts are not read.",
        ),
        differences=("mergekit takes a sum of weights below 1e-8 in magnitude as 1 while normalising.",),
    )
    version: ClassVar = 1
    shows_non_finite: ClassVar = True
    widens: ClassVar = True
    uses_base: ClassVar = True
    sums_deltas: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return weights, divisor and scale; see `Operator.prepare`."""
        weights = rounded(params.column("weight"), work)
        (scale,) = rounded((params.number("lambda"),), work)
        # The base among the experts is a zero delta: it neither adds anything nor counts in the normaliser.
        counted = [weight for index, weight in enumerate(weights) if index != params.base_expert]
        divisor = normaliser(counted, work) if params.values["normalize"] and counted else 1.0
        coefficients = tuple(
            0.0 if index == params.base_expert or scale == 0 else weight for index, weight in enumerate(weights)
        )
        return Prepared(coefficients=coefficients, divisor=divisor, scale=scale)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return ``base + scale * (sum(w_i delta_i) / divisor)``; see `Operator.apply`."""
        total = weighted_sum(inputs, prepared.coefficients, deltas=True)
        if total is None:
            total = inputs.xp.zeros(inputs.shape, dtype=inputs.dtype)
        if prepared.divisor != 1:
            total /= prepared.divisor
        if prepared.scale != 1:
            total *= prepared.scale
        total += inputs.base
        return total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return ``lambda w_i / divisor``, exactly: additive. See `Operator.influence`.

        The result is linear in the deltas, with coefficients that depend on none of them.
        """
        coefficients = (prepared.scale * weight / prepared.divisor for weight in prepared.coefficients)
        return additive(coefficients, linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where no delta is left; see `Operator.copied_input`."""
        return None if any(present) else -1


class Passthrough(Operator):
    """One checkpoint, copied or scaled."""

    signature: ClassVar = OperatorSignature(
        name="passthrough",
        summary="one checkpoint, copied bit for bit, or multiplied by a factor",
        base=BasePolicy.OPTIONAL,
        max_experts=1,
        params=(
            ParamSpec(
                name="scale",
                kind=ParamKind.REAL,
                scope=Scope.EXPERT,
                default=1.0,
                gradient=True,
                doc="The factor of the tensor; 1 copies its bytes.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=("y = scale x",),
        source="mergekit",
        locality=_LOCAL,
        edge_cases=(
            "scale 1 copies the tensor, bit for bit (where the output has its dtype).",
            "scale 0 gives zeros; the expert is not read.",
        ),
    )
    version: ClassVar = 1
    shows_non_finite: ClassVar = True
    widens: ClassVar = True
    uses_base: ClassVar = False
    ignores_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the factor; see `Operator.prepare`."""
        return Prepared(coefficients=rounded(params.column("scale"), work))

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return ``scale * x``; see `Operator.apply`."""
        total = weighted_sum(inputs, prepared.coefficients, deltas=False)
        return inputs.xp.zeros(inputs.shape, dtype=inputs.dtype) if total is None else total

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the factor, exactly: ``scale x`` moves by ``scale (x - base)``. See `Operator.influence`."""
        return additive(prepared.coefficients, base=excess(prepared.coefficients), linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the expert where its factor is 1; see `Operator.copied_input`."""
        return _only_unit_input(prepared, present)


def _only_unit_input(prepared: Prepared, present: tuple[bool, ...]) -> int | None:
    indices = [index for index, there in enumerate(present) if there]
    return indices[0] if len(indices) == 1 and prepared.coefficients[indices[0]] == 1 else None
