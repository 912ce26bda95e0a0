"""Writing the tensors of a progressive checkpoint that have no code: as they are, block by block."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.cache.sources import source_changed
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.standalone import StandaloneTensor
from mergepipe.digest import content_digest, digest_at
from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import pwrite_all
from mergepipe.fsio.reading import pread_into
from mergepipe.mergefile.schema import DEFAULT_SHARD_SIZE
from mergepipe.plan.layout import Shard, TensorSlot, lay_out


def write_exact(
    checkpoint: Checkpoint,
    infos: Sequence[TensorInfo],
    told: Mapping[str, StandaloneTensor],
    geometry: Geometry,
    folder: Path,
    shard_size: int = DEFAULT_SHARD_SIZE,
) -> tuple[str, ...]:
    """Write tensors of a checkpoint into files of a folder; return the names of the files.

    Parameters
    ----------
    told
        By tensor name, the digests that their blocks had when they were read first.
    shard_size
        Bytes of tensors in a file at most, larger tensors aside.

    Raises
    ------
    SourceChangedError
        If a block is another one than before.
    StorageError
        If the file system refuses.
    """
    if not infos:
        return ()
    slots = [TensorSlot(name=i.name, dtype=i.dtype, shape=i.shape, nbytes=i.nbytes) for i in infos]
    named = {info.name: info for info in infos}
    names = []
    for shard in lay_out(slots, shard_size).shards:
        name = shard.name.replace("model", "exact", 1)
        _write(checkpoint, shard, named, told, geometry, folder / name)
        names.append(name)
    return tuple(names)


def _write(
    checkpoint: Checkpoint,
    shard: Shard,
    infos: Mapping[str, TensorInfo],
    told: Mapping[str, StandaloneTensor],
    geometry: Geometry,
    path: Path,
) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        fail_storage(error, path, "create")
    try:
        pwrite_all(fd, memoryview(shard.header), 0)
        for slot in shard.tensors:
            _copy(checkpoint, infos[slot.name], told[slot.name], geometry, fd, shard.offsets[slot.name])
        os.fsync(fd)
        crash_point("pack.exact")
    except OSError as error:
        fail_storage(error, path, "write")
    finally:
        os.close(fd)


def _copy(
    checkpoint: Checkpoint, info: TensorInfo, told: StandaloneTensor, geometry: Geometry, target: int, at: int
) -> None:
    file, layout = checkpoint.files[info.file], grid(info.dtype, info.shape, geometry)
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        fail_storage(error, file.path, "read")
    try:
        for block in range(layout.count):
            start, stop = layout.byte_range(block)
            buffer = memoryview(bytearray(stop - start))
            pread_into(fd, buffer, info.offset + start, path=file.path)
            if content_digest(buffer) != digest_at(told.blocks, block):
                raise source_changed(checkpoint.label, file)
            pwrite_all(target, buffer, at + start)
    finally:
        os.close(fd)
