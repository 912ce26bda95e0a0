"""What a replay compared, as a value that prints as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.digest import DIGEST_SIZE, format_digest
from mergepipe.engine.meter import Meter
from mergepipe.lockfile.manifest_records import OUTPUT_KEY
from mergepipe.project.replay_plan import Remade
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """A replay whose result is equal.

    Attributes
    ----------
    name, operator, digest
        Of the output; the digest is that of the manifest and of the result.
    path
        Where the output was put, None where it was only compared.
    mergepipe
        The version that made the output first.
    budget
        As declared; ``full`` where all of the experts was read.
    sources
        By name the digest of each source that was read and compared, those of stages among them; of one that is not
        read whole its fingerprint, ``sample:b3:...``.
    stages
        By name the digest of each output that was made on the way.
    inputs, input_blocks
        Tensors of sources that were compared, and their blocks.
    tensors, blocks, shards
        Of the result; all are equal.
    side_files
        Names of the side files that are ``equal``, of those that are ``missing`` in the sources, and of those that the
        sources have and the output did not (``extra``): they are left out.
    generated
        Files that mergepipe writes itself and that it would write otherwise now, such as the model card.
    bytes
        What was read (``experts``, ``base``, ``index``) and what was ``written``.
    """

    name: str
    operator: str
    digest: str
    path: str | None
    mergepipe: str
    budget: str
    sources: Mapping[str, str]
    stages: Mapping[str, str]
    inputs: int
    input_blocks: int
    tensors: int
    blocks: int
    shards: int
    side_files: Mapping[str, tuple[str, ...]]
    generated: tuple[str, ...]
    bytes: Mapping[str, int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {"equal": True, **dataclasses.asdict(self)}


def replay_report(
    remade: Remade,
    out: Path | None,
    *,
    meters: Iterable[Meter],
    side_files: Sequence[str],
    generated: Sequence[str],
    seconds: float,
) -> ReplayReport:
    """Return the report of a replay; ``side_files`` are those that were made again."""
    manifest, output = remade.manifest, remade.manifest.output
    meters = list(meters)
    listed = [source for stage in manifest.stages for source in stage.sources]
    stated = [file.name for file in output.side_files]
    inputs = {
        (given.source, given.tensor or tensor.name): len(given.blocks)
        for plan in remade.plans.plans
        for tensor in remade.tensors[plan.output.name]
        for given in tensor.inputs
        if given.source not in remade.plans.stages
    }
    return ReplayReport(
        name=output.name,
        operator=output.operator,
        digest=format_digest(output.digest),
        path=None if out is None else str(out),
        mergepipe=manifest.mergepipe,
        budget=output.budget,
        sources={
            source.name: format_digest(source.digest)
            for source in (*listed, *manifest.sources)
            if OUTPUT_KEY not in source.location
        },
        stages={s.output.name: format_digest(s.output.digest) for s in manifest.stages if s.output.digest},
        inputs=len(inputs),
        input_blocks=sum(inputs.values()) // (DIGEST_SIZE // 2),
        tensors=len(manifest.tensors),
        blocks=sum(len(tensor.blocks) for tensor in manifest.tensors) // DIGEST_SIZE,
        shards=len(output.shards),
        side_files={
            "equal": tuple(name for name in stated if name in side_files),
            "missing": tuple(name for name in stated if name not in side_files),
            "extra": tuple(name for name in side_files if name not in stated),
        },
        generated=tuple(generated),
        bytes={
            "experts": sum(meter.expert_bytes for meter in meters),
            "base": sum(meter.base_bytes for meter in meters),
            "index": sum(meter.index_bytes for meter in meters),
            "written": sum(meter.written for meter in meters),
        },
        seconds=seconds,
    )
