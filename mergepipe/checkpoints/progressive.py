"""Opening a progressive checkpoint: its record, and the headers of the files with tensors that lie there exactly."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mergepipe.checkpoints.checkpoint import CONFIG, Checkpoint, CheckpointFile, is_folder, open_file, renumbered
from mergepipe.checkpoints.place import GET_AGAIN, Place, opened, read_object
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.standalone import (
    FOLDER,
    RECORD,
    Standalone,
    coded_info,
    exact_problems,
    read_record,
)
from mergepipe.fsio.identity import FileIdentity


def open_standalone(path: Path, *, label: str, shown: str | None = None) -> Checkpoint:
    """Open a progressive checkpoint; parameters and errors as those of `open_checkpoint`."""
    place = Place(label=label, root=Path(path).absolute(), shown=str(path) if shown is None else shown)
    if not is_folder(place):
        raise place.error("is a file, not a progressive checkpoint", hint=f"give the folder that holds `{RECORD}`")
    if not os.path.lexists(place.root / RECORD):
        hint = "`mergepipe pack` makes one; the source of a whole checkpoint has a `path`"
        raise place.error(f"is no progressive checkpoint: it has no `{RECORD}`", hint=hint)
    value = read_record(place)
    has_config = CONFIG in value.files or os.path.lexists(place.root / CONFIG)
    config = read_object(replace(place, sealed=value.files), CONFIG) if has_config else {}
    files, tensors = _standalone_files(place, value)
    return Checkpoint(
        label=place.label,
        root=place.root,
        files=tuple(files),
        tensors={name: tensors[name] for name in value.tensors},
        config=config,
        notes=(),
        standalone=value,
    )


def _standalone_files(place: Place, value: Standalone) -> tuple[list[CheckpointFile], dict[str, TensorInfo]]:
    """Return the files with weights, those of exact tensors first, and all tensors by name."""
    files: list[CheckpointFile] = []
    found: list[TensorInfo] = []
    for number, name in enumerate(value.exact):
        exact = open_file(place, f"{FOLDER}/{name}")
        files.append(replace(exact.file, is_sealed=True))
        found += [renumbered(info, number) for info in exact.header.tensors]
    problems = list(exact_problems(value, found))
    if problems:
        raise place.error(f"{problems[0]}", name=FOLDER, hint=GET_AGAIN)
    tensors = {info.name: info for info in found}
    for tensor in value.tensors.values():
        if tensor.pack is None:
            continue
        name = f"{FOLDER}/{tensor.pack}"
        with opened(place, name) as (_, status):
            identity = FileIdentity.of(status)
        tensors[tensor.name] = coded_info(tensor, len(files))
        files.append(
            CheckpointFile(
                path=place.root / name,
                name=name,
                identity=identity,
                header_size=0,
                header_digest=tensor.seal,
                is_sealed=True,
            )
        )
    return files, tensors
