"""Choices through the real planner and engine: how far each is from the full read, and models built from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from mergepipe.cache.packs import PackStore
from mergepipe.engine.deviation import Comparison
from mergepipe.engine.run import Engine, EngineOptions
from mergepipe.plan import budgeted
from mergepipe.plan.budgeted import Reading, with_selection
from mergepipe.plan.selection import Selection
from mergepipe.plan.values import OutputPlan
from mergepipe.project.gather import make_plans, open_sources
from mergepipe.project.session import Project
from mergepipe.project.sweep import SweptProject

Choose = Callable[[Reading], Selection]


class ChoosingProject(SweptProject):
    """A project one of whose outputs is compared with its full read for choices that the planner would not make."""

    def __init__(self, project: Project) -> None:
        super().__init__(project)

    def reading(self, name: str) -> Reading:
        """Return the reading order of an output; its deltas are measured, if they were not."""
        surveyed = self._survey(self.mergefile.outputs[name], {"blocks": ()}, measure=False)
        return surveyed.curves["blocks"].reading

    def compared(self, reading: Reading, selections: Sequence[Selection]) -> Comparison:
        """Return how far the merges of some selections are from the full read; nothing is written."""
        (output,) = (reading.plan.output,)
        plans = make_plans(
            self.mergefile, [output], self._operators, open_sources(self.mergefile, [output]), self._geometry
        )
        with self._writing() as (catalog, _):
            index, options = plans.index(catalog, self._geometry), EngineOptions(workers=self._workers)
            engine = Engine(catalog, PackStore(catalog, self._geometry), index, self._reporter, options)
            return engine.compare([chosen(reading, selection) for selection in selections])


def chosen(reading: Reading, selection: Selection) -> OutputPlan:
    """Return an output's plan with the access set of a selection, whatever order that is cut from."""
    return with_selection(reading, selection)


@contextlib.contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """Let builds read what a choice says, in the place of what the planner would choose."""

    def with_choice(plan: OutputPlan, survey: Mapping[str, budgeted.BudgetTensor]) -> OutputPlan:
        reading = budgeted.reading_of(plan, survey)
        return with_selection(reading, choose(reading))

    with mock.patch.object(budgeted, "with_access", with_choice):
        yield


def write_mergefile(folder: Path, sources: Mapping[str, Path], outputs: Mapping[str, str]) -> Path:
    """Write a Mergefile of sources and of outputs, given as the text of their tables; return its path."""
    text = ["version = 1\n"]
    text += [f'[sources.{name}]\npath = "{path}"\n' for name, path in sources.items()]
    text += [f"[outputs.{name}]\n{table}\n" for name, table in outputs.items()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "Mergefile.toml"
    path.write_text("\n".join(text), encoding="utf-8")
    return path
