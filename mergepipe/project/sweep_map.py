"""What budgets read first: by layer, module and expert, in even steps from nothing to everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mergepipe.mergefile.schema import Budget
from mergepipe.plan.budgeted import Reading
from mergepipe.plan.values import TensorPlan
from mergepipe.project.sweep_points import Update, sweep_point
from mergepipe.project.sweep_report import MapCell, ReadingMap

STEPS = 100
_LAYER = re.compile(r"(?P<stack>.+?)\.\d+\.(?P<module>.+)|\d+\.(?P<bare>.+)")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_WEIGHT = ".weight"

Place = tuple[int | None, str, int]
"""Layer, module, and expert of a cell."""


def reading_map(reading: Reading, experts: Sequence[str], update: Update) -> ReadingMap:
    """Return the map of an output's reading order.

    Parameters
    ----------
    experts
        The names that the cells' experts are places in.
    """
    precision = reading.plan.output.budget.precision if reading.plan.output.budget else None
    budgets = [Budget(share=step / STEPS, precision=precision) for step in range(STEPS + 1)]
    counts = [reading.order.count(budget, reading.expert_bytes) for budget in budgets]
    points = tuple(
        sweep_point(reading, budget, reading.order.cut(count), update)
        for budget, count in zip(budgets, counts, strict=True)
    )
    return ReadingMap(steps=points, cells=_cells(reading, experts, counts))


def _cells(reading: Reading, experts: Sequence[str], counts: Sequence[int]) -> tuple[MapCell, ...]:
    import numpy as np

    order = reading.order
    places, cells = _numbered(reading, experts)
    ranks = np.full(len(cells), -1, np.int64)  # what costs nothing is no item
    ranks[order.items[::-1]] = np.arange(len(order.items))[::-1]  # where there are several, the first reads anything
    ranks[order.copies] = ranks[order.originals]
    read = ranks >= 0
    # The first step that reads a block, and one behind the last where none does.
    steps = np.searchsorted(counts, ranks[read], side="right")
    width = len(counts) + 1
    found = np.bincount(cells[read] * width + steps, minlength=len(places) * width).reshape(len(places), width)
    sums = np.cumsum(found, axis=1)
    return tuple(
        MapCell(layer=layer, module=module, expert=expert, blocks=int(row[-1]), selected=tuple(row[:-1].tolist()))
        for (layer, module, expert), row in zip(places, sums, strict=True)
    )


def _numbered(reading: Reading, experts: Sequence[str]) -> tuple[list[Place], Any]:
    """Return the cells, and for each place of the order's row (tensor, block, expert) the number of its cell."""
    import numpy as np

    tensors = {tensor.name: tensor for tensor in reading.plan.tensors}
    named = [tensors[name] for name in reading.tensors]
    modules = modules_of(named)
    numbers: dict[Place, int] = {}
    parts = []
    for tensor, measured in zip(named, reading.order.tensors, strict=True):
        sources = [expert.source for expert in reading.plan.parts[tensor.part].experts]
        module = modules[tensor.name]
        own = [
            numbers.setdefault((tensor.layer, module, experts.index(source)), len(numbers)) for source in sources
        ]
        parts.append(np.tile(np.asarray(own, np.int64), measured.norms.shape[1]))
    return list(numbers), np.concatenate(parts) if parts else np.empty(0, np.int64)


def modules_of(tensors: Sequence[TensorPlan]) -> dict[str, str]:
    """Return by tensor name the module of each of these tensors, with the stack where there are several."""
    many = len({match["stack"] for tensor in tensors if (match := _layered(tensor))}) > 1
    return {tensor.name: module_of(tensor, with_stack=many) for tensor in tensors}


def module_of(tensor: TensorPlan, *, with_stack: bool = False) -> str:
    """Return the name of a tensor without its layer: what it has in common with those of other layers.

    Parameters
    ----------
    with_stack
        Keep what stands before the layer's number, for models with several stacks of layers.

    Notes
    -----
    Further numbers, such as those of a mixture's experts, become ``*``; the usual ``.weight`` at the end goes.
    """
    match = _layered(tensor)
    if match is None:
        return tensor.name.removesuffix(_WEIGHT)
    module = (match["module"] or match["bare"]).removesuffix(_WEIGHT)
    stack = f"{match['stack']}." if with_stack and match["stack"] else ""
    return stack + _NUMBERS.sub("*", f".{module}.").strip(".")


def _layered(tensor: TensorPlan) -> re.Match[str] | None:
    return _LAYER.fullmatch(tensor.name) if tensor.layer is not None else None
