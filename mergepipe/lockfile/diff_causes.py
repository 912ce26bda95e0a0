"""Why tensors of an output differ: from which sources, parameters and declarations, through which stages.

A lock has the digest of each source, not of a source's tensors. So with two locks, a tensor that differs is put down to
every source of its output that differs; with two manifests, only to those whose own tensors differ. Parameters are
resolved for each tensor, so they are a cause only where their value differs. What is declared for the whole output is
a cause wherever something differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mergepipe.checkpoints.layers import LayerMap
from mergepipe.digest import is_sampled_pin
from mergepipe.lockfile.diff_values import Cause, Side
from mergepipe.lockfile.manifest_records import ManifestTensor
from mergepipe.lockfile.records import LockedOutput, LockedSlice, LockedTensor
from mergepipe.signatures import ParamValue
from mergepipe.values import dataclass

Changed = Mapping[str, tuple[ParamValue | None, ParamValue | None]]
Causes = tuple[Cause, ...]
_FULL_BUDGET = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPair:
    """An output that both sides have, and what was found out about it.

    Attributes
    ----------
    changed
        Names of the tensors that differ, are new or gone.
    parameters
        By tensor the resolved parameters that differ; None where they cannot be resolved.
    layers
        Those of the tensors of either side.
    both
        Names of the tensors that both sides have.
    """

    old: LockedOutput
    new: LockedOutput
    changed: tuple[str, ...]
    parameters: Mapping[str, Changed] | None
    layers: LayerMap
    both: frozenset[str]


class CauseFinder:
    """Finds the causes of the tensors of all outputs; an output's are found once.

    Parameters
    ----------
    pairs
        The outputs that both sides have, by name.
    geometry
        Whether the sides cut blocks differently, which changes every digest.
    """

    def __init__(self, old: Side, new: Side, pairs: Mapping[str, OutputPair], *, geometry: bool) -> None:
        self._sides = old, new
        self._pairs = pairs
        self._geometry = geometry
        self._found: dict[str, dict[str, Causes]] = {}

    def causes(self, name: str) -> Mapping[str, Causes]:
        """Return the causes of each tensor of an output that differs."""
        if name not in self._found:
            self._found[name] = {}  # locks written by hand may go in a circle
            pair = self._pairs[name]
            general = tuple(self._general(pair))
            inputs = _Inputs.of(name, *self._sides)
            self._found[name] = {tensor: self._of_tensor(pair, tensor, general, inputs) for tensor in pair.changed}
        return self._found[name]

    def _general(self, pair: OutputPair) -> Iterator[Cause]:
        if self._geometry:
            yield Cause(kind="geometry", name="geometry")
        for key in declared_causes(pair.old, pair.new, unresolved=pair.parameters is None):
            yield Cause(kind="declared", name=key, output=pair.new.name)

    def _of_tensor(self, pair: OutputPair, tensor: str, general: Causes, inputs: _Inputs) -> Causes:
        if tensor not in pair.both:
            general = tuple(cause for cause in general if cause.name not in _KEEPS_NAMES)
        candidates = list(self._candidates(pair, tensor))
        precise = [cause for name, cause in candidates if inputs.may_differ(name, tensor)]
        values = (pair.parameters or {}).get(tensor, {})
        own = [Cause(kind="parameter", name=name, output=pair.new.name) for name in values]
        found = (*precise, *general, *own) or tuple(cause for _, cause in candidates)
        if found:
            return tuple(dict.fromkeys(found))
        budgeted = _FULL_BUDGET not in (pair.old.budget, pair.new.budget)
        return (Cause(kind="declared", name="access set", output=pair.new.name),) if budgeted else (_UNKNOWN,)

    def _candidates(self, pair: OutputPair, tensor: str) -> Iterator[tuple[str, Cause]]:
        """Yield (source, cause) for every source of other content, stages replaced by what changed them."""
        for name in sorted({*pair.old.sources} & {*pair.new.sources}):
            if not self._differs(name, pair.old.sources[name], pair.new.sources[name]):
                continue
            if not self._is_stage(name):
                yield name, Cause(kind="source", name=name)
                continue
            for cause in self._of_stage(name, None if pair.new.slices or pair.old.slices else tensor):
                yield name, cause if cause.kind == "stage" else replace(cause, via=(*cause.via, name))

    def _differs(self, name: str, old: bytes, new: bytes) -> bool:
        """Return whether what an output was made from has other content, as far as its pins tell.

        A fingerprint and a digest of all content cannot be compared; then the source's own entries count.
        """
        if is_sampled_pin(old) == is_sampled_pin(new):
            return old != new
        entries = [side.lock.source(name) for side in self._sides]
        pins = [entry.digest for entry in entries if entry is not None]
        return len({is_sampled_pin(pin) for pin in pins}) == 1 and len(set(pins)) > 1

    def _is_stage(self, name: str) -> bool:
        return all(side.lock.source(name) is None for side in self._sides)

    def _of_stage(self, stage: str, tensor: str | None) -> Iterable[Cause]:
        """Return why a tensor of a stage differs; any of its tensors for None, as in slices."""
        if stage not in self._pairs:
            return (Cause(kind="stage", name=stage),)
        found = self.causes(stage)
        if tensor is None or tensor not in {t.name for t in self._pairs[stage].new.tensors}:
            return dict.fromkeys(cause for causes in found.values() for cause in causes)
        return found.get(tensor, ())


_UNKNOWN = Cause(kind="unknown", name="unknown")
# What can change a tensor, but not whether there is one.
_KEEPS_NAMES = ("geometry", "operator_version", "numerics", "budget", "write.dtype")


def declared_causes(old: LockedOutput, new: LockedOutput, *, unresolved: bool = False) -> Iterator[str]:
    """Yield the keys of what is declared for a whole output, differs, and can change its tensors.

    Parameters
    ----------
    unresolved
        Whether parameters are taken as a whole, because they cannot be resolved for each tensor.
    """
    for key in ("operator", "operator_version", "code", "numerics", "base", "budget"):
        if getattr(old, key) != getattr(new, key):
            yield key
    if [expert.source for expert in old.experts] != [expert.source for expert in new.experts]:
        yield "experts"
    if old.write.get("dtype") != new.write.get("dtype"):
        yield "write.dtype"
    if list(map(_structure, old.slices)) != list(map(_structure, new.slices)):
        yield "slices"
    if unresolved and _parameters(old) != _parameters(new):
        yield "parameters"


def _structure(part: LockedSlice) -> tuple[object, ...]:
    experts = [(expert.source, expert.layers) for expert in part.experts]
    return part.layers, part.operator, part.operator_version, part.base, part.base_layers, experts


def _parameters(output: LockedOutput) -> tuple[object, ...]:
    slices = [(part.params, part.rules, [expert.params for expert in part.experts]) for part in output.slices]
    return output.params, output.rules, [expert.params for expert in output.experts], slices


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The tensors' inputs by output tensor and source, where both sides have manifests; else nothing is known."""

    old: Mapping[str, ManifestTensor]
    new: Mapping[str, ManifestTensor]

    @classmethod
    def of(cls, output: str, old: Side, new: Side) -> _Inputs:
        return cls(*({tensor.name: tensor for tensor in side.tensors.get(output, ())} for side in (old, new)))

    def may_differ(self, source: str, tensor: str) -> bool:
        """Return whether a source may have given other content to a tensor."""
        before, after = self.old.get(tensor), self.new.get(tensor)
        if before is None or after is None:
            return True
        digests = [[i.digest for i in side.inputs if i.source == source] for side in (before, after)]
        return digests[0] != digests[1]


def changed_tensors(
    old: Mapping[str, LockedTensor], new: Mapping[str, LockedTensor]
) -> Iterator[tuple[str, LockedTensor | None, LockedTensor | None]]:
    """Yield (name, old, new) of tensors whose digest differs or that one side lacks, in the order of ``new``.

    How many blocks were read of a tensor's experts is no difference of its own.
    """
    for name in dict.fromkeys((*new, *old)):
        before, after = old.get(name), new.get(name)
        if before is None or after is None or before.digest != after.digest:
            yield name, before, after
