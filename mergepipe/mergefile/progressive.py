"""What outputs may do with progressive checkpoints: experts alone, under budgets that buy levels.

A progressive checkpoint holds an expert's deltas as codes, which are approximations; the expert itself is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.schema import Mergefile, Output, Source
from mergepipe.mergefile.suggest import code

_BUDGET = 'write `[outputs.{}.budget]` with `expert_reads = "25%"` and `precision = "levels"`'


def with_coarse_budget(output: Output, sources: Mapping[str, Source]) -> Output:
    """Return an output whose budget says that not all of its experts can be read exactly, where that is so."""
    if output.budget is None or not any(_progressive_experts(output, sources)):
        return output
    return replace(output, budget=replace(output.budget, coarse=True))


def check_progressive(mergefile: Mergefile, problems: Problems) -> None:
    """Record every use of a progressive checkpoint that needs what it does not hold."""
    for source in mergefile.sources.values():
        below = mergefile.sources.get(source.on or "")
        if below is not None and below.progressive is not None:
            what = f"{code(below.name)} is a progressive checkpoint: an adapter applies to whole weights"
            problems.add(("sources", source.name, "on"), what)
    for output in mergefile.outputs.values():
        for name, path in _bases(output):
            if name in mergefile.sources and mergefile.sources[name].progressive is not None:
                what = f"{code(name)} is a progressive checkpoint, which can be an expert and no base"
                problems.add(path, what, hint="give the checkpoint that it was packed against")
        for name in _progressive_experts(output, mergefile.sources):
            _check_budget(name, output, problems)
            break


def _progressive_experts(output: Output, sources: Mapping[str, Source]) -> Iterator[str]:
    for name in output.expert_sources:
        if name in sources and sources[name].progressive is not None:
            yield name


def _bases(output: Output) -> Iterator[tuple[str, KeyPath]]:
    path: KeyPath = ("outputs", output.name)
    if output.base is not None:
        yield output.base, (*path, "base")
    for number, part in enumerate(output.slices or ()):
        if part.base is not None:
            yield part.base, (*path, "slices", number, "base")


def _check_budget(name: str, output: Output, problems: Problems) -> None:
    """Record what is wrong with the budget of an output that has this progressive expert."""
    budget = output.budget
    path: KeyPath = ("outputs", output.name)
    hint = _BUDGET.format(output.name)
    expert = f"expert {code(name)} is a progressive checkpoint"
    if budget is None:
        what = f"{expert}, which cannot be read exactly: the output needs a budget that buys levels"
        problems.add(path, what, hint=f'{hint} ("100%" for all that there is)')
        return
    path = (*path, "budget")
    if budget.max_error is not None:
        what = f"{expert}: how its delta lies to others is not known, and so no error relative to the update"
        problems.add((*path, "max_error"), what, hint='limit the bytes instead: `expert_reads = "25%"`')
    elif budget.stats == "sample":
        what = f"{expert}: its norms are known, and there is nothing to take samples of"
        problems.add((*path, "stats"), what, hint="remove `stats`")
    elif not budget.uses_levels:
        what = f"{expert}, which holds levels of precision and no exact blocks"
        where = path if budget.precision is None else (*path, "precision")
        problems.add(where, what, hint='write `precision = "levels"`')
