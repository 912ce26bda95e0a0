"""Fuzz for a while: ``python -m tests.fuzz --seconds 600``, from the root of the repository.

Each target runs in a process of its own, which may take 256 MB more than it has when it begins. What breaks a promise
is written to ``tests/fuzz/found/TARGET``; after the fault is mended, the file goes to ``tests/fuzz/corpus/TARGET``,
where every later run begins from it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from fuzz.targets import TARGETS, BuildTarget, ProjectTarget, Target  # noqa: E402
from fuzz.watch import BrokenPromiseError  # noqa: E402

MEMORY = 256 << 20
GRACE = 300  # seconds beyond its time that a process may take to begin and to end
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> int:
    """Run all targets, or those that are named, and print a table; return 1 if any promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--executions", type=int, default=10**9, help="for each target, at most")
    parser.add_argument("--seed", type=int, default=None, help="the same cases again")
    parser.add_argument("--found", type=Path, default=HERE / "found", help="where what was found is written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = time.time_ns() if options.seed is None else options.seed
    if options.worker:
        print(json.dumps(_run(_target(options.targets[0]), options, seed)))
        return 0
    broken = 0
    for name in options.targets or names:
        broken += _report(name, options, seed)
    return 1 if broken else 0


def _target(name: str) -> type[Target]:
    return next(target for target in TARGETS if target.name == name)


def _report(name: str, options: argparse.Namespace, seed: int) -> int:
    """Run one target in a process of its own, print its line, and return how many faults it found."""
    arguments = [name, "--worker", "--seconds", str(options.seconds), "--executions", str(options.executions)]
    arguments += ["--seed", str(seed), "--found", str(options.found)]
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    limit = min(options.seconds, 10**6) + GRACE
    try:
        done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{name}: the process stood still for more than {GRACE} s")
        return 1
    if done.returncode:
        print(f"{name}: the process died with {done.returncode}\n{done.stderr[-2000:]}")
        return 1
    told = json.loads(done.stdout.splitlines()[-1])
    ends = ", ".join(f"{kind} {count:,}" for kind, count in told["ends"].items())
    print(f"{name:<15} {told['executions']:>9,} in {told['seconds']:>6.1f} s, seed {seed}: {ends}", flush=True)
    for fault in told["faults"]:
        print(f"  {fault}")
    return len(told["faults"])


def _run(kind: type[Target], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mergepipe-fuzz-", dir=MEMORY_DISK) as folder:
        target = _prepared(kind, Path(folder))
        started = time.monotonic()
        while time.monotonic() - started < options.seconds and ends.total() < options.executions:
            draw = random.Random(f"{seed}/{kind.name}/{ends.total()}")
            ends[_once(target, draw, options.found, faults)] += 1
    seconds = time.monotonic() - started
    return {
        "executions": ends.total(), "seconds": seconds, "ends": dict(ends.most_common()),
        "faults": [f"{count}: {path}" for count, path in faults.items()],
    }  # fmt: skip


def _prepared(kind: type[Target], folder: Path) -> Target:
    """Return the target after a few cases, so that everything is imported, with its memory limited from then on."""
    builds = issubclass(kind, ProjectTarget | BuildTarget)
    if builds:
        _skip_flushing()
    target = kind(folder)
    for number in range(2 if builds else 20):
        with contextlib.suppress(BrokenPromiseError):  # it comes again, and is reported then
            target.execute(random.Random(number))
    with Path("/proc/self/statm").open(encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    # Threads of a build have stacks and arenas, which are address space and no memory.
    extra = (4 << 30) if builds else 0
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY + extra, resource.RLIM_INFINITY))
    return target


def _skip_flushing() -> None:
    from support.projects import quicken

    class Setter:
        setattr = staticmethod(setattr)

    quicken(Setter())


def _once(target: Target, draw: random.Random, found: Path, faults: dict[str, str]) -> str:
    """Run one case; keep the file of the first case that breaks a promise in some way."""
    data = target.mutate(draw, target.seeds)
    try:
        return target.judge(data)
    except BrokenPromiseError as error:
        what = str(error)[:300]
        if what not in faults and len(faults) < 20:
            folder = found / target.name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{len(faults):02d}"
            path.write_bytes(data)
            faults[what] = str(path)
        return "BROKEN"


if __name__ == "__main__":
    raise SystemExit(main())
