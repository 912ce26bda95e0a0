"""A sample of an output's blocks, made again from the sources and compared with the manifest.

What is made follows from the manifest alone, as in a replay; the blocks come out of the engine that builds.
"""

from __future__ import annotations

import heapq
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.packs import PackStore
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.digest import DIGEST_SIZE, digest_at, record_digest
from mergepipe.errors import SourceChangedError
from mergepipe.graph.inputs import slot_digest
from mergepipe.lockfile.manifest_records import Manifest, ManifestTensor
from mergepipe.plan.values import InputRef, OutputPlan
from mergepipe.project import build as steps
from mergepipe.project.levels import LevelBuilder
from mergepipe.project.replay_plan import Places, Remade, remake
from mergepipe.project.verify_report import Problem, SampleReport
from mergepipe.project.verify_shards import block_facts, block_words
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.recompute import MadeBlock, RecomputingEngine
    from mergepipe.engine.results import FinishedOutput
    from mergepipe.engine.survey import SurveyedOutput

_HINT = "the same recipe and sources must give the same bytes: report this, unless the manifest was tampered with"
_SEED_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How a sample is made.

    Attributes
    ----------
    percent
        The share of the blocks, more than 0 and at most 100; at least one block is made.
    seed
        Chooses the blocks; None takes one that follows from the output's digest.
    workers, memory, geometry
        As of a project.
    """

    percent: float
    seed: int | None
    workers: int
    memory: int | None
    geometry: Geometry


def rebuild_sample(
    manifest: Manifest,
    file: Path,
    where: str,
    places: Places,
    sample: Sample,
    cache: AbstractContextManager[Catalog],
    reporter: Reporter,
) -> tuple[SampleReport | None, list[Problem]]:
    """Make a sample of an output's blocks again.

    Parameters
    ----------
    file, where
        The manifest's path, absolute, and what messages call it.
    places
        Where the sources are.
    cache
        What is known of the sources is taken from there, and recorded there.

    Returns
    -------
    tuple
        What was made, None where nothing could be compared, and what is wrong.

    Raises
    ------
    MergepipeError
        For everything that keeps the same result from being expected, such as a source that is not found.
    """
    remade = remake(manifest, file, places, geometry=sample.geometry)
    seed = int.from_bytes(manifest.output.digest[:_SEED_BYTES], "big") if sample.seed is None else sample.seed
    wanted = choose_blocks(manifest.tensors, sample.percent, seed)
    with cache as catalog:
        try:
            made, problems = _Rebuild(remade, catalog, sample, reporter).run(wanted)
        except SourceChangedError as error:
            return None, [_changed(error)]
    report = SampleReport(
        percent=sample.percent,
        seed=seed,
        blocks=len(made),
        total=sum(len(tensor.blocks) // DIGEST_SIZE for tensor in manifest.tensors),
        bytes=sum(block.nbytes for block in made),
    )
    return report, [*problems, *_differences(remade.plan, manifest, where, made)]


def choose_blocks(tensors: Sequence[ManifestTensor], percent: float, seed: int) -> dict[str, list[int]]:
    """Return by tensor the blocks of a sample, in order: the same ones everywhere, and a larger sample has them too."""
    counts = {tensor.name: len(tensor.blocks) // DIGEST_SIZE for tensor in tensors}
    total = sum(counts.values())
    size = min(total, max(1, math.ceil(total * percent / 100)))
    ranked = (
        (record_digest("sample", seed, name, block), name, block)
        for name, count in counts.items()
        for block in range(count)
    )
    chosen: dict[str, list[int]] = {}
    for _, name, block in heapq.nsmallest(size, ranked):
        chosen.setdefault(name, []).append(block)
    return {name: sorted(chosen[name]) for name in counts if name in chosen}


@contextmanager
def temporary_cache(geometry: Geometry) -> Iterator[Catalog]:
    """Give a cache that is removed again, for what has no project."""
    with tempfile.TemporaryDirectory(prefix="mergepipe-verify-") as folder:
        layout = CacheLayout(Path(folder))
        layout.create()
        catalog = Catalog(layout, geometry.block_elements, create=True)
        try:
            yield catalog
        finally:
            catalog.close()


def _changed(error: SourceChangedError) -> Problem:
    source = error.facts.get("source")
    return Problem(
        kind="source",
        where=f"source `{source}`",
        what=f"`{error.facts.get('path')}` is not what the cache knows of it",
        hint="`mergepipe verify --full` tells where it differs",
        facts={"source": source},
    )


class _Rebuild:
    """Blocks of one output being made again, beside a catalog."""

    def __init__(self, remade: Remade, catalog: Catalog, sample: Sample, reporter: Reporter) -> None:
        self._remade = remade
        self._catalog = catalog
        self._sample = sample
        self._reporter = reporter
        self._packs = PackStore(catalog, sample.geometry)
        self._index = remade.plans.index(catalog, sample.geometry)

    def run(self, wanted: Mapping[str, Sequence[int]]) -> tuple[list[MadeBlock], list[Problem]]:
        """Make these blocks, but those of tensors whose inputs are not what they were."""
        plans, plan = self._remade.plans, self._remade.plan

        def run(some: Sequence[OutputPlan]) -> Mapping[str, FinishedOutput]:
            return self._engine().run(some)

        builder = LevelBuilder(plans, self._catalog, self._packs, self._index, run, _no_survey, self._reporter)
        for other in plans.plans:
            builder.introduce(steps.prepare(other, plans, self._index, self._catalog))

        def rebuild(_: Sequence[OutputPlan]) -> tuple[list[MadeBlock], list[Problem]]:
            engine = self._engine()
            engine.learn(plan, list(wanted))
            changed = {name: list(_other_inputs(plan, name, self._remade.manifest, self._index)) for name in wanted}
            alike = {name: blocks for name, blocks in wanted.items() if not changed[name]}
            return list(engine.recompute(plan, alike)), [problem for found in changed.values() for problem in found]

        return builder.over(rebuild, [plan])

    def _engine(self) -> RecomputingEngine:
        from mergepipe.engine.recompute import RecomputingEngine  # imported only to merge
        from mergepipe.engine.run import EngineOptions

        options = EngineOptions(workers=self._sample.workers, memory=self._sample.memory)
        return RecomputingEngine(self._catalog, self._packs, self._index, self._reporter, options)


def _no_survey(plans: Sequence[OutputPlan]) -> Mapping[str, SurveyedOutput]:
    raise AssertionError("the access sets are those of the manifest")


def _other_inputs(plan: OutputPlan, name: str, manifest: Manifest, index: SourceIndex) -> Iterator[Problem]:
    """Yield the inputs of a tensor that are not what it was made from: to make it again would prove nothing."""
    tensor = next(tensor for tensor in plan.tensors if tensor.name == name)
    given = next(tensor for tensor in manifest.tensors if tensor.name == name)
    recorded = {(one.source, one.tensor or name): one.digest for one in given.inputs}
    refs: list[InputRef] = [ref for slot in tensor.slots if slot is not None for ref in slot.stored]
    for ref in refs:
        if slot_digest(ref, index) != recorded.get((ref.source, ref.info.name)):
            what = f"tensor `{ref.info.name}` is not what output `{plan.output.name}` was made from"
            hint = f"restore it, or run `mergepipe build {plan.output.name}`"
            facts = {"source": ref.source, "tensor": ref.info.name}
            yield Problem(kind="source", where=f"source `{ref.source}`", what=what, hint=hint, facts=facts)


def _differences(plan: OutputPlan, manifest: Manifest, where: str, made: Sequence[MadeBlock]) -> Iterator[Problem]:
    """Yield the blocks that came out otherwise than the manifest says."""
    blocks: Mapping[str, bytes] = {tensor.name: tensor.blocks for tensor in manifest.tensors}
    grids = {tensor.name: tensor.grid(plan.geometry) for tensor in plan.tensors}
    for found in made:
        if found.digest != digest_at(blocks[found.tensor], found.block):
            span = found.block, found.block + 1
            words = block_words(grids[found.tensor], *span, "differ")
            what = f"made again from the sources, tensor `{found.tensor}`: {words}"
            facts = {"tensor": found.tensor, **block_facts(grids[found.tensor], *span)}
            yield Problem(kind="rebuild", where=where, what=what, hint=_HINT, facts=facts)
