"""From finished outputs to their manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergepipe._version import __version__
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.graph.inputs import slot_blocks, slot_digest, source_pin
from mergepipe.lockfile.assemble import ContentCounts, block_facts, expert_block_facts, locked_source
from mergepipe.lockfile.manifest import truncate_digests
from mergepipe.lockfile.manifest_records import (
    OUTPUT_KEY,
    Manifest,
    ManifestInput,
    ManifestParts,
    ManifestStage,
    ManifestTensor,
    ParameterSet,
    RunFacts,
)
from mergepipe.lockfile.records import LockedOutput, LockedSideFile, LockedSource
from mergepipe.mergefile.schema import Mergefile, Source
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan


def manifest(
    locked: LockedOutput,
    finished: FinishedOutput,
    index: SourceIndex,
    mergefile: Mergefile,
    files: tuple[str, ...],
    generated: Mapping[str, bytes],
    counts: Mapping[str, ContentCounts],
    parts: ManifestParts,
) -> Manifest:
    """Return the record that goes into the output directory.

    Parameters
    ----------
    generated
        By file name the content digest of what mergepipe writes there itself: index and card.
    files
        Every file that is put there, the manifest among them.
    parts
        What the manifest says of other outputs.
    """
    plan = finished.plan
    blocks = {tensor.name: tensor.block_digests for tensor in finished.tensors}
    return Manifest(
        mergepipe=__version__,
        geometry=plan.geometry.id,
        output=locked,
        sources=_manifest_sources(plan, index, mergefile),
        places=parts.places,
        operators=parts.operators,
        stages=parts.stages,
        tensors=tuple(
            _manifest_tensor(tensor, blocks[tensor.name], _inputs(tensor, index), plan) for tensor in plan.tensors
        ),
        shard_tensors=tuple(tuple(slot.name for slot in shard.shard.tensors) for shard in finished.shards),
        generated=tuple(LockedSideFile(name=name, digest=digest) for name, digest in sorted(generated.items())),
        files=files,
        decisions=plan.decisions,
        run=_run_facts(plan, finished.meter, counts),
    )


def stage_record(plan: OutputPlan, locked: LockedOutput, index: SourceIndex, mergefile: Mergefile) -> ManifestStage:
    """Return the record of an output that another one is made from, in the manifest of that one.

    Parameters
    ----------
    plan
        With its access set; the content of its sources must be known.
    """
    digests = {
        (ref.source, ref.info.name, ref.levels): slot_digest(ref, index)
        for tensor in plan.tensors
        for ref in _refs(tensor)
    }
    tensors = []
    for tensor in plan.tensors:
        inputs = []
        for ref in _refs(tensor):
            # What the catalog holds of a file may vanish meanwhile: the digest was asked for first, and says enough.
            digest, blocks = digests[ref.source, ref.info.name, ref.levels], slot_blocks(ref, index)
            assert digest is not None, "every input of a stage is known"
            inputs.append(_manifest_input(tensor.name, ref, digest, blocks or b""))
        tensors.append(_manifest_tensor(tensor, b"", tuple(inputs), plan))
    return ManifestStage(
        output=replace(locked, shards=(), side_files=()),
        sources=_manifest_sources(plan, index, mergefile),
        tensors=tuple(tensors),
    )


def _manifest_sources(plan: OutputPlan, index: SourceIndex, mergefile: Mergefile) -> tuple[LockedSource, ...]:
    return tuple(
        _manifest_source(name, checkpoint, source_pin(plan, name, index), mergefile)
        for name, checkpoint in plan.sources.items()
    )


def _manifest_source(name: str, checkpoint: Checkpoint, digest: bytes | None, mergefile: Mergefile) -> LockedSource:
    """Return the record of a source with its files; another output of the Mergefile is located by its name."""
    source = mergefile.sources.get(name)
    if source is not None:
        return locked_source(source, checkpoint, digest, files=True)
    record = locked_source(Source(name=name, path=""), checkpoint, digest, files=True)
    return replace(record, location={OUTPUT_KEY: name})


def _manifest_tensor(
    tensor: TensorPlan, blocks: bytes, inputs: tuple[ManifestInput, ...], plan: OutputPlan
) -> ManifestTensor:
    return ManifestTensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        decision=tensor.decision.value,
        parameters=ParameterSet(params=dict(tensor.params.values), experts=tensor.params.experts),
        inputs=inputs,
        blocks=blocks,
        levels=None if tensor.access is None else tensor.access.matrix(tensor.grid(plan.geometry).count),
    )


def _refs(tensor: TensorPlan) -> Iterator[InputRef]:
    return (ref for slot in tensor.slots if slot is not None for ref in slot.stored)


def _inputs(tensor: TensorPlan, index: SourceIndex) -> tuple[ManifestInput, ...]:
    found = []
    for ref in _refs(tensor):
        digest, blocks = slot_digest(ref, index), slot_blocks(ref, index)
        assert digest is not None, "every input of a finished tensor is known"
        assert blocks is not None, "every input of a finished tensor is known"
        found.append(_manifest_input(tensor.name, ref, digest, blocks))
    return tuple(found)


def _manifest_input(name: str, slot: InputRef, digest: bytes, blocks: bytes) -> ManifestInput:
    return ManifestInput(
        source=slot.source,
        digest=digest,
        blocks=truncate_digests(blocks),
        tensor=None if slot.info.name == name else slot.info.name,
    )


def _run_facts(plan: OutputPlan, meter: Meter, counts: Mapping[str, ContentCounts]) -> RunFacts:
    return RunFacts(
        expert_bytes_read=meter.expert_bytes,
        base_bytes_read=meter.base_bytes,
        index_bytes_read=meter.index_bytes,
        bytes_written=meter.written,
        blocks=block_facts(plan, meter),
        expert_blocks=expert_block_facts(counts, meter),
    )
