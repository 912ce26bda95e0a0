"""Small projects for tests: checkpoints and a Mergefile in a temporary folder, built through the Python API.

Expected tensors come from an evaluation of the Mergefile of its own: whole tensors at a time, plain numpy float32 (or
float64) arrays, multiply and add as separate steps in expert order, one rounding at the end by integer arithmetic. It
shares no code with mergepipe.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.lockfile.manifest import parse_manifest
from mergepipe.project import open_project
from support.checkpoints import as_dtype, header_name, raw_tensor, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mergepipe.lockfile.manifest_records import Manifest
    from mergepipe.project import Project
    from mergepipe.project.reports import BuildReport, OutputReport
    from support.checkpoints import RawTensor, Tensor

Array = NDArray[Any]
Recipe = dict[str, Any]

TINY = Geometry(block_elements=64)
"""Blocks of 64 elements: a tensor of a few hundred elements has several."""
MERGED = ("F64", "F32", "F16", "BF16")
_PRECISION = {"F16": (11, -14, 65504.0), "BF16": (8, -126, 3.3895313892515355e38), "F32": (24, -126, 2.0**128)}


class Messages:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.phases: list[str] = []

    def begin(self, phase: str, total_bytes: int) -> None:
        self.phases.append(phase)

    def advance(self, count: int) -> None: ...

    def end(self) -> None: ...

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

    def add_source(self, name: str, tensors: Mapping[str, Tensor], *, path: str | None = None, **options: Any) -> Path:
        """Write a checkpoint (anew) and declare it; ``options`` are those of `write_checkpoint`."""
        self.sources[name] = path or f"models/{name}"
        folder = self.root / self.sources[name]
        shutil.rmtree(folder, ignore_errors=True)
        write_checkpoint(folder, tensors, **options)
        self.save()
        return folder

    def set_output(self, name: str, recipe: Recipe) -> None:
        """Declare an output, or declare it anew."""
        self.outputs[name] = recipe
        self.save()

    def save(self) -> None:
        """Write the Mergefile."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.mergefile.write_text(mergefile_text(self.sources, self.outputs), encoding="utf-8")

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
        """Return the tensors that an output should have, evaluated from the sources' files."""
        checkpoints = {name: read_checkpoint(self.root / path) for name, path in self.sources.items()}
        return evaluate(self.outputs[output], checkpoints)

    def check(self, output: str, *, zero_signs: bool = True) -> None:
        """Assert that an output has the expected tensors, bit for bit."""
        assert_same_tensors(self.tensors(output), self.expected(output), zero_signs=zero_signs)

    def clone(self, root: Path) -> SmallProject:
        """Return a copy without cache, lock and outputs, in another folder."""
        other = SmallProject(root, self.geometry, dict(self.sources), dict(self.outputs))
        other.save()
        for path in self.sources.values():
            shutil.copytree(self.root / path, root / path, dirs_exist_ok=True)
        return other


def mergefile_text(sources: Mapping[str, str], outputs: Mapping[str, Recipe]) -> str:
    """Return a Mergefile."""
    lines = ["version = 1"]
    for name, path in sources.items():
        lines += [f"[sources.{_toml(name)}]", f"path = {_toml(path)}"]
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


# --- looking at files ---------------------------------------------------------------------------------------------


def snapshot(*roots: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return inode, size, mtime and ctime of everything in these folders (or of these files)."""
    found = {}
    for root in roots:
        for folder, folders, files in os.walk(root) if root.is_dir() else [(root.parent, [], [root.name])]:
            for path in [Path(folder), *(Path(folder, name) for name in (*folders, *files))]:
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


# --- the reference ------------------------------------------------------------------------------------------------


def assert_same_tensors(got: Mapping[str, Array], want: Mapping[str, Array], *, zero_signs: bool = True) -> None:
    """Assert equal names, dtypes, shapes and bits; NaN equals NaN, and zeros of either sign only where asked for."""
    assert sorted(got) == sorted(want)
    for name, expected in want.items():
        array = got[name]
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        if not same_bits(array, expected, zero_signs=zero_signs):
            differ = np.flatnonzero(array.reshape(-1) != expected.reshape(-1))
            raise AssertionError(f"{name}: differs at {differ[:8]}: {array.reshape(-1)[differ[:8]]} instead of "
                                 f"{expected.reshape(-1)[differ[:8]]}")  # fmt: skip


def same_bits(first: Array, second: Array, *, zero_signs: bool = True) -> bool:
    """Return whether two arrays of one dtype hold the same bits, whatever the payload of a NaN."""
    if header_name(first.dtype) not in MERGED:
        return first.tobytes() == second.tobytes()
    a, b = (np.array(array, dtype=np.float64).reshape(-1) for array in (first, second))
    both_nan = np.isnan(a) & np.isnan(b)
    signs = (np.signbit(a) == np.signbit(b)) if zero_signs else np.ones(a.shape, bool)
    return bool((both_nan | ((a == b) & signs)).all())


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 or float64 values once, to nearest even, to a dtype (header name)."""
    wide = np.array(values, dtype=np.float64)
    if dtype == "F64":
        return wide
    bits, smallest, largest = _PRECISION[dtype]
    exponent = np.maximum(np.frexp(wide)[1] - 1, smallest) - (bits - 1)
    with np.errstate(all="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(wide, -exponent)), exponent)  # rint rounds half to even
        limit = largest if dtype != "F32" else float(np.finfo(np.float32).max)
        rounded = np.where(np.abs(rounded) > limit, np.copysign(np.inf, rounded), rounded)
        rounded = np.where(np.isfinite(wide), rounded, wide)
        return np.asarray(rounded.astype(as_dtype(dtype)))  # exact: every value is one of the dtype's


def linear(arrays: Sequence[Array], weights: Sequence[float], *, normalize: bool = True) -> Array:
    """Return ``sum(w_i x_i) / sum(w_i)`` in the work dtype; an expert of weight 0 is no input."""
    work = work_dtype(arrays)
    factors = [work.type(weight) for weight in weights]
    divisor = _sum(factors, work) if normalize else work.type(1)
    with np.errstate(all="ignore"):
        total = np.zeros(arrays[0].shape, work)
        first = True
        for array, factor in zip(arrays, factors, strict=True):
            if factor != 0:
                term = np.multiply(array.astype(work), factor)
                total = term if first else np.add(total, term)
                first = False
        return total if divisor == 1 else np.divide(total, divisor)


def task_arithmetic(
    base: Array,
    experts: Sequence[Array | None],
    weights: Sequence[float],
    *,
    normalize: bool = False,
    scale: float = 1.0,
) -> Array:
    """Return ``base + scale * (sum(w_i (x_i - base)) / (1 or sum(w_i)))``; None is a delta of zero."""
    work = work_dtype([base, *(array for array in experts if array is not None)])
    factors = [work.type(weight) for weight in weights]
    divisor = _sum(factors, work) if normalize else work.type(1)
    wide = base.astype(work)
    with np.errstate(all="ignore"):
        total = np.zeros(base.shape, work)
        first = True
        for array, factor in zip(experts, factors, strict=True):
            if array is not None and factor != 0 and work.type(scale) != 0:
                term = np.multiply(np.subtract(array.astype(work), wide), factor)
                total = term if first else np.add(total, term)
                first = False
        total = total if divisor == 1 else np.divide(total, divisor)
        return np.add(wide, total if work.type(scale) == 1 else np.multiply(total, work.type(scale)))


def work_dtype(arrays: Iterable[Array]) -> np.dtype[Any]:
    """Return float64 where an input is float64, else float32."""
    return np.dtype(np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32)


def _sum(values: Sequence[Any], work: np.dtype[Any]) -> Any:
    total = work.type(0)
    for value in values:
        total = work.type(total + value)
    return total


def evaluate(recipe: Recipe, checkpoints: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return every tensor of an output, evaluated from its recipe and whole checkpoints."""
    experts = [{"source": e} if isinstance(e, str) else e for e in recipe["experts"]]
    base = recipe.get("base") if recipe["operator"] != "passthrough" else None
    definer = base or experts[0]["source"]
    layers = 1 + max((layer for name in checkpoints[definer] if (layer := layer_of(name)) is not None), default=-1)
    return {
        name: _evaluate_tensor(recipe, checkpoints, definer, experts, name, layers) for name in checkpoints[definer]
    }


def _evaluate_tensor(
    recipe: Recipe,
    checkpoints: Mapping[str, Mapping[str, Array]],
    definer: str,
    experts: Sequence[Recipe],
    name: str,
    layers: int,
) -> Array:
    own = checkpoints[definer][name]
    if header_name(own.dtype) not in MERGED:
        return own
    outer, columns = parameters(recipe, experts, name, layers)
    dtype = _header_dtype(recipe.get("write", {}).get("dtype")) or header_name(own.dtype)
    found = [checkpoints[expert["source"]].get(name) for expert in experts]
    rows = min(len(array) if array.ndim else 1 for array in (own, *(f for f in found if f is not None)))
    cut = [array if array is None or not array.ndim else array[:rows] for array in found]
    mine = own if not own.ndim else own[:rows]
    match recipe["operator"]:
        case "linear":
            filled = [mine if array is None else array for array in cut]
            merged = linear(filled, [c["weight"] for c in columns], normalize=outer["normalize"])
        case "task_arithmetic":
            merged = task_arithmetic(
                mine, cut, [c["weight"] for c in columns], normalize=outer["normalize"], scale=outer["lambda"]
            )
        case "passthrough":
            merged = linear([mine], [columns[0]["scale"]], normalize=False)
    rounded = round_to(merged, dtype)
    return rounded if not own.ndim else np.concatenate([rounded, round_to(own[rows:], dtype)])


_DEFAULTS: Mapping[str, tuple[Recipe, Recipe]] = {
    "linear": ({"normalize": True}, {"weight": 1.0}),
    "task_arithmetic": ({"normalize": False, "lambda": 1.0}, {"weight": 1.0}),
    "passthrough": ({}, {"scale": 1.0}),
}


def parameters(recipe: Recipe, experts: Sequence[Recipe], name: str, layers: int) -> tuple[Recipe, list[Recipe]]:
    """Return the parameters of a tensor: those of the output, and those of each expert."""
    outer, column = _DEFAULTS[recipe["operator"]]
    given = recipe.get("params", {})
    outer = outer | given
    columns = [column | given | expert for expert in experts]
    layer = layer_of(name)
    for rule in recipe.get("rules", ()):
        globs = rule.get("match", ["*"])
        first, _, stop = rule.get("layers", "").partition("..")
        if not any(fnmatch.fnmatchcase(name, glob) for glob in ([globs] if isinstance(globs, str) else globs)):
            continue
        if stop and (layer is None or not int(first) <= layer < int(stop)):
            continue
        general = rule.get("params", {})
        outer = outer | general
        special = rule.get("experts", {})
        columns = [c | general | special.get(c["source"], {}) for c in columns]
    outer = {key: _at(value, layer, layers) for key, value in outer.items()}
    return outer, [{key: _at(value, layer, layers) for key, value in c.items()} for c in columns]


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor of a small test model: ``layers.N`` somewhere in its name."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _at(value: Any, layer: int | None, layers: int) -> Any:
    if not isinstance(value, list):
        return value
    if layer is None:
        return value[0]
    position = (layer / (layers - 1) if layers > 1 else 1.0) * (len(value) - 1)
    return float(np.interp(position, range(len(value)), value))


def _header_dtype(name: str | None) -> str | None:
    return None if name is None else header_name(name)
