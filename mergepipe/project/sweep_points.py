"""One budget of a sweep: from the planner's numbers, and the engine's, to what is reported."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mergepipe.mergefile.schema import Budget
from mergepipe.plan.budgeted import Reading
from mergepipe.project.sweep_budgets import budget_label
from mergepipe.project.sweep_report import Distance, LostTensor, MeasuredDeviation, SweepPoint, SweptBound
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.deviation import Comparison, Deviation
    from mergepipe.plan.bounds import ErrorBound
    from mergepipe.plan.selection import Selection

LOSSES = 10
BLOCKS, LEVELS = "blocks", "levels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The norm of the full read less the base: measured, or else a lower bound of it, or None."""

    norm: float | None
    measured: bool

    @classmethod
    def of(cls, planned: float | None, comparison: Comparison | None) -> Update:
        """Return what is known of it; the measured one, if there is one, is the better."""
        if comparison is not None and comparison.deviations:
            return cls(norm=math.sqrt(comparison.deviations[0].update_squares), measured=True)
        return cls(norm=planned, measured=False)

    def share(self, length: float | None) -> float | None:
        """Return a length as a share of the update."""
        return _ratio(length, self.norm)


def sweep_point(
    reading: Reading, budget: Budget, selection: Selection, update: Update, deviation: Deviation | None = None
) -> SweepPoint:
    """Return what a budget came to."""
    return SweepPoint(
        budget=budget_label(budget),
        precision=budget.precision or BLOCKS,
        expert_bytes=selection.planned_bytes + reading.plan.adapter_bytes,
        blocks=selection.blocks,
        bound=_bound(selection.bound, update),
        expected=Distance(absolute=selection.expected, relative_to_update=update.share(selection.expected)),
        omitted_mass=selection.omitted_mass,
        losses=tuple(
            LostTensor(
                tensor=reading.tensors[loss.tensor],
                omitted_bytes=loss.omitted_bytes,
                bound=loss.bound,
                expected=loss.expected,
                omitted_mass=loss.omitted_mass,
            )
            for loss in selection.losses(LOSSES)
        ),
        deviation=None if deviation is None else _deviation(deviation, update),
    )


def _bound(bound: ErrorBound, update: Update) -> SweptBound:
    """Return the bound; where the plan does not know the update, or only estimates it, relative to the measured one."""
    relative = bound.relative_to_update
    if update.measured and (relative is None or bound.kind == "estimated"):
        relative = update.share(bound.absolute)
    return SweptBound(
        kind=bound.kind,
        absolute=bound.absolute,
        relative_to_update=relative,
        relative_to_base=bound.relative_to_base,
    )


def _deviation(deviation: Deviation, update: Update) -> MeasuredDeviation:
    length = math.sqrt(deviation.squares)
    return MeasuredDeviation(
        length=Distance(
            absolute=length,
            relative_to_update=update.share(length),
            relative_to_output=_ratio(length, math.sqrt(deviation.output_squares)),
        ),
        largest=deviation.largest,
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    """Return a quotient; no part of nothing is none of it, and any other is not known."""
    if part is None or whole is None:
        return None
    if whole == 0:
        return 0.0 if part == 0 else None
    return part / whole
