"""Replays in tests: from a manifest that stands alone, into an empty directory."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

from mergepipe.lockfile.manifest import parse_manifest
from mergepipe.project.replay import ReplayOptions, replay
from mergepipe.project.replay_plan import Places
from support.projects import SmallProject

if TYPE_CHECKING:
    from pathlib import Path

    from mergepipe.lockfile.manifest_records import Manifest
    from mergepipe.project.replay_report import ReplayReport

MANIFEST = "mergepipe.json"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(data: bytes, folder: Path) -> Manifest:
    """Return a manifest without what was measured."""
    manifest = parse_manifest(data, folder / MANIFEST)
    return dataclasses.replace(manifest, run=dataclasses.replace(manifest.run, **dict.fromkeys(_COSTS, 0)))


_COSTS = ("expert_bytes_read", "base_bytes_read", "index_bytes_read", "bytes_written")


def leave_sources_alone(project: SmallProject) -> None:
    """Remove all of a project but its sources and its outputs."""
    shutil.rmtree(project.cache)
    project.mergefile.unlink()
    project.lock.unlink()


def alone(project: SmallProject, output: str, root: Path) -> Path:
    """Put an output's manifest, and nothing else, into a new directory; return its path."""
    root.mkdir(parents=True)
    return shutil.copy(project.folder(output) / MANIFEST, root / MANIFEST)


def replay_alone(project: SmallProject, output: str, root: Path, **places: Any) -> ReplayReport:
    """Replay an output from a copy of its manifest into ``root / "out"``."""
    where = {"base_dir": project.root} | places
    options = ReplayOptions(out=root / "out", workers=2, geometry=project.geometry)
    return replay(alone(project, output, root), Places(**where), options)


def assert_replays(project: SmallProject, output: str, root: Path, **places: Any) -> ReplayReport:
    """Replay an output and assert that every byte of every file is the same, but for the costs in the manifest."""
    report = replay_alone(project, output, root, **places)
    before, after = contents(project.folder(output)), contents(root / "out")
    assert list(before) != []
    assert sorted(before) == sorted(after)
    assert [name for name in before if name != MANIFEST and before[name] != after[name]] == []
    first, second = (record(files[MANIFEST], root) for files in (before, after))
    assert dataclasses.replace(first, run=second.run) == second
    assert sorted(path.name for path in root.iterdir()) == [MANIFEST, "out"]
    return report
