"""Running the engine level by level: a finished stage becomes a source of the next level, read from its packs.

The content of a stage that is what it should be is known from its record, so that nothing of it need be there to find
out that what is made from it is unchanged. Only where a build must read it are its packs looked for, and where they are
gone or damaged the stage is built again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore, hash_shard
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import InternalError, SourceChangedError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.graph.nodes import State
from mergepipe.graph.state import tensor_nodes
from mergepipe.lockfile.reader import parse_lock
from mergepipe.plan.stages import placed
from mergepipe.plan.values import OutputPlan
from mergepipe.project.budgets import planned
from mergepipe.project.build import Prepared, block_digests, looked_at_again, prepare_again, prepare_resolved
from mergepipe.project.stages import Plans
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.survey import SurveyedOutput

T = TypeVar("T")

RunEngine = Callable[[Sequence[OutputPlan]], Mapping[str, FinishedOutput]]
TakeSurvey = Callable[[Sequence[OutputPlan]], Mapping[str, "SurveyedOutput"]]
_ATTEMPTS = 3  # how often one pack may turn out damaged before the machine is not to be trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContent:
    """The content of a stage: its packs, one for each shard, and by tensor name the digests.

    ``blocks`` is empty for an output that was no stage when it was built: its packs must be looked into then.
    """

    packs: tuple[str, ...]
    digests: Mapping[str, bytes]
    blocks: Mapping[str, bytes]


def recorded_content(prepared: Prepared) -> StageContent | None:
    """Return the content of an output from the record of the build that made it, None where that is another one."""
    if prepared.known is None or not prepared.content_known:
        return None
    record = prepared.known.record
    locked = parse_lock(record.lock, prepared.target).outputs[0]
    return StageContent(
        packs=tuple(shard.digest.hex() for shard in locked.shards),
        digests={tensor.name: tensor.digest for tensor in locked.tensors},
        blocks=record.blocks,
    )


def introduce(prepared: Prepared, plans: Plans, index: SourceIndex) -> StageContent | None:
    """Tell the index the content of a stage if an earlier build made it, and return it; its files are not looked at."""
    content = recorded_content(prepared) if prepared.name in plans.stages else None
    if content is not None:
        index.add_known(prepared.name, plans.stages[prepared.name].checkpoint, content.digests, content.blocks)
    return content


class LevelBuilder:
    """Brings the outputs of one build about.

    Parameters
    ----------
    engine
        Runs plans whose sources are all there.
    survey
        Measures what the budgets of such plans are planned from.

    Attributes
    ----------
    finished, seconds
        By output name what the engine made, and how long the run took that made it.
    measured
        By output name what was read to plan its budget.
    """

    def __init__(
        self,
        plans: Plans,
        catalog: Catalog,
        packs: PackStore,
        index: SourceIndex,
        engine: RunEngine,
        survey: TakeSurvey,
        reporter: Reporter,
    ) -> None:
        self.finished: dict[str, FinishedOutput] = {}
        self.seconds: dict[str, float] = {}
        self.measured: dict[str, Meter] = {}
        self._plans = plans
        self._catalog = catalog
        self._packs = packs
        self._index = index
        self._engine = engine
        self._survey = survey
        self._reporter = reporter
        self._contents: dict[str, StageContent] = {}
        self._at_hand: set[str] = set()
        self._failures: dict[str, int] = {}
        self._resolved: dict[str, OutputPlan] = {}

    def introduce(self, prepared: Prepared) -> None:
        """Take an output whose content may be known already."""
        self._resolved[prepared.name] = prepared.plan
        content = introduce(prepared, self._plans, self._index)
        if content is not None:
            self._contents[prepared.name] = content
            self._place(prepared.name)

    def build(self, prepared: Mapping[str, Prepared]) -> dict[str, Prepared]:
        """Run the engine for the outputs that are not what they should be; return what each turned out to need.

        Raises
        ------
        MergepipeError
            If anything stops the engine; what was finished is kept for the next build.
        """
        found: dict[str, Prepared] = {}
        for level in self._plans.levels():
            members = self._resolve_all(
                [prepare_again(prepared[plan.output.name], self._plans, self._index, self._catalog) for plan in level]
            )
            for member in members:
                found[member.name] = member
                self._resolved[member.name] = member.plan
                if member.name not in self._contents:
                    self.introduce(member)
            pending = [member.plan for member in members if not member.unchanged]
            for plan in pending:
                for message in (*plan.notes, *plan.decisions):
                    self._reporter.note(message)
            if pending:
                self._run(pending)
        return {plan.output.name: found[plan.output.name] for plan in self._plans.plans}

    # --- budgets --------------------------------------------------------------------------------------------------

    def _resolve_all(self, members: Sequence[Prepared]) -> list[Prepared]:
        """Measure what is not known of the outputs whose budgets are not resolved, and look at these again."""
        pending = [member.plan for member in members if member.plan.is_pending]
        if not pending:
            return list(members)
        plans = self.resolve(pending)
        return [
            prepare_resolved(member, plans[member.name], self._plans, self._index, self._catalog)
            if member.name in plans
            else member
            for member in members
        ]

    def measure(self, prepared: Mapping[str, Prepared]) -> dict[str, Prepared]:
        """Measure what is needed to resolve the budgets of outputs, and look at all again; nothing is built.

        Those that are made from stages which are not built stay unresolved. Others may turn out to be what they should:
        what was read is known to all that are made from it.
        """
        for member in prepared.values():
            self.introduce(member)
        ready = [p for p in prepared.values() if p.plan.is_pending and self.can_measure(p.plan)]
        if not ready:
            return dict(prepared)
        measured = {member.name: member for member in self._resolve_all(ready)}
        found = {}
        for name, member in prepared.items():  # what an output is made from stands before it
            found[name] = measured.get(name) or looked_at_again(member, self._plans, self._index, self._catalog)
            self.introduce(found[name])
        return found

    def can_measure(self, plan: OutputPlan) -> bool:
        """Return whether the bytes of all sources of an output are there, without building any of them."""
        return all(stage in self._at_hand or self._is_whole_stage(stage) for stage in self._plans.stages_of(plan))

    def resolve(self, plans: Sequence[OutputPlan]) -> dict[str, OutputPlan]:
        """Return the plans with their access sets, by output name; the weights are read where they were not measured.

        Raises
        ------
        MergepipeError
            If anything stops the engine; what was measured is kept for the next build.
        """
        found = self.survey(plans)
        return {
            plan.output.name: planned(plan, found[plan.output.name].survey, self._index, self._catalog)
            for plan in plans
        }

    def survey(self, plans: Sequence[OutputPlan]) -> Mapping[str, SurveyedOutput]:
        """Return what the budgets of these outputs are planned from, by output name; see `resolve`."""
        started = time.monotonic()
        found = self.over(self._survey, plans)
        for name, surveyed in found.items():
            self.measured.setdefault(name, Meter()).add(surveyed.meter)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        return found

    def over(self, run: Callable[[Sequence[OutputPlan]], T], plans: Sequence[OutputPlan]) -> T:
        """Run something that reads all that these outputs are made from, with the bytes of their stages at hand."""
        for plan in plans:
            for stage in self._plans.stages_of(plan):
                self._fetch(stage)
        return self._mended(run, plans)

    # --- running --------------------------------------------------------------------------------------------------

    def _plan_of(self, stage: str) -> OutputPlan:
        """Return a stage's plan, with its access set."""
        plan = self._resolved.get(stage, self._plans.stages[stage].plan)
        if plan.is_pending:
            plan = self._resolved[stage] = self.resolve([plan])[stage]
        return plan

    def _mended(self, run: Callable[[Sequence[OutputPlan]], T], plans: Sequence[OutputPlan]) -> T:
        """Run something over plans; where the bytes of a stage turn out damaged or gone, build it again, and go on."""
        while True:
            try:
                return run(plans)
            except SourceChangedError as error:
                self._mend(error)

    def _run(self, plans: Sequence[OutputPlan]) -> None:
        """Run the engine, with the bytes of all stages that it needs at hand."""
        started = time.monotonic()
        for plan in plans:
            for stage in self._needed(plan):
                self._fetch(stage)
        for name, output in self._mended(self._engine, plans).items():
            self._take(name, output)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def _needed(self, plan: OutputPlan) -> list[str]:
        """Return the stages whose bytes, or block digests, an output needs."""
        stages = [stage for stage in self._plans.stages_of(plan) if stage not in self._at_hand]
        if not stages:
            return []
        nodes = tensor_nodes(plan, self._index, self._catalog)
        read = {
            ref.source
            for tensor, node in zip(plan.tensors, nodes, strict=True)
            if node.state is State.DIRTY
            for slot in tensor.slots
            if slot is not None
            for ref in slot.stored
        }
        return [stage for stage in stages if stage in read or not self._contents[stage].blocks]

    def _fetch(self, stage: str) -> None:
        """Have the bytes of a stage at hand: in its packs, or else by building it again.

        The packs are not hashed: whoever reads a block compares its digest, and one that is not right comes to `_mend`.
        """
        if stage in self._at_hand:
            return
        content = self._contents.get(stage)
        if content is not None and self._is_whole_stage(stage):
            with self._catalog.transaction():
                for pack in content.packs:
                    self._packs.refresh(pack)  # it is in use: not the first to be pruned
            self._place(stage)
            self._at_hand.add(stage)
        else:
            self._run([self._plan_of(stage)])

    def _is_whole_stage(self, stage: str) -> bool:
        content, files = self._contents.get(stage), self._plans.stages[stage].checkpoint.files
        return content is not None and bool(content.blocks) and all(map(self._is_whole, content.packs, files))

    def _is_whole(self, pack: str, file: CheckpointFile) -> bool:
        identity = FileIdentity.at(self._packs.path(pack))
        return identity is not None and identity.size == file.identity.size

    def _take(self, name: str, output: FinishedOutput) -> None:
        """Enter a finished output; from here on a stage is a source."""
        earlier = self.finished.get(name)
        if earlier is not None:
            output.meter.add(earlier.meter)
        elif name in self.measured:
            output.meter.add(self.measured[name])
        self.finished[name] = output
        if name not in self._plans.stages:
            return
        known = self._contents.get(name)
        digests = {tensor.name: tensor.digest for tensor in output.tensors}
        if known is not None and known.digests != digests:
            raise InternalError(
                f"output `{name}` was built again with another result than before",
                hint="an operator of your own must give the same result for the same inputs; without one, please report"
                " this: deleting the cache directory gets around it",
                output=name,
            )
        packs = tuple(shard.pack for shard in output.shards)
        self._contents[name] = StageContent(packs=packs, digests=digests, blocks=block_digests(output))
        self._place(name)
        self._at_hand.add(name)

    def _place(self, stage: str) -> None:
        """Let the index read a stage from its packs, whether they are there or not."""
        content = self._contents[stage]
        checkpoint = placed(self._plans.stages[stage].checkpoint, [self._packs.path(pack) for pack in content.packs])
        self._index.add_known(stage, checkpoint, content.digests, content.blocks)

    def _mend(self, error: SourceChangedError) -> None:
        """Get the bytes of a stage again whose file is gone, was touched, or is damaged.

        Raises
        ------
        SourceChangedError
            The same, if it is about a source, or about a file that failed again and again.
        """
        path = Path(str(error.facts.get("path")))
        pack = path.stem
        stages = [
            name for name, content in self._contents.items() if pack in content.packs and path == self._packs.path(pack)
        ]
        self._failures[pack] = self._failures.get(pack, 0) + 1
        if not stages or self._failures[pack] > _ATTEMPTS:
            raise error
        if path.exists() and hash_shard(path, self._index.geometry) != bytes.fromhex(pack):
            self._packs.quarantine(pack)
            self._reporter.warn(
                f"the cached shard {pack[:16]}… is damaged: it was taken out of use, and output `{stages[0]}` is built"
                " again"
            )
        for stage in stages:
            self._at_hand.discard(stage)
            self._place(stage)  # the engine has forgotten what it knew of the file
            self._fetch(stage)
