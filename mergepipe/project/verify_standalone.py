"""Reading a progressive checkpoint whole: every chunk of its codes, every exact tensor, its other files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mergepipe.cache.given import GivenCodes
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.place import Place, read_small
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.digest import content_digest, digest_at
from mergepipe.errors import MergepipeError, SourceChangedError
from mergepipe.fsio.reading import pread_into
from mergepipe.progressive.pack import check_pack
from mergepipe.publish.sourcecard import SOURCE_CARD
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.kernel import Scratch
    from mergepipe.engine.pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A tensor to be checked, and by which name its file is called."""

    source: str
    checkpoint: Checkpoint
    info: TensorInfo
    codes: GivenCodes
    geometry: Geometry


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of tensors that a source has on the disk: of a progressive checkpoint, those of its codes."""
    value = checkpoint.standalone
    if value is None:
        return checkpoint.nbytes
    exact = sum(info.nbytes for info in checkpoint.stored.values() if not value.is_coded(info.name))
    return exact + sum(file.identity.size for file in checkpoint.files[len(value.exact) :])


def standalone_problems(
    name: str, checkpoint: Checkpoint, geometry: Geometry, pool: WorkerPool, reporter: Reporter
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a progressive checkpoint: a file of it, and a sentence.

    The card may have been edited by who published it, and is not looked at.
    """
    value = checkpoint.standalone
    assert value is not None, "it is a progressive checkpoint"
    codes = GivenCodes({name: checkpoint}, geometry)
    tasks = [
        _Task(source=name, checkpoint=checkpoint, info=info, codes=codes, geometry=geometry)
        for info in checkpoint.stored.values()
    ]
    for task, problem in zip(tasks, pool.run(_check, tasks), strict=True):
        file = checkpoint.files[task.info.file]
        reporter.advance(file.identity.size if value.is_coded(task.info.name) else task.info.nbytes)
        if problem is not None:
            yield file.name, problem
    place = Place(label=name, root=checkpoint.root, shown=str(checkpoint.root))
    for other, digest in value.files.items():
        if other == SOURCE_CARD:
            continue
        try:
            if content_digest(read_small(place, other)) != digest:
                yield other, f"file `{other}` is not what was packed"
        except MergepipeError as error:
            yield other, error.message


def _check(task: _Task, scratch: Scratch) -> str | None:
    """Return what is wrong with a tensor."""
    file = task.checkpoint.files[task.info.file]
    try:
        if task.codes.code(task.source, task.info) is not None:
            check_pack(file.path)
            return None
        return _check_exact(task, scratch)
    except (MergepipeError, SourceChangedError) as error:
        return error.message
    except OSError as error:
        return f"`{file.path}` cannot be read: {error.strerror or error}"


def _check_exact(task: _Task, scratch: Scratch) -> str | None:
    info, file = task.info, task.checkpoint.files[task.info.file]
    value = task.checkpoint.standalone
    assert value is not None, "it is a progressive checkpoint"
    layout, told = grid(info.dtype, info.shape, task.geometry), value.tensors[info.name]
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for block in range(layout.count):
            start, stop = layout.byte_range(block)
            buffer = scratch.buffer("standalone", stop - start)
            pread_into(fd, buffer, info.offset + start, path=file.path)
            if content_digest(buffer) != digest_at(told.blocks, block):
                return f"tensor `{info.name}` in `{file.path}`: block {block} is not what was packed"
    finally:
        os.close(fd)
    return None
