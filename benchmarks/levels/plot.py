"""The picture of docs/levels-measured.md: deviation and bound over the bytes that are read, levels and whole blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.levels.results import Json
from benchmarks.pages import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS, _BLOCKS = "#0969da", "#bc4c00"


def draw(found: Json, path: Path) -> None:
    """Draw a panel for each operator of the family's figures, as SVG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(found["operators"]), squeeze=False)[0]
        for axes, (operator, measured) in zip(panels, found["operators"].items(), strict=True):
            _panel(axes, operator, measured["rows"])
        panels[0].set_ylabel("distance to the full read, % of the update")
        lines, names = panels[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, operator: str, rows: Json) -> None:
    for kind, colour, mark in (("levels", _LEVELS, "o"), ("blocks", _BLOCKS, "s")):
        own = sorted((row for name, row in rows.items() if name.startswith(kind)), key=lambda row: row["planned"])
        read = [100 * row["planned"] / row["full"] for row in own]
        deviations = [100 * row["deviation"] for row in own]
        axes.plot(read, deviations, color=colour, marker=mark, markersize=4, label=f"{kind}: deviation")
        if kind == "levels" or operator == "task_arithmetic":
            bounds = [100 * row["bound"] for row in own]
            axes.plot(read, bounds, color=colour, linestyle="--", linewidth=0.9, label=f"{kind}: bound")
    axes.set_title(operator, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("bytes read of the experts, %")
    axes.set_yscale("log")
    axes.yaxis.grid(visible=True, color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
