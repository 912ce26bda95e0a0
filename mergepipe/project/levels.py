"""Running the engine level by level: a finished stage becomes a source of the next level, read from its packs.

The content of a stage that is what it should be is known from its record, so that nothing of it need be there to find
out that what is made from it is unchanged. Only where a build must read it are its packs looked for, and where they are
gone or damaged the stage is built again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore, hash_shard
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.engine.results import FinishedOutput
from mergepipe.errors import InternalError, SourceChangedError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.graph.nodes import State
from mergepipe.graph.state import tensor_nodes
from mergepipe.lockfile.reader import parse_lock
from mergepipe.plan.stages import placed
from mergepipe.plan.values import OutputPlan
from mergepipe.project.build import Prepared, block_digests, prepare_again
from mergepipe.project.stages import Plans
from mergepipe.reporting import Reporter

RunEngine = Callable[[Sequence[OutputPlan]], Mapping[str, FinishedOutput]]
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

    Attributes
    ----------
    finished, seconds
        By output name what the engine made, and how long the run took that made it.
    """

    def __init__(
        self,
        plans: Plans,
        catalog: Catalog,
        packs: PackStore,
        index: SourceIndex,
        engine: RunEngine,
        reporter: Reporter,
    ) -> None:
        self.finished: dict[str, FinishedOutput] = {}
        self.seconds: dict[str, float] = {}
        self._plans = plans
        self._catalog = catalog
        self._packs = packs
        self._index = index
        self._engine = engine
        self._reporter = reporter
        self._contents: dict[str, StageContent] = {}
        self._at_hand: set[str] = set()
        self._failures: dict[str, int] = {}

    def introduce(self, prepared: Prepared) -> None:
        """Take an output whose content may be known already."""
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
            members = [
                prepare_again(prepared[plan.output.name], self._plans, self._index, self._catalog) for plan in level
            ]
            for member in members:
                found[member.name] = member
                if member.name not in self._contents:
                    self.introduce(member)
            pending = [member.plan for member in members if not member.unchanged]
            for plan in pending:
                for message in (*plan.notes, *plan.decisions):
                    self._reporter.note(message)
            if pending:
                self._run(pending)
        return {plan.output.name: found[plan.output.name] for plan in self._plans.plans}

    # --- running --------------------------------------------------------------------------------------------------

    def _run(self, plans: Sequence[OutputPlan]) -> None:
        """Run the engine; where the bytes of a stage turn out damaged or gone, build it again, and run once more."""
        started = time.monotonic()
        for plan in plans:
            for stage in self._needed(plan):
                self._fetch(stage)
        while True:
            try:
                made = self._engine(plans)
                break
            except SourceChangedError as error:
                self._mend(error)
        for name, output in made.items():
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
        content = self._contents[stage]
        if content.blocks and all(map(self._is_whole, content.packs, self._plans.stages[stage].checkpoint.files)):
            with self._catalog.transaction():
                for pack in content.packs:
                    self._packs.refresh(pack)  # it is in use: not the first to be pruned
            self._place(stage)
            self._at_hand.add(stage)
        else:
            self._run([self._plans.stages[stage].plan])

    def _is_whole(self, pack: str, file: CheckpointFile) -> bool:
        identity = FileIdentity.at(self._packs.path(pack))
        return identity is not None and identity.size == file.identity.size

    def _take(self, name: str, output: FinishedOutput) -> None:
        """Enter a finished output; from here on a stage is a source."""
        earlier = self.finished.get(name)
        if earlier is not None:
            output.meter.add(earlier.meter)
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
