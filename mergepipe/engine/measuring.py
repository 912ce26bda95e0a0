"""Running the pass that measures contributions (`mergepipe.engine.contributions`) on the workers of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe.cache.reserve import reserve
from mergepipe.engine.contributions import ContributionPasses, TensorContributions, contributions_of
from mergepipe.engine.groups import GroupMaker
from mergepipe.engine.meter import Meter
from mergepipe.engine.run import Engine
from mergepipe.engine.work import Group
from mergepipe.plan.values import OutputPlan


class MeasuringEngine(Engine):
    """An engine that looks at a finished output beside its inputs."""

    def contributions(self, plan: OutputPlan) -> tuple[Mapping[str, TensorContributions], int]:
        """Return by tensor name what the experts contributed, and the bytes that were read to find it.

        Parameters
        ----------
        plan
            A `measured_plan`.

        Raises
        ------
        SourceChangedError
            If a source, or a file of the output, is not what it was when the output was built.
        """
        maker = GroupMaker(self._index, self._catalog, *self._shards([plan]))
        meters = {plan.output.name: Meter()}
        pool = self._pool([plan])
        try:
            with reserve(self._catalog.layout):
                self._load_blocks([plan])
                passes = [self._contribution_passes(group) for group in maker.groups((plan, t) for t in plan.tensors)]
                self._run("measuring", [plan], passes, meters, pool)
            self._record()
        finally:
            pool.close()
        return contributions_of(passes), meters[plan.output.name].index_bytes

    def _contribution_passes(self, group: Group) -> ContributionPasses:
        return ContributionPasses(group, self._index, self._store, self._hold, self._job_sizes(group))
