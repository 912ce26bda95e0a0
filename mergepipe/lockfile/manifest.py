"""The manifest, ``mergepipe.json``: everything needed to verify an output, and to build it again from its sources.

JSON. What people look at comes first and is indented; then one line per tensor, with its packed arrays in base64:

- the block digests of an output tensor, 32 bytes each: hashed with dtype and shape they give the tensor digest;
- the block digests of every input tensor, *truncated to their first 16 bytes*, so that a manifest of a 70B model with
  eight experts stays under 100 MB. 128 bits still identify a block; the whole tensor digest stands beside them.

A manifest vouches for itself: a reader checks that blocks, tensors and output hash to the digests that it states, and
that all its bytes have the checksum at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from mergepipe.digest import DIGEST_SIZE, source_digest, tensor_digest
from mergepipe.errors import InternalError, LockError
from mergepipe.lockfile import convert, wire
from mergepipe.lockfile.checksum import has_checksum
from mergepipe.lockfile.manifest_records import (
    INPUT_DIGEST_SIZE,
    LEVEL_EXACT,
    LEVEL_OMITTED,
    MANIFEST_VERSION,
    Manifest,
    ManifestInput,
    ManifestPlace,
    ManifestStage,
    ManifestTensor,
    ParameterSet,
    RunFacts,
)
from mergepipe.lockfile.manifest_stages import input_problems, stage_problems
from mergepipe.lockfile.records import LockedTensor

__all__ = [
    "INPUT_DIGEST_SIZE",
    "LEVEL_EXACT",
    "LEVEL_OMITTED",
    "MANIFEST_NAME",
    "MANIFEST_VERSION",
    "Manifest",
    "ManifestInput",
    "ManifestPlace",
    "ManifestStage",
    "ManifestTensor",
    "ParameterSet",
    "RunFacts",
    "parse_manifest",
    "render_manifest",
    "truncate_digests",
]

MANIFEST_NAME = "mergepipe.json"
T = TypeVar("T")


def truncate_digests(packed: bytes) -> bytes:
    """Return packed block digests (32 bytes each) as a manifest keeps those of inputs (the first 16 of each)."""
    return b"".join([packed[at : at + INPUT_DIGEST_SIZE] for at in range(0, len(packed), DIGEST_SIZE)])


def render_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest: UTF-8 JSON in a fixed order, with a newline at the end.

    Raises
    ------
    InternalError
        If the manifest contradicts itself, so that `parse_manifest` would refuse it.
    LockError
        If a name is not valid Unicode.
    """
    problem = next(_problems(manifest), None)
    if problem:
        raise InternalError(f"the manifest of output `{manifest.output.name}` contradicts itself: {problem}")
    try:
        return convert.encode(manifest)
    except UnicodeEncodeError as error:
        raise LockError(
            f"the name {error.object!a} is not valid Unicode and cannot be written into the manifest",
            hint="rename the file so that its name is valid UTF-8",
        ) from error


def parse_manifest(data: bytes, path: Path, *, unchanged: bool = True) -> Manifest:
    """Return the manifest that ``data`` holds; ``path`` is for messages.

    Parameters
    ----------
    unchanged
        Whether its bytes must be those that were written. False leaves that to the caller (`has_checksum`).

    Raises
    ------
    LockError
        If it is not a manifest, has another version, contradicts itself, or was changed after it was written.
    """
    version = _decode(data, wire.Version, path).version
    if version != MANIFEST_VERSION:
        raise LockError(
            f"{path}: is a manifest of version {version}, and this mergepipe reads version {MANIFEST_VERSION}",
            hint="upgrade mergepipe, or use the one that wrote it" if version > MANIFEST_VERSION else None,
            file=str(path),
            expected=MANIFEST_VERSION,
            got=version,
        )
    wired = _decode(data, wire.SealedManifest, path)
    try:
        manifest = convert.from_wire(wired)
    except ValueError as error:
        raise _error(path, str(error)) from error
    problem = next(_problems(manifest), None)
    if problem is None and unchanged and not has_checksum(data):
        problem = "it was changed after it was written: its bytes do not have the checksum that it states"
    if problem:
        raise _error(path, problem)
    return manifest


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise _error(path, "it is nested too deeply") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise _error(path, str(error)) from error


def _error(path: Path, problem: str) -> LockError:
    return LockError(
        f"{path}: not a valid manifest: {problem}",
        hint="build the output again to write a new one",
        file=str(path),
    )


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what contradicts itself in a manifest."""
    if [tensor.name for tensor in manifest.tensors] == [tensor.name for tensor in manifest.output.tensors]:
        yield from _content_problems(manifest)
    else:
        yield "the tensors are not those of the output"
    yield from _file_problems(manifest)
    yield from stage_problems(manifest)
    if manifest.output.path is None:
        yield "the output has no path"
    if {source.name: source.digest for source in manifest.sources} != dict(manifest.output.sources):
        yield "the digests of the sources are not those of the output"


def _content_problems(manifest: Manifest) -> Iterator[str]:
    output = manifest.output
    for tensor, locked in zip(manifest.tensors, output.tensors, strict=True):
        yield from (f"tensor `{tensor.name}`: {problem}" for problem in _tensor_problems(tensor, locked, manifest))
    if source_digest((tensor.name, tensor.digest) for tensor in output.tensors) != output.digest:
        yield "the digest of the output is not that of its tensors"


def _tensor_problems(tensor: ManifestTensor, locked: LockedTensor, manifest: Manifest) -> Iterator[str]:
    count, rest = divmod(len(tensor.blocks), DIGEST_SIZE)
    yield from input_problems(tensor)
    if rest or tensor_digest(tensor.dtype, tensor.shape, tensor.blocks) != locked.digest:
        yield "its digest is not that of its blocks"
    sliced = tensor.parameters if manifest.output.slices else None
    experts = len(manifest.output.experts if sliced is None else sliced.experts)
    if tensor.levels is not None and len(tensor.levels) != experts * count:
        yield f"{len(tensor.levels)} access levels for {experts} experts of {count} blocks"
    yield from _level_problems(tensor, locked, manifest)
    if locked.read > locked.total:
        yield f"{locked.read} of {locked.total} expert blocks are read"


def _level_problems(tensor: ManifestTensor, locked: LockedTensor, manifest: Manifest) -> Iterator[str]:
    """Yield where the counts of levels are not those of the access: blocks that carry nothing of their own miss."""
    if locked.levels is None:
        return
    if manifest.output.levels_version is None:
        yield "it has levels, and the output no `levels_version`"
    access = tensor.levels or b""
    for level, count in locked.levels.blocks.items():
        if level != LEVEL_EXACT and count > access.count(level):
            yield f"{count} expert blocks at level {level}, and its access has {access.count(level)}"


def _file_problems(manifest: Manifest) -> Iterator[str]:
    output = manifest.output
    placed = [name for names in manifest.shard_tensors for name in names]
    if len(manifest.shard_tensors) != len(output.shards) or sorted(placed) != sorted(t.name for t in output.tensors):
        yield "the shards do not hold each tensor once"
    # Publishing replaces these files, so none may lie outside the directory.
    yield from (f"`{name}` is not a file name inside the output" for name in manifest.files if not _is_inside(name))
    if len(set(manifest.files)) != len(manifest.files):
        yield "a file is listed twice"
    published = [shard.name for shard in output.shards]
    published += [file.name for file in (*output.side_files, *manifest.generated)]
    yield from (f"`{name}` is not among the files" for name in published if name not in manifest.files)


def _is_inside(name: str) -> bool:
    """Return whether a relative name stays inside its directory, on every system."""
    parts = name.replace("\\", "/").split("/")
    return "\0" not in name and ":" not in parts[0] and all(part not in ("", ".", "..") for part in parts)
