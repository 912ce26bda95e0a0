"""The columns of a sweep: as text for people, as CSV for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from mergepipe.cli.tables import fact, pad, plain, rows, width
from mergepipe.units import format_bytes, format_count

if TYPE_CHECKING:
    from mergepipe.project.sweep_report import LostTensor, SweepPoint, SweepReport

_COLUMNS = (
    "budget",
    "expert_bytes",
    "share",
    "blocks",
    "bound_kind",
    "bound",
    "bound_relative_to_update",
    "bound_relative_to_base",
    "expected",
    "expected_relative_to_update",
    "omitted_mass",
    "deviation",
    "deviation_relative_to_update",
    "deviation_relative_to_output",
    "deviation_largest",
    "precision",
)
_NEVER = "-"


def csv_text(report: SweepReport) -> str:
    """Return the points as CSV, a header first; what is not known is empty, figures stand behind the columns of ours.

    Numbers have all their digits. Lines end with a line feed.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([*_COLUMNS, *report.figures])
    for point in report.all_points:
        row = [*_row(report, point), *(point.figures.get(name) for name in report.figures)]
        writer.writerow(["" if value is None else value for value in row])
    return written.getvalue()


def _row(report: SweepReport, point: SweepPoint) -> list[object]:
    bound, expected, found = point.bound, point.expected, point.deviation
    deviation: list[object] = [None] * 4
    if found is not None:
        length = found.length
        deviation = [length.absolute, length.relative_to_update, length.relative_to_output, found.largest]
    return [
        point.budget,
        point.expert_bytes,
        report.share(point.expert_bytes),
        point.blocks,
        bound.kind,
        bound.absolute,
        bound.relative_to_update,
        bound.relative_to_base,
        expected.absolute,
        expected.relative_to_update,
        point.omitted_mass,
        *deviation,
        point.precision,
    ]


def sweep_lines(report: SweepReport, *, verbose: bool) -> Iterator[str]:
    """Yield a sweep for people: what was swept, then a line for each budget.

    Parameters
    ----------
    verbose
        Name the tensors that lose most at each budget, too.
    """
    yield f"{click.style(plain(report.output), bold=True)} ({plain(report.operator)})"
    yield from fact("experts", [format_bytes(report.expert_bytes), full_read(report)])
    if report.own is not None:
        yield from fact("budget", [f"{report.own.budget}, which reads {format_bytes(report.own.expert_bytes)}"])
    read = [f"{format_bytes(report.index_bytes_read)} to plan"] if report.index_bytes_read else []
    read += [f"{format_bytes(report.measured_bytes_read)} to compare"] if report.measured_bytes_read else []
    if read:
        yield from fact("read", read)
    for points in filter(None, (report.points, report.levels)):
        yield ""
        yield from _table(report, points)
    yield ""
    yield from legend(report)
    if verbose:
        yield from _losses(report)


def full_read(report: SweepReport) -> str:
    """Return in words what a full read takes of the experts."""
    less = f"{format_bytes(report.full_bytes)} " if report.full_bytes != report.expert_bytes else "them "
    return f"a full read takes {less}in {format_count(report.full_blocks, 'block')}"


def head_of(report: SweepReport) -> list[str]:
    """Return the titles of the columns for people."""
    return [
        *("budget", "expert bytes", "blocks", "bound", "expected"),
        *(["deviation"] if report.is_measured else []),
        *(plain(name) for name in report.figures),
    ]


def cells_of(report: SweepReport, point: SweepPoint) -> list[str]:
    """Return a line of the table for people; the budget of the Mergefile is marked."""
    return [_mark(report, point), *_cells(report, point)]


def _table(report: SweepReport, points: Sequence[SweepPoint]) -> Iterator[str]:
    head, lines = head_of(report), [cells_of(report, point) for point in points]
    widths = [max(map(width, column)) for column in zip(head, *lines, strict=True)]
    for cells in (head, *lines):
        # Numbers stand to the right of their column, the budget to the left.
        first = pad(cells[0], widths[0])
        rest = [" " * (size - width(cell)) + cell for cell, size in zip(cells[1:], widths[1:], strict=True)]
        yield "  ".join([f"  {first}", *rest]).rstrip()


def _mark(report: SweepReport, point: SweepPoint) -> str:
    return f"{point.budget} *" if report.is_own(point) else point.budget


def _cells(report: SweepReport, point: SweepPoint) -> Iterator[str]:
    yield f"{format_bytes(point.expert_bytes)} ({report.share(point.expert_bytes):.1%})"
    yield f"{point.blocks:,}"
    yield _bound(point)
    yield _percent(point.expected.relative_to_update, point.expected.absolute)
    if report.is_measured:
        found = point.deviation
        yield _NEVER if found is None else _percent(found.length.relative_to_update, found.length.absolute)
    for name in report.figures:
        value = point.figures.get(name)
        yield _NEVER if value is None else f"{value:.6g}"


def _bound(point: SweepPoint) -> str:
    if point.bound.kind == "none":
        return _NEVER
    sign = "~" if point.bound.kind == "estimated" else ""
    return sign + _percent(point.bound.relative_to_update, point.bound.absolute)


def _percent(relative: float | None, absolute: float | None) -> str:
    """Return a share of the update in percent, or in its place the absolute value."""
    if relative is not None:
        return f"{relative * 100:.3g}%"
    return _NEVER if absolute is None else f"{absolute:.3g}"


def legend(report: SweepReport) -> Iterator[str]:
    """Yield what the table means, line by line."""
    kinds = {point.bound.kind for point in report.all_points}
    relative = any(point.expected.relative_to_update is not None for point in report.all_points)
    yield f"errors {'in percent of the update (the full read less the base)' if relative else 'as norms'}"
    yield "expected: if what is left out were orthogonal"
    if any(point.precision == "levels" for point in report.all_points):
        yield "in levels: the first bits of nearly every block, before any is read exactly"
    if any(map(_is_rounded, report.all_points)):
        yield "deviations are of weights as they are stored: their rounding is in no bound"
    if "none" in kinds:
        yield f"{_NEVER}: no bound is known for this operator"
    if "estimated" in kinds:
        yield "~: an estimate, the norms were sampled"
    if any(map(report.is_own, report.all_points)):
        yield "*: the budget of the Mergefile"


def _is_rounded(point: SweepPoint) -> bool:
    """Return whether the rounding to the dtype of the output is more than all that the bound allows for."""
    found, bound = point.deviation, point.bound.absolute
    length = None if found is None else found.length.absolute
    return length is not None and bound is not None and length > bound


def _losses(report: SweepReport) -> Iterator[str]:
    """Yield what loses most, budget by budget: each tensor's expected error and the share of its deltas left out."""
    for point in report.all_points:
        if point.losses:
            yield ""
            yield f"what loses most at {point.budget}: expected error, share of the deltas left out"
            yield from rows([_loss(report, loss) for loss in point.losses], indent="  ")


def _loss(report: SweepReport, loss: LostTensor) -> list[str]:
    expected = loss.expected / report.update if report.update else None
    return [_percent(expected, loss.expected), f"{loss.omitted_mass:.1%}", plain(loss.tensor)]
