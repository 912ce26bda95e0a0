"""Measure budgets in levels, and write docs/levels-measured.md and its picture.

python -m benchmarks.levels family --family ../family   # a real family: distances, bounds and perplexities
python -m benchmarks.levels synthetic                   # 0.5B shapes, 8 experts: bytes, time and memory of builds
python -m benchmarks.levels code                        # the code alone: rates, sizes
python -m benchmarks.levels render                      # tables and picture from benchmarks/levels/results.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.levels import code, family, report, synthetic
from benchmarks.levels.results import record


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("family", "synthetic", "code", "render"))
    parser.add_argument("--family", type=Path, help="a real family: base, expert-python, expert-c, ...; perplexity.py")
    parser.add_argument("--experts", type=int, default=8, help="of the synthetic family")
    parser.add_argument("--rounds", type=int, default=5, help="of the synthetic builds and of the code")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergepipe-levels-") as temporary:
        work = (options.folder or Path(temporary)).resolve()
        if options.command == "family":
            if options.family is None:
                parser.error("--family is needed")
            record("family", family.measure(options.family.resolve(), work))
        elif options.command == "synthetic":
            record("synthetic", synthetic.measure(work, options.experts, options.rounds))
        elif options.command == "code":
            record("code", code.measure(options.rounds))
    report.render()


if __name__ == "__main__":
    main()
