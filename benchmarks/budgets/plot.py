"""The picture of docs/budgets-measured.md: deviation and bound over the bytes that are read of the experts."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.budgets.results import Json
from benchmarks.pages import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _RANDOM, _HASH = "#0969da", "#6e7781", "#bc4c00"


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
            _panel(axes, operator, measured)
        panels[0].set_ylabel("distance to the full read, % of the update")
        lines, names = panels[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, operator: str, measured: Json) -> None:
    rows = sorted(measured["budgets"].items(), key=lambda row: int(row[0]))
    whole = measured["expert_bytes"]
    gain, hashed = [row["gain"] for _, row in rows], [row.get("hash", row["gain"]) for _, row in rows]
    many = [row.get("random", [row["gain"]]) for _, row in rows]
    shares = [100 * statistics.fmean(point["bytes"] for point in points) / whole for points in many]
    deviations = [[100 * point["deviation"] for point in points] for points in many]
    axes.fill_between(
        shares, [min(d) for d in deviations], [max(d) for d in deviations], color=_RANDOM, alpha=0.25, linewidth=0
    )
    axes.plot(shares, [statistics.fmean(d) for d in deviations], color=_RANDOM, label="at random: mean, and all seeds")
    bounds = [100 * statistics.fmean(point["bound"] for point in points) for points in many]
    axes.plot(shares, bounds, color=_RANDOM, linestyle="--", linewidth=0.9, label="bound of these (mean)")
    for points, colour, mark, name in ((hashed, _HASH, "s", "hash order"), (gain, _OURS, "o", "mergepipe")):
        read = [100 * point["bytes"] / whole for point in points]
        lines = {key: [100 * point[key] for point in points] for key in ("deviation", "bound")}
        axes.plot(read, lines["deviation"], color=colour, marker=mark, markersize=4, label=f"{name}: deviation")
        axes.plot(read, lines["bound"], color=colour, linestyle="--", linewidth=0.9, label=f"{name}: bound")
    axes.set_title(operator, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("bytes read of the experts, %")
    axes.set_xlim(-1, 101)
    axes.set_ylim(bottom=0)
    axes.yaxis.grid(visible=True, color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
