"""The maps of a report: the update, what is read, agreement of signs, and each expert's share, by layer and module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mergepipe.cli.pages.filling import text
from mergepipe.cli.pages.maps import EXACT_LEVEL, STEPS, HeatMap, Scale, level_text, scale_of, svg_of
from mergepipe.cli.pages.report_parts import Column, share, table
from mergepipe.cli.tables import plain
from mergepipe.units import format_count

if TYPE_CHECKING:
    from mergepipe.project.report_page import OutputReported, ReportedCell

Value = Callable[["ReportedCell"], "float | None"]
_SWATCHES = 5
_LEVELS = {str(level): level for level in range(1, EXACT_LEVEL)}


def map_section(report: OutputReported) -> Iterator[str]:
    """Yield the maps, each with its scale and the same as a table."""
    layers = len({cell.layer for cell in report.cells if cell.layer is not None})
    yield (
        f"<p>{text(format_count(layers, 'layer'))}, a row each; a column for each module. Outlined cells have no value."
        " The arrow keys go through a map that has the focus.</p>"
    )
    if report.not_measured is not None:
        yield f"<p>What the weights would tell is not known: {text(report.not_measured)}.</p>"
    yield '<div class="maps">'
    for one in heat_maps(report):
        yield _figure(one)
    yield "</div>"


def heat_maps(report: OutputReported) -> list[HeatMap]:
    """Return the maps of a report; those of which nothing is known are left out."""
    found = [
        _map(report, "update", "Update", "The norm of output less base, of the base's.", _update, None),
        _map(report, "read", "Read", "The share of the expert blocks that is read.", _read, Scale(low=0, high=1)),
        *_level_maps(report),
        _map(report, "signs", "Agreement of signs", "In which share of the elements two experts change a weight in the"
             " same direction; a half is what chance gives.", _signs, None, low=None),
    ]  # fmt: skip
    shares = [
        _map(report, f"share-{place}", f"Share of {plain(name)}", "Its delta times its weight, by norm, of all"
             " experts'.", _share_of(name), None)
        for place, name in enumerate(report.experts)
    ]  # fmt: skip
    scale = scale_of([list(one.known()) for one in shares], low=0.0)
    found += [
        HeatMap(
            name=one.name, title=one.title, note=one.note, layers=one.layers, modules=one.modules, values=one.values,
            outside=one.outside, scale=scale, of_levels=one.of_levels,
        )
        for one in shares
    ]  # fmt: skip
    return [one for one in found if any(True for _ in one.known())]


def _level_maps(report: OutputReported) -> Iterator[HeatMap]:
    """Yield the map of levels, where the budget buys them."""
    if report.budget.levels is not None:
        note = (
            "The mean level of the expert blocks that carry content of their own: 0 where nothing is read, then the"
            f" number of bit planes, {EXACT_LEVEL} for the exact block."
        )
        scale = Scale(low=0, high=EXACT_LEVEL)
        yield replace(_map(report, "levels", "Levels", note, mean_level, scale), of_levels=True)


def mean_level(cell: ReportedCell) -> float | None:
    """Return the mean level of a cell's expert blocks, an exact one taken as one more than all planes."""
    levels = cell.levels or {}
    blocks = sum(levels.values())
    total = sum(count * _LEVELS.get(name, 0 if name == "omitted" else EXACT_LEVEL) for name, count in levels.items())
    return total / blocks if blocks else None


def _update(cell: ReportedCell) -> float | None:
    return cell.update_relative


def _read(cell: ReportedCell) -> float | None:
    return cell.read / cell.total if cell.total else None


def _signs(cell: ReportedCell) -> float | None:
    return cell.sign_agreement


def _share_of(name: str) -> Value:
    return lambda cell: cell.shares.get(name)


def _map(
    report: OutputReported, name: str, title: str, note: str, value: Value, scale: Scale | None,
    *, low: float | None = 0.0,
) -> HeatMap:  # fmt: skip
    inside = {(cell.layer, cell.module): value(cell) for cell in report.cells if cell.layer is not None}
    layers = tuple(sorted({layer for layer, _ in inside if layer is not None}))
    modules = tuple(dict.fromkeys(module for _, module in inside))
    made = HeatMap(
        name=f"map-{name}",
        title=title,
        note=note,
        layers=layers,
        modules=modules,
        values=tuple(tuple(inside.get((layer, module)) for module in modules) for layer in layers),
        outside=tuple((cell.module, value(cell)) for cell in report.cells if cell.layer is None),
        scale=scale or Scale(low=0, high=1),
    )
    if scale is not None:
        return made
    fitting = scale_of([list(made.known())], low=low)
    return HeatMap(**{field: getattr(made, field) for field in made.__slots__} | {"scale": fitting})


def _figure(one: HeatMap) -> str:
    caption = f'<figcaption><b id="{one.name}-title">{text(one.title)}</b><span>{text(one.note)}</span></figcaption>'
    drawing = f'<div class="wide">{svg_of(one, plain)}</div>'
    status = f'<p class="status" id="{one.name}-status" aria-live="polite">&nbsp;</p>'
    return f"<figure>{caption}{_scale(one)}{drawing}{status}{_as_table(one)}</figure>"


def _scale(one: HeatMap) -> str:
    swatches, scale = [], one.scale
    count = EXACT_LEVEL if one.of_levels else _SWATCHES
    for place in range(count + 1):
        part = place / count
        value = one.words(scale.low + part * (scale.high - scale.low)).removeprefix("level ")
        colour = f'<rect width="1" height="1" class="h{round(STEPS * part)}"/>'
        box = f'<svg viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true">{colour}</svg>'
        swatches.append(f"<li>{box}{text(value)}</li>")
    return f'<ul class="scale" aria-label="Colour scale">{"".join(swatches)}</ul>'


def _as_table(one: HeatMap) -> str:
    shown = (lambda value: text(level_text(value))) if one.of_levels else share
    rows = [[str(layer), *map(shown, row)] for layer, row in zip(one.layers, one.values, strict=True)]
    columns = [Column("Layer"), *(Column(module, is_number=True) for module in one.modules)]
    tables = table(f"{one.name}-layers", columns, rows, label=f"{one.title}, by layer and module") if rows else ""
    outside = [[text(module), shown(value)] for module, value in one.outside]
    columns = [Column("Outside the layers"), Column(one.title, is_number=True)]
    tables += table(f"{one.name}-outside", columns, outside, label=f"{one.title}, outside") if outside else ""
    return f"<details><summary>As a table</summary>{tables}</details>"
