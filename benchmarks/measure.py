"""Measuring one run as a process of its own: wall time, CPU time, peak memory, and bytes by the kernel's count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHILD = """
import json, resource, sys, time
code = sys.stdin.read()
scope = {"argv": sys.argv[1:]}
begin = time.perf_counter()
exec(compile(code, "benchmark", "exec"), scope)
seconds = time.perf_counter() - begin
io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
# ru_maxrss would count the parent's memory before exec; VmHWM counts this program alone.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({
    "inner_seconds": seconds, "read": int(io["rchar"]), "written": int(io["wchar"]),
    "rss": max(int(peak.split()[1]), usages[1].ru_maxrss) * 1024,
    "cpu": sum(usage.ru_utime + usage.ru_stime for usage in usages), "result": scope.get("result"),
}))
"""

BUILD = """
import mergepipe
report = mergepipe.open("Mergefile.toml").build(argv)
result = {name: output.as_json() for name, output in report.outputs.items()}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run; bytes as the kernel counts them for the process and its children, page cache included.

    Attributes
    ----------
    rss
        Of the largest process among them.
    """

    wall: float
    cpu: float
    rss: int
    read: int
    written: int
    result: dict | None


def run(code: str, arguments: Sequence[str], folder: Path) -> Run:
    """Run a piece of Python in a fresh process in ``folder`` and measure it whole, interpreter start included."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments], input=code, cwd=folder, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"a benchmark run failed:\n{done.stderr}")
    facts = json.loads(done.stdout.splitlines()[-1])
    return Run(
        wall=wall,
        cpu=facts["cpu"],
        rss=facts["rss"],
        read=facts["read"],
        written=facts["written"],
        result=facts["result"],
    )


def drop_page_cache() -> bool:
    """Empty the page cache, where this process may; return whether it did."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def fill_page_cache(files: Iterable[Path]) -> None:
    """Read files, so that they are in the page cache; and let the disk finish what it has to write."""
    os.sync()
    buffer = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def machine() -> str:
    """Return the machine in words: processor, cores, memory."""
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "unknown")
    memory = next((int(x.split()[1]) for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), 0)
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory / 1e6:.0f} GB of memory"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
