"""Three merge methods that mergepipe does not have; `Mergefile.toml` beside this file uses them.

`docs/guides/custom-operators.md` goes through them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mergepipe import merge_function
from mergepipe.digest import record_digest
from mergepipe.operators.contract import (
    BlockInputs,
    Operator,
    Prepared,
    Reducing,
    Reduction,
    Statistic,
    TensorFacts,
    TensorParams,
)
from mergepipe.operators.numerics import rounded, weighted_sum
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec, Scope


def median(base, experts, *, pull: float = 1.0):
    """Move every element from the base towards the median of the experts."""
    return base + pull * (np.median(experts, axis=0) - base)


@merge_function(base="required", per_expert={"weight": 1.0}, rows=True)
def keep_lengths(base, experts, *, weight):
    """Add weighted deltas, then give every row the length that it has in the base."""
    merged = base + sum(w * (expert - base) for w, expert in zip(weight, experts, strict=True))
    lengths, now = (np.linalg.norm(rows, axis=1, keepdims=True) for rows in (base, merged))
    return merged * np.divide(lengths, now, out=np.ones_like(now), where=now > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Statistic):
    """The squared lengths of a block's update and of its base: two float64 numbers."""

    name: ClassVar[str] = "example.lengths"
    version: ClassVar[int] = 1
    slots: tuple[int, ...]
    weights: tuple[float, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return the weights: the numbers depend on them."""
        return self.weights

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the sums over a block."""
        update = base = 0.0
        for inputs in tiles:
            step = weighted_sum(inputs, self.weights, deltas=True)
            update += 0.0 if step is None else _squares(step)
            base += _squares(inputs.base)
        return struct.pack("<2d", update, base)


def _squares(values: Any) -> float:
    return float(np.add.reduce(np.square(values, dtype=np.float64)))


@dataclass(frozen=True, kw_only=True)
class Bound(Prepared):
    """What `BoundedUpdate` needs of the parameters, besides the weights (`coefficients`)."""

    share: float
    work: str


class BoundedUpdate(Operator):
    """Task arithmetic whose update is at most ``share`` times as long as the base, tensor by tensor."""

    signature: ClassVar = OperatorSignature(
        name="bounded_update",
        summary="task vectors, shortened where they would move a tensor too far",
        base=BasePolicy.REQUIRED,
        params=(
            ParamSpec(
                name="weight",
                kind=ParamKind.REAL,
                scope=Scope.EXPERT,
                default=1.0,
                gradient=True,
                doc="The expert's weight; an expert of weight 0 is not read.",
            ),
            ParamSpec(
                name="share",
                kind=ParamKind.REAL,
                default=0.1,
                low=0.0,
                gradient=True,
                doc="The length of the update, relative to the base's, that is not exceeded.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=("u = sum(w_i (x_i - base))", "y = base + min(1, share |base| / |u|) u"),
        source="an example",
        locality="A changed block is measured again; the others are computed again where the factor changed.",
        statistics="per block the squared lengths of update and base",
        passes=(1, 2),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Bound:
        """Return the weights, 0 for the base among the experts, and the share."""
        weights = rounded(params.column("weight"), work)
        own = tuple(0.0 if index == params.base_expert else weight for index, weight in enumerate(weights))
        return Bound(coefficients=own, share=params.number("share"), work=work)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether there is an update to be measured."""
        return any(prepared.live)

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the factor of the update."""
        assert isinstance(prepared, Bound)
        used = tuple(slot for slot, there in enumerate(slots) if there)
        lengths = Lengths(slots=used, weights=prepared.coefficients)
        values = yield [lengths]
        update = base = 0.0
        for block in values[lengths]:  # in block order, so that the sums are the same everywhere
            parts = struct.unpack("<2d", block)
            update, base = update + parts[0], base + parts[1]
        factor = min(1.0, prepared.share * math.sqrt(base / update)) if update > 0 else 1.0
        (factor,) = rounded((factor,), prepared.work)
        return Reduction(value=factor, key=record_digest("example.bounded_update", factor))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one: `reduce` yields once."""
        return 1

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Any:
        """Return the base plus the shortened update."""
        update = weighted_sum(inputs, prepared.coefficients, deltas=True)
        if update is None:
            update = inputs.scratch(0)
            update.fill(0)
        if reduction is not None and reduction.value != 1:
            update *= reduction.value
        update += inputs.base
        return update

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base for blocks without any delta: they are copied, not computed."""
        return None if any(present) else -1
