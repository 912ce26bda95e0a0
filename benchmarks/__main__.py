"""Measure merges against mergekit and against the I/O floor, in turn, and write docs/benchmarks.md.

python -m benchmarks speed --mergekit VENV/bin/python        # everything
python -m benchmarks speed --rows linear,ties --rounds 3 --warm --mergekit VENV/bin/python --resume
python -m benchmarks flags --mergekit VENV/bin/python        # which of mergekit's flags are its best
python -m benchmarks compare BEFORE.json AFTER.json          # are the ratios of two runs the same?
python -m benchmarks render                                  # the page, from the figures that are there
python -m benchmarks scale                                   # how plan and status grow with a model (benchmarks.scale)
python -m benchmarks rows                                    # what `--rows` may name

Without a command everything is measured. With --shape tiny it is a quick look, which leaves the page as it is.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scale.__main__ import main as scale
from benchmarks.speed import compare, mergekit, report, rows, runner
from benchmarks.speed.ground import Ground
from benchmarks.speed.process import CommandError
from benchmarks.speed.results import RESULTS, OtherRunError, Results

SHAPE = "qwen2.5-0.5b"
FOLDER = Path("build/bench")
COMMANDS = ("speed", "flags", "compare", "render", "rows")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["scale"]:
        return scale(words[1:])
    parser = _parser()
    named = bool(words) and words[0] in (*COMMANDS, "-h", "--help")
    options = parser.parse_args(words if named else ["speed", *words])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is running ends, too
    try:
        return int(COMMAND[options.command](options))
    except (OtherRunError, CommandError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from here", file=sys.stderr)
        return 130


def _speed(options: argparse.Namespace) -> int:
    chosen = rows.choose(options.rows)
    modes = [mode for mode in rows.MODES if getattr(options, mode)] or list(rows.MODES)
    rounds = rows.Rounds(
        ours=options.rounds,
        slow=options.slow_rounds,
        default=options.default_rounds,
        slow_default=options.slow_default_rounds,
        few=options.few_rounds,
    )
    results = Results(_results_path(options))
    ground = _ground(options, results)
    unknown = results.found.get("flags", {}).get("shape") != options.shape
    if ground.python and options.rows is None and options.mergekit_flags is None and unknown and options.flag_rounds:
        runner.try_flags(ground, ["linear"], options.flag_rounds, results)
        ground = _ground(options, results)
    runner.run(chosen, ground, rounds, modes, results, resume=options.resume)
    _show(options, results)
    return 0


def _flags(options: argparse.Namespace) -> int:
    if options.mergekit is None:
        raise ValueError("--mergekit is needed")
    results = Results(_results_path(options))
    names = [row.name for row in rows.choose(options.rows or "linear")]
    runner.try_flags(_ground(options, results), names, options.rounds, results)
    print(report.flags_table(results.found))
    _show(options, results)
    return 0


def _compare(options: argparse.Namespace) -> int:
    before, after = (Results(path) for path in (options.before, options.after))
    for path, one in ((options.before, before), (options.after, after)):
        if not one.rows:
            raise ValueError(f"{path} has no figures")
    print("\n".join(compare.report(before.found, after.found)))
    found = compare.summary(before.found, after.found)
    if options.record:
        after.found["compared"] = found
        after.save()
        if after.path.resolve() == RESULTS:
            report.render()
    return 1 if found["apart"] or not found["ratios"] else 0


def _render(_: argparse.Namespace) -> int:
    report.render()
    return 0


def _rows(_: argparse.Namespace) -> int:
    for row in rows.ROWS.values():
        print(f"{row.name}: {row.title} ({', '.join(row.modes)}; {', '.join(rows.participants(row))})")
    return 0


COMMAND = {"speed": _speed, "flags": _flags, "compare": _compare, "render": _render, "rows": _rows}


def _show(options: argparse.Namespace, results: Results) -> None:
    """Print the bars, and write the page if these are its figures."""
    print(f"\n{report.bars_table(results.found)}\n\nfigures: {results.path}")
    if results.path == RESULTS and not options.no_docs:
        report.render()
        print(f"page: {report.PAGE}")


def _results_path(options: argparse.Namespace) -> Path:
    if options.results is not None:
        return Path(options.results).resolve()
    return RESULTS if options.shape == SHAPE else Path(options.folder).resolve() / f"{options.shape}.json"


def _ground(options: argparse.Namespace, results: Results) -> Ground:
    python = None
    if options.mergekit is not None:
        python = str(Path(options.mergekit).absolute())  # not resolved: a link would lead out of the environment
        _check_mergekit(python)
    flags = options.mergekit_flags
    if flags is None:
        flags = mergekit.best(results.found, options.shape)
    return Ground(folder=options.folder.resolve(), shape=options.shape, python=python, flags=flags)


def _check_mergekit(python: str) -> None:
    code = "import importlib.metadata as m; print(m.version('mergekit'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"--mergekit {python}: {error.strerror}") from error
    if done.returncode or done.stdout.strip() != mergekit.VERSION:
        said = "".join((done.stdout + done.stderr).strip().splitlines()[-1:])
        raise ValueError(f"{python} has not mergekit {mergekit.VERSION}: {said}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--rows", help="only these, separated by commas")
    common.add_argument("--rounds", type=_count, default=5, help="how often each runs (5)")
    common.add_argument("--shape", choices=list(rows.LARGER), default=SHAPE)
    common.add_argument("--mergekit", metavar="PYTHON", help="the Python of an environment with mergekit 0.1.5")
    common.add_argument("--mergekit-flags", help="its best flags (what `flags` found, if it ran)")
    common.add_argument("--folder", type=Path, default=FOLDER, help="where families are kept (%(default)s)")
    common.add_argument("--results", type=Path, help="the figures (benchmarks/speed/results.json, with the page)")
    common.add_argument("--no-docs", action="store_true", help="leave the page as it is")
    speed = commands.add_parser("speed", parents=[common], help="run rows")
    speed.add_argument("--cold", action="store_true", help="only with an empty page cache")
    speed.add_argument("--warm", action="store_true", help="only with the weights in the page cache")
    speed.add_argument("--resume", action="store_true", help="keep the rounds that are there")
    speed.add_argument("--slow-rounds", type=_count, default=2, help="of mergekit where it takes minutes (2)")
    speed.add_argument("--default-rounds", type=_count, default=1, help="of mergekit with its default flags (1)")
    speed.add_argument("--slow-default-rounds", type=_count, default=0, help="of these where it takes minutes (0)")
    speed.add_argument("--flag-rounds", type=_count, default=2, help="of finding mergekit's best flags, if need be (2)")
    speed.add_argument("--few-rounds", type=_count, default=2, help="of the rows whose counters matter (2)")
    commands.add_parser("flags", parents=[common], help="find mergekit's best flags")
    comparing = commands.add_parser("compare", help="compare the ratios of two runs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--record", action="store_true", help="keep the outcome in AFTER, for its table of bars")
    commands.add_parser("render", help="write the page from its figures")
    commands.add_parser("rows", help="list the rows")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
