"""The picture of a sweep, drawn by matplotlib: errors over the bytes that are read of the experts."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.cli.errors import UsageError
from mergepipe.cli.pages.curves import Curve, curves
from mergepipe.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mergepipe.project.sweep_report import SweepReport

FORMATS = (".png", ".svg")
_INK = "#1f2328"
_FAINT = "#d0d7de"
_STYLE: Any = {
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "mergepipe",  # the same picture has the same bytes
    "text.color": _INK,
    "text.parse_math": False,  # a name may hold a dollar; so ticks are written by us
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
}
_SHAPES = {"bound": "o", "expected": "s", "deviation": "D"}


def check_picture(path: str) -> None:
    """Check, before any work is done, that a picture can be drawn and is asked for in a form that we have.

    Raises
    ------
    UsageError
        If matplotlib is not installed, or the name ends otherwise.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"`{path}` is neither a PNG nor an SVG", hint="end its name in .png or .svg", path=path)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "`--plot` needs matplotlib, which is not installed",
            hint="run `pip install 'mergepipe[plot]'`, or use `--html`, which needs nothing",
            path=path,
        )


def picture(report: SweepReport, form: str) -> bytes:
    """Return the picture.

    Parameters
    ----------
    form
        ``png`` or ``svg``.
    """
    # It takes longer to import than most commands take; and no display is needed.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw(axes, report)
        written = io.BytesIO()
        figure.savefig(written, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return written.getvalue()


def _draw(axes: Axes, report: SweepReport) -> None:
    found = curves(report)
    axes.set_title(f"{report.output} ({report.operator})", loc="left", fontsize=10, fontweight="bold", pad=12)
    floor = _floor(found)
    for curve in found:
        _draw_curve(axes, curve, floor)
    axes.set_yscale("log", subs=[2, 5])
    axes.set_xlim(-0.02 * max(report.expert_bytes, 1), 1.02 * max(report.expert_bytes, 1))
    axes.set_ylim(bottom=floor / 1.35)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(_ticks(found, 1.5 * floor))
    # Between the powers of ten only where there are few of them.
    axes.yaxis.set_minor_formatter(_ticks(found, 1.5 * floor if high / low < 100 else math.inf))
    axes.yaxis.grid(visible=True, color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("bytes read of the experts")
    axes.set_ylabel("error, of the update" if found and found[0].relative else "error, Frobenius norm")
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(max(value, 0)))
    if any(0 in curve.values for curve in found):
        axes.annotate("0", (0, floor), xycoords=("axes fraction", "data"), xytext=(-6, 0), ha="right", va="center",
                      textcoords="offset points", color="#57606a")  # fmt: skip
    if report.own is not None:
        axes.axvline(report.own.expert_bytes, color="#57606a", linewidth=0.9, linestyle=(0, (2, 2)))
        axes.annotate(f"Mergefile: {report.own.budget}", (report.own.expert_bytes, 1), xytext=(3, 2), fontsize=8,
                      xycoords=("data", "axes fraction"), textcoords="offset points", color="#57606a")  # fmt: skip
    if found:
        axes.legend(frameon=False, loc="best")


def _draw_curve(axes: Axes, curve: Curve, floor: float) -> None:
    """Draw a curve; what is 0 lies on the floor of the logarithmic axis, as a hollow mark without a line to it."""
    positive = [(x, y) for x, y in zip(curve.bytes, curve.values, strict=True) if y > 0]
    zero = [x for x, y in zip(curve.bytes, curve.values, strict=True) if y == 0]
    shape = _SHAPES[curve.name]
    axes.plot(*_columns(positive), color=curve.colour, marker=shape, markersize=4, linewidth=1.6, label=curve.title,
              linestyle="--" if curve.in_levels else "-")  # fmt: skip
    axes.plot(zero, [floor] * len(zero), color=curve.colour, marker=shape, markersize=5, linestyle="none",
              markerfacecolor="white", clip_on=False)  # fmt: skip


def _ticks(found: Sequence[Curve], above: float) -> Callable[[float, float | None], str]:
    """Return what writes the values of the vertical axis; nothing where 0 is drawn."""
    relative = bool(found) and found[0].relative

    def written(value: float, _: float | None) -> str:
        if value <= above:
            return ""
        return f"{value * 100:.3g}%" if relative else f"{value:.3g}"

    return written


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _floor(found: Sequence[Curve]) -> float:
    """Return where 0 is drawn: below the least value that is not."""
    values = [value for curve in found for value in curve.values if value > 0]
    return min(values, default=1.0) / 3
