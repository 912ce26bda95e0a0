"""Spherical interpolation of two checkpoints by weight: whole tensors, or each row or column on its own."""

from __future__ import annotations

import enum
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
from mergepipe.operators.numerics import rounded
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass

# The weights count as cancelling below this, as in mergekit: t is then one half.
NO_WEIGHT = 1e-6


class Vectors(enum.Enum):
    """What is one vector."""

    WHOLE = "the whole tensor"
    ROWS = "each row of the last dimension"
    COLUMNS = "each column along the first dimension"


@dataclass(frozen=True, kw_only=True)
class NuSlerpPrepared(Prepared):
    """Where to interpolate, what is a vector (the whole tensor where it is a single one), and the work dtype."""

    t: float
    vectors: Vectors
    work: str

    def vectors_of(self, facts: TensorFacts) -> Vectors:
        """Return what is a vector in a tensor of this shape: a 1-D tensor is one."""
        single = facts.columns <= 1 if self.vectors is Vectors.COLUMNS else facts.rows <= 1
        return Vectors.WHOLE if single else self.vectors


class NuSlerp(Operator):
    """The point at ``t = w_1 / (w_0 + w_1)`` of the arc between two checkpoints, or between their deltas from a base.

    Cosines come from float64 inner products; the two weights of a vector are computed in float64 and rounded to the
    work dtype. Products are added left to right, then the base. Vectors along rows need no statistics (tiles hold
    whole rows). Vectors down columns do: three float64 sums per column and block, so a changed block costs one pass
    over its own values. That is much for a statistic: 24 bytes for each column that a block has part in, more than the
    weights where a block holds less than a few rows.
    """

    signature: ClassVar = OperatorSignature(
        name="nuslerp",
        summary="spherical interpolation of two checkpoints by weight, of their deltas where there is a base",
        base=BasePolicy.OPTIONAL,
        min_experts=2,
        max_experts=2,
        params=(
            ParamSpec(
                name="nuslerp_flatten",
                kind=ParamKind.FLAG,
                default=True,
                doc="Whether a whole tensor is one vector, not each of its rows or columns.",
            ),
            ParamSpec(
                name="nuslerp_row_wise",
                kind=ParamKind.FLAG,
                default=False,
                doc="Without flattening: vectors down the first dimension instead of along the last (mergekit's name).",
            ),
            WEIGHT,
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "v_i = x_i - base, or x_i without a base; t = w_1 / (w_0 + w_1), 1/2 where |w_0 + w_1| < 1e-6",
            "c = (v_0 . v_1) / (max(|v_0|, 1e-7) max(|v_1|, 1e-7)); a = arccos c",
            "result = base + sin((1 - t) a) / sin a * v_0 + sin(t a) / sin a * v_1",
            "where 1 - c^2 <= 2^-24: result = base + (1 - t) v_0 + t v_1",
        ),
        source="mergekit's NuSLERP; Shoemake 1985, Animating rotation with quaternion curves",
        locality=(
            "Flattened: a changed block is read again for its inner products, and the others are computed again only "
            "where the two weights, rounded, have changed. Along rows: the changed block alone. Down columns: "
            "any change changes weights of some columns, and with them every block."
        ),
        passes=(1, 2),
        statistics=(
            "flattened: per block 3 float64 inner products; along rows: none; down columns: per block and column "
            "3 float64 sums"
        ),
        edge_cases=(
            "An expert of weight 0 is not read, and the result is a copy of the other.",
            "A vector of zeros is orthogonal to every other: the other enters with sin(t pi / 2), not with t.",
            "Next to opposite vectors the weights are large, and their errors with them.",
            "A 1-D tensor is one vector.",
            "The base must not be one of the two: its delta has no direction.",
            NO_ANGLE + "(1 - t) v_0 + t v_1, for the vector concerned.",
        ),
        differences=(
            (
                "Cosines are float64 instead of float32, so the weights differ by their last bits; next to opposite "
                "vectors, where they are large, by more."
            ),
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True
    widens: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return t and what is a vector; an expert of weight 0 is no input. See `Operator.prepare`."""
        if params.base_expert is not None:
            raise OperatorError(
                "nuslerp interpolates between the deltas of two experts, and one of them is the base itself",
                hint="leave out `base` to interpolate between checkpoints, or use slerp",
            )
        first, second = params.column("weight")
        total = first + second
        t = 0.5 if abs(total) < NO_WEIGHT else second / total
        flatten, down = params.values["nuslerp_flatten"], params.values["nuslerp_row_wise"]
        return NuSlerpPrepared(
            coefficients=rounded((1.0 - t, t), work),
            t=t,
            vectors=Vectors.WHOLE if flatten else Vectors.COLUMNS if down else Vectors.ROWS,
            work=work,
        )

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether rows are vectors; see `Operator.rowwise`."""
        assert isinstance(prepared, NuSlerpPrepared)
        return prepared.vectors_of(facts) is Vectors.ROWS and all(prepared.live)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether an angle spans blocks; see `Operator.reduces`."""
        assert isinstance(prepared, NuSlerpPrepared)
        return facts.elements > 0 and all(prepared.live) and prepared.vectors_of(facts) is not Vectors.ROWS

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the two weights, of the whole tensor or of each column; see `Operator.reduce`."""
        assert isinstance(prepared, NuSlerpPrepared)
        from mergepipe.operators.arcs import column_products, pair_weights

        if prepared.vectors_of(facts) is Vectors.WHOLE:
            gram = yield from gram_of_experts((0, 1), slots)
            weights = pair_weights(gram[0, 0], gram[0, 1], gram[1, 1], prepared.t, prepared.work)
            pair = (float(weights[0]), float(weights[1]))
            return Reduction(value=pair, key=record_digest("nuslerp", *pair))
        first, both, second = yield from column_products(facts.columns, slots)
        weights = pair_weights(first, both, second, prepared.t, prepared.work)
        key = record_digest("nuslerp columns", *(weight.astype(f"<f{weight.itemsize}").tobytes() for weight in weights))
        return Reduction(value=weights, key=key)

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the weighted sum of the two deltas and the base; see `Operator.apply`."""
        assert isinstance(prepared, NuSlerpPrepared)
        if not all(prepared.live):
            index = prepared.live.index(True)
            return copied(inputs, inputs.value(index, 1) if inputs.has(index) else inputs.base)
        if reduction is not None and isinstance(reduction.value[0], float):
            return combination(inputs, reduction.value)
        from mergepipe.operators.arcs import blended_columns, blended_rows

        if reduction is not None:
            return blended_columns(inputs, reduction.value)
        return blended_rows(inputs, prepared.t, prepared.work)

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the weights of the full read, exactly: additive; none along rows. See `Operator.influence`.

        With its two weights given the result is linear in the deltas. Down columns each column has weights of its own,
        and the largest bounds them all. Along rows the weights are made from the rows of the block itself: without one
        of the deltas they are others, and next to opposite vectors there is no limit to the difference.
        """
        assert isinstance(prepared, NuSlerpPrepared)
        if not all(prepared.live):
            return additive((1.0 if value else 0.0 for value in prepared.coefficients), linear=True)
        if reduction is None:
            return Influence(factors=tuple(map(abs, prepared.coefficients)), kind="none")
        if isinstance(reduction.value[0], float):
            return additive(reduction.value, linear=True)
        return additive((float(abs(weights).max()) for weights in reduction.value), base=None, linear=True)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the only expert with a weight, and the base where no delta is left; see `Operator.copied_input`."""
        if not any(present):
            return -1
        return None if all(prepared.live) else present.index(True)
