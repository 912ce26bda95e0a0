"""Measure how the costs of plan, status and sampling grow with a model, and put them into docs/benchmarks.md.

python -m benchmarks scale                        # 0.5B, 1B, 8B and 70B shapes, 8 experts; a few minutes
python -m benchmarks scale --shapes 0.5B,1B       # a quick look, which leaves figures and page as they are
python -m benchmarks scale --samples              # what runs of samples are worth where rows are long, by simulation
python -m benchmarks scale --render               # table and picture from benchmarks/scale/results.json
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import machine
from benchmarks.scale import report, samples
from benchmarks.scale.family import SCALE_SHAPES
from benchmarks.scale.measure import measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SCALE_SHAPES), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work: a file system with sparse files")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--samples", action="store_true", help="print what forms of samples are worth")
    options = parser.parse_args(arguments)
    if options.samples:
        print(samples.table())
        return 0
    if not options.render:
        shapes = options.shapes.split(",")
        unknown = [name for name in shapes if name not in SCALE_SHAPES]
        if unknown:
            parser.error(f"no such shape: {', '.join(unknown)} (there are {', '.join(SCALE_SHAPES)})")
        if options.folder is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mergepipe-scale-", dir=options.folder) as temporary:
            found = {name: measure(name, Path(temporary), options.rounds) for name in shapes}
        results = {
            "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
            "machine": machine(),
            "rounds": options.rounds,
            "shapes": found,
        }
        if set(shapes) != set(SCALE_SHAPES):
            print(report.table(results))
            return 0
        report.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(report.render())
    return 0


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second command finds the first one's bytecode
    raise SystemExit(main())
