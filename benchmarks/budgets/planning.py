"""Time and memory of the planner alone, for eight experts of a 70B model: two million blocks, in a process of its own.

The norms are drawn at random, for what is planned does not depend on where they come from. A run makes the order of all
blocks with the bound of each of its prefixes, cuts it for 21 budgets and for a `max_error`, and makes the access set of
the last.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.budgets.results import Json
from benchmarks.families import Shape
from benchmarks.measure import run
from mergepipe.checkpoints.geometry import GEOMETRY_1, grid

SHAPE = Shape(
    layers=80, hidden=8192, mlp=28672, vocabulary=128256, heads=64, kv_heads=8, head_size=128, biases=False
)
EXPERTS = 8

_PLAN = """
import json, time
import numpy as np
from mergepipe.operators.influence import additive
from mergepipe.plan.budget import BudgetTensor, reading_order

experts, counts = int(argv[0]), json.loads(argv[1])
rng = np.random.default_rng(0)
tensors = [
    BudgetTensor(
        norms=rng.lognormal(0.0, 1.0, (experts, blocks)), costs=np.full((experts, blocks), 2 * elements // blocks),
        influence=additive([0.125] * experts), update=1.0, base=100.0,
    )
    for blocks, elements in counts
]
status = open("/proc/self/status").read()
before = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
begin, used = time.perf_counter(), time.process_time()
order = reading_order(tensors)
ordered = time.perf_counter()
cuts = [order.cut(order.fitting(int(order.bytes[-1]) * percent // 100)) for percent in range(0, 101, 5)]
within = order.cut(order.within(0.5))
access = cuts[5].access()
cuts[5].slot_bytes()
cuts[5].losses(10)
done, cpu = time.perf_counter(), time.process_time() - used
bounds = [cut.bound.absolute for cut in cuts]
assert bounds == sorted(bounds, reverse=True) and within.bound.relative_to_update <= 0.5
result = {"blocks": len(order.items), "bytes": int(order.bytes[-1]), "tensors": len(access), "before": before,
          "order_seconds": ordered - begin, "seconds": done - begin, "cpu": cpu}
"""


def measure(rounds: int) -> Json:
    """Return what planning took: medians, and the slowest."""
    counts = [[blocks_of(shape), math.prod(shape)] for shape in tensors()]
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(_PLAN, [str(EXPERTS), json.dumps(counts)], Path(folder)) for _ in range(rounds)]
    found = [one.result for one in runs if one.result is not None]
    seconds = [one["seconds"] for one in found]
    figures = {
        "experts": EXPERTS,
        "tensors": found[0]["tensors"],
        "blocks": found[0]["blocks"],
        "expert_bytes": found[0]["bytes"],
        "rounds": rounds,
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "cpu": statistics.median(one["cpu"] for one in found),
        "order_seconds": statistics.median(one["order_seconds"] for one in found),
        "rss": max(one.rss for one in runs),
        "rss_before": max(one["before"] for one in found),
    }
    print(
        f"{figures['blocks']:,} blocks planned in {figures['seconds']:.2f} s (slowest {figures['slowest']:.2f} s,"
        f" CPU {figures['cpu']:.2f} s), peak RSS {figures['rss'] / 1e6:.0f} MB,"
        f" of which {figures['rss_before'] / 1e6:.0f} MB before planning began"
    )
    return figures


def tensors() -> list[tuple[int, ...]]:
    """Return the shapes of all tensors, an untied head among them."""
    return [*(shape for _, shape in SHAPE.tensors()), (SHAPE.vocabulary, SHAPE.hidden)]


def blocks_of(shape: tuple[int, ...]) -> int:
    """Return of how many blocks a tensor consists."""
    return grid("BF16", shape, GEOMETRY_1).count
