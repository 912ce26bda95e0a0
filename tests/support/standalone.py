"""Progressive checkpoints in tests: packing experts of a project, and another machine that has no more than these."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from mergepipe.checkpoints.standalone import RECORD
from mergepipe.digest import content_digest, format_digest
from mergepipe.project.pack import PackOptions, PackReport, pack
from mergepipe.reporting import SilentReporter
from support.projects import SmallProject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from mergepipe.checkpoints.geometry import Geometry


def packed(source: Path, base: Path, out: Path, geometry: Geometry, **options: object) -> PackReport:
    """Pack an expert."""
    return pack(str(source), str(base), out, PackOptions(geometry=geometry, **options), SilentReporter())  # type: ignore[arg-type]


def other_machine(project: SmallProject, root: Path, experts: Iterable[str]) -> SmallProject:
    """Return the project on another machine: these experts are there as progressive checkpoints alone."""
    experts = list(experts)
    found = SmallProject(root, project.geometry, adapters=dict(project.adapters))
    for name, path in project.sources.items():
        source, target = project.root / path, root / path
        if name in experts:
            packed(source, project.root / project.sources["base"], target, project.geometry)
            found.progressive.add(name)
        else:
            shutil.copytree(source, target)
        found.sources[name] = path
    found.outputs = {name: dict(recipe) for name, recipe in project.outputs.items()}
    found.save()
    return found


def resealed(folder: Path, change: Callable[[str], str]) -> None:
    """Change the record of a progressive checkpoint, and seal it again: what somebody hostile would do."""
    path = folder / RECORD
    text = change(path.read_text())
    body = text[: text.rindex('\n"seal"')]
    path.write_text(f'{body}\n"seal":"{format_digest(content_digest(body.encode()))}"}}\n')


def planes(folder: Path) -> list[Path]:
    """Return the files of the codes of a progressive checkpoint."""
    return sorted((folder / "tensors").glob("*.planes"))


def spoil(path: Path, at: int) -> None:
    """Flip a byte of a file, whatever its mode, at a place from its start, or from its end."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def lock_without_places(project: SmallProject) -> str:
    """Return the lock without what differs with a progressive checkpoint: where it lies, and bounds."""
    text = re.sub(r"^(path|progressive) = .*\n", "", project.lock.read_text(), flags=re.MULTILINE)
    return re.sub(r"^bound\..*\n", "", text, flags=re.MULTILINE)
