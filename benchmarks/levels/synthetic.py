"""Builds with a budget of 10% in levels next to full reads, on a synthetic family of real shapes.

Every build is a process of its own, and full reads and budgeted builds take turns. "Cold" runs start with an empty page
cache, where this process may empty it; before "warm" ones all sources and codes are read.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.budgets.projects import write_mergefile
from benchmarks.families import SHAPES, write_family
from benchmarks.levels.family import load, norm
from benchmarks.levels.results import Json
from benchmarks.measure import BUILD, Run, drop_page_cache, fill_page_cache, run

SHAPE = "qwen2.5-0.5b"
WEIGHT = 0.3
BUDGETS = (5, 10, 25, 50)
"""In percent of the experts' bytes."""
TIMED = 10
_PRISTINE = "measured.db"
_PLAN = 'import mergepipe; mergepipe.open("Mergefile.toml").plan()'


class Bench:
    """A family and a project that merges it, with a budget or without."""

    def __init__(self, work: Path, experts: int) -> None:
        self.project = work / "project"
        self.measured = work / "measured"
        self.family = work / SHAPE
        write_family(SHAPES[SHAPE], self.family, experts)
        self.experts = [f"e{number}" for number in range(1, experts + 1)]
        self.sources = {name: self.family / name for name in ("base", *self.experts)}

    def table(self, percent: int | None, precision: str = "levels", dtype: str = "bfloat16") -> str:
        """Return the table of the output."""
        listed = ", ".join(f'{{ source = "{name}", weight = {WEIGHT} }}' for name in self.experts)
        limit = f'budget = {{ expert_reads = "{percent}%", precision = "{precision}" }}\n'
        own = "" if percent is None else limit
        return (
            f'operator = "task_arithmetic"\nbase = "base"\nexperts = [{listed}]\n{own}write = {{ dtype = "{dtype}" }}\n'
        )

    def index(self, precision: str) -> Run:
        """Take the statistics of a budget in an empty cache, codes among them for levels; keep the cache."""
        self._clear()
        write_mergefile(self.project, self.sources, {"merged": self.table(TIMED, precision)})
        drop_page_cache()
        found = run(_PLAN, [], self.project)
        kept = self.measured.with_name(f"measured-{precision}")
        shutil.rmtree(kept, ignore_errors=True)
        (self.project / ".mergecache").rename(kept)
        shutil.copyfile(kept / "catalog.db", kept / _PRISTINE)
        return found

    def build(self, percent: int | None, precision: str = "levels", *, cold: bool, dtype: str = "bfloat16") -> Run:
        """Build in a cache that knows the sources' content and, with a budget, what it is planned from; no results."""
        cache = self.measured.with_name(f"measured-{precision}")
        if not cold:
            fill_page_cache(self._inputs(cache))
        self._clear()
        write_mergefile(self.project, self.sources, {"merged": self.table(percent, precision, dtype)})
        shutil.copyfile(cache / _PRISTINE, cache / "catalog.db")  # it knows no results
        cache.rename(self.project / ".mergecache")
        try:
            if cold:
                drop_page_cache()
            return run(BUILD, [], self.project)
        finally:
            (self.project / ".mergecache").rename(cache)
            shutil.rmtree(cache / "packs", ignore_errors=True)

    def _inputs(self, cache: Path) -> list[Path]:
        """Return the files that builds read: the sources, and the codes in a cache."""
        weights = [path for folder in self.sources.values() for path in folder.glob("*.safetensors")]
        return sorted([*weights, *cache.glob("progressive/*.planes")])

    def _clear(self) -> None:
        for left in (".mergecache", "build"):
            shutil.rmtree(self.project / left, ignore_errors=True)
        (self.project / "Mergefile.lock").unlink(missing_ok=True)


def scenarios(bench: Bench) -> dict[str, Callable[[], Run]]:
    """Return what is measured, in the order in which each round runs it."""
    found: dict[str, Callable[[], Run]] = {}
    for name, cold in (("cold", True), ("warm", False)):
        found[f"full read, {name}"] = lambda cold=cold: bench.build(None, cold=cold)
        found[f"{TIMED}% in levels, {name}"] = lambda cold=cold: bench.build(TIMED, cold=cold)
        found[f"{TIMED}% in blocks, {name}"] = lambda cold=cold: bench.build(TIMED, "blocks", cold=cold)
    return found


def measure(work: Path, experts: int, rounds: int) -> Json:
    """Return the figures of builds in turn, what the index pass costs, and distances."""
    bench = Bench(work, experts)
    indexes = {precision: bench.index(precision) for precision in ("blocks", "levels")}
    codes = sum(path.stat().st_size for path in (work / "measured-levels" / "progressive").iterdir())
    results: dict[str, list[Run]] = {}
    for number in range(rounds):
        for name, scenario in scenarios(bench).items():
            results.setdefault(name, []).append(scenario())
            print(f"round {number + 1}, {name}: {results[name][-1].wall:.2f} s", flush=True)
    return {
        "shape": SHAPE,
        "experts": experts,
        "weight": WEIGHT,
        "rounds": rounds,
        "page_cache_emptied": drop_page_cache(),
        "code_bytes": codes,
        "indexes": {name: {"wall": one.wall, "cpu": one.cpu, "rss": one.rss} for name, one in indexes.items()},
        "builds": {name: _figures(runs, results[f"full read, {name[-4:]}"]) for name, runs in results.items()},
        "distances": _distances(bench),
    }


def _figures(runs: list[Run], full: list[Run]) -> Json:
    """Return medians; the ratio is to the full read of the same round, so that a slow minute is in both."""
    report = (runs[-1].result or {})["merged"]
    return {
        "wall": statistics.median(one.wall for one in runs),
        "least": min(one.wall for one in runs),
        "most": max(one.wall for one in runs),
        "cpu": statistics.median(one.cpu for one in runs),
        "rss": max(one.rss for one in runs),
        "read": runs[-1].read,
        "expert_bytes": report["expert_bytes"],
        "to_full": statistics.median(one.wall / other.wall for one, other in zip(runs, full, strict=True)),
    }


def _distances(bench: Bench) -> Json:
    """Return how far merges are from the full read, in float32, and the bounds; as shares of the update."""
    bench.build(None, cold=False, dtype="float32")
    output = bench.project / "build/merged"
    kept = output.with_name("full")
    output.rename(kept)
    full, base = load(kept), load(bench.family / "base")
    aside = bench.project.with_name("full")
    shutil.rmtree(aside, ignore_errors=True)
    kept.rename(aside)
    update, found = norm(full, base), {}
    del base
    for precision in ("levels", "blocks"):
        for percent in BUDGETS:
            report = (bench.build(percent, precision, cold=False, dtype="float32").result or {})["merged"]
            found[f"{precision}-{percent}"] = {
                "bytes": report["expert_bytes"]["read"],
                "full": report["expert_bytes"]["full"],
                "deviation": norm(load(output), full) / update,
                "bound": report["bound"]["absolute"] / update,
            }
    shutil.rmtree(aside)
    return found
