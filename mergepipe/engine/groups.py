"""Making groups: which source tensors are read together, for which outputs, and with which earlier results at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe.cache.catalog import Catalog, StagedTensor
from mergepipe.cache.sources import SourceIndex
from mergepipe.engine.staging import StagedShard
from mergepipe.engine.work import Group, Input, InputKey, TensorWork
from mergepipe.graph.blocks import Holding, TensorRecipe
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan


class GroupMaker:
    """Turns pending output tensors into groups.

    Parameters
    ----------
    shards
        By (output, tensor) the staged shard that the tensor belongs to.
    staged
        By (output, tensor) what an unfinished build left of it.
    """

    def __init__(
        self,
        index: SourceIndex,
        catalog: Catalog,
        shards: Mapping[tuple[str, str], StagedShard],
        staged: Mapping[tuple[str, str], StagedTensor],
    ) -> None:
        self._index = index
        self._catalog = catalog
        self._shards = shards
        self._staged = staged

    def work(self, plan: OutputPlan, tensor: TensorPlan) -> TensorWork:
        """Return the work for one output tensor."""
        name = (plan.output.name, tensor.name)
        earlier = self._catalog.candidates(plan.output.name, tensor.name, tensor.recipe, tensor.shape)
        holdings = [Holding.of_result(result) for result in earlier]
        if name in self._staged:
            holdings.insert(0, Holding.of_staged(self._staged[name]))
        return TensorWork(
            plan=plan,
            recipe=TensorRecipe.of(plan.operator, tensor, plan.geometry),
            shard=self._shards[name],
            inputs=tuple(self._key(slot) if slot else None for slot in tensor.slots),
            candidates=tuple(holdings),
        )

    def group(self, works: Sequence[TensorWork]) -> Group:
        """Return the group of these works with all of their inputs."""
        inputs: dict[InputKey, Input] = {}
        for work in works:
            for slot in work.recipe.tensor.slots:
                if slot is not None:
                    inputs.setdefault(self._key(slot), self._input(slot))
        return Group(works=tuple(works), inputs=inputs)

    def groups(self, pending: Iterable[tuple[OutputPlan, TensorPlan]]) -> list[Group]:
        """Return the groups of all pending tensors: one per name, in the order of first appearance."""
        members: dict[str, list[TensorWork]] = {}
        for plan, tensor in pending:
            members.setdefault(tensor.name, []).append(self.work(plan, tensor))
        return [self.group(works) for works in members.values()]

    def hashing(self, sources: Iterable[str], covered: Iterable[Group]) -> list[Group]:
        """Return groups that only hash: the cold tensors of these sources that no other group reads."""
        read = {key for group in covered for key in group.inputs}
        groups = []
        for source in sources:
            for info in self._index.cold(source):
                ref = InputRef(source=source, info=info)
                if self._key(ref) not in read:
                    read.add(self._key(ref))
                    groups.append(Group(works=(), inputs={self._key(ref): self._input(ref)}))
        return groups

    def _key(self, ref: InputRef) -> InputKey:
        return (self._index.file(ref.source, ref.info).path, ref.info.name)

    def _input(self, ref: InputRef) -> Input:
        return Input(
            key=self._key(ref),
            ref=ref,
            file=self._index.file(ref.source, ref.info),
            grid=ref.grid(self._index.geometry),
            known=self._index.blocks(ref.source, ref.info),
        )
