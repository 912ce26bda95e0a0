"""Measure what budgets come to, and write docs/budgets-measured.md and its picture.

python -m benchmarks.budgets family --family ../family   # a real family: other choices, distances, perplexities
python -m benchmarks.budgets synthetic                   # 0.5B shapes, 8 experts: bytes, time and memory of builds
python -m benchmarks.budgets planning                    # 70B shapes, 8 experts: time and memory of the planner
python -m benchmarks.budgets render                      # tables and picture from benchmarks/budgets/results.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.budgets import family, planning, report, synthetic
from benchmarks.budgets.results import record


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("family", "synthetic", "planning", "render"))
    parser.add_argument("--family", type=Path, help="a real family: base, expert-python, expert-c, ...; perplexity.py")
    parser.add_argument("--seeds", type=int, default=10, help="random choices for each budget")
    parser.add_argument("--scored", type=int, default=10, help="of how many of these the models are built and scored")
    parser.add_argument("--experts", type=int, default=8, help="of the synthetic family")
    parser.add_argument("--rounds", type=int, default=5, help="of the synthetic builds, and of planning")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergepipe-budgets-") as temporary:
        work = (options.folder or Path(temporary)).resolve()
        if options.command == "family":
            if options.family is None:
                parser.error("--family is needed")
            record("family", family.measure(options.family.resolve(), work, options.seeds, options.scored))
        elif options.command == "synthetic":
            record("synthetic", synthetic.measure(work, options.experts, options.rounds))
        elif options.command == "planning":
            record("planning", planning.measure(options.rounds))
    report.render()


if __name__ == "__main__":
    main()
