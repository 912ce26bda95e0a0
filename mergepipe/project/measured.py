"""Looking at an output as it is: what it would be made from now, what a build made, and what experts gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.packs import PackStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.errors import PublishError, SourceChangedError
from mergepipe.fsio.reading import read_regular
from mergepipe.graph.state import tensor_nodes
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import LockedOutput
from mergepipe.plan.stages import placed, planned_checkpoint
from mergepipe.plan.values import OutputPlan
from mergepipe.project import build as steps
from mergepipe.project.gather import select_outputs
from mergepipe.project.levels import introduce
from mergepipe.project.session import Project
from mergepipe.project.stages import Plans
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.contributions import TensorContributions

LABEL = "\0output"
"""What the index knows the finished output by: no source has such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One output beside the catalog.

    Attributes
    ----------
    prepared
        Its plan, resolved as far as the catalog knows, and what is known of it.
    stages
        The same of all outputs that were looked at, by name.
    """

    prepared: steps.Prepared
    stages: Mapping[str, steps.Prepared]
    plans: Plans
    index: SourceIndex
    catalog: Catalog

    @property
    def plan(self) -> OutputPlan:
        """The output's plan."""
        return self.prepared.plan

    @property
    def is_current(self) -> bool:
        """Whether the output's tensors are what a build would make now."""
        return self.prepared.known is not None and (not self.prepared.reasons or self.prepared.content_known)

    def locked(self) -> LockedOutput | None:
        """Return the record of the output that an earlier build made."""
        return locked_of(self.prepared)


def locked_of(prepared: steps.Prepared) -> LockedOutput | None:
    """Return the record of an output that an earlier build made."""
    known = prepared.known
    return None if known is None else parse_lock(known.record.lock, prepared.target).outputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What the experts contributed to an output's tensors.

    Attributes
    ----------
    tensors
        By name; those that are copied, and those that nothing was asked of, are not there. None if nothing is known.
    why
        Why it is not known, in words.
    bytes_read
        What was read just now to find it.
    """

    tensors: Mapping[str, TensorContributions] | None
    why: str | None = None
    bytes_read: int = 0


class MeasuredProject(Project):
    """A project whose outputs are looked at; nothing is built."""

    def __init__(self, project: Project) -> None:
        # The same project: opening it again would run custom operators' code again.
        self.__dict__.update(vars(project))

    def look(self, names: Sequence[str], catalog: Catalog) -> dict[str, Looked]:
        """Return how outputs stand, by name; reads headers, side files and the catalog.

        Raises
        ------
        MergepipeError
            For everything that a build would refuse before it reads weights.
        """
        plans = self._plans(select_outputs(self.mergefile, names))
        index = plans.index(catalog, self._geometry)
        prepared: dict[str, steps.Prepared] = {}
        for plan in plans.plans:  # what an output is made from stands before it
            found = steps.prepare(plan, plans, index, catalog)
            introduce(found, plans, index)
            prepared[found.name] = found
        return {
            name: Looked(prepared=prepared[name], stages=prepared, plans=plans, index=index, catalog=catalog)
            for name in names
        }

    def known(self, looked: Looked, tensors: Sequence[str] | None = None) -> Measurement | None:
        """Return what the catalog knows of the contributions, or why there are none; None: they must be measured."""
        plan, why = self._measurable(looked, tensors)
        if plan is None:
            return Measurement(tensors=None, why=why)
        from mergepipe.engine.contributions import known_contributions

        found = known_contributions(plan, looked.index, StatisticStore(looked.catalog))
        return None if found is None else Measurement(tensors=found)

    def measure(self, name: str, tensors: Sequence[str] | None = None) -> Measurement:
        """Return the contributions to an output's tensors, of some or of all; reads them where they are not known.

        Raises
        ------
        PublishError
            If the output is not what was built.
        SourceChangedError
            If a source is not what it was built from.
        """
        with self._writing() as (catalog, _):
            looked = self.look([name], catalog)[name]
            known = self.known(looked, tensors)
            if known is not None:
                return known
            plan, _ = self._measurable(looked, tensors)
            assert plan is not None, "what cannot be measured is known not to be"
            from mergepipe.engine.measuring import MeasuringEngine
            from mergepipe.engine.run import EngineOptions

            options = EngineOptions(workers=self._workers, memory=self._memory)
            packs = PackStore(catalog, self._geometry)
            engine = MeasuringEngine(catalog, packs, looked.index, self._reporter, options)
            try:
                found, count = engine.contributions(plan)
            except SourceChangedError as error:
                raise self._damaged(looked, error) from error
        return Measurement(tensors=found, bytes_read=count)

    def _measurable(self, looked: Looked, tensors: Sequence[str] | None) -> tuple[OutputPlan | None, str | None]:
        """Return the plan of what is measured, with all files known to the index; or why nothing can be."""
        if looked.prepared.known is None:
            return None, "it is not built yet"
        if not looked.is_current:
            return None, "it is not what a build would make now"
        from mergepipe.engine.contributions import is_readable, measured_plan

        for stage in looked.plans.stages_of(looked.plan):
            if not self._place(stage, stage, looked):
                return None, f"the files of output `{stage}` are gone"
        checkpoint = self._place(looked.plan.output.name, LABEL, looked)
        if checkpoint is None:
            return None, "its files are gone"
        plan = measured_plan(looked.plan, checkpoint)
        if tensors is not None:
            plan = _with_tensors(plan, frozenset(tensors))
        if not is_readable(looked.plan, plan, looked.index):
            coded = any(ref is not None and ref.coded_only for tensor in plan.tensors for ref in tensor.experts)
            samples = "its budget goes by samples, and its experts were not read whole"
            return None, "an expert is a progressive checkpoint: its deltas are not here" if coded else samples
        return plan, None

    def _place(self, name: str, label: str, looked: Looked) -> Checkpoint | None:
        """Let the index know a finished output under a label, by the files in its directory or its packs.

        Returns
        -------
        Checkpoint or None
            None if its files are nowhere.
        """
        prepared = looked.stages[name]
        locked = locked_of(prepared)
        paths = None if locked is None else self._files(prepared, locked, looked.catalog)
        if locked is None or paths is None:
            return None
        planned = planned_checkpoint(prepared.plan, prepared.target, {})
        checkpoint = _labelled(placed(planned, paths), label)
        results = {node.tensor: node.result for node in tensor_nodes(prepared.plan, looked.index, looked.catalog)}
        blocks = {**(prepared.known.record.blocks if prepared.known else {})}
        digests = {tensor.name: tensor.digest for tensor in locked.tensors}
        for tensor, result in results.items():
            if result is not None and result.digest == digests.get(tensor):
                blocks[tensor] = result.block_digests
        if len(blocks) < len(digests) and prepared.plan.output.publish:
            blocks = {**_manifest_blocks(prepared.target), **blocks}
        looked.index.add_known(label, checkpoint, digests, {k: v for k, v in blocks.items() if k in digests})
        return checkpoint

    def _files(self, prepared: steps.Prepared, locked: LockedOutput, catalog: Catalog) -> list[Path] | None:
        """Return the files of an output, those that were published before the packs; None if any is gone."""
        packs = PackStore(catalog, self._geometry)
        published = [prepared.target / shard.name for shard in locked.shards]
        cached = [packs.path(shard.digest.hex()) for shard in locked.shards]
        for paths in (published if prepared.plan.output.publish else [], cached):
            if paths and all(path.is_file() for path in paths):
                return paths
        return None

    def _damaged(self, looked: Looked, error: SourceChangedError) -> PublishError | SourceChangedError:
        """Return what to say of a file that is not what it should be: one of the output is no source."""
        if error.facts.get("source") != LABEL:
            return error
        name, path = looked.plan.output.name, error.facts.get("path")
        return PublishError(
            f"`{path}` of output `{name}` is not what was built",
            hint=f"build it again: `mergepipe build {name}`",
            output=name,
            path=path,
        )


def _with_tensors(plan: OutputPlan, names: frozenset[str]) -> OutputPlan:
    return replace(plan, tensors=tuple(tensor for tensor in plan.tensors if tensor.name in names))


def _labelled(checkpoint: Checkpoint, label: str) -> Checkpoint:
    return replace(checkpoint, label=label)


def _manifest_blocks(directory: Path) -> dict[str, bytes]:
    """Return by tensor the block digests that a published output's manifest states; nothing if it cannot be read."""
    from mergepipe.errors import LockError
    from mergepipe.lockfile.manifest import MANIFEST_NAME, parse_manifest

    path = directory / MANIFEST_NAME
    try:
        manifest = parse_manifest(read_regular(path), path)
    except (OSError, LockError):
        return {}
    return {tensor.name: tensor.blocks for tensor in manifest.tensors}
