"""What a sweep over budgets found: plain values with a stable JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from mergepipe.project.reports import Json
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """A length, absolute (Frobenius norm) and as a share of others; None where one of the two is unknown."""

    absolute: float | None
    relative_to_update: float | None
    relative_to_output: float | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "absolute": finite(self.absolute),
            "relative_to_update": finite(self.relative_to_update),
            "relative_to_output": finite(self.relative_to_output),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptBound:
    """How far the budgeted merge can be from the full read: ``exact``, ``certified``, ``estimated`` or ``none``."""

    kind: str
    absolute: float | None
    relative_to_update: float | None
    relative_to_base: float | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "absolute": finite(self.absolute),
            "relative_to_update": finite(self.relative_to_update),
            "relative_to_base": finite(self.relative_to_base),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDeviation:
    """The true distance to the full-read merge, as both are stored.

    Attributes
    ----------
    length
        Over all merged tensors; ``relative_to_update`` divides by the full read less the base, ``relative_to_output``
        by the full read.
    largest
        The largest difference of any element.
    """

    length: Distance
    largest: float

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {**self.length.as_json(), "largest": finite(self.largest)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTensor:
    """What one tensor loses at a budget; ``bound`` is None where none is known, ``omitted_mass`` a share, 0 to 1."""

    tensor: str
    omitted_bytes: int
    bound: float | None
    expected: float
    omitted_mass: float

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "tensor": self.tensor,
            "omitted_bytes": self.omitted_bytes,
            "bound": finite(self.bound),
            "expected": finite(self.expected),
            "omitted_mass": finite(self.omitted_mass),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One budget.

    Attributes
    ----------
    budget
        Its label: ``25%``, ``500 KB``, ``full``, ``25% in levels``. As it is written in a lock, but for sizes, which
        have bytes there.
    precision
        What it buys: ``blocks``, whole ones, or ``levels`` of them.
    expert_bytes
        What a build with it reads of experts to merge, adapters among it.
    blocks
        The blocks of experts of which anything is read.
    bound, expected
        The certified error, and that if what is left out were orthogonal: an estimate.
    omitted_mass
        The share of the length of all deltas that is left out, 0 to 1.
    losses
        The tensors that lose most, those that lose more first.
    deviation
        Where it was measured.
    figures
        What the user's command said of the model, by name; a figure that it did not give is not there.
    """

    budget: str
    expert_bytes: int
    blocks: int
    bound: SweptBound
    expected: Distance
    omitted_mass: float
    losses: tuple[LostTensor, ...] = ()
    deviation: MeasuredDeviation | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    precision: str = "blocks"

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "budget": self.budget,
            "precision": self.precision,
            "expert_bytes": self.expert_bytes,
            "blocks": self.blocks,
            "bound": self.bound.as_json(),
            "expected": {key: value for key, value in self.expected.as_json().items() if key != "relative_to_output"},
            "omitted_mass": finite(self.omitted_mass),
            "deviation": None if self.deviation is None else self.deviation.as_json(),
            "figures": {name: finite(value) for name, value in self.figures.items()},
            "losses": [loss.as_json() for loss in self.losses],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """The blocks of one expert in the tensors of one module of one layer.

    Attributes
    ----------
    layer
        None outside the layers.
    module
        The tensor's name without its layer.
    expert
        Its place among the experts.
    blocks
        How many have to be read at all.
    selected
        How many of them each step reads.
    """

    layer: int | None
    module: str
    expert: int
    blocks: int
    selected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingMap:
    """What is read first: the same budget in even steps, finer than the points.

    Attributes
    ----------
    steps
        A point for each step from nothing to everything.
    cells
        By layer, module and expert.
    """

    steps: tuple[SweepPoint, ...]
    cells: tuple[MapCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBudget:
    """The budget that the Mergefile gives the output, and the bytes of experts that it reads."""

    budget: str
    expert_bytes: int
    precision: str = "blocks"

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"budget": self.budget, "precision": self.precision, "expert_bytes": self.expert_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What budgets come to for one output.

    Attributes
    ----------
    experts
        Their names, in expert order.
    expert_bytes
        The experts' bytes, which shares are of.
    full_bytes, full_blocks
        What there is to read of them: without zero deltas and equal blocks.
    index_bytes_read, measured_bytes_read
        Source bytes that the sweep read to plan, and to measure deviations.
    update
        The norm of the full read less the base: measured, else a lower bound of it, or None.
    own
        Where the Mergefile gives the output a budget.
    points
        Those that read less first: budgets that buy whole blocks, unless levels alone were asked for.
    levels
        The same budgets, buying levels; empty where they were not asked for.
    map
        Where it was asked for; no part of the JSON form.
    """

    output: str
    operator: str
    base: str | None
    experts: tuple[str, ...]
    expert_bytes: int
    full_bytes: int
    full_blocks: int
    index_bytes_read: int
    measured_bytes_read: int
    update: float | None
    own: OwnBudget | None
    points: tuple[SweepPoint, ...]
    levels: tuple[SweepPoint, ...] = ()
    map: ReadingMap | None = None

    @property
    def all_points(self) -> tuple[SweepPoint, ...]:
        """The points of both curves."""
        return (*self.points, *self.levels)

    def is_own(self, point: SweepPoint) -> bool:
        """Return whether a point is what the Mergefile's own budget comes to."""
        own = self.own
        return own is not None and (own.precision, own.expert_bytes) == (point.precision, point.expert_bytes)

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures of the user's command, in the order in which they came first."""
        return tuple(dict.fromkeys(name for point in self.all_points for name in point.figures))

    @property
    def is_measured(self) -> bool:
        """Whether deviations were measured."""
        return any(point.deviation is not None for point in self.all_points)

    def share(self, expert_bytes: int) -> float:
        """Return what share of the full read so many bytes are; 1 where the full read reads nothing."""
        return expert_bytes / self.expert_bytes if self.expert_bytes else 1.0

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "output": self.output,
            "operator": self.operator,
            "base": self.base,
            "experts": list(self.experts),
            "expert_bytes": self.expert_bytes,
            "full_bytes": self.full_bytes,
            "full_blocks": self.full_blocks,
            "index_bytes_read": self.index_bytes_read,
            "measured_bytes_read": self.measured_bytes_read,
            "update": finite(self.update),
            "own_budget": None if self.own is None else self.own.as_json(),
            "points": [self._point(point) for point in self.points],
            "levels": [self._point(point) for point in self.levels],
        }

    def _point(self, point: SweepPoint) -> Json:
        return {"share": self.share(point.expert_bytes), **point.as_json()}


def finite(value: float | None) -> float | None:
    """Return a number as JSON has it: None for infinities and NaN."""
    return value if value is not None and math.isfinite(value) else None
