"""Merge the same inputs with mergekit 0.1.5 (`dtype: float32`) and with mergepipe, and say how far they are apart.

python -m benchmarks.parity --mergekit ../mergekit-venv/bin/python --family ../family
python -m benchmarks.parity --mergekit ... --methods ties,slerp --quick
python -m benchmarks.parity fixtures --mergekit ...     # what tests/parity compares with, anew
python -m benchmarks.parity edges --mergekit ...
python -m benchmarks.parity perplexity --mergekit ... --family ../family
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.parity.cases import METHODS
from benchmarks.parity.compare import summary
from benchmarks.parity.edges import run_edges
from benchmarks.parity.fixtures import write_fixtures
from benchmarks.parity.perplexity import measure
from benchmarks.parity.report import record, record_edges, render
from benchmarks.parity.runner import Runner
from mergepipe.operators.registry import operators


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ("compare", "edges", "fixtures", "perplexity", "render")
    parser.add_argument("command", nargs="?", choices=commands, default="compare")
    parser.add_argument("--mergekit", metavar="PYTHON", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("--family", type=Path, help="a real family: base, expert-python, expert-c, ...; perplexity.py")
    parser.add_argument("--methods", help="only these, separated by commas")
    parser.add_argument("--quick", action="store_true", help="every fourth case; nothing is recorded")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    if options.command != "render" and not options.mergekit:
        parser.error("--mergekit is needed")
    with tempfile.TemporaryDirectory(prefix="mergepipe-parity-") as temporary:
        work = (options.folder or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        real = options.family.resolve() if options.family else None
        methods = options.methods.split(",") if options.methods else list(METHODS)
        if options.command == "compare":
            _compare(Runner(options.mergekit, work, real, quick=options.quick), methods)
        elif options.command == "edges":
            record_edges(run_edges(Runner(options.mergekit, work, None, quick=False)))
        elif options.command == "fixtures":
            write_fixtures(Runner(options.mergekit, work, None, quick=False), methods)
        elif options.command == "perplexity":
            if real is None:
                parser.error("--family is needed")
            measure(Runner(options.mergekit, work, real, quick=False), methods)
    if not options.quick:
        render()


def _compare(runner: Runner, methods: list[str]) -> None:
    for method in methods:
        if method not in operators():
            print(f"{method}: not there yet", file=sys.stderr)
            continue
        began = time.perf_counter()
        outcome = runner.method(method)
        print(f"{method}: {outcome.cases} cases, {summary(outcome.total)}; refused {len(outcome.refused)};"
              f" {time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
        for number, group in sorted(outcome.masks.groups.items()):
            if group.elements:
                print(f"   masks {number}: {group}, deviation {group.deviation:+.2f}")
        if not runner.quick:
            record(method, outcome)
    runner.mergekit.close()


if __name__ == "__main__":
    main()
