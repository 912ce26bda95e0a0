"""The curves that the picture and the page of a sweep draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.project.sweep_report import SweepPoint, SweepReport

# Told apart by people who see few colours, too (Okabe and Ito 2008, "Color universal design"); dark enough on white.
_COLOURS = {"bound": "#0072b2", "expected": "#b86e00", "deviation": "#007a5a"}
_TITLES = {"bound": "bound", "expected": "expected", "deviation": "measured"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One kind of error over the bytes of experts that are read.

    Attributes
    ----------
    name
        ``bound``, ``expected`` or ``deviation``.
    relative
        Whether values are shares of the update, and not absolute.
    bytes, values
        Of the points at which it is known, those that read less first.
    in_levels
        Whether budgets buy levels, beside another curve of whole blocks.
    """

    name: str
    relative: bool
    bytes: tuple[int, ...]
    values: tuple[float, ...]
    in_levels: bool = False

    @property
    def title(self) -> str:
        """What people call it."""
        return _TITLES[self.name] + (" in levels" if self.in_levels else "")

    @property
    def colour(self) -> str:
        """Its colour on white."""
        return _COLOURS[self.name]


def curves(report: SweepReport) -> list[Curve]:
    """Return the curves of a report: all relative to the update, or all absolute where the update is not known."""
    relative = all(point.expected.relative_to_update is not None for point in report.all_points)
    pick = _relative if relative else _absolute
    found = []
    for name, in_levels in [(name, in_levels) for in_levels in (False, True) for name in _TITLES]:
        chosen = report.levels if in_levels else report.points
        points = [(point.expert_bytes, pick(point, name)) for point in chosen]
        known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
        if known:
            xs, ys = zip(*known, strict=True)
            found.append(Curve(name=name, relative=relative, bytes=xs, values=ys, in_levels=in_levels))
    return found


def _relative(point: SweepPoint, name: str) -> float | None:
    return _of(point, name, lambda error: error.relative_to_update)


def _absolute(point: SweepPoint, name: str) -> float | None:
    return _of(point, name, lambda error: error.absolute)


def _of(point: SweepPoint, name: str, value: Callable[..., float | None]) -> float | None:
    if name == "bound":
        return None if point.bound.kind == "none" else value(point.bound)
    if name == "expected":
        return value(point.expected)
    return None if point.deviation is None else value(point.deviation.length)
