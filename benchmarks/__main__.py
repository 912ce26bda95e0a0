"""Time builds against the I/O floor of this machine, in turn, and write the table into docs/benchmarks.md.

    python -m benchmarks                          # 0.5B shapes, 4 experts, 5 rounds
    python -m benchmarks --shape tiny --rounds 2  # a quick look
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.families import SHAPES, write_family
from benchmarks.measure import BUILD, FLOOR, Run, drop_page_cache, machine, run
from mergepipe.units import format_bytes

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
EDITED = "model.layers.1.mlp.down_proj.weight"


def mergefile(family: Path, experts: int, ruled_weight: float) -> str:
    """Return the Mergefile of the benchmark: one task_arithmetic output with a rule on one layer."""
    names = [f"e{number}" for number in range(1, experts + 1)]
    sources = "".join(f'[sources.{name}]\npath = "{family / name}"\n' for name in ("base", *names))
    listed = ", ".join(f'{{ source = "{name}", weight = 0.3 }}' for name in names)
    return (
        f'version = 1\n{sources}[outputs.merged]\noperator = "task_arithmetic"\nbase = "base"\nexperts = [{listed}]\n'
        f'[[outputs.merged.rules]]\nmatch = "model.layers.0.*"\nparams = {{ weight = {ruled_weight} }}\n'
    )


class Bench:
    """One family in one folder, and the scenarios that are run over it."""

    def __init__(self, family: Path, work: Path, experts: int) -> None:
        self.family, self.work, self.experts = family, work, experts
        self.project = work / "project"
        self.weight = 0.3

    def inputs(self) -> list[Path]:
        """Return the weight files of base and experts."""
        names = ["base", *(f"e{number}" for number in range(1, self.experts + 1))]
        return [self.family / name / "model.safetensors" for name in names]

    def build(self) -> Run:
        """Build as things are."""
        self.project.mkdir(exist_ok=True)
        (self.project / "Mergefile.toml").write_text(mergefile(self.family, self.experts, self.weight))
        return run(BUILD, [], self.project)

    def fresh(self) -> Run:
        """Build without any cache or output."""
        shutil.rmtree(self.project, ignore_errors=True)
        return self.build()

    def cold(self) -> Run:
        """Build without cache or output, and with an empty page cache."""
        drop_page_cache()
        return self.fresh()

    def cold_floor(self) -> Run:
        """Read all inputs and write the output's bytes, with an empty page cache."""
        drop_page_cache()
        return self.floor()

    def floor(self) -> Run:
        """Read all inputs and write the output's bytes, nothing else."""
        paths = [str(path) for path in self.inputs()]
        return run(FLOOR, [*paths, str(Path(paths[0]).stat().st_size), str(self.work / "floor.bin")], self.work)

    def one_tensor(self) -> Run:
        """Change one tensor of one expert, then build."""
        with (self.family / "e1" / "model.safetensors").open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, stop = json.loads(file.read(length))[EDITED]["data_offsets"]
            file.seek(8 + length + begin)
            values = np.frombuffer(file.read(stop - begin), np.uint16) ^ np.uint16(1)
            file.seek(8 + length + begin)
            file.write(values.tobytes())
        return self.build()

    def one_rule(self) -> Run:
        """Change the weight in the rule on layer 0, then build."""
        self.weight = round(self.weight + 0.01, 4)
        return self.build()


def scenarios(bench: Bench) -> dict[str, Callable[[], Run]]:
    """Return what is measured, in the order in which each round runs it."""
    return {
        "I/O floor, cold": bench.cold_floor,
        "full build, cold": bench.cold,
        "I/O floor, warm": bench.floor,
        "full build, warm": bench.fresh,
        "nothing changed": bench.build,
        "one tensor of one expert changed": bench.one_tensor,
        "one weight in a rule changed": bench.one_rule,
    }


def table(results: dict[str, list[Run]]) -> str:
    """Return the markdown table: medians with (min to max) of wall time, and ratios to the floor of the same round."""
    rows = [
        "| run | bytes read | bytes written | blocks computed | peak RSS | CPU, s | wall, s (min to max) | / floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        floor = results["I/O floor, cold" if "cold" in name else "I/O floor, warm"]
        ratio = statistics.median(a.wall / b.wall for a, b in zip(runs, floor, strict=True))
        walls = [r.wall for r in runs]
        merged = (runs[-1].result or {}).get("merged")
        rows.append(
            f"| {name} | {_median(runs, 'read')} | {_median(runs, 'written')}"
            f" | {merged['blocks']['computed'] if merged else '-'} | {_median(runs, 'rss')}"
            f" | {statistics.median(r.cpu for r in runs):.2f}"
            f" | {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f}) | {ratio:.2f} |"
        )
    return "\n".join(rows)


def _median(runs: list[Run], field: str) -> str:
    return format_bytes(statistics.median(getattr(r, field) for r in runs))


def main() -> None:
    """Run the benchmark and write its table and raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to keep the families (default: a temporary folder)")
    parser.add_argument("--no-docs", action="store_true", help="print the table only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergepipe-bench-") as temporary:
        family = (options.folder or Path(temporary)).resolve() / options.shape
        write_family(SHAPES[options.shape], family, options.experts)
        bench = Bench(family, Path(temporary), options.experts)
        results: dict[str, list[Run]] = {}
        for _ in range(options.rounds):
            for name, scenario in scenarios(bench).items():
                results.setdefault(name, []).append(scenario())
    text = (
        f"Shape {options.shape}, {options.experts} experts and the base, bfloat16, task_arithmetic with one rule;"
        f" medians of {options.rounds} rounds, in each of which every row ran once, in this order.\n"
        f"Machine: {machine()}. Date: {dt.datetime.now(dt.UTC):%Y-%m-%d}.\n\n{table(results)}\n"
    )
    print(text)
    if not options.no_docs:
        _write_docs(text)


def _write_docs(text: str) -> None:
    begin, end = "<!-- begin: python -m benchmarks -->", "<!-- end -->"
    page = DOCS.read_text()
    head, tail = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    DOCS.write_text(f"{head}\n{text}{tail}")


if __name__ == "__main__":
    main()
