"""The figures, in one JSON file with a section per row. Every run is on the disk before the next one begins."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

RESULTS = Path(__file__).with_name("results.json")
Json = dict[str, Any]

# What may not differ between the runs of a row: else they are no rounds of one comparison.
SAME = ("machine", "shape", "mergekit_flags")


class OtherRunError(ValueError):
    """A row was begun with other settings, or on another machine."""


class Results:
    """The figures in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: Json = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.rows: dict[str, Json] = self.found.setdefault("rows", {})

    def begin(self, row: str, facts: Json, modes: Collection[str], *, resume: bool) -> None:
        """Begin a row: anew, or with the runs that it has; those of other modes stay where they are of the same day.

        Raises
        ------
        OtherRunError
            If it is to go on with other settings.
        """
        now = facts | {"machine": machine(), "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"}
        there = self.rows.get(row)
        if resume and there is not None:
            if different := [name for name in SAME if there.get(name) != now.get(name)]:
                what = ", ".join(f"{name} ({there.get(name)}, now {now.get(name)})" for name in different)
                raise OtherRunError(f"row `{row}` was begun with another {what}; without --resume it begins anew")
            return
        self.found.pop("compared", None)
        is_same = there is not None and all(there.get(name) == now.get(name) for name in (*SAME, "date"))
        kept = [run for run in there["runs"] if run["mode"] not in modes] if there is not None and is_same else []
        self.rows[row] = now | {"runs": kept}

    def note(self, row: str, **facts: Any) -> None:
        """Note something of a row."""
        self.rows[row].update(facts)

    def is_complete(self, row: str, number: int, mode: str, who: Collection[str]) -> bool:
        """Return whether a round of a row has the runs of all who take part."""
        return {run["who"] for run in self._runs(row, number, mode)} >= set(who)

    def drop(self, row: str, number: int, mode: str) -> None:
        """Drop a round that was interrupted: its runs were to take turns with those that are missing."""
        gone = [id(run) for run in self._runs(row, number, mode)]
        self.rows[row]["runs"] = [run for run in self.rows[row]["runs"] if id(run) not in gone]

    def add(self, row: str, number: int, mode: str, who: str, figures: Json) -> None:
        """Add a run, and write the file."""
        self.rows[row]["runs"].append({"round": number, "mode": mode, "who": who} | figures)
        self.save()

    def save(self) -> None:
        """Write the file; a reader sees the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(encoded(self.found), encoding="utf-8")
        new.replace(self.path)

    def _runs(self, row: str, number: int, mode: str) -> list[Json]:
        return [run for run in self.rows[row]["runs"] if (run["round"], run["mode"]) == (number, mode)]


def encoded(found: Json) -> str:
    """Return figures as JSON with one run a line."""
    lines = []
    for key, value in found.items():
        if key != "rows":
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
            continue
        rows = []
        for name, row in value.items():
            facts = "".join(f"   {json.dumps(k)}: {json.dumps(v)},\n" for k, v in row.items() if k != "runs")
            runs = ",\n".join(f"    {json.dumps(run)}" for run in row["runs"])
            rows.append(f"  {json.dumps(name)}: {{\n{facts}" + f'   "runs": [\n{runs}\n   ]\n  }}')
        lines.append(' "rows": {\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"
