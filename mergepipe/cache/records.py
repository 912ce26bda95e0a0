"""What the catalog keeps, as values: digests of sources, results and where their bytes lie, published outputs."""

from __future__ import annotations

from pathlib import Path

from mergepipe.fsio.identity import FileIdentity
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigests:
    """The digests of one source tensor: its own and, packed, those of its blocks."""

    name: str
    digest: bytes
    blocks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSamples:
    """What is known of a source tensor that was not read whole.

    Attributes
    ----------
    samples
        Packed, the digest of the sample of each block (`mergepipe.checkpoints.samples`); empty if they were not taken.
    blocks
        Packed, the digest of each block that was read, zeros for one that was not; empty if none was.
    """

    name: str
    samples: bytes
    blocks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A source file as the catalog knows it: where it is, what it looked like, and when it was read."""

    path: Path
    identity: FileIdentity
    header: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished output tensor and where its bytes lie.

    Attributes
    ----------
    key, recipe, digest
        The tensor's action key, the recipe that is part of it, and its content digest.
    output
        The output that it was made for first; a hint where to look, no part of the key.
    block_keys, block_digests
        Packed, one per block.
    pack, offset
        The pack's name and the position of the tensor's first byte in that file.
    """

    key: bytes
    output: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    recipe: bytes
    digest: bytes
    block_keys: bytes
    block_digests: bytes
    pack: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTensor:
    """Blocks of an output tensor that a build has written to its staged shard; a key of zeros is a block not yet."""

    tensor: str
    block_keys: bytes
    block_digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What was last put into an output directory: its action key, its files' identities, and the caller's record."""

    key: bytes
    files: bytes
    record: bytes
