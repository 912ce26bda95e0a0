"""A made-up sweep to print and draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mergepipe.project.sweep_report import (
    Distance,
    LostTensor,
    MapCell,
    MeasuredDeviation,
    OwnBudget,
    ReadingMap,
    SweepPoint,
    SweepReport,
    SweptBound,
)

MODULES = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
TOTAL = 480_000_000
BLOCKS = 960


def fake_point(
    share: float, *, kind: str = "certified", measured: bool = True, figures: bool = False, relative: bool = True
) -> SweepPoint:
    """Return what a budget of this share came to: numbers that fall with it, to zero at the full read."""
    rest = 1.0 - share
    bound, expected = 3.1 * rest**0.7, 1.7 * rest**0.9
    update = 2.0 if relative else math.nan
    shown = "exact" if rest == 0 else kind
    deviation = MeasuredDeviation(
        length=Distance(
            absolute=0.9 * expected,
            relative_to_update=0.9 * expected / 2.0,
            relative_to_output=0.9 * expected / 210.0,
        ),
        largest=0.0125 * rest,
    )
    losses = tuple(
        LostTensor(
            tensor=f"model.layers.{layer}.{MODULES[layer % 4]}",
            omitted_bytes=round(rest * 1_000_000) * (5 - layer),
            bound=None if kind == "none" else bound / (layer + 2),
            expected=expected / (layer + 2),
            omitted_mass=rest / (layer + 1),
        )
        for layer in range(4)
        if rest
    )
    known = relative and shown != "none"
    return SweepPoint(
        budget="full" if share == 1 else f"{100 * share:.15g}%",
        expert_bytes=round(share * TOTAL),
        blocks=round(share * BLOCKS),
        bound=SweptBound(
            kind=shown,
            absolute=None if shown == "none" else bound,
            relative_to_update=bound / update if known else None,
            relative_to_base=bound / 200.0 if known else None,
        ),
        expected=Distance(absolute=expected, relative_to_update=expected / update if relative else None),
        omitted_mass=rest**0.5,
        losses=losses,
        deviation=deviation if measured else None,
        figures={"perplexity": 8.25 + rest, "loss": math.log(8.25 + rest)} if figures else {},
    )


def fake_map(
    layers: int, experts: Sequence[str], modules: Sequence[str] = MODULES, **options: object
) -> ReadingMap:
    """Return a map of 101 steps that reads earlier layers and experts first."""
    steps = tuple(fake_point(number / 100, measured=False, **options) for number in range(101))  # type: ignore[arg-type]
    places = [(layer, module) for layer in range(layers) for module in modules]
    places += [(None, "model.embed_tokens.weight"), (None, "model.norm.weight")]
    cells = [
        MapCell(
            layer=layer,
            module=module,
            expert=expert,
            blocks=0 if module == "model.norm.weight" and expert else 12,
            selected=tuple(
                min(12, max(0, round(12 * (2.2 * number / 100 - (layer or 0) / layers / 2 - expert / 6 - at % 3 / 9))))
                for number in range(101)
            ),
        )
        for at, (layer, module) in enumerate(places)
        for expert in range(len(experts))
    ]
    return ReadingMap(steps=steps, cells=tuple(cells))


def fake_sweep(
    shares: Sequence[float] = (0.0, 0.1, 0.25, 0.5, 1.0),
    *,
    experts: Sequence[str] = ("math", "code", "legal"),
    layers: int = 4,
    name: str = "assistant",
    modules: Sequence[str] = MODULES,
    measured: bool = True,
    figures: bool = False,
    kind: str = "certified",
    relative: bool = True,
    levels: bool = False,
) -> SweepReport:
    """Return a sweep with its map; with ``levels`` the same budgets come to a third of the errors in levels."""
    return SweepReport(
        output=name,
        operator="task_arithmetic",
        base="base",
        experts=tuple(experts),
        expert_bytes=TOTAL,
        full_bytes=TOTAL,
        full_blocks=BLOCKS,
        index_bytes_read=640_000_000,
        measured_bytes_read=640_000_000 if measured else 0,
        update=2.0 if relative else None,
        own=OwnBudget(budget="25%", expert_bytes=TOTAL // 4),
        points=tuple(
            fake_point(share, kind=kind, measured=measured, figures=figures, relative=relative) for share in shares
        ),
        levels=tuple(
            in_levels(fake_point(share, kind=kind, measured=measured, figures=figures, relative=relative))
            for share in shares
            if levels
        ),
        map=fake_map(layers, experts, modules, kind=kind, relative=relative),
    )


def in_levels(point: SweepPoint) -> SweepPoint:
    """Return the point of a budget that buys levels."""
    third = None if point.expected.relative_to_update is None else point.expected.relative_to_update / 3
    return replace(
        point,
        budget=point.budget if point.budget == "full" else f"{point.budget} in levels",
        precision="levels",
        blocks=BLOCKS if point.blocks else 0,
        expected=replace(point.expected, absolute=(point.expected.absolute or 0) / 3, relative_to_update=third),
    )
