"""Measuring what budgets are planned from: passes of statistics without a merge behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.engine.codings import BeginCodings, begin_codings, finish_codings
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.limits import JobSizes
from mergepipe.engine.meter import Meter
from mergepipe.engine.passes import GroupPasses, Reducer
from mergepipe.engine.work import Group, InputKey, Job, JobDone, TensorWork
from mergepipe.graph.given import given_squares
from mergepipe.graph.prices import level_prices
from mergepipe.graph.survey import Survey, budget_tensor, is_surveyed, start_survey
from mergepipe.plan.budget import BudgetTensor
from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedOutput:
    """The survey of an output, and what the run read for it."""

    survey: Survey
    meter: Meter


class SurveyPasses(GroupPasses):
    """Drives one group to what its budgets are planned from; nothing is merged.

    Attributes
    ----------
    found
        By (output, tensor) what was measured; filled when the last pass was taken.
    """

    def __init__(
        self,
        group: Group,
        index: SourceIndex,
        store: StatisticStore,
        pool: HoldPool,
        sizes: JobSizes,
        codes: CodeStore | None = None,
    ) -> None:
        super().__init__(group, index, store, pool, sizes)
        self._codes = codes
        self.found: dict[tuple[str, str], BudgetTensor] = {}
        self.unreported = self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes to go through, for progress: every input once."""
        return self.group.input_bytes

    def take(self, done: JobDone) -> None:
        """Enter what a job found; the first jobs that cover the inputs are their progress."""
        super().take(done)
        job = done.job
        share = self.nbytes * job.stop // self.group.blocks - self.nbytes * job.start // self.group.blocks
        done.nbytes = min(self.unreported, share)
        self.unreported -= done.nbytes

    def merging(self) -> Sequence[Job]:
        """Return nothing: there is no such pass."""
        return ()

    def has_passes(self, work: TensorWork) -> bool:
        """Return whether there may be more than one round of statistics."""
        return work.recipe.reduces

    def begin(self) -> None:
        """Begin the survey of every work."""
        self.reducers = [Reducer(work, *start_survey(work.recipe)) for work in self.group.works]
        if self._codes is not None:
            self.codings = tuple(begin_codings(self.group, self._codes, self._index))

    def coded(self) -> None:
        """Put the packs into the cache."""
        assert self._codes is not None or not self.codings, "codes are made where they can be kept"
        finish_codings(self.codings, self._codes, self._index)
        self.codings = ()

    def done(self, work: TensorWork, value: Any) -> None:
        """Put a price to each block; all inputs are known by now."""
        blocks = [self._packed(key) for key in work.inputs]
        prices = None if self._codes is None else level_prices(work.plan, work.recipe, self._index, self._codes)
        self.found[work.plan.output.name, work.name] = budget_tensor(
            work.recipe, blocks, value, prices, given_squares(work.recipe.tensor, self._index)
        )

    def _packed(self, key: InputKey | None) -> bytes | None:
        if key is None:
            return None
        grid = (self.group.adapters.get(key) or self.group.inputs[key]).grid
        return b"".join(self.digest(key, block) or b"" for block in range(grid.count))


class CodePasses(GroupPasses):
    """Makes packs that a group's merge reads; nothing is merged.

    Parameters
    ----------
    begin
        Begins them: those that are gone (`remade_codings`), or those of which nothing is known (`first_codings`).
    """

    def __init__(
        self,
        group: Group,
        index: SourceIndex,
        store: StatisticStore,
        pool: HoldPool,
        sizes: JobSizes,
        codes: CodeStore,
        begin: BeginCodings,
    ) -> None:
        super().__init__(group, index, store, pool, sizes)
        self._codes = codes
        self._begin = begin

    @property
    def hold_bytes(self) -> int:
        """Nothing: there is one pass."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes to go through, for progress."""
        return self.group.input_bytes

    def begin(self) -> None:
        """Begin the packs that are not there."""
        self.codings = tuple(self._begin(self.group, self._codes, self._index))

    def coded(self) -> None:
        """Put the packs into the cache."""
        finish_codings(self.codings, self._codes, self._index)
        self.codings = ()

    def merging(self) -> Sequence[Job]:
        """Return nothing: there is no such pass."""
        return ()


def surveyed_tensors(plans: Sequence[OutputPlan]) -> list[tuple[OutputPlan, TensorPlan]]:
    """Return the tensors whose deltas must be measured whole, in plan order."""
    return [(plan, tensor) for plan in plans for tensor in plan.tensors if is_surveyed(tensor) and not tensor.sampled]


def surveyed_outputs(
    plans: Sequence[OutputPlan], found: Mapping[tuple[str, str], BudgetTensor], meters: Mapping[str, Meter]
) -> dict[str, SurveyedOutput]:
    """Return the survey of each output, in plan order."""
    return {
        plan.output.name: SurveyedOutput(
            survey={
                tensor.name: found[plan.output.name, tensor.name] for tensor in plan.tensors if is_surveyed(tensor)
            },
            meter=meters[plan.output.name],
        )
        for plan in plans
    }
