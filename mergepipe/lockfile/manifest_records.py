"""What a manifest says, as values; it builds on the records of the lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from mergepipe.lockfile.records import LockedOutput, LockedSideFile, LockedSource
from mergepipe.signatures import Scalar
from mergepipe.values import dataclass

MANIFEST_VERSION = 1
"""The format that this package writes and reads."""
INPUT_DIGEST_SIZE = 16
"""Bytes kept of an input block's digest."""
OUTPUT_KEY = "output"
"""The key of the location of a source that is another output of the same Mergefile; its value is the output's name."""
LEVEL_OMITTED = 0
LEVEL_EXACT = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSet:
    """The resolved parameters of one tensor: those of the output, and one mapping per expert in expert order."""

    params: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestInput:
    """What one source gave to an output tensor.

    Attributes
    ----------
    source
        Its name.
    tensor
        The name of its tensor where that is another one than the output's, else None.
    digest
        The digest of the source's tensor, 32 bytes.
    blocks
        Its block digests, `INPUT_DIGEST_SIZE` bytes each, packed; of a stage's input empty where they are not known.
    """

    source: str
    digest: bytes
    blocks: bytes
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestTensor:
    """How one output tensor came about.

    Attributes
    ----------
    name, dtype, shape
        As in the output; dtype by its safetensors name.
    decision
        What was done: ``merge``, ``copy``, ...
    parameters
        The resolved parameters, None where none apply. Equal sets are stored once.
    inputs
        The sources that take part.
    blocks
        The block digests of the result, 32 bytes each, packed; empty for a tensor of a stage.
    levels
        The access level of each (expert, block): a row per expert of the output, a byte per block of this tensor; 0
        is omitted, 255 is exact, those between are kept for planes. None: full access, every block exactly.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    decision: str
    parameters: ParameterSet | None
    inputs: tuple[ManifestInput, ...]
    blocks: bytes
    levels: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStage:
    """An output of the same Mergefile that this one is made from: what it takes to make it again.

    Attributes
    ----------
    output
        As the lock has it, without shards and side files. Its ``digest`` is empty where no weights of it are used, only
        its tokenizer: then it has no ``tensors`` either, and its sources are among the manifest's ``places``.
    sources
        The sources that it was made from, other stages among them.
    tensors
        One for each of ``output.tensors``, in the same order, without block digests.
    """

    output: LockedOutput
    sources: tuple[LockedSource, ...]
    tensors: tuple[ManifestTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestPlace:
    """A source of which no weights are used, only headers and the files beside them: its name, and where it is."""

    name: str
    location: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestParts:
    """The parts of a manifest that are about more than its own output; see `Manifest`."""

    stages: tuple[ManifestStage, ...] = ()
    places: tuple[ManifestPlace, ...] = ()
    operators: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run that made the output really moved, in bytes, and its counts of blocks by what became of them."""

    expert_bytes_read: int
    base_bytes_read: int
    index_bytes_read: int
    bytes_written: int
    blocks: Mapping[str, int]
    expert_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of one output.

    Attributes
    ----------
    mergepipe
        The version of mergepipe that wrote it.
    geometry
        The id of the block geometry.
    output
        The output as the lock has it, complete.
    sources
        The sources that it was made from, other outputs of the Mergefile among them.
    places
        The sources whose weights neither it nor a stage is made from, but that its side files need.
    operators
        By name the file and function of each custom operator that a file defines, ``ops.py:my_merge``; the file is
        relative to the Mergefile. Those that a package offers have none.
    stages
        The other outputs that it is made from, and those that these are made from, each behind those.
    tensors
        One for each of ``output.tensors``, in the same order.
    shard_tensors
        For each of ``output.shards``, its tensors in file order.
    generated
        The files beside the weights that mergepipe writes itself: the index of the shards, the model card.
    files
        Every file that mergepipe put in the directory, relative to it; others belong to the user.
    decisions
        What was decided at plan time (extra tensors dropped, ...), in words.
    run
        Measured costs.
    """

    mergepipe: str
    geometry: int
    output: LockedOutput
    sources: tuple[LockedSource, ...]
    tensors: tuple[ManifestTensor, ...]
    shard_tensors: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    decisions: tuple[str, ...]
    run: RunFacts
    places: tuple[ManifestPlace, ...] = ()
    operators: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[ManifestStage, ...] = ()
    generated: tuple[LockedSideFile, ...] = ()
