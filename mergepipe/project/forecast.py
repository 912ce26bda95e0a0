"""What the next build would do: reads, blocks and bytes of every output, level by level; nothing is read or written.

`plan` shows it, and a build asks for it to know before it begins how much room it needs, where there is little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.records import StagedTensor
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import tensor_digest
from mergepipe.graph.nodes import State, TensorNode
from mergepipe.graph.state import tensor_nodes
from mergepipe.plan.layout import Shard
from mergepipe.plan.sampling import whole_sources
from mergepipe.plan.values import OutputPlan, TensorPlan, first_users
from mergepipe.project.build import Prepared
from mergepipe.project.levels import recorded_content
from mergepipe.project.moves import Moves
from mergepipe.project.reads import GroupReads
from mergepipe.project.reads_cached import count_clean
from mergepipe.project.reads_codes import LostCodes, PackRoom
from mergepipe.project.stages import Plans
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.staging import StagedShard
    from mergepipe.engine.work import TensorWork

Named = tuple[str, str]
"""An output's name and a tensor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the next build does for one output.

    Attributes
    ----------
    unchanged
        Whether the output is what a build would make: then nothing of it is read or written.
    moves
        What is read, made and written.
    cache_bytes, certain_bytes
        Room that its new shards and progressive packs take in the cache, at most; and the shards that cannot but be
        made.
    code_bytes
        The same of the progressive packs that cannot but be made, at most.
    """

    unchanged: bool
    moves: Moves = field(default_factory=Moves)
    cache_bytes: int = 0
    certain_bytes: int = 0
    code_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildForecast:
    """What a build, or a run of it, does.

    Attributes
    ----------
    outputs
        By name. Where not all is known, what they read may be less together than the sum of their limits; what an
        output was to read that others need, too, one of these may read in its place.
    total
        What is read for all of them.
    """

    outputs: Mapping[str, Forecast]
    total: Moves


def forecast(
    plans: Plans, prepared: Mapping[str, Prepared], index: SourceIndex, catalog: Catalog, hold_limit: int
) -> BuildForecast:
    """Return what a build of these outputs would do.

    Parameters
    ----------
    prepared
        By output name; budgets are resolved as far as they can be.
    hold_limit
        Bytes that may be kept between passes over a tensor.
    """
    found: dict[str, Forecast] = {}
    total = Moves()
    runs: list[Mapping[str, Forecast]] = []
    lost = LostCodes(index)

    def run(members: Sequence[OutputPlan]) -> Mapping[str, Forecast]:
        lost.begin_run()
        return _RunForecast(members, index, catalog, plans.stages, hold_limit, total, lost).found()

    for level in plans.levels():
        members = [prepared[plan.output.name] for plan in level]
        found |= {member.name: _unchanged(member.plan) for member in members if is_settled(member)}
        pending = [member.plan for member in members if not is_settled(member)]
        for stage, is_certain in _lost_stages(pending, plans, prepared, index, catalog).items():
            if found[stage].unchanged:
                again = run([prepared[stage].plan])
                runs.append(again if is_certain else {stage: _at_most(again[stage])})
                found |= runs[-1]
        if pending:
            runs.append(run(pending))
            found |= runs[-1]
    _count_headers(runs, prepared, index, total)
    return BuildForecast(outputs={plan.output.name: found[plan.output.name] for plan in plans.plans}, total=total)


def _count_headers(
    runs: Iterable[Mapping[str, Forecast]], prepared: Mapping[str, Prepared], index: SourceIndex, total: Moves
) -> None:
    """Count the headers of progressive checkpoints, as the engine does for the first output that uses each.

    A build has read all of them before its first run: to plan, and to know what it does. Of those that were read just
    now to measure what a budget is planned from, it may need no more than some.
    """
    read = index.given.headers_read()
    for run in runs:
        for name, found in run.items():
            for source in [source for source in prepared[name].plan.sources if source in read]:
                count = read.pop(source)
                found.moves.add_index(source, count)
                total.add_index(source, count)
                found.moves.exact &= not index.given.is_counted(source)


def _lost_stages(
    pending: Sequence[OutputPlan],
    plans: Plans,
    prepared: Mapping[str, Prepared],
    index: SourceIndex,
    catalog: Catalog,
) -> dict[str, bool]:
    """Return the stages that these outputs read and whose packs are gone, each behind those that it is made from.

    They are built again, though they are what they should be: for certain, or if their reader turns out to need them.
    """
    lost: dict[str, bool] = {}
    for plan in pending:
        runs = _is_run(prepared[plan.output.name], plans, index)
        for stage, is_read in _read_stages(plan, plans, index, catalog).items():
            content = recorded_content(prepared[stage]) if is_settled(prepared[stage]) else None
            packs = [catalog.layout.packs / f"{pack}.safetensors" for pack in content.packs] if content else []
            if content is not None and not (content.blocks and all(pack.exists() for pack in packs)):
                again = _lost_stages([prepared[stage].plan], plans, prepared, index, catalog)
                for name, is_certain in (again | {stage: True}).items():
                    lost[name] = lost.get(name, False) or (runs and is_read and is_certain)
    return lost


def _is_run(prepared: Prepared, plans: Plans, index: SourceIndex) -> bool:
    """Return whether an output that is not settled cannot turn out to be what it should when its stages are there."""
    known = all(index.digest(stage) is not None for stage in plans.stages_of(prepared.plan))
    return known or prepared.known is None or prepared.forced


def _read_stages(plan: OutputPlan, plans: Plans, index: SourceIndex, catalog: Catalog) -> dict[str, bool]:
    """Return the stages that the tensors of an output read which are not clean, and of each whether that is certain."""
    stages = set(plans.stages_of(plan))
    found: dict[str, bool] = {}
    if not stages:
        return found
    for tensor, node in zip(plan.tensors, tensor_nodes(plan, index, catalog), strict=True):
        read = (ref.source for slot in tensor.slots if slot is not None for ref in slot.stored)
        for stage in read if node.state is not State.CACHED else ():
            if stage in stages:
                found[stage] = found.get(stage, False) or node.state is State.DIRTY
    return found


def _at_most(found: Forecast) -> Forecast:
    """Return the forecast of an output that may not be built: nothing of it is certain."""
    found.moves.exact = False
    return replace(found, certain_bytes=0, code_bytes=0)


def is_settled(prepared: Prepared) -> bool:
    """Return whether a build leaves an output alone, as far as can be known without hashing its files."""
    return prepared.unchanged or (prepared.only_touched and prepared.target.is_dir())


def _unchanged(plan: OutputPlan) -> Forecast:
    """Return the forecast of an output that is what it should be: all that is planned is cached."""
    from mergepipe.plan.budgeted import expert_bytes

    experts = expert_bytes(plan) if plan.outcome is None else plan.outcome.experts
    return Forecast(unchanged=True, moves=Moves(cached=dict(experts), reused=plan.blocks))


class _RunForecast:
    """The forecast of one run of the engine."""

    def __init__(
        self,
        plans: Sequence[OutputPlan],
        index: SourceIndex,
        catalog: Catalog,
        stages: Collection[str],
        hold_limit: int,
        total: Moves,
        lost: LostCodes,
    ) -> None:
        self._lost = lost
        self._total = total
        self._plans = plans
        self._index = index
        self._catalog = catalog
        self._stages = stages
        self._hold_limit = hold_limit
        self._room = PackRoom(index)
        self._moves = {plan.output.name: Moves() for plan in plans}
        self._works: dict[Named, TensorWork] = {}
        self._shards: dict[Named, StagedShard] = {}
        self._clean: dict[Named, TensorNode] = {}

    def found(self) -> dict[str, Forecast]:
        """Go through the run."""
        from mergepipe.engine.groups import GroupMaker  # numpy, which is not needed where nothing is to be done

        left = self._staged()
        maker = GroupMaker(self._index, self._catalog, self._shards, left)
        groups = maker.groups(self._pending())
        store = StatisticStore(self._catalog)
        for group in groups:
            for work in group.works:
                self._works[work.plan.output.name, work.name] = work
            GroupReads(
                group, self._index, store, self._moves, self._total, self._stages, self._hold_limit, self._lost
            ).count()
        self._count_hashing(maker.hashing(self._sources(), groups))
        return {plan.output.name: self._forecast(plan) for plan in self._plans}

    def _staged(self) -> dict[Named, StagedTensor]:
        """Return what an unfinished build left of each tensor."""
        from mergepipe.engine.staging import StagedShard, staged_name

        left: dict[Named, StagedTensor] = {}
        for plan in self._plans:
            output = plan.output.name
            for shard in plan.layout.shards:
                rows = self._catalog.staged(staged_name(output, shard))
                staged = StagedShard(self._catalog.layout.staging, output, shard, resumable=bool(rows))
                self._shards.update({(output, tensor.name): staged for tensor in shard.tensors})
                if staged.resumed:
                    left.update({(output, name): row for name, row in rows.items()})
        return left

    def _pending(self) -> list[tuple[OutputPlan, TensorPlan]]:
        """Return the tensors that are not clean; count those that are."""
        pending = []
        for plan in self._plans:
            for tensor, node in zip(plan.tensors, tensor_nodes(plan, self._index, self._catalog), strict=True):
                if node.state is State.CACHED:
                    self._clean[plan.output.name, tensor.name] = node
                    count_clean(plan, tensor, self._index, self._moves[plan.output.name])
                else:
                    pending.append((plan, tensor))
        return pending

    def _sources(self) -> list[str]:
        """Return the sources that are read whole, and are not known as soon as they are built.

        What samples are taken of before a budget is resolved counts as if it were read whole.
        """
        read = (plan.sources if plan.is_pending else whole_sources(plan) for plan in self._plans)
        sources = dict.fromkeys(source for some in read for source in some)
        return [source for source in sources if source not in self._stages]

    def _count_hashing(self, groups: Iterable[object]) -> None:
        """Count what is read only to index the sources, for the first output that uses each."""
        from mergepipe.engine.work import Group

        users = first_users(self._plans)
        for group in groups:
            assert isinstance(group, Group)
            for source in group.inputs.values():
                for moves in (self._moves[users[source.ref.source]], self._total):
                    moves.add_index(source.ref.source, source.grid.nbytes)

    # --- shards ---------------------------------------------------------------------------------------------------

    def _forecast(self, plan: OutputPlan) -> Forecast:
        moves, needed, certain = self._moves[plan.output.name], 0, 0
        for shard in plan.layout.shards:
            if self._is_there(plan, shard):
                continue
            room = shard.size - self._allocated(plan, shard)
            needed += max(0, room)
            certain += max(0, room) if self._is_made(plan, shard) else 0
            moved = self._moved(plan, shard)
            moves.moved_bytes += moved
            moves.written += moved
        codes = 0
        for tensor in plan.tensors:
            work = self._works.get((plan.output.name, tensor.name))
            if work is not None:
                coded, made = self._room.of(plan, tensor, is_new=not work.candidates)
                needed += coded
                codes += made
        back = sum(map(_taken, other_layouts(plan, self._catalog.layout)))
        return Forecast(
            unchanged=False,
            moves=moves,
            cache_bytes=max(0, needed - back),
            certain_bytes=max(0, certain - back),
            code_bytes=codes,
        )

    def _is_there(self, plan: OutputPlan, shard: Shard) -> bool:
        """Return whether a pack with the shard's content is there: all of its blocks are known to be held."""
        digests = []
        for tensor in shard.tensors:
            name = (plan.output.name, tensor.name)
            if name in self._clean:
                result = self._clean[name].result
                assert result is not None, "a clean tensor has a result"
                digests.append(result.digest)
            elif len(self._works[name].holdings) == self._works[name].recipe.grid.count:
                digests.append(tensor_digest(tensor.dtype, tensor.shape, bytes(self._works[name].digests)))
            else:
                return False
        return self._catalog.has_pack(shard.digest(digests).hex())

    def _is_made(self, plan: OutputPlan, shard: Shard) -> bool:
        """Return whether some tensor of a shard must be made anew, whatever its inputs turn out to be."""
        works = [self._works.get((plan.output.name, tensor.name)) for tensor in shard.tensors]
        return any(work is not None and not work.candidates and work.recipe.grid.count > 0 for work in works) or (
            self._moves[plan.output.name].exact and any(work is not None and work.changed for work in works)
        )

    def _allocated(self, plan: OutputPlan, shard: Shard) -> int:
        """Return the bytes on the disk that an unfinished build gave the shard already.

        What cannot be gone on with is removed right before the shard is begun, so that its room comes back.
        """
        return _taken(self._shards[plan.output.name, shard.tensors[0].name].path)

    def _moved(self, plan: OutputPlan, shard: Shard) -> int:
        """Return the bytes of a shard that are copied from packs."""
        count = 0
        for tensor in shard.tensors:
            work = self._works.get((plan.output.name, tensor.name))
            if work is None:
                count += tensor.nbytes
                continue
            extents = [work.recipe.grid.byte_range(b) for b, held in work.holdings.items() if held.result is not None]
            count += sum(stop - start for start, stop in extents)
        return count


def other_layouts(plan: OutputPlan, layout: CacheLayout) -> list[Path]:
    """Return the staged shards that killed builds left of layouts which an output no longer has.

    A build removes them, before it begins where there may be too little room.
    """
    from mergepipe.engine.staging import abandoned, staged_name

    own = {staged_name(plan.output.name, shard) for shard in plan.layout.shards}
    return [path for path in abandoned(layout.staging, plan.output.name) if path.stem not in own]


def _taken(path: Path) -> int:
    """Return the bytes on the disk that a file takes."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # a build that runs made a pack of it, or removed it
        return 0
