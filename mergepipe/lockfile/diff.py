"""The differences of two records of a project, told from their causes: what changed, what follows, and why.

Built on the fact-by-fact comparison that `build --locked` uses (`mergepipe.lockfile.compare`): there is a difference
here exactly if there is one there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.layers import LayerMap
from mergepipe.digest import format_digest
from mergepipe.lockfile.compare import Difference, DifferenceKind, compare_locks
from mergepipe.lockfile.diff_causes import CauseFinder, Causes, OutputPair, changed_tensors
from mergepipe.lockfile.diff_groups import places_of
from mergepipe.lockfile.diff_params import Signatures, changed_values, parameter_changes, resolver_of
from mergepipe.lockfile.diff_values import (
    Cause,
    EntryChange,
    LockDiff,
    Moves,
    OutputChange,
    Side,
    TensorChange,
    TensorGroup,
)
from mergepipe.lockfile.manifest_records import LEVEL_EXACT, OUTPUT_KEY, Manifest, ManifestTensor
from mergepipe.lockfile.records import LockedOutput, LockedSource, LockedTensor, Lockfile
from mergepipe.lockfile.writer import levels_text

EMPTY_LOCK = Lockfile(geometry=0, sources=(), outputs=())
"""Stands for a lock that there is not; its geometry is that of the other side."""


def manifest_side(name: str, manifest: Manifest) -> Side:
    """Return what a manifest says, as a side of a comparison."""
    stages = [stage for stage in manifest.stages if stage.output.tensors]
    records = [*manifest.sources, *(source for stage in stages for source in stage.sources)]
    sources = {record.name: record for record in reversed(records) if OUTPUT_KEY not in record.location}
    own = manifest.output
    return Side(
        name=name,
        kind="manifest",
        lock=Lockfile(
            geometry=manifest.geometry,
            sources=tuple(sources.values()),
            outputs=(own, *(stage.output for stage in stages)),
        ),
        own=own.name,
        tensors={own.name: manifest.tensors, **{stage.output.name: stage.tensors for stage in stages}},
    )


def diff_sides(old: Side, new: Side, signatures: Signatures) -> LockDiff:
    """Return what differs between two sides.

    A manifest has one output: of a lock that is compared with one, only this output and its sources count. Two
    manifests are compared whatever their outputs are called. The files of sources count where both sides have them.

    Parameters
    ----------
    signatures
        Of the operators that are known, for resolving parameters.
    """
    old, new = _comparable(old, new)
    differences = compare_locks(old.lock, new.lock)
    geometry = next((d for d in differences if d.kind is DifferenceKind.GEOMETRY), None)
    by_output = _by_owner(differences, DifferenceKind.DECLARED, DifferenceKind.RESULT, DifferenceKind.TENSOR)
    pairs = {
        output.name: _pair(output, after, old, new, signatures)
        for output in old.lock.outputs
        if (after := new.lock.output(output.name)) is not None
    }
    finder = CauseFinder(old, new, pairs, geometry=geometry is not None)
    names = sorted({output.name for side in (old, new) for output in side.lock.outputs})
    return LockDiff(
        old=old,
        new=new,
        geometry=geometry,
        sources=tuple(_source_changes(differences)),
        outputs=tuple(
            _output_change(name, old, new, by_output[name], pairs, finder) for name in names if name in by_output
        ),
        unchanged=tuple(name for name in names if name not in by_output),
    )


def _by_owner(differences: Iterable[Difference], *kinds: DifferenceKind) -> dict[str, list[Difference]]:
    found: defaultdict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        if difference.kind in kinds and difference.owner is not None:
            found[difference.owner].append(difference)
    return dict(found)


# --- making sides comparable -------------------------------------------------------------------------------------


def _comparable(old: Side, new: Side) -> tuple[Side, Side]:
    if old.kind == "empty":
        old = replace(old, lock=replace(old.lock, geometry=new.lock.geometry))
    if new.kind == "empty":
        new = replace(new, lock=replace(new.lock, geometry=old.lock.geometry))
    if old.own is not None and new.own is not None and old.own != new.own:
        old, new = _renamed(_alone(old), new.own), _alone(new)
    elif old.own is not None or new.own is not None:
        names = {output.name for side in (old, new) if side.own is not None for output in side.lock.outputs}
        own = new.own or old.own or ""
        old, new = (_restricted(side, names, own) for side in (old, new))
    return _without_files(old, new), _without_files(new, old)


def _alone(side: Side) -> Side:
    """Return a manifest's side with its own output only: stages of outputs of two names have nothing in common."""
    return _restricted(side, {side.own or ""}, side.own or "")


def _renamed(side: Side, name: str) -> Side:
    """Return a side of one output under another name."""
    output = replace(side.lock.outputs[0], name=name)
    tensors = dict.fromkeys([name], *side.tensors.values())
    return replace(side, lock=replace(side.lock, outputs=(output,)), own=name, tensors=tensors)


def _restricted(side: Side, names: Collection[str], own: str) -> Side:
    """Return a side with some outputs and the sources that they were made from.

    Of the others than ``own`` a manifest has no files, so that they are left out.
    """
    kept = [output for output in side.lock.outputs if output.name in names]
    outputs = tuple(o if o.name == own else replace(o, shards=(), side_files=()) for o in kept)
    used = {source for output in outputs for source in output.sources}
    sources = tuple(source for source in side.lock.sources if source.name in used)
    tensors = {name: found for name, found in side.tensors.items() if name in names}
    return replace(side, lock=replace(side.lock, sources=sources, outputs=outputs), tensors=tensors)


def _without_files(side: Side, other: Side) -> Side:
    """Return a side without the files of sources of which the other side does not know them."""

    def kept(source: LockedSource) -> LockedSource:
        partner = other.lock.source(source.name)
        return replace(source, files=()) if partner is not None and not partner.files else source

    lock = replace(side.lock, sources=tuple(map(kept, side.lock.sources)))
    return replace(side, lock=lock)


# --- sources and outputs ----------------------------------------------------------------------------------------


def _source_changes(differences: Sequence[Difference]) -> Iterator[EntryChange]:
    for name, facts in _by_owner(differences, DifferenceKind.SOURCE, DifferenceKind.LAYOUT).items():
        yield EntryChange(name=name, change=_change(facts), facts=tuple(facts))


def _change(facts: Sequence[Difference]) -> str:
    if len(facts) == 1 and not facts[0].key:  # the entry itself
        return "added" if facts[0].old is None else "removed"
    return "changed"


def _pair(old: LockedOutput, new: LockedOutput, left: Side, right: Side, signatures: Signatures) -> OutputPair:
    before, after = ({tensor.name: tensor for tensor in output.tensors} for output in (old, new))
    layers = LayerMap({*before, *after})
    resolvers = [
        resolver_of(output, side.tensors.get(output.name, ()), signatures, LayerMap(tensors))
        for output, side, tensors in ((old, left, before), (new, right, after))
    ]
    both = [name for name in after if name in before]
    parameters = None
    if resolvers[0] is not None and resolvers[1] is not None:
        resolve_old, resolve_new = resolvers[0], resolvers[1]
        alone = _experts(old) ^ _experts(new)
        parameters = {
            name: values for name in both if (values := changed_values(resolve_old(name), resolve_new(name), alone))
        }
    changed = tuple(name for name, _, _ in changed_tensors(before, after))
    return OutputPair(old=old, new=new, changed=changed, parameters=parameters, layers=layers, both=frozenset(both))


def _experts(output: LockedOutput) -> set[str]:
    found = {expert.source for part in output.slices for expert in part.experts}
    return found | {expert.source for expert in output.experts}


def _output_change(
    name: str,
    old: Side,
    new: Side,
    facts: Sequence[Difference],
    pairs: Mapping[str, OutputPair],
    finder: CauseFinder,
) -> OutputChange:
    pair = pairs.get(name)
    declared = tuple(fact for fact in facts if fact.kind is DifferenceKind.DECLARED and fact.key)
    results = tuple(fact for fact in facts if fact.kind is DifferenceKind.RESULT)
    if pair is None:
        return OutputChange(name=name, change=_change(facts), old=old.lock.output(name), new=new.lock.output(name))
    causes = finder.causes(name)
    order = _ordered(causes)
    tensors = tuple(_tensor_changes(name, pair, old, new, causes, order))
    counts = Counter(cause for found in causes.values() for cause in found)
    resolved = None if pair.parameters is None else parameter_changes(pair.parameters.items(), pair.layers, pair.both)
    return OutputChange(
        name=name,
        change="changed",
        old=pair.old,
        new=pair.new,
        declared=declared,
        parameters=resolved,
        results=results,
        causes=tuple((cause, counts[cause]) for cause in order),
        groups=tuple(_groups(tensors, pair)),
        tensors=tensors,
    )


_KINDS = ("source", "stage", "declared", "parameter", "geometry", "unknown")


def _ordered(causes: Mapping[str, Causes]) -> dict[Cause, int]:
    """Return every cause with its position: by kind, those nearest first, then by name."""
    found = {cause for causes_of_tensor in causes.values() for cause in causes_of_tensor}
    ordered = sorted(found, key=lambda c: (_KINDS.index(c.kind), len(c.via), c.via, c.output or "", c.name))
    return {cause: position for position, cause in enumerate(ordered)}


def _tensor_changes(
    name: str, pair: OutputPair, old: Side, new: Side, causes: Mapping[str, Causes], order: Mapping[Cause, int]
) -> Iterator[TensorChange]:
    before, after = ({tensor.name: tensor for tensor in output.tensors} for output in (pair.old, pair.new))
    known = [{tensor.name: tensor for tensor in side.tensors.get(name, ())} for side in (old, new)]
    for tensor in pair.changed:
        was, now = before.get(tensor), after.get(tensor)
        left, right = (side.get(tensor) for side in known)
        yield TensorChange(
            name=tensor,
            change="added" if was is None else "removed" if now is None else "changed",
            digests=(_digest(was), _digest(now)),
            read=(_read(was), _read(now)),
            dtypes=(left.dtype if left else None, right.dtype if right else None),
            shapes=(left.shape if left else None, right.shape if right else None),
            causes=tuple(sorted(order[cause] for cause in causes[tensor])),
            levels=(_level_text(was), _level_text(now)),
            moves=_moves(left, right) if pair.old.expert_sources == pair.new.expert_sources else (),
        )


def _digest(tensor: LockedTensor | None) -> str | None:
    return None if tensor is None else format_digest(tensor.digest)


def _level_text(tensor: LockedTensor | None) -> str | None:
    return None if tensor is None or tensor.levels is None else levels_text(tensor.levels)


def _moves(old: ManifestTensor | None, new: ManifestTensor | None) -> Moves:
    """Return how many expert blocks went from one level to another; nothing where blocks are not the same."""
    if old is None or new is None or old.shape != new.shape or (old.levels is None and new.levels is None):
        return ()
    count = len(old.levels or new.levels or b"")
    rows = [bytes([LEVEL_EXACT]) * count if one.levels is None else one.levels for one in (old, new)]
    found = Counter((a, b) for a, b in zip(*rows, strict=False) if a != b)
    return tuple(sorted(found.items())) if len(rows[0]) == len(rows[1]) else ()


def _read(tensor: LockedTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.read}/{tensor.total}"


def _groups(tensors: Sequence[TensorChange], pair: OutputPair) -> Iterator[TensorGroup]:
    """Yield the tensors that changed alike and for the same reasons, those with the first causes first."""
    together: defaultdict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for tensor in tensors:
        together[tensor.change, tensor.causes].append(tensor.name)
    order = ("changed", "added", "removed")
    for change, causes in sorted(together, key=lambda group: (order.index(group[0]), group[1])):
        yield TensorGroup(
            change=change, causes=causes, places=places_of(together[change, causes], pair.layers, pair.both)
        )
