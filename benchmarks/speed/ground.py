"""Where the benchmark runs: a family of checkpoints, a folder to work in, and how each participant is started there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mergepipe
from benchmarks.families import SHAPES, write_family
from benchmarks.measure import fill_page_cache
from benchmarks.speed import mergekit
from benchmarks.speed.merges import Merge, mergefile
from benchmarks.speed.process import CommandError, Measured, empty_page_cache, measure
from benchmarks.speed.rows import COLD
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.speeds import recorded_seconds
from mergepipe.checkpoints.geometry import GEOMETRY_1

Figures = dict[str, Any]

FLOOR_PROGRAM = Path(__file__).with_name("floor.py")


@dataclasses.dataclass(slots=True, kw_only=True)
class Ground:
    """A folder with families and what is being merged.

    Attributes
    ----------
    python
        The Python of an environment with mergekit; None leaves mergekit out.
    flags
        mergekit's best flags.
    emptied
        How the page cache was emptied: ``all``, ``files``, or None while it was not.
    """

    folder: Path
    shape: str
    python: str | None = None
    flags: str = mergekit.SPARING
    emptied: str | None = None

    @property
    def family(self) -> Path:
        """Return the folder of the family."""
        return self.folder / "families" / self.shape

    @property
    def work(self) -> Path:
        """Return the folder of what is made; it may go at any time."""
        return self.folder / "work"

    @property
    def project(self) -> Path:
        """Return the folder of mergepipe's project."""
        return self.work / "mergepipe"

    @property
    def weight_bytes(self) -> int:
        """Return how many bytes of weights a checkpoint has."""
        return SHAPES[self.shape].weight_bytes

    def prepare(self, experts: int) -> None:
        """Write the family, as far as it is not there."""
        write_family(SHAPES[self.shape], self.family, experts)
        self.work.mkdir(parents=True, exist_ok=True)

    def sources(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the folders of sources."""
        return {name: self.family / name for name in names}

    def clear(self) -> None:
        """Remove everything that was made."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def settle(self, mode: str, files: Sequence[Path]) -> None:
        """Bring the page cache into the state of a mode; nothing waits to be written then."""
        if mode == COLD:
            self.emptied = empty_page_cache(files)
        else:
            fill_page_cache(files)

    # --- participants ---------------------------------------------------------------------------------------------

    def floor(self, files: Sequence[Path], mode: str) -> Figures:
        """Read files and write as many bytes as a checkpoint's weights have, nothing else."""
        threads, target = len(os.sched_getaffinity(0)), self.work / "floor.bin"
        command = [sys.executable, "-S", "-E", str(FLOOR_PROGRAM), str(threads), str(target), str(self.weight_bytes)]
        self.settle(mode, files)
        found = measure([*command, *map(str, files)], self.work)
        return _figures(found) | {"flush": json.loads(found.output)["flush"]}

    def mergekit(self, merge: Merge, mode: str, flags: str, dtype: str = mergekit.DTYPE) -> Figures:
        """Merge with mergekit."""
        assert self.python is not None, "whoever runs mergekit says where it is"
        sources, output = self.sources(merge.inputs), self.work / "mergekit"
        mergekit.write_config(merge, sources, self.work / "mergekit.yaml", dtype)
        command, variables = mergekit.command(self.python, self.work / "mergekit.yaml", output, flags)
        shutil.rmtree(output, ignore_errors=True)
        self.settle(mode, weight_files(sources.values()))
        found = measure(command, self.work, variables)
        made = sum(path.stat().st_size for path in output.glob("*.safetensors"))
        if made < self.weight_bytes:
            raise CommandError(f"mergekit wrote {made} bytes of weights:\n{found.output[-2000:]}")
        shutil.rmtree(output)
        return _figures(found)

    def fresh(
        self,
        outputs: Mapping[str, Merge],
        mode: str,
        *,
        sources: Mapping[str, Path] | None = None,
        cache: Path | None = None,
    ) -> Figures:
        """Build with mergepipe from nothing, or with a copy of a cache.

        Parameters
        ----------
        sources
            Other folders than the family's, by name.
        """
        shutil.rmtree(self.project, ignore_errors=True)
        self.write_mergefile(outputs, sources)
        if cache is not None:
            shutil.copytree(cache, self.project / ".mergecache")
        self.settle(mode, weight_files(self._sources(outputs, sources).values()))
        return self.build()

    def write_mergefile(self, outputs: Mapping[str, Merge], sources: Mapping[str, Path] | None = None) -> None:
        """Write the project's Mergefile; what was built of another one stays."""
        self.project.mkdir(parents=True, exist_ok=True)
        text = mergefile(self._sources(outputs, sources), outputs)
        (self.project / "Mergefile.toml").write_text(text, encoding="utf-8")

    def _sources(self, outputs: Mapping[str, Merge], other: Mapping[str, Path] | None) -> dict[str, Path]:
        return self.sources(name for one in outputs.values() for name in one.inputs) | dict(other or {})

    def build(self) -> Figures:
        """Build the project as it is, and say what was read, computed and measured."""
        before = self._speeds()
        os.sync()
        found = self.mergepipe("build")
        reports: Mapping[str, Mapping[str, Any]] = json.loads(found.output)["outputs"]
        last = list(reports.values())[-1]
        after = {kind: speed for kind, speed in self._speeds().items() if kind.startswith("measure ")}
        return _figures(found) | {
            "blocks": sum(report["blocks"]["computed"] for report in reports.values()),
            "expert_bytes": sum(report["expert_bytes"]["read"] for report in reports.values()),
            "base_bytes": sum(report["base_bytes_read"] for report in reports.values()),
            "index_bytes": sum(report["index_bytes_read"] for report in reports.values()),
            "statistics": any(before.get(kind) != speed for kind, speed in after.items()),
            "digest": last["digest"],
        }

    def mergepipe(self, *arguments: str) -> Measured:
        """Run a command of mergepipe in the project."""
        package = str(Path(mergepipe.__file__).parents[1])  # this one, wherever another is installed
        here = {"PYTHONPATH": package, "MERGEPIPE_CACHE_DIR": str(self.project / ".mergecache")}
        return measure([sys.executable, "-m", "mergepipe", "--json", *arguments], self.project, here)

    def _speeds(self) -> dict[str, float]:
        """Return what the cache knows of how long each kind of work takes: a build that took statistics changed it."""
        layout = CacheLayout(self.project / ".mergecache")
        with contextlib.closing(Catalog(layout, GEOMETRY_1.block_elements, create=False)) as catalog:
            return recorded_seconds(catalog)

    def check_hashed(self) -> None:
        """Check that the lock has a digest of every source and output, and that the outputs' bytes have theirs.

        Raises
        ------
        CommandError
            If not: then the benchmark measured something else than it says.
        """
        lock = tomllib.loads((self.project / "Mergefile.lock").read_text(encoding="utf-8"))
        for part in ("sources", "outputs"):
            for name, entry in lock[part].items():
                if not str(entry.get("digest", "")).startswith("b3:"):
                    raise CommandError(f"the lock has no digest of {part}.{name}")
        self.mergepipe("verify")


def weight_files(folders: Iterable[Path]) -> list[Path]:
    """Return the weight files of checkpoints."""
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def _figures(found: Measured) -> Figures:
    figures = dataclasses.asdict(found)
    del figures["output"]
    return figures | {"load": round(os.getloadavg()[0], 2)}
