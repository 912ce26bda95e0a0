"""The figures of these benchmarks, committed beside them: a section for each, with the machine and the day."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

RESULTS = Path(__file__).with_name("results.json")
Json = dict[str, Any]


def load() -> Json:
    """Return all figures that were recorded."""
    found: Json = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def record(section: str, figures: Json) -> None:
    """Put the figures of one benchmark in the place of those that it had."""
    busy = f"load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
    noted = {"date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}", "machine": machine(), "load": busy}
    everything = load() | {section: noted | figures}
    RESULTS.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
