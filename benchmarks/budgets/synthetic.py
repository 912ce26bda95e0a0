"""Builds with a budget of 10% next to full reads, on a synthetic family of real shapes: bytes, time, memory, distance.

Every build is a process of its own; full reads and budgeted builds take turns, so that whatever else the machine does
is shared among them. "Cold" runs start with an empty page cache, where this process may empty it.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import mergepipe
from benchmarks.budgets.choices import at_random, by_hash, fill
from benchmarks.budgets.projects import ChoosingProject, write_mergefile
from benchmarks.budgets.results import Json
from benchmarks.families import SHAPES, write_family
from benchmarks.measure import BUILD, Run, drop_page_cache, fill_page_cache, run

SHAPE = "qwen2.5-0.5b"
BUDGET = "10%"
WEIGHT = 0.3
SEEDS = 3

_PLAN = 'import mergepipe; mergepipe.open("Mergefile.toml").plan()'


class Bench:
    """A family and a project that merges it, with a budget or without."""

    def __init__(self, work: Path, experts: int) -> None:
        self.project = work / "project"
        self.measured = work / "measured"
        family = work / SHAPE
        write_family(SHAPES[SHAPE], family, experts)
        self.experts = [f"e{number}" for number in range(1, experts + 1)]
        self.sources = {name: family / name for name in ("base", *self.experts)}

    def table(self, budget: str | None, dtype: str = "bfloat16", stats: str = "full") -> str:
        """Return the table of the output."""
        listed = ", ".join(f'{{ source = "{name}", weight = {WEIGHT} }}' for name in self.experts)
        limit = f'budget = {{ expert_reads = "{budget}", stats = "{stats}", precision = "blocks" }}\n'
        own = "" if budget is None else limit
        return (
            f'operator = "task_arithmetic"\nbase = "base"\nexperts = [{listed}]\n{own}write = {{ dtype = "{dtype}" }}\n'
        )

    def prepare(self) -> None:
        """Measure the deltas once, and keep the cache that knows them and has no results."""
        self._clear()
        write_mergefile(self.project, self.sources, {"merged": self.table(BUDGET)})
        run(_PLAN, [], self.project)
        shutil.rmtree(self.measured, ignore_errors=True)
        shutil.copytree(self.project / ".mergecache", self.measured)

    def build(self, budget: str | None, *, known: bool, cold: bool) -> Run:
        """Build as a process of its own.

        Parameters
        ----------
        budget
            None for a full read.
        known
            Whether the cache knows the sources and the lengths of their deltas; it never has results.
        cold
            Whether the page cache is emptied before; otherwise all sources are read.
        """
        if not cold:  # before the last build is removed, whose memory a virtual machine soon gives back to its host
            fill_page_cache(path for folder in self.sources.values() for path in sorted(folder.glob("*.safetensors")))
        self._clear()
        write_mergefile(self.project, self.sources, {"merged": self.table(budget)})
        if known:
            shutil.copytree(self.measured, self.project / ".mergecache")
        if cold:
            drop_page_cache()
        return run(BUILD, [], self.project)

    def _clear(self) -> None:
        for left in (".mergecache", "build"):
            shutil.rmtree(self.project / left, ignore_errors=True)
        (self.project / "Mergefile.lock").unlink(missing_ok=True)

    def distances(self, dtype: str) -> Json:
        """Return how far merges with the budget are from the full read, by what is read: ours and other choices."""
        self._clear()
        path = write_mergefile(self.project, self.sources, {"merged": self.table(None, dtype)})
        shutil.copytree(self.measured, self.project / ".mergecache")
        project = ChoosingProject(mergepipe.open(path))
        reading = project.reading("merged")
        order, limit = reading.order, reading.expert_bytes * int(BUDGET.rstrip("%")) // 100
        ours = order.cut(order.fitting(limit))
        others = {"hash": by_hash(order, reading.tensors)}
        others |= {f"random {seed}": at_random(order, seed) for seed in range(SEEDS)}
        chosen = {"gain": ours} | {name: fill(order, items, limit) for name, items in others.items()}
        found = dict(zip(chosen, project.compared(reading, list(chosen.values())).deviations, strict=True))
        update = math.sqrt(found["gain"].update_squares)
        output = math.sqrt(found["gain"].output_squares)
        figures = {
            name: {
                "bytes": selection.planned_bytes,
                "to_update": math.sqrt(found[name].squares) / update,
                "to_output": math.sqrt(found[name].squares) / output,
                "bound_to_update": (selection.bound.absolute or 0.0) / update,
                "bound_to_output": (selection.bound.absolute or 0.0) / output,
            }
            for name, selection in chosen.items()
        }
        return {"update_to_output": update / output, "choices": figures}


def scenarios(bench: Bench) -> dict[str, Callable[[], Run]]:
    """Return what is measured, in the order in which each round runs it."""
    return {
        "full read, cold": lambda: bench.build(None, known=False, cold=True),
        "10%, nothing measured, cold": lambda: bench.build(BUDGET, known=False, cold=True),
        "10%, deltas measured, cold": lambda: bench.build(BUDGET, known=True, cold=True),
        "full read, warm": lambda: bench.build(None, known=False, cold=False),
        "10%, deltas measured, warm": lambda: bench.build(BUDGET, known=True, cold=False),
    }


def measure(work: Path, experts: int, rounds: int) -> Json:
    """Return the figures of builds in turn, and the distances."""
    bench = Bench(work, experts)
    bench.prepare()
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
        "builds": {name: _figures(runs, results[against(name)]) for name, runs in results.items()},
        "distances": {dtype: bench.distances(dtype) for dtype in ("bfloat16", "float32")},
    }


def against(name: str) -> str:
    """Return the full read that a build is compared with: the one of the same round with the same page cache."""
    return "full read, cold" if name.endswith("cold") else "full read, warm"


def _figures(runs: Sequence[Run], full: Sequence[Run]) -> Json:
    """Return medians; the speed-up is that of the same round, so that a slow minute of the machine is in both."""
    walls = [one.wall for one in runs]
    report = (runs[-1].result or {})["merged"]
    return {
        "wall": statistics.median(walls),
        "wall_range": [min(walls), max(walls)],
        "speedup": statistics.median(b.wall / a.wall for a, b in zip(runs, full, strict=True)),
        "cpu": statistics.median(one.cpu for one in runs),
        "rss": max(one.rss for one in runs),
        "process_read": statistics.median(one.read for one in runs),
        "expert_bytes": report["expert_bytes"],
        "base_bytes": report["base_bytes_read"],
        "index_bytes": report["index_bytes_read"],
        "blocks": report["blocks"],
        "bound": report["bound"],
    }
