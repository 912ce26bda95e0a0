"""The page of a sweep: one HTML file that needs nothing else, with curves, a map of what is read, and tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mergepipe.cli.pages.columns import cells_of, full_read, head_of, legend
from mergepipe.cli.pages.filling import filled, part, script_json
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.sweep_report import LostTensor, SweepPoint, SweepReport

def page(report: SweepReport) -> str:
    """Return the page.

    Parameters
    ----------
    report
        With its map.
    """
    parts = {
        "title": html.escape(f"{report.output}: a sweep over budgets"),
        "name": html.escape(report.output),
        "summary": html.escape(_summary(report)),
        "table": _table(report),
        "data": script_json(_data(report)),
        "style": part("page.css"),
        "script": part("page.js"),
    }
    return filled("page.html", parts)


def _summary(report: SweepReport) -> str:
    experts = format_count(len(report.experts), "expert")
    base = f" on {report.base}" if report.base else ""
    return f"{report.operator} of {experts}{base}, {format_bytes(report.expert_bytes)}; {full_read(report)}."


def _table(report: SweepReport) -> str:
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head_of(report))
    rows = []
    for point in report.all_points:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells_of(report, point))
        rows.append(f"<tr{' class=own' if report.is_own(point) else ''}>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>" + "".join(
        f"<p>{html.escape(line)}</p>" for line in legend(report)
    )


def _data(report: SweepReport) -> dict[str, Any]:
    """Return what the script draws from; errors are relative to the update wherever that is known."""
    assert report.map is not None, "a page shows the map"
    relative = all(point.expected.relative_to_update is not None for point in report.all_points)
    cells = report.map.cells
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    modules = list(dict.fromkeys(cell.module for cell in cells))
    tensors = list(dict.fromkeys(loss.tensor for step in report.map.steps for loss in step.losses))
    numbers = {name: number for number, name in enumerate(tensors)}
    unit = report.update if relative and report.update else 1.0
    return {
        "experts": report.experts,
        "expertBytes": report.expert_bytes,
        "fullBlocks": report.full_blocks,
        "own": None if report.own is None else {"budget": report.own.budget, "bytes": report.own.expert_bytes},
        "relative": relative,
        "points": [_named_point(point, relative=relative) for point in report.points],
        "levels": [_named_point(point, relative=relative) for point in report.levels],
        "steps": [
            {
                **_point(step, relative=relative),
                "losses": [_loss(loss, numbers[loss.tensor], unit) for loss in step.losses],
            }
            for step in report.map.steps
        ],
        "tensors": tensors,
        "layers": layers,
        "modules": modules,
        "cells": [
            [-1 if c.layer is None else layers.index(c.layer), modules.index(c.module), c.expert, c.blocks, c.selected]
            for c in cells
        ],
    }


def _named_point(point: SweepPoint, *, relative: bool) -> dict[str, Any]:
    return {
        **_point(point, relative=relative),
        "budget": point.budget,
        "figures": [(name, value) for name, value in point.figures.items() if _rounded(value) is not None],
    }


def _point(point: SweepPoint, *, relative: bool) -> dict[str, Any]:
    bound, expected = point.bound, point.expected
    length = point.deviation.length if point.deviation else None
    return {
        "bytes": point.expert_bytes,
        "blocks": point.blocks,
        "kind": bound.kind,
        "bound": _rounded(bound.relative_to_update if relative else bound.absolute),
        "expected": _rounded(expected.relative_to_update if relative else expected.absolute),
        "deviation": _rounded((length.relative_to_update if relative else length.absolute) if length else None),
    }


def _loss(loss: LostTensor, number: int, unit: float) -> Sequence[float | None]:
    bound = None if loss.bound is None else loss.bound / unit
    return (number, loss.omitted_bytes, _rounded(bound), _rounded(loss.expected / unit), _rounded(loss.omitted_mass))


def _rounded(value: float | None) -> float | None:
    """Return a number with the digits that the page may show; None for what is not finite."""
    return float(f"{value:.8g}") if value is not None and abs(value) != float("inf") and value == value else None
