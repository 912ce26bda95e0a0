"""Runs the cases of a method on both sides and compares them, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parity.cases import Case, cases, folders
from benchmarks.parity.checkpoints import FAMILIES, Arrays, make, read, write
from benchmarks.parity.compare import ROUNDING, Comparison, compare, spacing
from benchmarks.parity.emulate import emulate
from benchmarks.parity.exact import by_design, evaluate
from benchmarks.parity.masks import MaskCount, count_masks
from benchmarks.parity.sides import Mergekit, SideError, masks_of, merge_all
from benchmarks.parity.values import Exact, Inputs, at_layer

RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")


@dataclass(slots=True)
class Outcome:
    """What came of the cases of one method."""

    cases: int = 0
    total: Comparison = field(default_factory=Comparison)
    exact_cases: int = 0
    masks: MaskCount = field(default_factory=MaskCount)
    refused: list[str] = field(default_factory=list)
    by_family: dict[str, Comparison] = field(default_factory=dict)


class Runner:
    """Both sides, the families' folders, and what they hold."""

    def __init__(self, python: str, work: Path, real: Path | None, *, quick: bool) -> None:
        self.mergekit = Mergekit(python, work)
        self.work, self.real, self.quick = work, real, quick
        self._tensors: dict[str, dict[str, Arrays]] = {}

    def folders(self, family: str) -> dict[str, str]:
        """Return the folders of a family, written on first use."""
        found = folders(family, str(self.work / "families"), str(self.real) if self.real else None)
        if family in FAMILIES and not (self.work / "families" / family).exists():
            for source, tensors in make(family).items():
                write(tensors, Path(found[source]))
        return found

    def tensors(self, family: str) -> dict[str, Arrays]:
        """Return the tensors of a family's sources."""
        if family not in self._tensors:
            self._tensors = {family: {s: read(Path(folder)) for s, folder in self.folders(family).items()}}
        return self._tensors[family]

    def method(self, method: str) -> Outcome:
        """Run all cases of a method."""
        outcome = Outcome()
        chosen = cases(method, real=self.real is not None, quick=self.quick)
        for family in dict.fromkeys(case.family for case in chosen):
            mine = [case for case in chosen if case.family == family]
            ours = merge_all(mine, self.folders(family), self.work / "ours")
            for case in mine:
                self._case(case, ours[case.id], outcome)
        return outcome

    def _case(self, case: Case, ours: Arrays | str, outcome: Outcome) -> None:
        outcome.cases += 1
        where, sources = self.folders(case.family), self.tensors(case.family)
        masks = probabilities = None
        if isinstance(ours, str):
            self._refused(case, f"mergepipe: {ours}", outcome)
            return
        try:
            if case.method in RANDOM:
                masks = masks_of(case, where, self.work / "masks-of-ours", sources["base"])
                probabilities = self.work / "probabilities" / "model.safetensors"
                probabilities.parent.mkdir(exist_ok=True)
            extra = {"probabilities": str(probabilities)} if probabilities else {}
            theirs = self.mergekit.merge(case.mergekit(where), masks, **extra)
        except SideError as error:
            self._refused(case, str(error), outcome)
            return
        if masks is not None and probabilities is not None:
            outcome.masks.add(count_masks(masks, read(probabilities.parent), case, sources))
        found = self._compare(case, ours, theirs, sources, masks)
        outcome.exact_cases += found.equal == found.elements
        outcome.total.add(found)
        outcome.by_family.setdefault(case.family, Comparison()).add(found)
        for line in found.worst:
            print(f"  {line}\n    {case}", file=sys.stderr)

    def _refused(self, case: Case, why: str, outcome: Outcome) -> None:
        outcome.refused.append(f"{case.id}: {why}")
        print(f"{case.id}: {why} ({case})", file=sys.stderr)

    def _compare(
        self, case: Case, ours: Arrays, theirs: Arrays, sources: Mapping[str, Arrays], masks: Arrays | None
    ) -> Comparison:
        total = Comparison()
        if sorted(ours) != sorted(theirs):
            raise SystemExit(f"{case.id}: other tensors: {sorted(set(ours) ^ set(theirs))}")
        layers = 1 + max(int(name.split(".")[2]) for name in ours if ".layers." in name)
        for name, array in ours.items():
            inputs = inputs_at(case, name, layers, sources, masks)
            seen = [*inputs.experts, *([inputs.base] if inputs.base is not None else [])]
            evaluated = evaluate(inputs)
            if case.method == "sce" and evaluated.undecided.any():
                evaluated = with_own_choices(inputs, evaluated, array, theirs[name])
            label, other = f"{case.id} {name}", by_design(inputs)
            total.add(compare(label, array, theirs[name], seen, evaluated, deliberate=other, emulated=emulate(inputs)))
            if _counts_tell(case) and array.dtype == np.float32 and not other:
                total.counts += 1
                kept, their = (int((out != inputs.base).sum()) for out in (array, theirs[name]))
                total.other_counts += kept != their
        return total


def with_own_choices(inputs: Inputs, exact: Exact, ours: np.ndarray, theirs: np.ndarray) -> Exact:
    """Return the exact values of sce with more that is undecided: where each side is right given what it selected.

    Its weights depend on all selected elements, so that the choice among equal variances moves every element a little.
    What was selected shows in the output: it is not the base there. Only equal variances may be selected differently.
    """
    selections = [out.astype(np.float32) != inputs.base for out in (ours, theirs)]
    if ((selections[0] != selections[1]) & ~exact.undecided).any():
        return exact
    right = np.ones(ours.shape, bool)
    for out, selected in zip((ours, theirs), selections, strict=True):
        own = evaluate(replace(inputs, selected=selected)).value
        scale = spacing(np.max([np.abs(own), np.abs(inputs.base), *(np.abs(x) for x in inputs.experts)], axis=0))
        right &= np.abs(out.astype(np.float64) - own) <= ROUNDING * scale
    return replace(exact, undecided=exact.undecided | right)


def _counts_tell(case: Case) -> bool:
    """Return whether the elements that are not the base's are those that were kept: with one expert, and in sce."""
    experts = [source for source, _ in case.experts if source != "base"]
    return case.method == "sce" or (case.method.startswith(("ties", "breadcrumbs")) and len(experts) == 1)


def inputs_at(case: Case, name: str, layers: int, sources: Mapping[str, Arrays], masks: Arrays | None) -> Inputs:
    """Return what goes into one tensor of a case, as mergekit counts inputs."""
    ignores = case.method in ("linear", "karcher", "passthrough")
    listed = [(source, own) for source, own in case.experts if ignores or source != "base"]

    def wide(source: str) -> np.ndarray:
        return sources[source][name].astype(np.float32)

    settings: tuple[Mapping[str, Any], ...] = tuple(at_layer(own, name, layers) for _, own in listed)
    return Inputs(
        method=case.method,
        base=wide("base") if case.base and not ignores else None,
        experts=tuple(wide(source) for source, _ in listed),
        settings=settings,
        params=at_layer(case.params, name, layers),
        masks=tuple(masks[f"{name}|{n}"] for n in range(len(listed))) if masks else None,
    )
