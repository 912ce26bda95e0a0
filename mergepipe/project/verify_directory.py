"""An output directory against its manifest: everything but the hashing of weights, which `verify_shards` does.

Nothing is needed but the directory: it may be a copy on another machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from blake3 import blake3

from mergepipe.errors import LockError
from mergepipe.fsio.reading import open_regular, read_regular
from mergepipe.lockfile.checksum import has_checksum
from mergepipe.lockfile.manifest import MANIFEST_NAME, Manifest, parse_manifest
from mergepipe.lockfile.records import LockedSideFile
from mergepipe.project.verify_report import Problem
from mergepipe.project.verify_shards import ExpectedTensor, ShardToCheck, unreadable
from mergepipe.publish.card import CARD
from mergepipe.publish.directory import INDEX, SIGNATURE, is_weight_name
from mergepipe.values import dataclass

COPY_AGAIN = "copy it again from where it came from"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_CHUNK = 1 << 20
_BYTE = re.compile(r"\(byte (\d+)\)")


@dataclass(slots=True, kw_only=True)
class DirectoryCheck:
    """An output directory that is looked at.

    Attributes
    ----------
    path, shown
        The directory, and how messages name it.
    command
        What makes the output again, None for a copy of it.
    manifest
        What it says, None where it cannot be read.
    problems
        What is wrong with it so far.
    files, bytes
        How many files beside the weights were hashed, and their bytes.
    others
        How many files are not mergepipe's.
    shards
        What is to be hashed; their problems are not among ``problems``.
    identity
        What tells whether the directory is still the same one.
    """

    path: Path
    shown: str
    command: str | None
    manifest: Manifest | None = None
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    others: int = 0
    shards: list[ShardToCheck] = field(default_factory=list)
    identity: tuple[int, int] | None = None

    @property
    def missing(self) -> str:
        """What to do where a file is missing."""
        return COPY_AGAIN if self.command is None else f"run `{self.command}`"

    @property
    def damaged(self) -> str:
        """What to do where a file is damaged: a build finds out by itself where it was edited, not where it rotted."""
        return COPY_AGAIN if self.command is None else f"remove it and run `{self.command}`"

    @property
    def unclaimed(self) -> str:
        """What to do where the manifest is damaged: without it, only the cache knows whose the directory is."""
        return self.damaged if self.command is None else f"{self.damaged}, with `--force` if the cache is gone"

    def unreadable(self, where: str, error: OSError) -> Problem:
        """Return the problem of a file that is not there, or cannot be read."""
        return unreadable(where, error, missing=self.missing, damaged=self.damaged)

    def where(self, name: str) -> str:
        """Return how messages name a file in it."""
        return os.path.join(self.shown, name)


def check_directory(path: Path, shown: str, command: str | None) -> DirectoryCheck:
    """Look at an output directory: its manifest, the files that should be there, and those beside the weights."""
    check = DirectoryCheck(path=path, shown=shown, command=command, identity=_identity(path))
    if check.identity is None:
        what = "there is no such directory"
        check.problems.append(Problem(kind="output", where=shown, what=what, hint=check.missing))
        return check
    _read_manifest(check)
    if check.manifest is None:
        return check
    for file in (*check.manifest.output.side_files, *check.manifest.generated):
        _check_side_file(check, file)
    check.problems += _missing(check, check.manifest)
    _look_for_others(check, check.manifest)
    check.shards = list(_expected_shards(check, check.manifest))
    return check


def replaced_meanwhile(check: DirectoryCheck) -> bool:
    """Return whether another directory has taken the place of the one that was looked at."""
    return check.identity is not None and _identity(check.path) != check.identity


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a directory, None for no directory: publication puts another one in its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if path.is_dir() else None


def _read_manifest(check: DirectoryCheck) -> None:
    path, where = check.path / MANIFEST_NAME, check.where(MANIFEST_NAME)
    try:
        data = read_regular(path)
    except OSError as error:
        check.problems.append(check.unreadable(where, error))
        return
    check.files += 1
    check.bytes += len(data)
    try:
        check.manifest = parse_manifest(data, Path(where), unchanged=False)
    except LockError as error:
        check.problems.append(_manifest_problem(check, where, data, error))
        return
    if not has_checksum(data):
        what = "it was changed after it was written: its bytes do not have the checksum that it states"
        check.problems.append(Problem(kind="manifest", where=where, what=what, hint=check.unclaimed))


def _manifest_problem(check: DirectoryCheck, where: str, data: bytes, error: LockError) -> Problem:
    """Return the problem of a manifest that cannot be read, with the line where the reader says a byte."""
    what = error.message.removeprefix(f"{where}: ")
    at = _BYTE.search(what)
    line = data.count(b"\n", 0, int(at[1])) + 1 if at else None
    return Problem(
        kind="manifest",
        where=where if line is None else f"{where}:{line}",
        what=what,
        hint=check.unclaimed,
        facts={} if line is None else {"line": line},
    )


def _check_side_file(check: DirectoryCheck, file: LockedSideFile) -> None:
    where = check.where(file.name)
    try:
        digest, count = hash_file(check.path / file.name)
    except OSError as error:
        check.problems.append(check.unreadable(where, error))
        return
    check.files += 1
    check.bytes += count
    if digest != file.digest:
        what = "is not what was written: its digest differs"
        theirs = "if you changed it, the next build takes it for yours; else " if file.name == CARD else ""
        hint = f"{theirs}{check.damaged}"
        check.problems.append(Problem(kind="file", where=where, what=what, hint=hint, facts={"file": file.name}))


def hash_file(path: Path) -> tuple[bytes, int]:
    """Return the content digest of a file and its size, a piece at a time.

    Raises
    ------
    OSError
        If it is not there, or no regular file.
    """
    hasher, count = blake3(), 0
    with os.fdopen(open_regular(path), "rb") as file:
        while data := file.read(_CHUNK):
            hasher.update(data)
            count += len(data)
    return hasher.digest(), count


def _missing(check: DirectoryCheck, manifest: Manifest) -> Iterator[Problem]:
    """Yield the files that the manifest lists, and whose bytes nobody looks at otherwise, that are not there."""
    output = manifest.output
    hashed = {file.name for file in (*output.side_files, *manifest.generated)}
    hashed |= {shard.name for shard in output.shards} | {MANIFEST_NAME}
    for name in manifest.files:
        if name not in hashed and not os.path.lexists(check.path / name):
            yield Problem(kind="file", where=check.where(name), what="is missing", hint=check.missing)


def _look_for_others(check: DirectoryCheck, manifest: Manifest) -> None:
    """Count the files that are not mergepipe's; those that loaders would take for weights are a problem."""
    ours = {*manifest.files, SIGNATURE}
    for folder, _, names in os.walk(check.path):
        for name in sorted(names):
            relative = os.path.relpath(os.path.join(folder, name), check.path).replace(os.sep, "/")
            if relative in ours:
                continue
            check.others += 1
            if _is_loaded(relative, manifest):
                what = "is not part of the output, and loaders may take it for weights"
                check.problems.append(
                    Problem(kind="extra", where=check.where(relative), what=what, hint="remove it, or move it away")
                )


def _is_loaded(name: str, manifest: Manifest) -> bool:
    """Return whether loaders of a model folder would take a file that is not the output's for weights.

    They look for adapters by name, and some take every safetensors file where no index says which.
    """
    if is_weight_name(name) or name in _ADAPTERS:
        return True
    return INDEX not in manifest.files and "/" not in name and name.endswith(".safetensors")


def _expected_shards(check: DirectoryCheck, manifest: Manifest) -> Iterator[ShardToCheck]:
    """Yield what the shards should hold."""
    for shard, tensors in zip(manifest.output.shards, expected_tensors(manifest), strict=True):
        yield ShardToCheck(
            path=check.path / shard.name,
            where=check.where(shard.name),
            kind="block",
            shard=shard,
            tensors=tensors,
            hint=check.damaged,
            missing=check.missing,
        )


def expected_tensors(manifest: Manifest) -> list[tuple[ExpectedTensor, ...]]:
    """Return, for each shard, its tensors in file order."""
    digests = {tensor.name: tensor.digest for tensor in manifest.output.tensors}
    by_name = {
        tensor.name: ExpectedTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            digest=digests[tensor.name],
            blocks=tensor.blocks,
        )
        for tensor in manifest.tensors
    }
    return [tuple(by_name[name] for name in names) for names in manifest.shard_tensors]
