"""Small projects for tests: checkpoints and a Mergefile in a temporary folder, built through the Python API."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.fsio import identity
from mergepipe.lockfile.manifest import parse_manifest
from mergepipe.project import open_project
from support.checkpoints import as_dtype, raw_tensor, read_checkpoint, write_checkpoint
from support.reference import Array, Recipe, assert_same_tensors, evaluate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mergepipe.lockfile.manifest_records import Manifest
    from mergepipe.project import Project
    from mergepipe.project.reports import BuildReport, OutputReport
    from support.checkpoints import RawTensor, Tensor

_CLOCK_REALTIME_COARSE = 5  # linux/time.h; the module `time` does not have it

TINY = Geometry(block_elements=64)
"""Blocks of 64 elements: a tensor of a few hundred elements has several."""


class Messages:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.phases: list[tuple[str, int, int, bool]] = []
        """Name, bytes that were announced, bytes that were done, and whether it ended."""

    def begin(self, phase: str, total_bytes: int) -> None:
        self.phases.append((phase, total_bytes, 0, False))

    def advance(self, count: int) -> None:
        phase, total, done, ended = self.phases[-1]
        assert not ended
        self.phases[-1] = (phase, total, done + count, ended)

    def end(self) -> None:
        self.phases[-1] = (*self.phases[-1][:3], True)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


# --- the project --------------------------------------------------------------------------------------------------


@dataclass
class SmallProject:
    """A project in a folder: sources under ``models/``, a Mergefile that is written anew on every change.

    A recipe is an output's table as it stands in a Mergefile: ``operator``, ``base``, ``experts`` and so on.
    """

    root: Path
    geometry: Geometry = TINY
    sources: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Recipe] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    """By source name what an adapter applies to (`support.adapters`)."""
    progressive: set[str] = field(default_factory=set)
    """The names of sources that are progressive checkpoints."""

    def add_source(self, name: str, tensors: Mapping[str, Tensor], *, path: str | None = None, **options: Any) -> Path:
        """Write a checkpoint (anew) and declare it; ``options`` are those of `write_checkpoint`."""
        folder = self._write_source(name, tensors, path, options)
        self.save()
        return folder

    def add_sources(self, sources: Mapping[str, Mapping[str, Tensor]], **options: Any) -> None:
        """Write several checkpoints under ``models/`` and declare them."""
        for name, tensors in sources.items():
            self._write_source(name, tensors, None, options)
        self.save()

    def _write_source(self, name: str, tensors: Mapping[str, Tensor], path: str | None, options: Any) -> Path:
        self.sources[name] = path or f"models/{name}"
        folder = self.root / self.sources[name]
        shutil.rmtree(folder, ignore_errors=True)
        return write_checkpoint(folder, tensors, **options)

    def set_output(self, name: str, recipe: Recipe) -> None:
        """Declare an output, or declare it anew."""
        self.outputs[name] = recipe
        self.save()

    def save(self) -> None:
        """Write the Mergefile."""
        self.root.mkdir(parents=True, exist_ok=True)
        text = mergefile_text(self.sources, self.outputs, self.adapters, self.progressive)
        self.mergefile.write_text(text, encoding="utf-8")

    @property
    def mergefile(self) -> Path:
        return self.root / "Mergefile.toml"

    @property
    def lock(self) -> Path:
        return self.root / "Mergefile.lock"

    @property
    def cache(self) -> Path:
        return self.root / ".mergecache"

    def source_file(self, name: str) -> Path:
        """Return the file of a source that has only one."""
        return self.root / self.sources[name] / "model.safetensors"

    def folder(self, output: str) -> Path:
        """Return the directory of an output."""
        return self.root / self.outputs[output].get("path", f"build/{output}")

    def open(self, **options: Any) -> Project:
        """Open it; ``options`` are those of `mergepipe.open`."""
        return open_project(self.mergefile, **({"geometry": self.geometry, "workers": 2} | options))

    def build(self, *outputs: str, locked: bool = False, force: bool = False, **options: Any) -> BuildReport:
        """Build these outputs, all of them by default."""
        return self.open(**options).build(outputs, locked=locked, force=force)

    def build_one(self, output: str, **options: Any) -> OutputReport:
        """Build one output and return what was done."""
        return self.build(output, **options).outputs[output]

    def tensors(self, output: str) -> dict[str, Array]:
        """Return an output's tensors as they are on the disk."""
        return read_checkpoint(self.folder(output))

    def raw(self, output: str) -> dict[str, RawTensor]:
        """Return an output's tensors as dtype, shape and bytes."""
        return {name: raw_tensor(array) for name, array in self.tensors(output).items()}

    def manifest(self, output: str) -> Manifest:
        """Return an output's manifest."""
        path = self.folder(output) / "mergepipe.json"
        return parse_manifest(path.read_bytes(), path)

    def expected(self, output: str) -> dict[str, Array]:
        """Return the tensors that an output should have, evaluated from the sources' files, stage by stage."""
        checkpoints = {name: read_checkpoint(self.root / path) for name, path in self.sources.items()}
        recipe = self.outputs[output]
        parts = [recipe, *recipe.get("slices", ())]
        experts = [expert for part in parts for expert in part.get("experts", [part.get("source")])]
        named = [part.get("base") for part in parts]
        named += [expert["source"] if isinstance(expert, dict) else expert for expert in experts]
        checkpoints |= {name: self.expected(name) for name in named if name in self.outputs}
        return evaluate(recipe, checkpoints)

    def check(self, output: str, *, zero_signs: bool = True) -> None:
        """Assert that an output has the expected tensors, bit for bit."""
        assert_same_tensors(self.tensors(output), self.expected(output), zero_signs=zero_signs)

    def clone(self, root: Path) -> SmallProject:
        """Return a copy without cache, lock and outputs, in another folder."""
        other = SmallProject(root, self.geometry, dict(self.sources), dict(self.outputs), dict(self.adapters))
        other.save()
        for path in self.sources.values():
            shutil.copytree(self.root / path, root / path, dirs_exist_ok=True)
        return other


def mergefile_text(
    sources: Mapping[str, str],
    outputs: Mapping[str, Recipe],
    adapters: Mapping[str, str] | None = None,
    progressive: Collection[str] = (),
) -> str:
    """Return a Mergefile."""
    lines = ["version = 1"]
    for name, path in sources.items():
        key = "progressive" if name in progressive else "path"
        lines += [f"[sources.{_toml(name)}]", f"{key} = {_toml(path)}"]
        if name in (adapters or {}):
            lines.append(f"on = {_toml((adapters or {})[name])}")
    for name, recipe in outputs.items():
        lines += [f"[outputs.{_toml(name)}]", *(f"{key} = {_toml(value)}" for key, value in recipe.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case float():
            return repr(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


def _granularity_ns() -> int:
    """Return how far a file's time may be behind: a tick of the kernel's coarse clock, and a margin."""
    if sys.platform != "linux":
        return identity.FINE_GRANULARITY_NS
    tick = round(time.clock_getres(_CLOCK_REALTIME_COARSE) * 1e9)
    return min(max(tick, 4_000_000) + 1_000_000, identity.FINE_GRANULARITY_NS)


def quicken(monkeypatch: Any, *, flush: bool = False) -> None:
    """Make small builds quick: they flush nothing, and wait for a source to settle only as long as this machine needs.

    mergepipe waits as long as the machine with the slowest clock needs, which is most of a tiny build's time.
    ``monkeypatch`` is pytest's, or anything else with a ``setattr``.
    """
    if not flush:
        skip_flushing(monkeypatch)
    monkeypatch.setattr(identity, "FINE_GRANULARITY_NS", _granularity_ns())


def skip_flushing(monkeypatch: Any) -> None:
    """Do not flush files and the catalog: it takes most of a small build's time, and only power cuts tell."""
    connect = sqlite3.connect

    def connect_without_flushing(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        with contextlib.suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # a file that is no database
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(sqlite3, "connect", connect_without_flushing)


# --- looking at files ---------------------------------------------------------------------------------------------


def snapshot(*roots: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return inode, size, mtime and ctime of everything in these folders (or of these files)."""
    found = {}
    for root in roots:
        for path in [root, *sorted(root.rglob("*"))]:
            status = path.lstat()
            found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


class Reads:
    """Records the ranges that `os.pread` and `os.preadv` read of each file, while it is installed."""

    def __init__(self, monkeypatch: Any) -> None:
        self.ranges: list[tuple[Path, int, int]] = []
        pread, preadv = os.pread, os.preadv

        def recording_pread(fd: int, count: int, offset: int) -> bytes:
            data = pread(fd, count, offset)
            self._add(fd, offset, len(data))
            return data

        def recording_preadv(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
            count = preadv(fd, buffers, offset, *flags)
            if not flags or len(buffers[0]) > 1:  # single bytes with flags are a look at the page cache
                self._add(fd, offset, count)
            return count

        monkeypatch.setattr(os, "pread", recording_pread)
        monkeypatch.setattr(os, "preadv", recording_preadv)

    def _add(self, fd: int, offset: int, count: int) -> None:
        self.ranges.append((Path(f"/proc/self/fd/{fd}").readlink(), offset, offset + count))

    def clear(self) -> None:
        """Forget what was recorded."""
        self.ranges.clear()

    def data_ranges(self, path: Path) -> list[tuple[int, int]]:
        """Return what was read of a safetensors file's data, from its first data byte on, in file order."""
        start = data_start(path)
        found = [(max(a, start) - start, b - start) for file, a, b in self.ranges if file == path and b > start]
        return sorted(found)


def data_start(path: Path) -> int:
    """Return the position of the first data byte of a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def tensor_range(path: Path, tensor: str) -> tuple[int, int]:
    """Return where a tensor's bytes start and stop, from the file's first data byte on."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    start, stop = header[tensor]["data_offsets"]
    return start, stop


def edit_tensor(path: Path, tensor: str, index: int, value: float) -> None:
    """Set one element of a tensor in a file, in place."""
    start, stop = tensor_range(path, tensor)
    with path.open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        dtype = as_dtype(header[tensor]["dtype"])
        position = data_start(path) + start + index * dtype.itemsize
        assert position + dtype.itemsize <= data_start(path) + stop
        file.seek(position)
        file.write(np.asarray(value).astype(dtype).tobytes())
