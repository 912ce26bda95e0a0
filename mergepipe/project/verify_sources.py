"""Sources against the lock: all their bytes, whatever the catalog takes for granted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import BlockGrid, Geometry, grid
from mergepipe.checkpoints.place import GET_AGAIN
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.samples import sample_runs
from mergepipe.digest import (
    DIGEST_SIZE,
    content_digest,
    format_digest,
    is_sampled_pin,
    pinned_fingerprint,
    sampled_pin,
    sampled_tensor_digest,
    source_digest,
    tensor_digest,
)
from mergepipe.errors import SourceChangedError
from mergepipe.fsio.reading import pread_into
from mergepipe.lockfile.manifest_records import INPUT_DIGEST_SIZE, Manifest, ManifestInput
from mergepipe.project.verify_report import Problem, VerifiedSource
from mergepipe.project.verify_shards import block_facts, block_words
from mergepipe.project.verify_standalone import standalone_problems, stored_bytes
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.kernel import Scratch
    from mergepipe.engine.pool import WorkerPool

_RUN_BYTES = 4 << 20  # read at once by a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedSource:
    """A source that was read whole.

    Attributes
    ----------
    digest, fingerprint
        What a lock may pin it by: the digest of all content, and that of samples of its blocks.
    blocks, samples
        By the name of each stored tensor, packed, the digests of its blocks and of their samples.
    nbytes
        Bytes that were read.
    """

    digest: bytes
    fingerprint: bytes
    blocks: Mapping[str, bytes]
    samples: Mapping[str, bytes]
    nbytes: int

    def has_pin(self, pin: bytes) -> bool:
        """Return whether the source is what a lock says, by whichever of the two it pins it."""
        return self.fingerprint == pinned_fingerprint(pin) if is_sampled_pin(pin) else self.digest == pin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Adjacent blocks of one tensor."""

    checkpoint: Checkpoint
    info: TensorInfo
    grid: BlockGrid
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.grid.byte_range(self.stop - 1)[1] - self.grid.byte_range(self.start)[0]


def hash_source(checkpoint: Checkpoint, geometry: Geometry, pool: WorkerPool, reporter: Reporter) -> HashedSource:
    """Hash every byte of a source's tensors, in parallel; nothing that is known of it is used, or recorded.

    Raises
    ------
    OSError, SourceChangedError
        If a file cannot be read to its end.
    """
    runs = list(_runs(checkpoint, geometry))
    blocks: dict[str, bytearray] = {name: bytearray() for name in checkpoint.stored}
    samples: dict[str, bytearray] = {name: bytearray() for name in checkpoint.stored}
    for run, (whole, sampled) in zip(runs, pool.run(_hash, runs), strict=True):
        blocks[run.info.name] += whole
        samples[run.info.name] += sampled
        reporter.advance(run.nbytes)
    tensors = checkpoint.stored.items()
    wholes = [(name, tensor_digest(info.dtype, info.shape, bytes(blocks[name]))) for name, info in tensors]
    parts = [(name, sampled_tensor_digest(info.dtype, info.shape, bytes(samples[name]))) for name, info in tensors]
    return HashedSource(
        digest=source_digest([*wholes, *checkpoint.facts]),
        fingerprint=source_digest([*parts, *checkpoint.facts]),
        blocks={name: bytes(packed) for name, packed in blocks.items()},
        samples={name: bytes(packed) for name, packed in samples.items()},
        nbytes=sum(run.nbytes for run in runs),
    )


def _runs(checkpoint: Checkpoint, geometry: Geometry) -> Iterator[_Run]:
    for info in checkpoint.stored.values():
        layout = grid(info.dtype, info.shape, geometry)
        step = max(1, _RUN_BYTES // max(1, layout.block_rows * layout.row_bytes))
        for start in range(0, layout.count, step):
            stop = min(start + step, layout.count)
            yield _Run(checkpoint=checkpoint, info=info, grid=layout, start=start, stop=stop)


def _hash(run: _Run, scratch: Scratch) -> tuple[bytes, bytes]:
    """Return, packed, the digests of the blocks of a run, and those of their samples."""
    origin, buffer = run.grid.byte_range(run.start)[0], scratch.buffer("verify", run.nbytes)
    path = run.checkpoint.files[run.info.file].path
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pread_into(fd, buffer, run.info.offset + origin, path=path)
    finally:
        os.close(fd)
    whole, sampled = bytearray(), bytearray()
    for block in range(run.start, run.stop):
        start, stop = run.grid.byte_range(block)
        data = buffer[start - origin : stop - origin]
        whole += content_digest(data)
        sampled += content_digest(_sample(data, run.grid, block))
    return bytes(whole), bytes(sampled)


def _sample(data: memoryview, layout: BlockGrid, block: int) -> bytes:
    """Return the bytes of a block that stand for it where it is not read whole."""
    item = layout.row_bytes // layout.row_elements
    runs = sample_runs(len(data) // item, block, layout.row_elements)
    return b"".join(data[first * item : stop * item] for first, stop in runs)


# --- comparing --------------------------------------------------------------------------------------------------------


def check_sources(
    checkpoints: Mapping[str, Checkpoint],
    pinned: Mapping[str, Sequence[bytes]],
    manifests: Sequence[Manifest],
    geometry: Geometry,
    pool: WorkerPool,
    reporter: Reporter,
) -> list[VerifiedSource]:
    """Hash sources and compare them with what the lock, and what the outputs were made from, says of them.

    Parameters
    ----------
    pinned
        By source the digests that it may have; more than one where outputs were made from it at different times.
    manifests
        Of the outputs: they tell which tensor and which block differs.
    """
    reporter.begin("hashing sources", sum(map(stored_bytes, checkpoints.values())))
    try:
        return [
            _check_source(name, checkpoint, pinned.get(name, ()), manifests, geometry, pool, reporter)
            for name, checkpoint in checkpoints.items()
        ]
    finally:
        reporter.end()


def _check_source(
    name: str,
    checkpoint: Checkpoint,
    pinned: Sequence[bytes],
    manifests: Iterable[Manifest],
    geometry: Geometry,
    pool: WorkerPool,
    reporter: Reporter,
) -> VerifiedSource:
    where = f"source `{name}`"
    try:
        if checkpoint.standalone is not None:
            return _check_standalone(name, where, checkpoint, pinned, geometry, pool, reporter)
        found = hash_source(checkpoint, geometry, pool, reporter)
    except (OSError, SourceChangedError) as error:
        reason = error.message if isinstance(error, SourceChangedError) else error.strerror or type(error).__name__
        problem = Problem(kind="source", where=where, what=f"cannot be read: {reason}", facts={"source": name})
        return VerifiedSource(name=name, digest=None, bytes=0, problems=(problem,))
    problems: list[Problem] = []
    is_right = not pinned or any(map(found.has_pin, pinned))
    if not is_right or any(map(is_sampled_pin, pinned)):  # samples say nothing of the blocks that were read
        problems = list(_differences(name, where, checkpoint, found, manifests, geometry))
        if not problems and not is_right:
            own = sampled_pin(found.fingerprint) if is_sampled_pin(pinned[0]) else found.digest
            what = f"has the digest {format_digest(own)}, and the lock says {format_digest(pinned[0])}"
            problems = [Problem(kind="source", where=where, what=what, hint=_HINT, facts={"source": name})]
    return VerifiedSource(
        name=name,
        digest=format_digest(found.digest),
        pinned_by=None if not pinned else "sample" if is_sampled_pin(pinned[0]) else "content",
        bytes=found.nbytes,
        problems=tuple(problems),
    )


def _check_standalone(
    name: str,
    where: str,
    checkpoint: Checkpoint,
    pinned: Sequence[bytes],
    geometry: Geometry,
    pool: WorkerPool,
    reporter: Reporter,
) -> VerifiedSource:
    """Read a progressive checkpoint whole: what it is said to be made from must be what the lock says."""
    value = checkpoint.standalone
    assert value is not None, "it is a progressive checkpoint"
    problems = []
    facts: dict[str, Any] = {"source": name}
    for file, what in standalone_problems(name, checkpoint, geometry, pool, reporter):
        problems.append(Problem(kind="source", where=where, what=what, hint=GET_AGAIN, facts={**facts, "file": file}))
    if pinned and value.expert not in pinned:
        what = f"is made from {format_digest(value.expert)}, and the lock says {format_digest(pinned[0])}"
        problems.append(Problem(kind="source", where=where, what=what, hint=_HINT, facts=facts))
    return VerifiedSource(
        name=name,
        digest=format_digest(value.expert),
        pinned_by="content" if pinned else None,
        bytes=stored_bytes(checkpoint),
        problems=tuple(problems),
    )


_HINT = "restore it, or run `mergepipe build` to make the outputs from what it is now"


def _differences(
    name: str,
    where: str,
    checkpoint: Checkpoint,
    found: HashedSource,
    manifests: Iterable[Manifest],
    geometry: Geometry,
) -> Iterator[Problem]:
    """Yield the tensors, and their blocks, that are not what an output was made from; each once."""
    seen: set[tuple[str, bytes]] = set()
    for manifest in manifests:
        for tensor in manifest.tensors:
            for given in tensor.inputs:
                own = given.tensor or tensor.name
                if given.source != name or own not in found.blocks or (own, given.digest) in seen:
                    continue
                seen.add((own, given.digest))
                yield from _tensor_differences(name, where, checkpoint.stored[own], given, found, geometry)


def _tensor_differences(
    name: str, where: str, info: TensorInfo, given: ManifestInput, found: HashedSource, geometry: Geometry
) -> Iterator[Problem]:
    """Yield the blocks of a tensor that are not what an output was made from, by their digests or their samples'."""
    blocks, samples = found.blocks[info.name], found.samples[info.name]
    if tensor_digest(info.dtype, info.shape, blocks) == given.digest:
        return
    facts = {"source": name, "tensor": info.name}
    layout, size = grid(info.dtype, info.shape, geometry), INPUT_DIGEST_SIZE
    bad = [
        block
        for block in range(layout.count)
        if given.blocks[block * size : (block + 1) * size] not in (
            blocks[block * DIGEST_SIZE :][:size],
            samples[block * DIGEST_SIZE :][:size],
        )
    ]
    if len(given.blocks) != layout.count * size:
        what = f"tensor `{info.name}` is not what the outputs were made from"
        yield Problem(kind="source", where=where, what=what, hint=_HINT, facts=facts)
        return
    for start, stop in _adjacent(bad):
        what = f"tensor `{info.name}`: {block_words(layout, start, stop, 'differ')}"
        yield Problem(
            kind="source", where=where, what=what, hint=_HINT, facts={**facts, **block_facts(layout, start, stop)}
        )


def _adjacent(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[start], blocks[at - 1] + 1
            start = at
