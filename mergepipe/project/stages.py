"""Outputs that are sources of others: what is known of them before they are built, and what earlier builds tell."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import CONFIG, Checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.place import Place
from mergepipe.mergefile.checks import references
from mergepipe.mergefile.schema import Mergefile, Output
from mergepipe.plan.stages import planned_checkpoint
from mergepipe.plan.values import OutputPlan
from mergepipe.publish.sidefiles import SideFile, adapt_config, has_tokenizer, side_files
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """An output that others refer to: its plan, the checkpoint that it will be, and its side files."""

    plan: OutputPlan
    checkpoint: Checkpoint
    side_files: tuple[SideFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Everything that is decided before the cache is asked.

    Attributes
    ----------
    checkpoints
        The opened sources, by name.
    stages
        The outputs that one of these refers to, by name.
    plans
        Of the outputs to build, each behind those that it is made from.
    """

    mergefile: Mergefile
    checkpoints: Mapping[str, Checkpoint]
    stages: Mapping[str, Stage]
    plans: tuple[OutputPlan, ...]

    def levels(self) -> tuple[tuple[OutputPlan, ...], ...]:
        """Return the plans by level: those made from sources alone, then those made from these too, and so on."""
        depths: dict[str, int] = {}
        for plan in self.plans:
            depths[plan.output.name] = 1 + max((depths[name] for name in plan.sources if name in depths), default=-1)
        numbers = range(1 + max(depths.values(), default=-1))
        return tuple(tuple(plan for plan in self.plans if depths[plan.output.name] == number) for number in numbers)

    def stages_of(self, plan: OutputPlan) -> tuple[str, ...]:
        """Return the outputs whose weights an output is made from."""
        return tuple(name for name in plan.sources if name in self.stages)

    def is_stage(self, name: str) -> bool:
        """Return whether any output of the Mergefile refers to this one, whether it is built now or not."""
        return any(name == other for output in self.mergefile.outputs.values() for other, _ in references(output))

    def side_files(self, plan: OutputPlan) -> tuple[SideFile, ...]:
        """Return an output's side files.

        Raises
        ------
        SourceError
            For those that cannot be read.
        """
        stage = self.stages.get(plan.output.name)
        return stage.side_files if stage else _side_files(plan, self.mergefile, self.checkpoints, self.stages)

    def index(self, catalog: Catalog, geometry: Geometry) -> SourceIndex:
        """Return the index of all sources; of the stages it knows nothing yet."""
        index = SourceIndex(catalog, self.checkpoints, geometry)
        for name, stage in self.stages.items():
            index.add_known(name, stage.checkpoint, {}, {})
        return index


def record_place(mergefile: Mergefile, output: Output) -> Path:
    """Return the absolute, normalised directory of an output; the catalog keeps its record under it.

    For one that is not published it is a path below the Mergefile, where no directory can be.
    """
    if output.publish:
        return Path(os.path.normpath(mergefile.output_path(output.name)))
    return mergefile.path / "outputs" / output.name


def make_stage(
    plan: OutputPlan, mergefile: Mergefile, checkpoints: Mapping[str, Checkpoint], stages: Mapping[str, Stage]
) -> Stage:
    """Return a planned output as a source of others; reads the files beside the weights of its own sources.

    Raises
    ------
    SourceError
        For those that cannot be read.
    """
    files = _side_files(plan, mergefile, checkpoints, stages)
    configs = [json.loads(file.data.decode("utf-8-sig")) for file in files if file.name == CONFIG]
    checkpoint = planned_checkpoint(plan, record_place(mergefile, plan.output), configs[0] if configs else {})
    return Stage(plan=plan, checkpoint=checkpoint, side_files=files)


def tokenizer_of(plan: OutputPlan) -> str:
    """Return the source that the tokenizer and its side files come from."""
    return plan.output.write.tokenizer or plan.definer


def _side_files(
    plan: OutputPlan, mergefile: Mergefile, checkpoints: Mapping[str, Checkpoint], stages: Mapping[str, Stage]
) -> tuple[SideFile, ...]:
    """Return side files from the folders of sources, and from what stages will have beside their weights."""
    tokenizer, definer = tokenizer_of(plan), plan.definer
    own = _own_tokenizer(tokenizer, checkpoints)
    folders = [_folder(source, mergefile, checkpoints, own=adapter) for source, adapter in (
        (tokenizer, own), (definer, False), (tokenizer, False)
    )]  # fmt: skip
    found = list(side_files(plan, *folders[:2], model=folders[2] if own else None))
    if tokenizer in stages:
        found += [file for file in stages[tokenizer].side_files if file.name != CONFIG]
    if definer in stages:
        configs = [file.data for file in stages[definer].side_files if file.name == CONFIG]
        found += [SideFile(name=CONFIG, data=adapt_config(data, plan)) for data in configs]
    return tuple(sorted(found, key=lambda file: file.name))


def _own_tokenizer(source: str, checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether a source is an adapter with a tokenizer of its own."""
    checkpoint = checkpoints.get(source)
    return checkpoint is not None and checkpoint.adapter is not None and has_tokenizer(checkpoint.root)


def _folder(
    source: str, mergefile: Mergefile, checkpoints: Mapping[str, Checkpoint], *, own: bool = False
) -> Place | None:
    """Return where a source's side files lie; None for a single file, which has none, and for a stage.

    Those of an adapter are of the checkpoint that it applies to, except where its ``own`` ones are asked for.
    """
    checkpoint = checkpoints.get(source)
    if checkpoint is not None and checkpoint.adapter is not None and not own:
        checkpoint = checkpoint.adapter.on
    if checkpoint is None or not checkpoint.is_folder:
        return None
    sealed = None if checkpoint.standalone is None else checkpoint.standalone.files
    return Place(label=checkpoint.label, root=checkpoint.root, shown=shown_root(mergefile, checkpoint), sealed=sealed)


def shown_root(mergefile: Mergefile, checkpoint: Checkpoint) -> str:
    """Return what messages call a source's folder: as it is declared, unless it was read from somewhere else."""
    declared, path = mergefile.sources[checkpoint.label].place, mergefile.source_path(checkpoint.label)
    is_there = path is not None and os.path.normpath(path) == os.path.normpath(checkpoint.root)
    return declared if declared is not None and is_there else str(checkpoint.root)
