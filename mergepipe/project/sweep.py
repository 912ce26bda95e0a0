"""Sweeping over budgets: what each would read of an output's experts, and how far its merge is from the full read.

Whatever budget the Mergefile gives an output, it is planned as one that has one, and surveyed once; each budget is then
a cut of the same reading order. Deviations are computed from the sources block by block: no output is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mergepipe.cache.packs import PackStore
from mergepipe.errors import MergefileError
from mergepipe.mergefile.schema import Budget, Output
from mergepipe.plan.budgeted import Reading, reading_of, with_selection
from mergepipe.plan.values import OutputPlan
from mergepipe.project import build as steps
from mergepipe.project import room
from mergepipe.project.gather import make_plans, open_sources, select_outputs
from mergepipe.project.session import Project
from mergepipe.project.sweep_budgets import as_budgets, budget_label
from mergepipe.project.sweep_map import reading_map
from mergepipe.project.sweep_points import BLOCKS, LEVELS, Update, sweep_point
from mergepipe.project.sweep_report import OwnBudget, SweepReport
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.deviation import Comparison
    from mergepipe.plan.budget import BudgetTensor
    from mergepipe.plan.selection import Selection
    from mergepipe.project.evaluate import Command

NOTHING = Budget(share=0.0)
"""Any budget that is no full read: a plan made with it has the base at hand for whatever is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A reading order, and the cuts of it that were asked for."""

    reading: Reading
    cuts: tuple[tuple[Budget, Selection], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surveyed:
    """The curves of one output by precision, and what was measured of all of their cuts."""

    curves: Mapping[str, _Curve]
    comparison: Comparison | None
    index_bytes: int


class SweptProject(Project):
    """A project in which one output is looked at with other budgets than its own."""

    def __init__(self, project: Project) -> None:
        # The same project, but for what a sweep replaces: opening it again would run custom operators' code again.
        self.__dict__.update(vars(project))

    def swept(
        self,
        name: str,
        budgets: Iterable[Budget | str],
        *,
        measure: bool,
        mapped: bool,
        command: Command | None,
        precision: str | None = None,
    ) -> SweepReport:
        """Return the sweep of an output; see `Project.sweep`."""
        (output,) = select_outputs(self.mergefile, [name])
        self._check_base(output)
        wanted = _by_precision(output, as_budgets(budgets), precision)
        report = self._report(output, self._survey(output, wanted, measure=measure), mapped=mapped)
        if command is None:
            return report
        from mergepipe.project.evaluate import evaluated

        by_label = {budget_label(budget): budget for some in wanted.values() for budget in some}
        labels = dict.fromkeys(point.budget for point in report.all_points)  # a full read is one for both
        found = evaluated(self, output, [by_label[label] for label in labels], command)
        points, levels = (
            tuple(replace(point, figures=found[point.budget]) for point in some)
            for some in (report.points, report.levels)
        )
        return replace(report, points=points, levels=levels)

    def _check_base(self, output: Output) -> None:
        """Refuse outputs that no budget can be given.

        Raises
        ------
        MergefileError
            If nothing stands for what would be left out.
        """
        for part in output.slices or (output,):
            operator = self._operators[part.operator or output.operator]
            if operator.ignores_base or (part.base or output.base) is None:
                whole = f"`{operator.signature.name}` reads its experts whole"
                why = whole if operator.ignores_base else "it has no base"
                raise MergefileError(
                    f"output `{output.name}` cannot be swept: {why}, and a budget leaves out what a base stands for",
                    hint="give it a `base`" if not operator.ignores_base else "sweep an output that merges onto a base",
                    output=output.name,
                )

    def _survey(self, output: Output, budgets: Mapping[str, Sequence[Budget]], *, measure: bool) -> _Surveyed:
        """Measure the deltas, if they were not, and cut the reading orders for each budget."""
        own = output.budget or NOTHING
        if measure and own.coarse:
            raise MergefileError(
                f"output `{output.name}` cannot be measured: an expert is a progressive checkpoint, and the full"
                " read is not to be had",
                hint="leave out `--measure`: the bounds are certified without",
                output=output.name,
            )
        # Levels, if they are asked for: what is measured for them is all that whole blocks need.
        planned = replace(output, budget=replace(NOTHING, stats=own.stats, precision=max(budgets), coarse=own.coarse))
        self.mergefile = replace(self.mergefile, outputs={**self.mergefile.outputs, output.name: planned})
        plans = make_plans(
            self.mergefile, [planned], self._operators, open_sources(self.mergefile, [planned]), self._geometry
        )
        plan = next(plan for plan in plans.plans if plan.output.name == output.name)
        with self._writing() as (catalog, _):
            index, packs = plans.index(catalog, self._geometry), PackStore(catalog, self._geometry)
            builder = self._builder(plans, catalog, packs, index)
            for other in plans.plans:
                if other is not plan:
                    builder.introduce(steps.prepare(other, plans, index, catalog))
            room.room_for_codes([plan], index, self._layout.root, plans.stages)
            surveyed = builder.survey([plan])[output.name]
            curves = {
                name: _curve(plan, name, surveyed.survey, some) for name, some in budgets.items()
            }
            comparison = None
            if measure:
                resolved = [
                    with_selection(curve.reading, selection) for curve in curves.values() for _, selection in curve.cuts
                ]

                def compare(some: Sequence[OutputPlan]) -> Comparison:
                    from mergepipe.engine.run import Engine, EngineOptions

                    options = EngineOptions(workers=self._workers, memory=self._memory)
                    return Engine(catalog, packs, index, self._reporter, options).compare(some)

                comparison = builder.over(compare, resolved)
        return _Surveyed(curves=curves, comparison=comparison, index_bytes=surveyed.meter.index_bytes)

    def _report(self, output: Output, surveyed: _Surveyed, *, mapped: bool) -> SweepReport:
        curves, comparison = surveyed.curves, surveyed.comparison
        reading = next(iter(curves.values())).reading
        plan, full = reading.plan, reading.order.cut(len(reading.order.items))
        update = Update.of(reading.order.update, comparison)
        deviations = iter(comparison.deviations if comparison else ())
        points = [
            tuple(
                sweep_point(curve.reading, budget, selection, update, next(deviations, None))
                for budget, selection in curve.cuts
            )
            for curve in curves.values()
        ]
        return SweepReport(
            output=output.name,
            operator=output.operator,
            base=output.base,
            experts=output.expert_sources,
            expert_bytes=plan.expert_bytes,
            full_bytes=full.planned_bytes + plan.adapter_bytes,
            full_blocks=full.full_blocks,
            index_bytes_read=surveyed.index_bytes,
            measured_bytes_read=comparison.bytes_read if comparison else 0,
            update=update.norm,
            own=_own(output, curves),
            points=points[0],
            levels=points[1] if len(points) > 1 else (),
            map=reading_map(reading, output.expert_sources, update) if mapped else None,
        )


def _by_precision(
    output: Output, budgets: Sequence[Budget], precision: str | None
) -> dict[str, tuple[Budget, ...]]:
    """Return the budgets of whole blocks, and of levels, as far as they are asked for.

    Raises
    ------
    MergefileError
        If levels are asked for of an output whose budget goes by samples.
    """
    own = output.budget or NOTHING
    sampled = own.stats == "sample"
    if own.coarse and precision == BLOCKS:
        raise MergefileError(
            f"output `{output.name}` cannot be swept in whole blocks: an expert is a progressive checkpoint, which has"
            " none",
            hint="leave out `--precision`, or sweep it with `--precision levels`",
            output=output.name,
        )
    if sampled and precision == LEVELS:
        raise MergefileError(
            f'output `{output.name}` cannot be swept in levels: its budget has `stats = "sample"`, and levels need'
            " every delta whole once",
            hint='sweep it with `--precision blocks`, or give its budget `stats = "full"`',
            output=output.name,
        )
    possible = (BLOCKS,) if sampled else (LEVELS,) if own.coarse else (BLOCKS, LEVELS)
    wanted = possible if precision is None else (precision,)
    found = {
        name: tuple(
            replace(budget, precision=name, coarse=own.coarse) for budget in budgets if budget.precision in (None, name)
        )
        for name in wanted
    }
    return {name: some for name, some in found.items() if some}


def _curve(plan: OutputPlan, precision: str, survey: Mapping[str, BudgetTensor], budgets: Sequence[Budget]) -> _Curve:
    """Return the reading order for a precision, and its cuts; whole blocks have no levels to be bought."""
    planned = plan.output.budget or NOTHING
    budget = replace(planned, precision=precision)
    if precision == BLOCKS:
        survey = {name: replace(tensor, prices=None) for name, tensor in survey.items()}
    reading = reading_of(replace(plan, output=replace(plan.output, budget=budget)), survey)
    return _Curve(reading=reading, cuts=tuple(_cuts(reading, budgets)))


def _cuts(reading: Reading, budgets: Sequence[Budget]) -> Iterable[tuple[Budget, Selection]]:
    """Return what each budget buys, those first that are smaller."""
    counted = [(reading.order.count(budget, reading.expert_bytes), budget) for budget in budgets]
    for count, budget in sorted(counted, key=lambda pair: (pair[0], _limit(pair[1], reading.expert_bytes))):
        yield budget, reading.order.cut(count)


def _limit(budget: Budget, expert_bytes: int) -> float:
    if budget.expert_reads is not None:
        return budget.expert_reads
    return math.inf if budget.share is None else budget.share * expert_bytes


def _own(output: Output, curves: Mapping[str, _Curve]) -> OwnBudget | None:
    """Return what the budget of the Mergefile comes to; None without one, and where its precision is not swept."""
    if output.budget is None or output.budget.is_full_read:
        return None
    precision = LEVELS if output.budget.uses_levels else BLOCKS
    if precision not in curves:
        return None
    reading = curves[precision].reading
    cut = reading.order.cut(reading.order.count(output.budget, reading.expert_bytes))
    return OwnBudget(
        budget=budget_label(output.budget),
        precision=precision,
        expert_bytes=cut.planned_bytes + reading.plan.adapter_bytes,
    )
