"""What a project's folder holds before and after a build, apart from values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.cases.tensors import checkpoint_problems

CACHE = ".mergecache"
LOCK = "Mergefile.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A project at one moment.

    Attributes
    ----------
    output
        Digest of each file of the output folder by relative path; None where there is no folder.
    lock
        The bytes of the lockfile, None where there is none.
    entries
        Every path of the project outside its cache, its output and its lock.
    """

    output: Mapping[str, str] | None
    lock: bytes | None
    entries: frozenset[str]


def take_snapshot(root: Path, out: Path) -> Snapshot:
    """Return what lies in the project ``root`` with the output folder ``out``."""
    lock = root / LOCK
    return Snapshot(
        output=_digests(out) if out.is_dir() else None,
        lock=lock.read_bytes() if lock.is_file() else None,
        entries=frozenset(_entries(root, out)),
    )


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _entries(root: Path, out: Path) -> Iterator[str]:
    skipped = {root / CACHE, out, root / LOCK}
    for path in root.rglob("*"):
        if not any(path == skip or skip in path.parents for skip in skipped) and path not in out.parents:
            yield str(path.relative_to(root))


def litter(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield each path that a build left in the project beside its output, its lock and its cache."""
    yield from (f"the build left `{path}` behind" for path in sorted(after.entries - before.entries))


def kept_output(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what a failed build did to an output that was there before it."""
    if before.output is None or after.output == before.output:
        return
    if after.output is None:
        yield "the earlier output is gone"
    else:
        changed = sorted(dict(before.output.items() ^ after.output.items()))
        yield f"the build failed and changed the earlier output: {changed}"


def kept_lock(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield whether the lockfile is other than it was."""
    if before.lock != after.lock:
        was, now = ("absent" if lock is None else f"{len(lock)} bytes" for lock in (before.lock, after.lock))
        yield f"`{LOCK}` was changed: {was} before, {now} after"


def partial_output(out: Path) -> Iterator[str]:
    """Yield what makes an output folder other than absent or complete."""
    if out.is_symlink() or out.exists():
        yield from checkpoint_problems(out)
