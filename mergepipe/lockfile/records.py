"""What a lock says, as values: sources, outputs, and what each output was made of.

A value holds raw digests (32 bytes); text forms belong to the writer. The order of experts, rules, tensors and files
carries meaning; sources and outputs are always kept in name order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import attrgetter

from mergepipe.signatures import ParamValue
from mergepipe.values import dataclass

VERSION = 1
"""The format that this module writes and reads. A reader refuses another one."""
REVISION = 1
"""Counts additions to the format that an older reader may ignore. A reader accepts a higher one.

1: levels. It is written only where there are any, so that locks without them stay what they are.
"""

LOCATION_KEYS = ("path", "progressive", "hub", "revision", "on")
BOUND_KEYS = ("kind", "absolute", "relative_to_update")
UNKNOWN_DIGEST = b""
"""Stands for a digest that is not known yet, in a lock that is compared before anything was merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedFile:
    """A file of a source: its name relative to the checkpoint, and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSource:
    """A source as it was when the outputs were made.

    Attributes
    ----------
    name
        Its name in the Mergefile.
    location
        Where it is, as declared: ``path``, or ``hub`` and ``revision``; ``on`` for an adapter. No absolute path
        appears that the Mergefile does not have.
    digest
        The source digest: content only, whatever the files are.
    tensors, bytes
        How many tensors it has, and the bytes of their data.
    files
        The files that hold them. Leave it empty to keep the file layout out of the lock.
    """

    name: str
    location: Mapping[str, str]
    digest: bytes
    tensors: int
    bytes: int
    files: tuple[LockedFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedLevels:
    """How precisely a tensor's expert blocks are read, where a budget buys levels.

    Attributes
    ----------
    bytes
        What is read of the experts for it: blocks and stages of progressive codes.
    blocks
        By level (0 omitted, 255 exact, between them planes) how many expert blocks have it, of those that carry content
        of their own; lowest first, none of them 0.
    """

    bytes: int
    blocks: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTensor:
    """A tensor of an output: its digest, and how many of its expert blocks were read.

    Attributes
    ----------
    read
        Expert blocks in the access set that carry content (a block equal to the base's carries none).
    total
        Expert blocks in all.
    levels
        How precisely they are read, where the output's budget buys levels; else None.
    """

    name: str
    digest: bytes
    read: int
    total: int
    levels: LockedLevels | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedShard:
    """A safetensors file of an output: name, digest of the whole file, size in bytes."""

    name: str
    digest: bytes
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSideFile:
    """A file of an output that holds no weights: name and content digest."""

    name: str
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedExpert:
    """An expert of an output or a slice, and the parameters given beside it.

    ``layers`` is its own range such as ``4..12`` in a slice, else None. No parameter is called ``source`` or
    ``layers``.
    """

    source: str
    params: Mapping[str, ParamValue]
    layers: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRule:
    """A rule of an output, as declared; later rules win.

    Attributes
    ----------
    match
        Globs on tensor names.
    layers
        A half-open range such as ``8..16``, or None.
    params, experts
        The parameters that it sets, for all experts and by expert.
    """

    match: tuple[str, ...]
    layers: str | None
    params: Mapping[str, ParamValue]
    experts: Mapping[str, Mapping[str, ParamValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSlice:
    """A slice of an output, as declared.

    Attributes
    ----------
    layers, base_layers
        Half-open ranges such as ``8..16``; of the base None where it is that of the slice.
    operator, operator_version, base
        None where they are the output's.
    experts
        In their order; ``source = "NAME"`` is one expert.
    params, rules
        On top of the output's.
    """

    layers: str
    operator: str | None
    operator_version: int | None
    base: str | None
    base_layers: str | None
    experts: tuple[LockedExpert, ...]
    params: Mapping[str, ParamValue]
    rules: tuple[LockedRule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedOutput:
    """An output: what was declared, and what came out.

    Attributes
    ----------
    name, path, operator, operator_version, numerics, base, experts, params, slices, rules, budget, write
        The declared part, as resolved from the Mergefile. ``path`` is None for an output that is not published.
    code
        By name of each custom operator the digest of its code.
    levels_version
        The version of the progressive code that its budget's levels are of; None where it buys whole blocks.
    sources
        The digest of each source that this output was made from, so that a build of some outputs cannot mix them;
        other outputs among them.
    expert_bytes_full, expert_bytes_planned
        Expert bytes that a full read and this plan take.
    bound
        ``kind``, and where there is a bound ``absolute`` and ``relative_to_update``.
    digest
        The source digest of the output's tensors.
    shards, side_files, tensors
        What came out; tensors in natural order.
    """

    name: str
    path: str | None
    operator: str
    operator_version: int
    numerics: str
    base: str | None
    experts: tuple[LockedExpert, ...]
    params: Mapping[str, ParamValue]
    rules: tuple[LockedRule, ...]
    budget: str
    write: Mapping[str, str | int]
    sources: Mapping[str, bytes]
    expert_bytes_full: int
    expert_bytes_planned: int
    bound: Mapping[str, str | float]
    digest: bytes
    shards: tuple[LockedShard, ...]
    side_files: tuple[LockedSideFile, ...]
    tensors: tuple[LockedTensor, ...]
    code: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    slices: tuple[LockedSlice, ...] = ()
    levels_version: int | None = None

    @property
    def expert_sources(self) -> tuple[str, ...]:
        """The names of its experts, in their order; those of its slices behind them."""
        experts = (*self.experts, *(expert for part in self.slices for expert in part.experts))
        return tuple(expert.source for expert in experts)

    def declared(self) -> LockedOutput:
        """Return this output without results: what is known before anything is merged."""
        return dataclasses.replace(
            self,
            expert_bytes_full=0,
            expert_bytes_planned=0,
            bound={},
            digest=UNKNOWN_DIGEST,
            shards=(),
            side_files=(),
            tensors=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lockfile:
    """A whole lock: the block geometry, and the sources and outputs, which it puts in name order."""

    geometry: int
    sources: tuple[LockedSource, ...]
    outputs: tuple[LockedOutput, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(sorted(self.sources, key=attrgetter("name"))))
        object.__setattr__(self, "outputs", tuple(sorted(self.outputs, key=attrgetter("name"))))

    def source(self, name: str) -> LockedSource | None:
        """Return the source of that name, or None."""
        return next((source for source in self.sources if source.name == name), None)

    def output(self, name: str) -> LockedOutput | None:
        """Return the output of that name, or None."""
        return next((output for output in self.outputs if output.name == name), None)
