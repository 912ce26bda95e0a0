"""What a budget reads of the experts: a prefix of the order, and what is known of the error that it leaves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mergepipe.plan.access import EXACT, OMITTED
from mergepipe.plan.bounds import ErrorBound, margin
from mergepipe.plan.places import full_row, parts, spread_out
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.plan.budget import BudgetTensor, Order

Array = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoss:
    """What a tensor loses by a cut.

    Attributes
    ----------
    tensor
        Its place among the tensors.
    omitted_bytes
        What the blocks that are left out would cost.
    bound
        Of its distance to the full read, None where none is known.
    expected
        As in `Selection`.
    omitted_mass
        As in `Selection`, of this tensor's deltas.
    """

    tensor: int
    omitted_bytes: int
    bound: float | None
    expected: float
    omitted_mass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a budget reads of the experts.

    Attributes
    ----------
    order
        What it is a prefix of.
    items
        How many items, which are blocks or steps of their precision, are read.
    planned_bytes, full_bytes
        What is read, and what a full read would: equal blocks are read once.
    blocks, full_blocks
        Of how many blocks of experts, of those that are not free, anything is read, and how many there are.
    bound
        Of the distance to the full read.
    expected
        An estimate of that distance: the deltas that are left out taken as orthogonal; infinite where norms are.
    uncertainty
        The standard error of that estimate that comes from measuring by samples; 0 where norms are exact.
    omitted_mass
        The norm of all deltas that are left out, as a share of the norm of all deltas; where some are infinite, of the
        others as long as those are read, and 1 if any of them is left out.
    """

    order: Order
    items: int
    planned_bytes: int
    full_bytes: int
    blocks: int
    full_blocks: int
    bound: ErrorBound
    expected: float
    uncertainty: float
    omitted_mass: float

    def access(self) -> tuple[tuple[bytes | None, ...], ...]:
        """Return per tensor and expert a level for each block (`mergepipe.plan.access`); None: every block exactly."""
        order = self.order
        levels = full_row(order.tensors, EXACT, np.uint8)
        levels[order.items] = OMITTED
        np.maximum.at(levels, order.items[: self.items], order.levels[: self.items])  # the last one is the best one
        levels[order.copies] = levels[order.originals]
        return tuple(
            tuple(None if (column == EXACT).all() else column.tobytes() for column in part.T)
            for part in parts(order.tensors, levels)
        )

    def slot_bytes(self) -> tuple[Array, ...]:
        """Return per tensor what is read of each expert, int64 ``(experts,)``; equal blocks count for the first."""
        read = full_row(self.order.tensors, 0, np.int64)
        costs = np.diff(self.order.bytes)
        np.add.at(read, self.order.items[: self.items], costs[: self.items])
        return tuple(np.add.reduce(part, axis=0) for part in parts(self.order.tensors, read))

    def losses(self, most: int | None = None) -> tuple[TensorLoss, ...]:
        """Return what each tensor loses that loses anything, largest expected error first; the first so many."""
        order, left = self.order, slice(self.items, None)
        owners = spread_out(range(len(order.tensors)), order.tensors, np.int64)[order.items[left]]
        counts = len(order.tensors)

        def sums(values: Array) -> list[float]:
            found: list[float] = np.bincount(owners, weights=values, minlength=counts).tolist()
            return found

        omitted, steps, gains = sums(np.diff(order.bytes)[left]), sums(order.steps[left]), sums(order.gains[left])
        squares = sums(order.squares[left])
        tensors = sorted(np.unique(owners).tolist(), key=lambda tensor: (-gains[tensor], tensor))
        grown = 1.0 + margin(len(order.items))
        return tuple(
            TensorLoss(
                tensor=tensor,
                omitted_bytes=int(omitted[tensor]),
                bound=_tensor_bound(order.tensors[tensor], steps[tensor], squares[tensor], grown),
                expected=math.sqrt(gains[tensor]),
                omitted_mass=share(squares[tensor], _mass(order.tensors[tensor])),
            )
            for tensor in tensors[:most]
        )


def _tensor_bound(tensor: BudgetTensor, steps: float, squares: float, grown: float) -> float | None:
    if not math.isfinite(steps) or (tensor.influence.kind == "none" and squares > 0):
        return None
    return math.sqrt(steps) * grown


def root_error(value: float, variance: float) -> float:
    """Return the standard error of a root from the variance of its square; the root itself where it is all error."""
    if not variance or not math.isfinite(value):
        return 0.0
    error = math.sqrt(variance)
    return error / (2.0 * value) if value * value > error else math.sqrt(error)


def share(part: float, whole: float) -> float:
    """Return the root of the share that a sum of squares has in another; 1 where the first is infinite."""
    if part == 0:
        return 0.0
    return math.sqrt(min(part / whole, 1.0)) if math.isfinite(part) and whole > 0 else 1.0


def _mass(tensor: BudgetTensor) -> float:
    """Return the sum of the squares of the norms that are finite."""
    masses = (tensor.norms * tensor.norms).ravel()
    return float(np.add.reduce(masses[np.isfinite(masses)]))
