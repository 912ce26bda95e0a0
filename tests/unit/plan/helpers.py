"""Planning outputs of small projects without building them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergepipe.errors import CollectedErrors, MergepipeError
from mergepipe.operators.registry import operators
from mergepipe.project.gather import make_plans, open_sources, select_outputs

if TYPE_CHECKING:
    from support.projects import SmallProject

    from mergepipe.plan.values import OutputPlan, TensorPlan


def plan(project: SmallProject, output: str = "m") -> OutputPlan:
    """Return the plan of one output."""
    mergefile = project.open().mergefile
    selected = select_outputs(mergefile, [output])
    sources = open_sources(mergefile, selected)
    plans = make_plans(mergefile, selected, operators(), sources, project.geometry).plans
    return next(found for found in plans if found.output.name == output)


def tensor(project: SmallProject, name: str, output: str = "m") -> TensorPlan:
    """Return the plan of one tensor."""
    return next(found for found in plan(project, output).tensors if found.name == name)


def problems(project: SmallProject, output: str = "m") -> list[MergepipeError]:
    """Return the errors that planning an output raises."""
    try:
        plan(project, output)
    except CollectedErrors as error:
        return list(error.errors)
    except MergepipeError as error:
        return [error]
    return []
