"""A toy that merges as mergepipe promises to, so that the harness can be tested without mergepipe.

``fake_tool.py [--fault NAME] build [--json] [--locked]``: linear and task arithmetic over small checkpoints, with a
cache, a lock and atomic publishing in their simplest form. A fault is one way to break a promise.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.cases.tensors import Tensor, read_checkpoint, read_safetensors, write_safetensors

FAULTS = (
    "traceback", "silent", "shifted", "litter", "stale", "trusting", "recompute", "half", "touch_lock",
    "lose_notes",
)  # fmt: skip
_STORED: Mapping[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
}


class ToolError(Exception):
    """What the toy reports as ``error: ...``, with an exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def main(argv: list[str]) -> int:
    """Run the command line."""
    fault = argv[1] if argv[0] == "--fault" else ""
    flags = argv[2:] if fault else argv
    Path(".mergecache/packs").mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(".mergecache/lock"):
            return _build(fault, flags)
    except ToolError as error:
        return _report(fault, str(error), error.code)
    except OSError as error:
        return _report(fault, f"cannot write `{error.filename}`: {error.strerror}", 1)


def _report(fault: str, message: str, code: int) -> int:
    if fault == "traceback":
        raise RuntimeError(message)
    if fault == "half":
        Path("out").mkdir(exist_ok=True)
        Path("out/model.safetensors").write_bytes(b"half")
    if fault == "touch_lock":
        Path("Mergefile.lock").write_text("other\n", encoding="utf-8")
    if fault != "silent":
        sys.stderr.write(f"error: {message}\n")
    return code


def _build(fault: str, flags: list[str]) -> int:
    text = Path("Mergefile.toml").read_text(encoding="utf-8")
    mergefile = tomllib.loads(text)
    output = mergefile["outputs"]["out"]
    paths = {name: Path(source["path"]) for name, source in mergefile["sources"].items()}
    before = {name: _identity(path) for name, path in paths.items()}
    checkpoints = {name: _read(path) for name, path in paths.items()}
    keys = before if fault == "stale" else {name: _digest(tensors) for name, tensors in checkpoints.items()}
    key = hashlib.sha256(json.dumps([output, keys], sort_keys=True).encode()).hexdigest()
    lock = _lock_text(key, keys)
    if "--locked" in flags:
        _check_lock(lock)
    pack, cached = _pack(fault, key, output, checkpoints)
    for name, path in paths.items():
        if _identity(path) != before[name]:
            pack.unlink()
            raise ToolError(f"`{path}/model.safetensors` changed while it was read", 1)
    _publish(fault, pack, Path(output["path"]), paths.get(output.get("base", "")))
    if not Path("Mergefile.lock").exists() or _normal(Path("Mergefile.lock").read_bytes()) != lock:
        Path("Mergefile.lock").write_text(lock, encoding="utf-8")
    computed = 0 if cached and fault != "recompute" else 1
    report = {"outputs": {"out": {"blocks": {"total": 1, "computed": computed}}}}
    sys.stdout.write(json.dumps(report) if "--json" in flags else "built out\n")
    return 0


def _identity(path: Path) -> list[int]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.exists()]
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise ToolError(f"there is no `{path}`")
    return read_checkpoint(path) if path.is_dir() else read_safetensors(path)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


def _lock_text(key: str, digests: Mapping[str, Any]) -> str:
    sources = (f'\n[sources.{name}]\ndigest = "{digest}"\nkind = "plain"\n' for name, digest in digests.items())
    return f'version = 1\ngeometry = 1\n\n[outputs.out]\naction = "{key}"\noperator = "toy"\n' + "".join(sources)


def _normal(lock: bytes) -> str:
    return lock.decode().replace("\r\n", "\n")


def _check_lock(lock: str) -> None:
    path = Path("Mergefile.lock")
    if not path.exists():
        raise ToolError("there is no `Mergefile.lock`", 3)
    old = _normal(path.read_bytes())
    if "<<<<<<<" in old:
        raise ToolError("`Mergefile.lock` holds conflict markers")
    if tomllib.loads(old).get("version") != 1:
        raise ToolError("`Mergefile.lock` is of a newer version")
    if tomllib.loads(old) != tomllib.loads(lock):
        names = [n for n, v in tomllib.loads(lock)["sources"].items() if tomllib.loads(old)["sources"].get(n) != v]
        raise ToolError(f"`Mergefile.lock` differs: {names}", 3)


def _pack(
    fault: str, key: str, output: Mapping[str, Any], checkpoints: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Path, bool]:
    pack, seal = Path(f".mergecache/packs/{key}"), Path(f".mergecache/{key}.seal")
    if pack.exists() and seal.exists():
        whole = seal.read_text(encoding="utf-8") == hashlib.sha256(pack.read_bytes()).hexdigest()
        if whole or fault == "trusting":
            return pack, True
    merged = dict(_merged(fault, output, checkpoints))
    partial = Path(".mergecache/partial")
    write_safetensors(partial, merged)
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    partial.replace(pack)
    seal.write_text(digest, encoding="utf-8")
    return pack, False


def _merged(
    fault: str, output: Mapping[str, Any], checkpoints: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    experts = [{"source": e} if isinstance(e, str) else e for e in output["experts"]]
    deltas = output["operator"] == "task_arithmetic"
    base = checkpoints[output["base"]] if output.get("base") else checkpoints[experts[0]["source"]]
    dtype, stored = _STORED[output.get("write", {}).get("dtype", "float32")]
    for name, tensor in base.items():
        total = tensor.array() if deltas else np.zeros(tensor.shape)
        for expert in experts:
            if name not in checkpoints[expert["source"]]:
                raise ToolError(f"`{name}` is not in `{expert['source']}`")
            value = checkpoints[expert["source"]][name].array()
            total = total + expert.get("weight", 1.0) * (value - tensor.array() if deltas else value)
        total = total + (1.0 if fault == "shifted" else 0.0)
        yield name, Tensor(dtype=dtype, shape=tensor.shape, data=total.astype(stored).tobytes())


def _publish(fault: str, pack: Path, target: Path, base: Path | None) -> None:
    staging = target.with_name(f".{target.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _fill(fault, staging, pack, target, base)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    if fault == "litter":
        Path("leftover.tmp").write_bytes(b"")


def _fill(fault: str, staging: Path, pack: Path, target: Path, base: Path | None) -> None:
    if fault == "trusting":
        os.link(pack, staging / "model.safetensors")
    else:
        shutil.copyfile(pack, staging / "model.safetensors")
    if base is not None and (base / "config.json").exists():
        shutil.copyfile(base / "config.json", staging / "config.json")
    notes = [p for p in target.glob("*.txt") if fault != "lose_notes"] if target.exists() else []
    for path in notes:
        shutil.copyfile(path, staging / path.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
