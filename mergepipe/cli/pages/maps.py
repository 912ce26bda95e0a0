"""Heat maps of a report: a cell for each layer and module, drawn by matplotlib as SVG that takes the page's colours.

matplotlib lays out axes and labels and writes the drawing. Its colours are stand-ins: what comes out of it is changed
so that each has a class of the page's style sheet, where light and dark are told apart; each cell gets its figure in
words, which a pointer and the arrow keys show; and identifiers that several drawings would share go.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mergepipe.cli.errors import UsageError
from mergepipe.progressive.levels import LEVELS
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 20
"""Colours of the scale, from 0 to this."""
_NS = "http://www.w3.org/2000/svg"
_INK, _UNKNOWN = "#01fe02", "#01fe03"  # stand-ins: text, and a cell without a value
_STAND_IN = "#02fe{:02x}"
_DARK_INK, _LIGHT_INK = STEPS + 1, STEPS + 2  # of the numbers on cells
_DARK_ENOUGH = 11  # up to this step the first ink has a contrast of 4.5 and more, behind it the second, in both themes
_COLOUR = re.compile(r"#0[12]fe[0-9a-f]{2}")
_FONT = 11.0
_LETTER = 0.56 * _FONT  # what a letter takes on average
_LEFT, _RIGHT, _GAP = 40.0, 10.0, 14.0
_WIDTH = 340.0
_LONGEST = 24
_NUMBER_WIDTH, _NUMBER_HEIGHT = 27.0, 14.0
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": _FONT,
    "svg.fonttype": "none",
    "svg.hashsalt": "mergepipe",  # the same map has the same bytes
    "text.parse_math": False,  # a name may hold a dollar
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The values of the lightest and of the darkest colour."""

    low: float
    high: float

    def step(self, value: float) -> int:
        """Return the colour of a value, 0 to `STEPS`."""
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.0
        return round(STEPS * min(1.0, max(0.0, share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A table of shares to be drawn.

    Attributes
    ----------
    name
        Unique among the maps of a page: letters, digits and hyphens.
    title, note
        What people read, as text.
    layers, modules
        The rows and the columns of what lies in the layers.
    values
        By row and column a share, 0 to 1; None where there is none.
    outside
        The modules outside the layers with their values.
    scale
        What the colours mean.
    of_levels
        Whether values are levels of precision, 0 to `EXACT_LEVEL`, and not shares.
    """

    name: str
    title: str
    note: str
    layers: tuple[int, ...]
    modules: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    outside: tuple[tuple[str, float | None], ...]
    scale: Scale
    of_levels: bool = False

    def words(self, value: float | None) -> str:
        """Return a value in words."""
        return level_text(value) if self.of_levels else percent(value)

    def known(self) -> Iterator[float]:
        """Yield all values."""
        yield from (value for row in self.values for value in row if value is not None)
        yield from (value for _, value in self.outside if value is not None)


def check_library() -> None:
    """Check, before any work is done, that maps can be drawn.

    Raises
    ------
    UsageError
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "`report` draws its maps with matplotlib, which is not installed",
            hint="run `pip install 'mergepipe[report]'`, or use `--json`, which needs nothing",
        )


EXACT_LEVEL = LEVELS + 1
"""Where the exact block lies on the scale of levels."""


def level_text(value: float | None) -> str:
    """Return a level, or the mean of some, in words; a dash for none."""
    if value is None:
        return "–"
    return {0.0: "nothing", float(EXACT_LEVEL): "exact"}.get(value, f"level {float(f'{value:.3g}'):.6g}")


def percent(value: float | None) -> str:
    """Return a share in percent with three digits; a dash for none."""
    return "–" if value is None else f"{float(f'{value * 100:.3g}'):.6g}%"


def scale_of(maps: Sequence[Sequence[float]], *, low: float | None = None, high: float | None = None) -> Scale:
    """Return a scale that all these values lie on, between round numbers; ``low`` and ``high`` where they are given."""
    values = [value for one in maps for value in one]
    least, most = min(values, default=0.0), max(values, default=1.0)
    unit = 10.0 ** math.floor(math.log10(most)) / 2 if most > 0 else 0.5
    bottom = math.floor(least / unit) * unit if low is None else low
    top = math.ceil(most / unit - 1e-9) * unit if high is None else high
    return Scale(low=bottom, high=top if top > bottom else bottom + unit)


def svg_of(one: HeatMap, describe: Any = None) -> str:
    """Return a map as an SVG element.

    Parameters
    ----------
    describe
        Returns a name as it may be shown; the name itself by default.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    shown = describe or str
    place = _Place.of(one)
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its own font lacks; the reader's has them
        figure = Figure(figsize=(place.width / 72, place.height / 72), dpi=72)
        FigureCanvasSVG(figure)
        figure.patch.set_visible(False)
        titles: _Drawn = {}
        if one.layers and one.modules:
            axes = figure.add_axes(place.inner())
            _draw_layers(axes, one, place, titles, shown)
        if one.outside:
            axes = figure.add_axes(place.lower())
            _draw_outside(axes, one, place, titles, shown)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _adapted(written.getvalue(), one, place, titles)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the parts of a drawing lie, in pixels: the cells of the layers, below them those outside."""

    cell: float
    row: float
    head: float
    rows: int
    columns: int
    others: int
    width: float

    @classmethod
    def of(cls, one: HeatMap) -> _Place:
        """Return the places for a map."""
        columns, rows = len(one.modules), len(one.layers)
        cell = min(48.0, max(13.0, (_WIDTH - _LEFT - _RIGHT) / max(columns, 1)))
        row = 20.0 if rows <= 24 else 15.0 if rows <= 48 else 11.0
        longest = max((min(len(name), _LONGEST) for name in one.modules), default=0)
        return cls(
            cell=cell,
            row=row,
            head=longest * _LETTER + 12 if rows and columns else 0.0,
            rows=rows if columns else 0,
            columns=columns if rows else 0,
            others=len(one.outside),
            width=max(_WIDTH, _LEFT + columns * cell + _RIGHT),
        )

    @property
    def height(self) -> float:
        gap = _GAP if self.rows and self.others else 0.0
        return self.head + self.rows * self.row + gap + self.others * 20.0 + 4

    def inner(self) -> tuple[float, float, float, float]:
        """Return the rectangle of the layers' cells, as shares of the drawing."""
        top = self.height - self.head
        bottom = top - self.rows * self.row
        return (
            _LEFT / self.width, bottom / self.height, self.columns * self.cell / self.width,
            self.rows * self.row / self.height,
        )  # fmt: skip

    def lower(self) -> tuple[float, float, float, float]:
        """Return the rectangle of the other cells."""
        return _LEFT / self.width, 4 / self.height, 48.0 / self.width, self.others * 20.0 / self.height


def _draw_layers(axes: Axes, one: HeatMap, place: _Place, titles: _Drawn, shown: Any) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.set_xlim(0, len(one.modules))
    axes.set_ylim(len(one.layers), 0)
    cells = [
        _Cell(at=(x, y), value=value, place=f"{y}-{x}", title=f"layer {layer}, {shown(module)}: {one.words(value)}")
        for y, (layer, row) in enumerate(zip(one.layers, one.values, strict=True))
        for x, (module, value) in enumerate(zip(one.modules, row, strict=True))
    ]
    _draw_cells(axes, one, cells, f"{one.name}-cells", (place.cell, place.row))
    titles[f"{one.name}-cells"] = cells
    axes.xaxis.tick_top()
    axes.xaxis.set_major_locator(FixedLocator([x + 0.5 for x in range(len(one.modules))]))
    axes.xaxis.set_major_formatter(FixedFormatter([_shortened(shown(module)) for module in one.modules]))
    axes.tick_params(axis="x", rotation=90, length=0, pad=4)
    every = 1 if len(one.layers) <= 24 else 4 if len(one.layers) <= 100 else 10
    marked = [y for y, layer in enumerate(one.layers) if layer % every == 0]
    axes.yaxis.set_major_locator(FixedLocator([y + 0.5 for y in marked]))
    axes.yaxis.set_major_formatter(FixedFormatter([str(one.layers[y]) for y in marked]))
    axes.tick_params(axis="y", length=0, pad=4)
    _bare(axes)


def _draw_outside(axes: Axes, one: HeatMap, place: _Place, titles: _Drawn, shown: Any) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.set_xlim(0, 1)
    axes.set_ylim(len(one.outside), 0)
    cells = [
        _Cell(at=(0, y), value=value, place=f"o-{y}", title=f"{shown(module)}: {one.words(value)}")
        for y, (module, value) in enumerate(one.outside)
    ]
    _draw_cells(axes, one, cells, f"{one.name}-others", (48.0, 20.0))
    titles[f"{one.name}-others"] = cells
    axes.xaxis.set_visible(False)
    axes.yaxis.tick_right()
    room = int((place.width - _LEFT - 48.0 - 12) / _LETTER)
    axes.yaxis.set_major_locator(FixedLocator([y + 0.5 for y in range(len(one.outside))]))
    axes.yaxis.set_major_formatter(FixedFormatter([_shortened(shown(name), room) for name, _ in one.outside]))
    axes.tick_params(axis="y", length=0, pad=6)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.patch.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A cell: its column and row, its value, its place for the arrow keys, and what is said of it."""

    at: tuple[int, int]
    value: float | None
    place: str
    title: str


_Drawn = dict[str, Sequence[_Cell]]
"""By the identifier of a drawn group its cells, in order."""


def _draw_cells(axes: Axes, one: HeatMap, cells: Sequence[_Cell], gid: str, size: tuple[float, float]) -> None:
    """Draw cells, each a pixel smaller than its place, with values on them where there is room."""
    from matplotlib.collections import PolyCollection

    width, height = 1 - 1 / size[0], 1 - 1 / size[1]
    steps = [None if cell.value is None else one.scale.step(cell.value) for cell in cells]
    corners = [(x, y) for cell in cells for x, y in [cell.at]]
    axes.add_collection(
        PolyCollection(
            [[(x, y), (x + width, y), (x + width, y + height), (x, y + height)] for x, y in corners],
            facecolors=[_UNKNOWN if step is None else _STAND_IN.format(step) for step in steps],
            edgecolors="none",
            linewidths=0,
            clip_on=False,
            gid=gid,
        )
    )
    if size[0] < _NUMBER_WIDTH or size[1] < _NUMBER_HEIGHT:
        return
    for cell, step in zip(cells, steps, strict=True):
        if cell.value is not None and step is not None:
            ink = _STAND_IN.format(_DARK_INK if step <= _DARK_ENOUGH else _LIGHT_INK)
            middle = cell.at[0] + width / 2, cell.at[1] + height / 2
            axes.text(*middle, _two_digits(cell.value, one), ha="center", va="center_baseline", fontsize=10, color=ink)


def _two_digits(value: float, one: HeatMap) -> str:
    """Return percent, or a level, in at most three characters."""
    if one.of_levels:
        return "ex" if value == EXACT_LEVEL else f"{float(f'{value:.2g}'):g}"
    shown = value * 100
    return f"{shown:.0f}" if shown >= 9.95 or shown == 0 else f"{shown:.1f}" if shown >= 0.095 else "<.1"


def _shortened(name: str, room: int = _LONGEST) -> str:
    return name if len(name) <= room else f"…{name[len(name) - room + 1 :].lstrip('.')}"


# --- the drawing, adapted to the page ---------------------------------------------------------------------------------


def _adapted(data: bytes, one: HeatMap, place: _Place, titles: _Drawn) -> str:
    ET.register_namespace("", _NS)
    root = ET.fromstring(data)  # noqa: S314 - matplotlib wrote it a moment ago
    for parent in root.iter():
        for child in list(parent):
            if child.tag in (f"{{{_NS}}}metadata", f"{{{_NS}}}defs"):
                parent.remove(child)
    for element in root.iter():
        _restyle(element)
        cells = titles.get(element.attrib.pop("id", ""), ())
        for path, cell in zip(element.iter(f"{{{_NS}}}path"), cells, strict=bool(cells)):
            path.set("data-place", cell.place)
            ET.SubElement(path, f"{{{_NS}}}title").text = cell.title
    _prune(root)
    root.attrib.clear()
    root.attrib.update({
        "viewBox": f"0 0 {place.width:g} {place.height:g}",
        "width": f"{place.width:g}",
        "height": f"{place.height:g}",
        "class": "map",
        "tabindex": "0",
        "role": "group",
        "aria-labelledby": f"{one.name}-title",
        "aria-describedby": f"{one.name}-status",
    })  # fmt: skip
    return ET.tostring(root, encoding="unicode")


def _prune(element: ET.Element) -> None:
    """Drop groups without content, blanks between elements, and turns by nothing."""
    for child in list(element):
        _prune(child)
        child.tail = None
        if child.tag == f"{{{_NS}}}g" and not len(child):
            element.remove(child)
    if len(element):
        element.text = None
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]


def _restyle(element: ET.Element) -> None:
    """Replace stand-ins for colours by classes, and drop what the style sheet says better."""
    style = element.attrib.pop("style", "")
    found = _COLOUR.search(style)
    if element.tag == f"{{{_NS}}}text":
        anchor = re.search(r"text-anchor: (\w+)", style)
        if anchor:
            element.set("text-anchor", anchor[1])
        number = found is not None and found[0] not in (_INK, _UNKNOWN)
        deep = found is not None and found[0] == _STAND_IN.format(_LIGHT_INK)
        element.set("class", ("n d" if deep else "n") if number else "l")
    elif found is not None:
        element.set("class", "cell h-none" if found[0] == _UNKNOWN else f"cell h{int(found[0][-2:], 16)}")
