"""The same machine over outputs that are made from one another; one of them is not published."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.stateful import precondition, rule
from stateful.test_project_machine import OUTPUTS, ProjectMachine, run

STAGES = {"sum": {"e1": "hidden"}, "mean": {"e2": "sum"}}
"""By output, which stage stands for which expert."""


class StagedMachine(ProjectMachine):
    """`hidden` is merged from the sources, `sum` from it and an expert, `mean` from `sum` and another expert."""

    def declare_outputs(self) -> None:
        recipes: dict[str, dict[str, Any]] = {}
        for output in reversed(OUTPUTS):  # in the file, too, what an output is made from stands behind it
            stand_in = STAGES[output]
            given = [
                {"source": stand_in.get(name, name), "weight": weight} for name, weight in self.weights[output].items()
            ]
            rules = [
                rule | {"experts": {stand_in.get(name, name): given for name, given in rule["experts"].items()}}
                for rule in self.recipes[output]["rules"]
            ]
            recipes[output] = self.recipes[output] | {"base": "base", "experts": given, "rules": rules}
        experts = [{"source": "e1", "weight": self.weights["mean"]["e2"]}, {"source": "e2", "weight": 0.5}]
        hidden = {"operator": "linear", "experts": experts, "params": {"normalize": False}, "publish": False}
        self.project.outputs = recipes | {"hidden": hidden | {"write": self.recipes["mean"]["write"]}}
        self.project.save()

    def is_budgeted(self, output: str) -> bool:
        made_from = ("sum",) if output == "mean" else ()
        return any("budget" in self.recipes[name] for name in (output, *made_from))

    @precondition(lambda self: self.project.lock.exists())
    @rule()
    def status(self) -> None:
        status = self.project.open().status()
        assert list(status.outputs) == ["hidden", "sum", "mean"]
        for output, state in status.outputs.items():
            if state.state == "up-to-date" and output in OUTPUTS:
                self.check_tensors(output)

    @rule()
    def build_the_stage_that_is_not_published(self) -> None:
        before = {output: self.intact(output) for output in OUTPUTS}
        (report,) = self.project.build("hidden").outputs.values()
        assert report.path is None
        assert before == {output: self.intact(output) for output in OUTPUTS}
        self.check_user_files()


def test_a_project_of_stages_always_ends_with_what_a_clean_build_makes():
    run(StagedMachine, examples=10, steps=16)


@pytest.mark.slow
def test_a_project_of_stages_always_ends_with_what_a_clean_build_makes_at_length():
    run(StagedMachine, examples=80, steps=40)
