"""The tables of docs/benchmarks.md, made from the figures alone, and put between the page's markers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pages import put, table
from benchmarks.speed import rows
from benchmarks.speed.bars import bars
from benchmarks.speed.plot import draw
from benchmarks.speed.ratios import PAIRS, Ratio, measured_rows, median, ratio, runs_of
from benchmarks.speed.results import RESULTS, Json, Results
from benchmarks.speed.rows import ROWS, Row
from mergepipe.units import format_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", DOCS / "images" / "benchmarks.svg"


def render() -> None:
    """Write the tables and the picture anew from the committed figures."""
    found = Results(RESULTS).found
    text = PAGE.read_text(encoding="utf-8")
    for name, make in SECTIONS.items():
        text = put(text, f"speed {name}", make(found))
    PAGE.write_text(text, encoding="utf-8")
    if measured_rows(found):
        draw(found, PICTURE)


def facts(found: Json) -> str:
    """Return on what machine, when, and with what the rows were measured."""
    chosen = [found["rows"][row.name] for row in measured_rows(found)]
    if not chosen:
        return "Nothing was measured yet."
    shapes, machines, flags, emptied = (
        [str(value) for value in dict.fromkeys(row.get(name) for row in chosen) if value]
        for name in ("shape", "machine", "mergekit_flags", "emptied")
    )
    days = sorted({row["date"] for row in chosen})
    loads = [run["load"] for row in chosen for run in row["runs"]]
    lines = [
        f"Machine: {'; '.join(machines)}. Date: {' to '.join(dict.fromkeys((days[0], days[-1])))}.",
        f"Shape {' and '.join(shapes)}, bfloat16.",
        f"Load average at the ends of the runs: {min(loads):.1f} to {max(loads):.1f}.",
    ]
    if flags:
        lines.append(f"mergekit's best flags: {' and '.join(f'`{one}`' for one in flags)}.")
    cold = {"all": "the whole page cache was emptied", "files": "the weights were dropped from the page cache"}
    if emptied:
        lines.append(f"Before cold runs {' or '.join(cold[one] for one in emptied)}.")
    return "\n".join(lines)


def bars_table(found: Json) -> str:
    """Return the table of bars."""
    head = ("bar", "target", "measured (min to max of rounds)", "met")
    return table(head, ((bar.what, bar.target, bar.measured, bar.verdict) for bar in bars(found)))


def runs_table(found: Json) -> str:
    """Return the tables of all rows: medians, and the ratios."""
    parts = [f"### {row.title[0].upper()}{row.title[1:]}\n\n{_row(found, row)}" for row in measured_rows(found)]
    return "\n\n".join(parts) or "Nothing was measured yet."


def _row(found: Json, row: Row) -> str:
    head = ["run", "bytes read", "from the disk", "written", "blocks computed", "peak RSS", "CPU, s"]
    head += ["wall, s (min to max)", "rounds", "ratio of wall times (min to max)"]

    def lines() -> Iterator[Sequence[str]]:
        for mode in row.modes:
            for who in rows.participants(row):
                runs = runs_of(found, row.name, mode, who)
                if runs:
                    name = f"`{who}`" if row.kind == "memory" else who
                    yield (f"{name}, {mode}", *_cells(runs), "; ".join(_ratios(found, row, mode, who)))

    return table(head, lines())


def _cells(runs: Sequence[Json]) -> Iterator[str]:
    for name in ("read", "disk_read", "written"):
        yield format_bytes(round(median(runs, name)))
    yield str(runs[-1].get("blocks", "-"))
    yield format_bytes(max(run["rss"] for run in runs))
    yield f"{median(runs, 'cpu'):.2f}"
    walls = [run["wall"] for run in runs]
    yield f"{median(runs, 'wall'):.2f} ({min(walls):.2f} to {max(walls):.2f})"
    yield str(len(runs))


def _ratios(found: Json, row: Row, mode: str, who: str) -> Iterator[str]:
    """Yield the ratios of which a participant is the upper part."""
    for of, by in PAIRS[row.kind]:
        one: Ratio | None = ratio(found, row.name, mode, of, by) if of == who else None
        if one is not None:
            yield f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f}) of {by}"


def flags_table(found: Json) -> str:
    """Return the table of mergekit's flags."""
    runs = found.get("flags", {}).get("runs", [])
    if not runs:
        return "Nothing was measured yet."
    head = ("merge", "dtype", "flags", "peak RSS", "CPU, s", "wall, s (min to max)", "rounds")

    def lines() -> Iterator[Sequence[str]]:
        for row, dtype, flags in dict.fromkeys((run["row"], run["dtype"], run["flags"]) for run in runs):
            mine = [run for run in runs if (run["row"], run["dtype"], run["flags"]) == (row, dtype, flags)]
            cells = list(_cells(mine))
            yield (ROWS[row].title, dtype, f"`{flags}`" if flags else "(default)", *cells[4:])

    return f"Shape {found['flags']['shape']}, warm.\n\n{table(head, lines())}"


SECTIONS = {"facts": facts, "bars": bars_table, "runs": runs_table, "flags": flags_table}
