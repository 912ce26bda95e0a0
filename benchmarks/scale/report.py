"""The table and the picture of how costs grow, made from the figures alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.pages import STYLE, put
from benchmarks.scale.measure import BUDGET, COMMANDS, EXPERTS, Json
from mergepipe.units import format_bytes

RESULTS = Path(__file__).with_name("results.json")
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", DOCS / "images" / "scale.svg"


def render() -> str:
    """Write the picture, and the table into its place on the page; return the table."""
    found = json.loads(RESULTS.read_text())
    text = table(found)
    _draw(found, PICTURE)
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), "scale", text), encoding="utf-8")
    return text


def table(found: Json) -> str:
    """Return the markdown of the figures."""
    rows = [
        "| shape | parameters | expert blocks | command | CPU, s | CPU a block, µs | wall, s (min to max) | peak RSS |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, shape in found["shapes"].items():
        blocks = shape["expert_blocks"]
        for command in COMMANDS:
            runs = shape["runs"][command]
            walls, cpu = [run["wall"] for run in runs], _median(runs, "cpu")
            rows.append(
                f"| {name} | {shape['parameters'] / 1e9:.2f} billion | {blocks:,} | {command}"
                f" | {cpu:.2f} | {1e6 * cpu / blocks:.1f}"
                f" | {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f})"
                f" | {format_bytes(max(run['rss'] for run in runs))} |"
            )
    last = list(found["shapes"].values())[-1]
    loads = [run["load"] for shape in found["shapes"].values() for runs in shape["runs"].values() for run in runs]
    budget = "`, `".join(BUDGET.splitlines())
    facts = (
        f"{EXPERTS} experts and the base, bfloat16, sparse files; `task_arithmetic` with `{budget}`."
        f" Medians of {found['rounds']} rounds. Machine: {found['machine']};"
        f" load average {min(loads):.1f} to {max(loads):.1f} while it was measured. Date: {found['date']}."
        f" The samples of the largest are {format_bytes(last['index_bytes'])},"
        f" {100 * last['index_bytes'] / last['expert_bytes']:.1f}% of the experts' bytes;"
        f" its catalog is {format_bytes(last['catalog_bytes'])}."
    )
    return f"{facts}\n\n" + "\n".join(rows) + "\n\n![CPU seconds over expert blocks](images/scale.svg)"


def _median(runs: list[Json], field: str) -> float:
    return statistics.median(run[field] for run in runs)


_COLOURS = {"first plan": "#bc4c00", "plan": "#0969da", "status": "#1a7f37"}


def _draw(found: Json, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        blocks = [shape["expert_blocks"] for shape in found["shapes"].values()]
        for command, colour in _COLOURS.items():
            seconds = [_median(shape["runs"][command], "cpu") for shape in found["shapes"].values()]
            axes.plot(blocks, seconds, marker="o", color=colour, label=command)
            # What grows with the blocks goes through the largest model.
            line = [seconds[-1] * count / blocks[-1] for count in blocks]
            axes.plot(blocks, line, color=colour, linestyle=":", linewidth=1)
        for name, count in zip(found["shapes"], blocks, strict=True):
            axes.annotate(name, (count, axes.get_ylim()[0]), textcoords="offset points", xytext=(0, 4), ha="center")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("expert blocks")
        axes.set_ylabel("CPU seconds (dotted: in proportion to the blocks)")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
