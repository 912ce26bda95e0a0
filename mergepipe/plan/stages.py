"""An output as a source of another one: the checkpoint that it will be follows from its plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.checkpoint import Checkpoint, CheckpointFile
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.digest import content_digest
from mergepipe.fsio.identity import FileIdentity
from mergepipe.plan.values import OutputPlan


def planned_checkpoint(plan: OutputPlan, root: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that an output will be.

    Parameters
    ----------
    root
        Stands for its folder. Its files are named below it and need not exist: `placed` says where they really are.
    config
        The content of its ``config.json``, empty if it has none.
    """
    shards = plan.layout.shards
    where = {tensor.name: number for number, shard in enumerate(shards) for tensor in shard.tensors}
    return Checkpoint(
        label=plan.output.name,
        root=root,
        files=tuple(
            CheckpointFile(
                path=root / shard.name,
                name=shard.name,
                identity=FileIdentity(shard.size, 0, 0, 0),
                header_size=len(shard.header),
                header_digest=content_digest(shard.header),
            )
            for shard in shards
        ),
        tensors={
            tensor.name: TensorInfo(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                file=where[tensor.name],
                offset=shards[where[tensor.name]].offsets[tensor.name],
                nbytes=tensor.nbytes,
            )
            for tensor in plan.tensors
        },
        config=config,
        notes=(),
        is_planned=True,
    )


def placed(checkpoint: Checkpoint, paths: Sequence[Path]) -> Checkpoint:
    """Return a planned checkpoint with its files at these paths, one for each, as they are there now."""
    files = []
    for file, path in zip(checkpoint.files, paths, strict=True):
        files.append(replace(file, path=path, identity=FileIdentity.at(path) or file.identity))
    return replace(checkpoint, files=tuple(files))
