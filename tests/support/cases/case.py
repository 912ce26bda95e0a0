"""A case as it is written: loaded, and checked for anything that the harness does not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cases.errors import CaseError, known_keys
from support.cases.outcome import check_expected
from support.cases.recipe import Recipe, check_recipe
from support.cases.steps import check_step

_PROSE = ("priority", "kind", "source", "description", "input", "correct", "unreadable")
_KEYS = ("id", *_PROSE, "recipe", "expected", "more_runs", "steps", "more_step_lists")
EACH_FILE = "<each file>"
FILE_NAME = "<file name>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One merge of a case, from a fresh copy.

    Attributes
    ----------
    number
        Its place among the case's runs; `bit_equal_to_run` refers to it.
    label
        For messages.
    """

    number: int
    label: str
    recipe: Recipe
    expected: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One folder of a case and what its ``case.json`` says."""

    folder: Path
    name: str
    kind: str
    recipe: Recipe
    expected: Mapping[str, Any]
    runs: tuple[Run, ...]
    step_lists: tuple[Sequence[Mapping[str, Any]], ...]


def load_case(folder: Path) -> Case:
    """Read a case and check every key in it.

    Raises
    ------
    CaseError
        If the harness does not know one.
    """
    data = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    known_keys(data, _KEYS, folder.name, required=("id", "recipe", "expected"))
    merges = [{"recipe": data["recipe"], "expected": data["expected"]}, *data.get("more_runs", ())]
    for number, merge in enumerate(merges):
        known_keys(merge, ("recipe", "expected"), f"run {number}", required=("recipe", "expected"))
        check_recipe(merge["recipe"], f"run {number}: recipe")
        check_expected(merge["expected"], f"run {number}: expected")
    lists = [data["steps"]] if "steps" in data else []
    lists += data.get("more_step_lists", ())
    for number, steps in enumerate(lists):
        for place, step in enumerate(steps):
            check_step(step, f"step list {number}, step {place}")
    return Case(
        folder=folder,
        name=data["id"],
        kind=data.get("kind", ""),
        recipe=data["recipe"],
        expected=data["expected"],
        # Steps take the place of the plain run; its number stays taken.
        runs=tuple(run for n, merge in enumerate(merges) if n or "steps" not in data for run in _runs(n, merge)),
        step_lists=tuple(lists),
    )


def _runs(number: int, merge: Mapping[str, Any]) -> Iterator[Run]:
    """Yield the run, or one run for each of the files that ``for_each`` lists."""
    recipe, expected = merge["recipe"], merge["expected"]
    if "for_each" not in expected:
        yield Run(number=number, label=f"run {number}", recipe=recipe, expected=expected)
        return
    if EACH_FILE not in json.dumps(recipe):
        raise CaseError(f"run {number}: `for_each` without `{EACH_FILE}` in the recipe")
    for file in expected["for_each"]:
        yield Run(
            number=number,
            label=f"run {number} with {file}",
            recipe=_with_file(recipe, file),
            expected=_with_file({k: v for k, v in expected.items() if k != "for_each"}, file),
        )


def _with_file(value: Any, file: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_file(item, file) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_file(item, file) for item in value]
    if not isinstance(value, str):
        return value
    folder, token, rest = value.partition(EACH_FILE)
    if token:
        # The list names whole paths, the recipe names their folder once more.
        value = folder + file.removeprefix(folder) + rest
    return value.replace(FILE_NAME, Path(file).name)
