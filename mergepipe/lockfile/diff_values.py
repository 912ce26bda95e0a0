"""What `mergepipe diff` says of two records of a project, as values: what changed, what follows, and from what.

Everything here is in a stable order and has a JSON form whose keys are documented in docs/reference/cli.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from mergepipe.digest import format_digest
from mergepipe.lockfile.compare import Difference
from mergepipe.lockfile.manifest_records import LEVEL_EXACT, LEVEL_OMITTED, ManifestTensor
from mergepipe.lockfile.records import LockedOutput, Lockfile
from mergepipe.signatures import ParamValue
from mergepipe.values import dataclass

Json = dict[str, Any]
Texts = tuple[str | None, str | None]
"""The old and the new value of something, None where it is absent."""
Counts = tuple[int | None, int | None]
Moves = tuple[tuple[tuple[int, int], int], ...]
"""By the old and the new level how many expert blocks went from the one to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two things that are compared.

    Attributes
    ----------
    name
        What the user calls it, such as ``HEAD`` or ``build/assistant``.
    kind
        ``revision``, ``lock``, ``manifest`` or ``empty``.
    lock
        What it says. A manifest is a lock of its output, of the outputs that this one was made from, and their sources.
    own
        The name of a manifest's own output; None for a lock.
    tensors
        By output name what a manifest knows of its tensors; nothing for a lock.
    """

    name: str
    kind: str
    lock: Lockfile
    own: str | None = None
    tensors: Mapping[str, Sequence[ManifestTensor]] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return name and kind."""
        return {"name": self.name, "kind": self.kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why tensors differ.

    Attributes
    ----------
    kind
        ``source`` (a source has other content, or is new or gone), ``parameter`` (a resolved value), ``declared``
        (something that is declared for the whole output: operator, experts, budget, dtype), ``stage`` (another output
        of which no more is known), ``geometry``, or ``unknown``.
    name
        The source, the parameter such as ``weight[math]``, the key of what is declared, or the stage.
    output
        The output that the parameter or the declaration belongs to; None for a source.
    via
        The outputs between the cause and the tensors, nearest to the cause first: stages that were made from it.
    """

    kind: str
    name: str
    output: str | None = None
    via: tuple[str, ...] = ()

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"kind": self.kind, "name": self.name, "output": self.output, "via": list(self.via)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChange:
    """A source or an output that is new, gone or says something else, with its differences."""

    name: str
    change: str
    facts: tuple[Difference, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"name": self.name, "change": self.change, "facts": [fact.as_json() for fact in self.facts]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Some tensors of an output in few words.

    Attributes
    ----------
    layers
        Ranges such as ``0-7, 9``; None for tensors outside the layers.
    modules
        (module, number of tensors), such as ``("mlp.down_proj", 8)``; integers within are written ``*``.
    complete
        Whether these are all tensors of the output in these layers, or outside of them.
    """

    layers: str | None
    modules: tuple[tuple[str, int], ...]
    complete: bool = False

    @property
    def count(self) -> int:
        """How many tensors that are."""
        return sum(count for _, count in self.modules)

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "layers": self.layers,
            "modules": dict(self.modules),
            "tensors": self.count,
            "complete": self.complete,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Tensors in which a parameter went from one value to another; None where the operator does not have it."""

    old: ParamValue | None
    new: ParamValue | None
    tensors: int
    places: tuple[Places, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        where = [places.as_json() for places in self.places]
        return {"old": self.old, "new": self.new, "tensors": self.tensors, "where": where}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """A parameter whose resolved values differ: ``lambda``, or one of an expert: ``weight[math]``."""

    name: str
    groups: tuple[ParameterGroup, ...]

    @property
    def tensors(self) -> int:
        """In how many tensors it differs."""
        return sum(group.tensors for group in self.groups)

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"name": self.name, "groups": [group.as_json() for group in self.groups]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors that changed alike: ``change`` is ``changed``, ``added`` or ``removed``; causes by position."""

    change: str
    causes: tuple[int, ...]
    places: tuple[Places, ...]

    @property
    def count(self) -> int:
        """How many tensors that are."""
        return sum(places.count for places in self.places)

    def as_json(self) -> Json:
        """Return the JSON form."""
        where = [places.as_json() for places in self.places]
        return {"change": self.change, "tensors": self.count, "causes": list(self.causes), "where": where}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor that differs, with what its lines in the locks say.

    ``levels`` is what they say of the levels at which its expert blocks are read; ``moves`` how many expert blocks went
    from one level to another, where both sides are manifests.
    """

    name: str
    change: str
    digests: Texts
    read: Texts
    dtypes: Texts = (None, None)
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    causes: tuple[int, ...] = ()
    levels: Texts = (None, None)
    moves: Moves = ()

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "name": self.name,
            "change": self.change,
            "digest": _pair(self.digests),
            "expert_blocks": _pair(self.read),
            "dtype": _pair(self.dtypes),
            "shape": _pair(self.shapes),
            "levels": _pair(self.levels),
            "moved_blocks": moves_json(self.moves),
            "causes": list(self.causes),
        }


def moves_json(moves: Moves) -> list[Json]:
    """Return the JSON form of moves between levels."""
    return [{"old": level_name(old), "new": level_name(new), "blocks": count} for (old, new), count in moves]


def level_name(level: int) -> str:
    """Return what a level is called where it is a key: ``omitted``, ``1`` and so on, ``exact``."""
    return {LEVEL_OMITTED: "omitted", LEVEL_EXACT: "exact"}.get(level, str(level))


def _pair(values: Sequence[Any]) -> Json:
    old, new = values
    return {"old": old, "new": new}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChange:
    """An output that is new, gone, declared otherwise, or came out otherwise.

    Attributes
    ----------
    change
        ``added``, ``removed`` or ``changed``.
    old, new
        Its entries; None where it is absent.
    declared, results
        What differs in them, fact by fact; tensors are not among them.
    parameters
        Resolved values that differ; None where they cannot be resolved (the operator is not known here).
    causes
        Why its tensors differ, each with the number of tensors.
    groups, tensors
        The tensors that differ, in few words and one by one.
    """

    name: str
    change: str
    old: LockedOutput | None
    new: LockedOutput | None
    declared: tuple[Difference, ...] = ()
    parameters: tuple[ParameterChange, ...] | None = ()
    results: tuple[Difference, ...] = ()
    causes: tuple[tuple[Cause, int], ...] = ()
    groups: tuple[TensorGroup, ...] = ()
    tensors: tuple[TensorChange, ...] = ()

    def counted(self, change: str) -> int:
        """Return how many tensors are ``changed``, ``added`` or ``removed``."""
        return sum(tensor.change == change for tensor in self.tensors)

    def reads(self) -> dict[str, Counts]:
        """Return what is read of the experts: bytes of a full read and of the plan, blocks read and in all."""
        return {key: (_read(self.old, key), _read(self.new, key)) for key in _READS}

    def levels(self) -> tuple[dict[int, int] | None, dict[int, int] | None]:
        """Return by level how many expert blocks have it, on both sides; None where a budget buys no levels."""
        return _levels(self.old), _levels(self.new)

    def moves(self) -> Moves:
        """Return how many expert blocks of its tensors went from one level to another, most first."""
        found: Counter[tuple[int, int]] = Counter()
        for tensor in self.tensors:
            found.update(dict(tensor.moves))
        return tuple(sorted(found.items(), key=lambda move: (-move[1], move[0])))

    def as_json(self) -> Json:
        """Return the JSON form."""
        sides = (self.old, self.new)
        levels = [
            None if known is None else {level_name(level): n for level, n in known.items()} for known in self.levels()
        ]
        totals = (_count(self.old), _count(self.new))
        counts = {change: self.counted(change) for change in ("changed", "added", "removed")}
        resolved = None if self.parameters is None else [change.as_json() for change in self.parameters]
        return {
            "name": self.name,
            "change": self.change,
            "operator": _pair([side and side.operator for side in sides]),
            "digest": _pair([side and format_digest(side.digest) for side in sides]),
            "declared": [fact.as_json() for fact in self.declared],
            "parameters": resolved,
            "budget": _pair([side and side.budget for side in sides]),
            "reads": {key: _pair(values) for key, values in self.reads().items()},
            "levels": _pair(levels),
            "moved_blocks": moves_json(self.moves()),
            "bound": _pair([side and dict(side.bound) for side in sides]),
            "results": [fact.as_json() for fact in self.results],
            "causes": [cause.as_json() | {"tensors": count} for cause, count in self.causes],
            "tensors": {"total": _pair(totals), **counts},
            "groups": [group.as_json() for group in self.groups],
            "changes": [tensor.as_json() for tensor in self.tensors],
        }


_READS = ("expert_bytes_full", "expert_bytes_planned", "expert_blocks_read", "expert_blocks_total")


def _read(output: LockedOutput | None, key: str) -> int | None:
    if output is None:
        return None
    if key.startswith("expert_bytes"):
        return int(getattr(output, key))
    return sum(tensor.read if key.endswith("read") else tensor.total for tensor in output.tensors)


def _levels(output: LockedOutput | None) -> dict[int, int] | None:
    if output is None or output.levels_version is None:
        return None
    found: Counter[int] = Counter()
    for tensor in output.tensors:
        found.update(tensor.levels.blocks if tensor.levels is not None else {})
    return {level: found[level] for level in sorted(found)}


def _count(output: LockedOutput | None) -> int | None:
    return None if output is None else len(output.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockDiff:
    """What differs between two sides.

    Attributes
    ----------
    geometry
        The ids of the block geometries where they differ.
    sources, outputs
        Those that differ, in name order.
    unchanged
        The names of the outputs that do not.
    """

    old: Side
    new: Side
    geometry: Difference | None
    sources: tuple[EntryChange, ...]
    outputs: tuple[OutputChange, ...]
    unchanged: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether both sides say the same."""
        return self.geometry is None and not self.sources and not self.outputs

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "old": self.old.as_json(),
            "new": self.new.as_json(),
            "equal": self.is_empty,
            "geometry": None if self.geometry is None else self.geometry.as_json(),
            "sources": [source.as_json() for source in self.sources],
            "outputs": [output.as_json() for output in self.outputs],
            "unchanged_outputs": list(self.unchanged),
        }
