"""Figures of benchmarks, committed beside them: a section for each, with the machine and the day."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

Json = dict[str, Any]


class Recorded:
    """A file of figures."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Json:
        """Return all figures that were recorded."""
        found: Json = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        return found

    def record(self, section: str, figures: Json) -> None:
        """Put the figures of one benchmark in the place of those that it had."""
        busy = f"load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
        noted = {"date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}", "machine": machine(), "load": busy}
        everything = self.load() | {section: noted | figures}
        self.path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
