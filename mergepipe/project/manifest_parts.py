"""What the manifest of an output says beyond it: the outputs that it is made from, and where else files come from.

With it one manifest and the sources are enough to make the output again, however many outputs lie between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mergepipe.cache.sources import SourceIndex
from mergepipe.lockfile.assemble import declared_output, location
from mergepipe.lockfile.assemble_manifest import stage_record
from mergepipe.lockfile.manifest_records import ManifestParts, ManifestPlace, ManifestStage
from mergepipe.lockfile.records import UNKNOWN_DIGEST, LockedOutput
from mergepipe.mergefile.schema import Mergefile
from mergepipe.plan.values import OutputPlan
from mergepipe.project.stages import Plans, tokenizer_of
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An output that was built: its plan with its access set, and its record."""

    plan: OutputPlan
    locked: LockedOutput


def manifest_parts(plan: OutputPlan, plans: Plans, made: Mapping[str, Made], index: SourceIndex) -> ManifestParts:
    """Return what it takes beside an output's own record to make it again.

    Parameters
    ----------
    plan
        The output's.
    made
        At least every output whose weights it is made from, by name.
    """
    weights = _weights(plan, plans)
    others = [other for other in _tokenizers(plan, plans) if other not in weights]
    # An output of which only the tokenizer is used is planned and not built: that takes its sources' headers.
    planned = _planned(others, plans)
    stages = []
    for name, stage in plans.stages.items():  # in the order in which they are made
        if name in weights and name in made:
            stages.append(stage_record(made[name].plan, made[name].locked, index, plans.mergefile))
        elif name in planned:
            stages.append(_declared(stage.plan, index))
    used = [plan, *(made[name].plan for name in weights if name in made)]
    used += [plans.stages[name].plan for name in planned]
    known = {source for one in used if one.output.name not in planned for source in one.sources}
    named = [source for one in used if one.output.name in planned for source in one.sources]
    places = dict.fromkeys(_with_bases([*others, *named], plans.mergefile))
    return ManifestParts(
        stages=tuple(stages),
        places=tuple(
            ManifestPlace(name=name, location=location(plans.mergefile.sources[name]))
            for name in places
            if name in plans.mergefile.sources and name not in known
        ),
        operators=_operators(used, plans.mergefile),
    )


def _weights(plan: OutputPlan, plans: Plans) -> dict[str, None]:
    """Return the outputs that an output's weights are made from, directly or not."""
    found: dict[str, None] = {}
    waiting = list(plans.stages_of(plan))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            waiting += plans.stages_of(plans.stages[name].plan)
    return found


def _tokenizers(plan: OutputPlan, plans: Plans) -> Iterator[str]:
    """Yield where an output's tokenizer comes from: a source, or an output and where its own comes from."""
    name = tokenizer_of(plan)
    yield name
    while name in plans.stages:
        name = tokenizer_of(plans.stages[name].plan)
        yield name


def _planned(names: list[str], plans: Plans) -> dict[str, None]:
    """Return the outputs among these names, and what these are made from."""
    found: dict[str, None] = {}
    for name in names:
        if name in plans.stages:
            found |= dict.fromkeys((name, *_weights(plans.stages[name].plan, plans)))
    return found


def _with_bases(names: list[str], mergefile: Mergefile) -> Iterator[str]:
    for name in names:
        on = mergefile.sources[name].on if name in mergefile.sources else None
        if on is not None:
            yield on
        yield name


def _declared(plan: OutputPlan, index: SourceIndex) -> ManifestStage:
    declared = declared_output(plan, tokenizer_of(plan), index)
    return ManifestStage(output=replace(declared, sources={}, digest=UNKNOWN_DIGEST), sources=(), tensors=())


def _operators(plans: list[OutputPlan], mergefile: Mergefile) -> dict[str, str]:
    """Return the file and the function of each custom operator that a file defines."""
    used = {operator.signature.name: operator for plan in plans for operator in plan.operators}
    declared = {name: mergefile.operators[name] for name in used if name in mergefile.operators}
    return {name: f"{entry.file}:{entry.function}" for name, entry in declared.items()}
