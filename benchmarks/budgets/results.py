"""The figures of these benchmarks (`benchmarks.recorded`)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.recorded import Json, Recorded

__all__ = ["Json", "load", "record"]

_RECORDED = Recorded(Path(__file__).with_name("results.json"))
load, record = _RECORDED.load, _RECORDED.record
