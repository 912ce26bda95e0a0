"""How far the weights of two builds of an output lie apart, tensor by tensor; for ``mergepipe diff --tensors``.

The weights of a side are looked for where they can be: in its output directory, and in the packs of the cache, which
keep former builds until they are pruned. What is read is hashed on the way, and counts only if it is what the record
says: numbers of other weights than those would be worse than none.

Streamed in pieces of 2^18 elements, summed in float64 in the order of the elements: memory does not grow with tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path, PurePath
from typing import Any

from mergepipe.cache.layout import CacheLayout
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.checkpoints.safetensors import TensorInfo, read_header
from mergepipe.errors import MergepipeError
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.diff_values import LockDiff, OutputChange
from mergepipe.lockfile.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.lockfile.records import LockedOutput
from mergepipe.project.diff_numbers import NOT_THERE, Distance, TensorStream, WeightsError, distance
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

Json = dict[str, Any]
CACHE_DIRECTORY = ".mergecache"
_SHARD = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor that differs: its distance, or why there is none."""

    name: str
    distance: Distance | None = None
    problem: str | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        numbers = Distance.nothing() if self.distance is None else self.distance.as_json()
        return {"name": self.name, **numbers, "problem": self.problem}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNumbers:
    """The distances of an output's tensors.

    Attributes
    ----------
    tensors
        Those that both sides have and that differ, in their order; empty where a side has no weights.
    missing
        By ``old`` and ``new``, why the weights of that side are not available.
    """

    tensors: tuple[Compared, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "tensors": [tensor.as_json() for tensor in self.tensors],
            "missing": {key: self.missing.get(key) for key in ("old", "new")},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the weights of one side may lie.

    Attributes
    ----------
    directory
        The output directory, of a side that is one; None for a lock.
    root
        The folder of the Mergefile, None where there is none.
    packs
        The folder of the cache's packs, None where no cache is known.
    """

    directory: Path | None
    root: Path | None
    packs: Path | None

    @classmethod
    def of(cls, directory: Path | None, lock_path: Callable[[], Path], cache: Path | None) -> Weights:
        """Return the places for a side; it is no error if there is no Mergefile."""
        root = None
        with contextlib.suppress(MergepipeError):
            root = lock_path().parent
        folder = cache or (root / CACHE_DIRECTORY if root else None)
        return cls(directory=directory, root=root, packs=CacheLayout(folder).packs if folder else None)

    def folder(self, output: LockedOutput) -> Path | None:
        """Return the directory that may hold an output."""
        if self.directory is not None:
            return self.directory
        if self.root is None or output.path is None:
            return None
        return self.root / os.path.expanduser(output.path)  # noqa: PTH111 - as the Mergefile does it

    def shards(self, output: LockedOutput) -> list[list[Path]]:
        """Return for each shard of an output the files that may be it: the pack that is named by its digest first."""
        folder = self.folder(output)
        folder = folder if folder is not None and _holds(folder, output) else None
        found = []
        for shard in output.shards:
            candidates = [self.packs / f"{shard.digest.hex()}{_SHARD}"] if self.packs else []
            # A record may come from anybody: no name leads out of the directory.
            candidates += [folder / shard.name] if folder and PurePath(shard.name).name == shard.name else []
            found.append([path for path in candidates if _size(path) == shard.bytes])
        return found


def _holds(folder: Path, output: LockedOutput) -> bool:
    """Return whether a directory says that it holds this very build of an output."""
    path = folder / MANIFEST_NAME
    try:
        return parse_manifest(read_regular(path), path).output.digest == output.digest
    except (OSError, MergepipeError):
        return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def compare_weights(diff: LockDiff, old: Weights, new: Weights, reporter: Reporter) -> dict[str, TensorNumbers]:
    """Return the distances of the tensors that differ, by output; those that are added or removed have none."""
    sides = diff.old, diff.new
    return {
        output.name: _compare_output(output, (old, new), tuple(_geometry(s.lock.geometry) for s in sides), reporter)
        for output in diff.outputs
        if output.old is not None and output.new is not None
    }


def _geometry(number: int) -> Geometry | None:
    return GEOMETRY_1 if number == GEOMETRY_1.id else None


def _compare_output(
    output: OutputChange, weights: tuple[Weights, Weights], geometries: tuple[Geometry | None, ...], reporter: Reporter
) -> TensorNumbers:
    names = [tensor.name for tensor in output.tensors if tensor.change == "changed"]
    with contextlib.ExitStack() as stack:
        opened: dict[str, _Opened] = {}
        missing: dict[str, str] = {}
        for key, locked, place, geometry in zip(
            ("old", "new"), (output.old, output.new), weights, geometries, strict=True
        ):
            assert locked is not None
            try:
                opened[key] = _Opened(locked, place, geometry, stack)
            except WeightsError as error:
                missing[key] = error.message
            else:
                if names and not any(map(opened[key].stream, names)):
                    missing[key] = NOT_THERE
        if missing or not names:
            return TensorNumbers(missing=missing)
        before, after = opened["old"], opened["new"]
        reporter.begin(f"comparing {output.name}", sum(before.nbytes(n) + after.nbytes(n) for n in names))
        found = tuple(_compare(name, before, after, reporter) for name in names)
        reporter.end()
    return TensorNumbers(tensors=found)


def _compare(name: str, old: _Opened, new: _Opened, reporter: Reporter) -> Compared:
    try:
        return Compared(name=name, distance=distance(old.stream(name), new.stream(name), reporter.advance))
    except WeightsError as error:
        return Compared(name=name, problem=error.message)


class _Opened:
    """The tensors of one side of an output, from files that are open until the stack is closed."""

    def __init__(
        self, output: LockedOutput, weights: Weights, geometry: Geometry | None, stack: contextlib.ExitStack
    ) -> None:
        if geometry is None:
            raise WeightsError("they were cut into blocks in a way that this mergepipe does not know")
        self._geometry = geometry
        self._digests = {tensor.name: tensor.digest for tensor in output.tensors}
        self._tensors: dict[str, list[tuple[int, Path, TensorInfo]]] = {}
        for shard, paths in zip(output.shards, weights.shards(output), strict=True):
            if not paths:
                raise WeightsError(_not_here(output, shard.name, weights))
            for path in paths:
                for fd, info in _tensors_of(path, stack):
                    self._tensors.setdefault(info.name, []).append((fd, path, info))

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        found = self._tensors.get(name)
        return found[0][2].nbytes if found else 0

    def stream(self, name: str) -> list[TensorStream]:
        """Return a tensor as it may be read: one stream for each file that may have it."""
        found = self._tensors.get(name, [])
        return [
            TensorStream(fd=fd, path=path, info=info, digest=self._digests[name], geometry=self._geometry)
            for fd, path, info in found
        ]


def _tensors_of(path: Path, stack: contextlib.ExitStack) -> Iterator[tuple[int, TensorInfo]]:
    """Yield the tensors of a file; of one that cannot be read there are none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        header = read_header(fd, path, os.fstat(fd).st_size, label="output")
    except (OSError, MergepipeError):
        return
    yield from ((fd, info) for info in header.tensors)


def _not_here(output: LockedOutput, shard: str, weights: Weights) -> str:
    folder = weights.folder(output)
    if folder is None:
        where = "the output is not published" if output.path is None else "no output directory is known"
    elif folder.is_dir():
        where = f"`{_shown(folder)}` holds another build" if not _holds(folder, output) else _damaged(folder, shard)
    else:
        where = f"`{_shown(folder)}` is not there"
    return f"{where}, and {f'the cache has no pack of `{shard}`' if weights.packs else 'no cache is known'}"


def _damaged(folder: Path, shard: str) -> str:
    return f"`{shard}` in `{_shown(folder)}` is missing or has another size"


def _shown(path: Path) -> str:
    return min(os.path.relpath(path), str(path), key=len)
