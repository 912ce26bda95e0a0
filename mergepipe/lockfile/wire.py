"""The JSON shape of a manifest, for reading it strictly and writing it in order.

Field order is the order in the file. Digests are ``b3:<hex>``; `bytes` fields are base64.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Digest = Annotated[str, msgspec.Meta(pattern=r"\Ab3:[0-9a-f]{64}\Z")]
Pin = Annotated[str, msgspec.Meta(pattern=r"\A(sample:)?b3:[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Level = Annotated[str, msgspec.Meta(pattern=r"\A(omitted|[1-9][0-9]{0,2}|exact)\Z")]
Number = int | float
WireScalar = bool | int | float | str
WireParam = bool | int | float | str | list[Number]


class _Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of what follows: every field is required and no other is allowed."""


class Version(msgspec.Struct):
    """The one field that a reader looks at first; it must stay what it is in every version."""

    version: int


class Expert(_Record, kw_only=True, omit_defaults=True):
    """`LockedExpert`; its own layers only in slices."""

    source: str
    layers: str | msgspec.UnsetType = msgspec.UNSET
    params: dict[str, WireParam]


class Rule(_Record):
    """`LockedRule`."""

    match: list[str]
    layers: str | None
    params: dict[str, WireParam]
    experts: dict[str, dict[str, WireParam]]


class Slice(_Record):
    """`LockedSlice`."""

    layers: str
    operator: str | None
    operator_version: Count | None
    base: str | None
    base_layers: str | None
    experts: list[Expert]
    params: dict[str, WireParam]
    rules: list[Rule]


class Output(_Record, kw_only=True, omit_defaults=True):
    """The declared part of a `LockedOutput`; its path is null for a stage that is not published."""

    name: str
    path: str | None
    operator: str
    operator_version: Count
    numerics: str
    base: str | None
    experts: list[Expert]
    params: dict[str, WireParam]
    slices: list[Slice]
    rules: list[Rule]
    budget: str
    levels_version: Count | msgspec.UnsetType = msgspec.UNSET
    write: dict[str, str | int]
    sources: dict[str, Pin]
    code: dict[str, Digest]


class ExpertBytes(_Record):
    """Expert bytes of a full read, and of the plan."""

    full: Count
    planned: Count


class Bound(_Record, omit_defaults=True):
    """The bound of an output; what is not known is left out."""

    kind: str | msgspec.UnsetType = msgspec.UNSET
    absolute: float | msgspec.UnsetType = msgspec.UNSET
    relative_to_update: float | msgspec.UnsetType = msgspec.UNSET


class File(_Record):
    """`LockedFile`."""

    name: str
    bytes: Count


class Source(_Record):
    """`LockedSource`."""

    name: str
    location: dict[str, str]
    digest: Pin
    tensors: Count
    bytes: Count
    files: list[File]


class Place(_Record):
    """`ManifestPlace`."""

    name: str
    location: dict[str, str]


class Shard(_Record):
    """`LockedShard`, with its tensors in file order."""

    name: str
    digest: Digest
    bytes: Count
    tensors: list[str]


class SideFile(_Record):
    """`LockedSideFile`."""

    name: str
    digest: Digest


class Run(_Record):
    """`RunFacts`."""

    expert_bytes_read: Count
    base_bytes_read: Count
    index_bytes_read: Count
    bytes_written: Count
    blocks: dict[str, Count]
    expert_blocks: dict[str, Count]


class Parameters(_Record):
    """`ParameterSet`."""

    params: dict[str, WireScalar]
    experts: list[dict[str, WireScalar]]


class ExpertBlocks(_Record, kw_only=True, omit_defaults=True):
    """`LockedTensor.read` and `LockedTensor.total`, and where a budget buys levels `LockedTensor.levels`."""

    read: Count
    total: Count
    bytes: Count | msgspec.UnsetType = msgspec.UNSET
    levels: dict[Level, Count] | msgspec.UnsetType = msgspec.UNSET


class Input(_Record, kw_only=True, omit_defaults=True):
    """`ManifestInput`; its tensor only where that has another name than the output's.

    In a stage its blocks are left out where another input of the same digest states them, before it in the order of
    `Manifest`'s own tensors and then the stages'.
    """

    source: str
    tensor: str | msgspec.UnsetType = msgspec.UNSET
    digest: Digest
    blocks: bytes | msgspec.UnsetType = msgspec.UNSET


class Levels(_Record):
    """Access that is not full: one byte per (expert, block)."""

    levels: bytes


class Tensor(_Record):
    """`ManifestTensor`; ``parameters`` is an index into the table of parameter sets."""

    name: str
    dtype: str
    shape: list[Count]
    digest: Digest
    expert_blocks: ExpertBlocks
    decision: str
    parameters: Count | None
    access: Literal["full"] | Levels
    blocks: bytes
    inputs: list[Input]


class StageTensor(_Record):
    """`ManifestTensor` of a stage; ``parameters`` is an index into the manifest's table."""

    name: str
    dtype: str
    shape: list[Count]
    digest: Digest
    expert_blocks: ExpertBlocks
    decision: str
    parameters: Count | None
    access: Literal["full"] | Levels
    inputs: list[Input]


class Stage(_Record):
    """`ManifestStage`; ``digest`` is null where its tokenizer alone is used."""

    output: Output
    digest: Digest | None
    expert_bytes: ExpertBytes
    bound: Bound
    sources: list[Source]
    tensors: list[StageTensor]


class Manifest(_Record):
    """`Manifest`."""

    version: int
    mergepipe: str
    geometry: Count
    output: Output
    digest: Digest
    expert_bytes: ExpertBytes
    bound: Bound
    sources: list[Source]
    places: list[Place]
    operators: dict[str, str]
    shards: list[Shard]
    side_files: list[SideFile]
    generated: list[SideFile]
    files: list[str]
    decisions: list[str]
    run: Run
    parameters: list[Parameters]
    stages: list[Stage]
    tensors: list[Tensor]


class SealedManifest(Manifest):
    """A whole file: the manifest, and behind it the checksum of all bytes before it."""

    checksum: Digest
