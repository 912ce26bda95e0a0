"""What budgets cost a real family: distance to the full read and perplexity, for the planner's choice and for others.

Every figure comes from the planner and the engine that users run: deviations from the comparison behind
``mergepipe sweep --measure``, perplexities from models that were built, bytes as those builds counted them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import mergepipe
from benchmarks.budgets.choices import at_random, by_hash, fill
from benchmarks.budgets.projects import ChoosingProject, choosing, chosen, write_mergefile
from benchmarks.budgets.results import Json
from mergepipe.errors import InternalError
from mergepipe.plan.budget import Order
from mergepipe.plan.budgeted import Reading
from mergepipe.plan.selection import Selection

BUDGETS = (0, 5, 10, 25, 50, 75, 100)
"""In percent of the experts' bytes."""
EXPERTS = ("python", "c", "legal", "js")
RECIPES = {
    "task_arithmetic": ("weight = 0.3", ""),
    "ties": ("weight = 1.0", "params = { density = 0.5, lambda = 0.5 }\n"),
}
Score = Callable[[Path], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to choose what a budget reads, at one budget.

    Attributes
    ----------
    kind
        ``gain`` (the planner's), ``hash`` or ``random``.
    percent
        The budget.
    seed
        For ``random``.
    """

    kind: str
    percent: int
    seed: int = 0

    @property
    def name(self) -> str:
        """A name for an output."""
        return f"{self.kind}-{self.percent}-{self.seed}"

    def select(self, reading: Reading) -> Selection:
        """Return what is read; the others may use the bytes that the planner leaves, for its prefixes are nested."""
        order, limit = reading.order, limit_of(self.percent, reading.expert_bytes)
        if self.kind == "gain":
            return order.cut(order.fitting(limit))
        return fill(order, self._items(order, reading.tensors), limit)

    def _items(self, order: Order, names: Sequence[str]) -> Any:
        return by_hash(order, names) if self.kind == "hash" else at_random(order, self.seed)


def limit_of(percent: int, expert_bytes: int) -> int:
    """Return the bytes that a budget allows for."""
    return math.floor(Fraction(percent, 100) * expert_bytes)


def choices(seeds: int) -> list[Choice]:
    """Return all choices; of nothing and of everything there is but one."""
    found = []
    for percent in BUDGETS:
        found.append(Choice(kind="gain", percent=percent))
        if 0 < percent < 100:
            found.append(Choice(kind="hash", percent=percent))
            found += [Choice(kind="random", percent=percent, seed=seed) for seed in range(seeds)]
    return found


def measure(family: Path, work: Path, seeds: int, scored: int, operators: Sequence[str] = tuple(RECIPES)) -> Json:
    """Return the figures of a family.

    Parameters
    ----------
    family
        A folder with ``base``, ``expert-python`` and so on, and ``perplexity.py``.
    work
        Where models are built. Scores stay there, by the models' digests, for a run that comes later.
    seeds, scored
        How many random choices there are, and of how many the models are built and scored.
    """
    score = scorer(family / "perplexity.py")
    return {
        "experts": list(EXPERTS),
        "seeds": seeds,
        "base": score(family / "base"),
        "operators": {name: Measured(name, family, work / name).figures(seeds, scored, score) for name in operators},
    }


class Measured:
    """One operator over the family: all choices are compared in one pass, then models are built and scored."""

    def __init__(self, operator: str, family: Path, work: Path) -> None:
        self.operator, self.work = operator, work
        self.sources = {"base": family / "base"} | {name: family / f"expert-{name}" for name in EXPERTS}

    def figures(self, seeds: int, scored: int, score: Score) -> Json:
        """Return the figures of all choices."""
        wanted = choices(seeds)
        found, points = self._compared(wanted)
        rows: Json = {}
        for choice in wanted:
            row = rows.setdefault(str(choice.percent), {"limit": limit_of(choice.percent, found["expert_bytes"])})
            if choice.kind == "random":
                row.setdefault("random", []).append(points[choice])
            else:
                row[choice.kind] = points[choice]
        for choice in sorted(wanted, key=lambda choice: choice.seed):  # the first seeds of all budgets first
            if choice.seed < scored:
                points[choice]["perplexity"] = self._scored(choice, points[choice]["bytes"], score)
                print(f"{self.operator} {choice.name}: {points[choice]}", flush=True)
        return found | {"budgets": rows}

    def _compared(self, wanted: Sequence[Choice]) -> tuple[Json, dict[Choice, Json]]:
        """Return what all choices have in common, and of each what it reads and how far it is from the full read."""
        shutil.rmtree(self.work / ".mergecache", ignore_errors=True)
        path = write_mergefile(self.work, self.sources, {"measured": table(self.operator)})
        project = ChoosingProject(mergepipe.open(path))
        reading = project.reading("measured")
        selections = [choice.select(reading) for choice in wanted]
        comparison = project.compared(reading, selections)
        shutil.rmtree(self.work / "measured", ignore_errors=True)
        shutil.copytree(self.work / ".mergecache", self.work / "measured")
        update = math.sqrt(comparison.deviations[0].update_squares)
        points = {
            choice: {
                "bytes": selection.planned_bytes,
                "blocks": selection.blocks,
                "deviation": math.sqrt(deviation.squares) / update,
                "bound": None if selection.bound.absolute is None else selection.bound.absolute / update,
                "expected": selection.expected / update,
                "experts": dict(chosen(reading, selection).outcome.experts),
            }
            for choice, selection, deviation in zip(wanted, selections, comparison.deviations, strict=True)
        }
        facts = {
            "recipe": table(self.operator),
            "expert_bytes": reading.expert_bytes,
            "expert_blocks": len(reading.order.items),
            "update_to_output": update / math.sqrt(comparison.deviations[0].output_squares),
        }
        return facts, points

    def _scored(self, choice: Choice, compared: int, score: Score) -> dict[str, float]:
        """Build the model of a choice, and score it.

        Raises
        ------
        InternalError
            If the build read something else than what was compared.
        """
        self._forget_results()
        path = write_mergefile(self.work, self.sources, {choice.name: table(self.operator, choice.percent)})
        with contextlib.nullcontext() if choice.kind == "gain" else choosing(choice.select):
            report = mergepipe.open(path).build().outputs[choice.name]
        if report.expert_bytes["read"] != compared:
            raise InternalError(f"{choice.name}: {report.expert_bytes} were read, {compared} were compared")
        known = self.work / "scores.json"
        scores: Json = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
        if report.digest not in scores:
            scores[report.digest] = score(self.work / str(report.path))
            known.write_text(json.dumps(scores), encoding="utf-8")
        found: dict[str, float] = scores[report.digest]
        return found

    def _forget_results(self) -> None:
        """Leave what is known of the sources and their deltas, and no results: a build would read less by these."""
        for left in (".mergecache", "build"):
            shutil.rmtree(self.work / left, ignore_errors=True)
        (self.work / "Mergefile.lock").unlink(missing_ok=True)
        shutil.copytree(self.work / "measured", self.work / ".mergecache")


def table(operator: str, percent: int | None = None) -> str:
    """Return the table of an output, with a budget or without."""
    own, params = RECIPES[operator]
    listed = ", ".join(f'{{ source = "{name}", {own} }}' for name in EXPERTS)
    budget = "" if percent is None else f'budget = {{ expert_reads = "{percent}%", precision = "blocks" }}\n'
    return f'operator = "{operator}"\nbase = "base"\nexperts = [{listed}]\n{params}{budget}'


def scorer(path: Path) -> Score:
    """Return the family's own scoring: perplexity by domain, and ``mean``, that of the mean nats per token."""
    spec = importlib.util.spec_from_file_location("family_perplexity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def score(folder: Path) -> dict[str, float]:
        with contextlib.redirect_stderr(io.StringIO()):
            rows = module.evaluate(folder)
        mean = statistics.fmean(row["nats_per_token"] for row in rows.values())
        return {name: row["perplexity"] for name, row in rows.items()} | {"mean": math.exp(mean)}

    return score
