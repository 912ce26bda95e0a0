"""The picture of docs/benchmarks.md: wall times of the full merges, the floor beside them, cold and warm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import STYLE
from benchmarks.speed import rows
from benchmarks.speed.ratios import median, runs_of
from benchmarks.speed.results import Json
from benchmarks.speed.rows import COLD, ROWS, WARM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WHO = (
    (rows.FLOOR, "I/O floor", "#8c959f"),
    (rows.OURS, "mergepipe", "#0969da"),
    (rows.BEST, "mergekit, best flags", "#bc4c00"),
)
_APART = 0.27


def draw(found: Json, path: Path) -> None:
    """Draw a panel for each mode, as SVG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [row.name for row in ROWS.values() if row.kind == "full" and row.name in found["rows"]]
    with mpl.rc_context(STYLE | {"ytick.color": STYLE["text.color"]}):
        figure = Figure(figsize=(9.5, 1.2 + 0.5 * max(1, len(names))), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, squeeze=False, sharey=True)[0]
        for axes, mode in zip(panels, (COLD, WARM), strict=True):
            _panel(axes, found, names, mode)
        bars, labels = panels[0].get_legend_handles_labels()
        if labels:
            figure.legend(bars, labels, loc="outside lower center", ncols=len(_WHO), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, found: Json, names: list[str], mode: str) -> None:
    for place, (who, label, colour) in enumerate(_WHO):
        heights, walls, errors = [], [], []
        for row, name in enumerate(names):
            runs = runs_of(found, name, mode, who)
            if runs:
                middle = median(runs, "wall")
                heights.append(row + (place - 1) * _APART)
                walls.append(middle)
                errors.append((middle - min(r["wall"] for r in runs), max(r["wall"] for r in runs) - middle))
        if not walls:
            continue
        spread = [list(side) for side in zip(*errors, strict=True)]
        style: Any = {"fmt": "o", "markersize": 5, "color": colour, "ecolor": colour, "elinewidth": 1.6, "label": label}
        axes.errorbar(walls, heights, xerr=spread, **style)
        for height, wall, (_, above) in zip(heights, walls, errors, strict=True):
            axes.annotate(
                f"{wall:.3g}", (wall + above, height), (5, 0), textcoords="offset points", va="center", fontsize=7
            )
    axes.set_xscale("log")
    axes.set_xlim(0.3, 300)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    for line in range(1, len(names)):
        axes.axhline(line - 0.5, color="#d0d7de", linewidth=0.6)
    axes.set_yticks(range(len(names)), [name.replace("-8", ", 8 experts") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("wall time, s (medians; lines: smallest to largest; logarithmic)")
    axes.set_title(mode, loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.grid(visible=True, color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
