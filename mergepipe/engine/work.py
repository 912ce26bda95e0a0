"""The units of work: groups of output tensors that read the same source tensors, and jobs of adjacent blocks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import field
from typing import TYPE_CHECKING

from mergepipe.cache.records import StagedTensor
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.digest import DIGEST_SIZE, digest_at
from mergepipe.engine.meter import Meter
from mergepipe.engine.staging import StagedShard
from mergepipe.graph.blocks import Holding, TensorRecipe
from mergepipe.operators.contract import Reduction, Statistic
from mergepipe.plan.values import InputRef, OutputPlan
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.adapters import AdapterInput
    from mergepipe.engine.coding import CodeInput, Coding

UNREAD = bytes(DIGEST_SIZE)
"""Stands for the digest of a block that is never read."""
InputKey = tuple[str, str]
"""A source tensor by the path of the file that holds it and its name: two sources may be the same files."""


@dataclass(slots=True, kw_only=True)
class Input:
    """A stored source tensor that a group reads.

    Attributes
    ----------
    known
        Its packed block digests, or None while it is cold: then what is wanted of it is read and hashed.
    levels
        A byte for each block, 0 for those that are never read; None where it is read whole. What stands for such a
        block in ``known`` is no digest of it.
    earlier
        While it is cold, the packed digests of the blocks that earlier builds read, zeros for others; or empty.
    """

    key: InputKey
    ref: InputRef
    file: CheckpointFile
    grid: BlockGrid
    known: bytes | None
    levels: bytes | None = None
    earlier: bytes = b""

    def digest(self, block: int) -> bytes | None:
        """Return the known digest of a block; None if the input has no such block."""
        assert self.known is not None, "the digests of a cold input are found by reading it"
        return digest_at(self.known, block)

    def is_wanted(self, block: int) -> bool:
        """Return whether a block may be read."""
        return self.levels is None or self.levels[block] != 0

    def is_missing(self, block: int) -> bool:
        """Return whether a block of a cold input must be read to know what it holds."""
        return self.is_wanted(block) and self.known_earlier(block) is None

    def known_earlier(self, block: int) -> bytes | None:
        """Return the digest of a block of a cold input that an earlier build read, None if none did."""
        digest = digest_at(self.earlier, block)
        return None if digest == UNREAD else digest


@dataclass(slots=True)
class TensorWork:
    """One output tensor in the making. Workers read it; only the thread that runs the build changes it.

    Attributes
    ----------
    inputs
        Per slot the key of its input, or None.
    keys, digests
        Packed, filled as blocks are finished; a key of zeros is a block not yet.
    holdings
        Per finished block where its bytes lie: None in the staged shard, else the place to copy it from.
    reduction
        What the tensor's statistics came to, where the recipe `reduces`; set before any block is merged.
    """

    plan: OutputPlan
    recipe: TensorRecipe
    shard: StagedShard
    inputs: tuple[InputKey | None, ...]
    candidates: tuple[Holding, ...]
    keys: bytearray = field(default_factory=bytearray)
    digests: bytearray = field(default_factory=bytearray)
    holdings: dict[int, Holding] = field(default_factory=dict)
    changed: bool = False
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        size = self.recipe.grid.count * DIGEST_SIZE
        self.keys, self.digests = bytearray(size), bytearray(size)

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.recipe.tensor.name

    def code(self, slot: int) -> tuple[InputKey, InputKey]:
        """Return the key of the code of a slot's delta."""
        base, expert = self.inputs[0], self.inputs[slot]
        assert base is not None, "a code is that of a delta against a base"
        assert expert is not None, "a code is that of an expert's delta"
        return base, expert

    def take(self, done: BlocksDone) -> None:
        """Enter finished blocks."""
        at = done.first * DIGEST_SIZE
        self.keys[at : at + len(done.keys)] = done.keys
        self.digests[at : at + len(done.digests)] = done.digests
        if done.holding is None:
            self.changed = True
        else:
            self.holdings.update(dict.fromkeys(done.blocks, done.holding))

    def staged(self) -> StagedTensor:
        """Return what of this tensor lies in its staged shard, as the catalog records it."""
        keys = bytearray(self.keys)
        for block, holding in self.holdings.items():
            if holding.result is None:
                continue  # an unfinished build wrote it there
            keys[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE] = bytes(DIGEST_SIZE)
        return StagedTensor(tensor=self.name, block_keys=bytes(keys), block_digests=bytes(self.digests))


@dataclass(slots=True)
class Group:
    """Output tensors of one name, whatever their outputs, that are made from one reading of their inputs.

    A group without tensors only hashes its inputs.

    Attributes
    ----------
    inputs
        The stored tensors, by key.
    adapters
        The tensors that are computed from stored factors, by key.
    codes
        The progressive codes that are read, by the keys of base and expert.
    held
        By input key the bytes of its first `kept` blocks, as far as they were read: what a group keeps in memory
        between its passes; None where it keeps nothing.
    kept
        How many blocks of each input that are.
    present
        The (input, block) pairs that lie in ``held``.
    claimed
        Those of them that were counted as read to merge.
    """

    works: tuple[TensorWork, ...]
    inputs: Mapping[InputKey, Input]
    adapters: Mapping[InputKey, AdapterInput] = field(default_factory=dict)
    codes: Mapping[tuple[InputKey, InputKey], CodeInput] = field(default_factory=dict)
    hashed: dict[InputKey, bytearray] = field(default_factory=dict)
    held: dict[InputKey, memoryview] | None = None
    kept: int = 0
    present: set[tuple[InputKey, int]] = field(default_factory=set)
    claimed: set[tuple[InputKey, int]] = field(default_factory=set)

    @property
    def blocks(self) -> int:
        """How many blocks the longest member has."""
        counts = [work.recipe.grid.count for work in self.works]
        counts += [source.grid.count for source in self.inputs.values() if source.known is None or not self.works]
        return max(counts, default=0)

    @property
    def cold(self) -> bool:
        """Whether the content of an input is not known."""
        return any(source.known is None for source in self.inputs.values())

    @property
    def input_bytes(self) -> int:
        """Bytes of all stored inputs."""
        return sum(i.grid.nbytes for i in self.inputs.values())

    @property
    def nbytes(self) -> int:
        """Bytes to go through, for progress: every input, and every output."""
        return self.input_bytes + sum(w.recipe.grid.nbytes for w in self.works)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A statistic to be taken of the blocks of a work's tensor.

    Attributes
    ----------
    recipe
        The part of the key that does not depend on content (`mergepipe.graph.keys.statistic_recipe`).
    known
        The keys of what is known from earlier.
    is_first
        Whether no other statistics of the work led to this one.
    """

    work: TensorWork
    statistic: Statistic
    recipe: bytes
    known: Set[bytes]
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of adjacent blocks of a group, worked on by one worker: to be measured, or to be merged.

    Attributes
    ----------
    piece
        How many blocks of it are in memory at a time, at most; 0 for all of them.
    measures, codings
        The statistics to be taken, and the codes to be made; where there are none, the blocks are merged.
    reuse
        False computes blocks even where an earlier result is known: its bytes turned out to be damaged.
    """

    group: Group
    start: int
    stop: int
    piece: int = 0
    reuse: bool = True
    measures: tuple[Measure, ...] = ()
    codings: tuple[Coding, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its share of the bytes that the group goes through; exact when summed over all jobs of a pass."""
        group = self.group
        return group.nbytes * self.stop // group.blocks - group.nbytes * self.start // group.blocks


@dataclass(slots=True)
class BlocksDone:
    """Adjacent finished blocks: the first, their packed keys and digests, where they lie (None: the staged shard)."""

    first: int
    keys: bytes
    digests: bytes
    holding: Holding | None

    @property
    def blocks(self) -> range:
        """The blocks."""
        return range(self.first, self.first + len(self.keys) // DIGEST_SIZE)


@dataclass(slots=True)
class BlockMeasured:
    """A block's statistic: the index of the measure, the block, the key, and the numbers (None: known from earlier)."""

    measure: int
    block: int
    key: bytes
    value: bytes | None


@dataclass(slots=True)
class JobDone:
    """What a job found and did.

    Attributes
    ----------
    hashed
        Per cold input the packed digests of its blocks in the job's range.
    done, meters
        Per work of the group, in order.
    measured
        What was measured.
    index_bytes
        Per input the bytes that were read only to hash them or to measure.
    claimed
        The (input, block) pairs that were counted as read to merge, of those that the group keeps.
    adapters
        By key of an adapter's tensor the index of the work that read it to merge first, and whether as an expert.
    nbytes
        The job's share of the group's bytes, for progress.
    """

    job: Job
    hashed: dict[InputKey, bytes]
    done: tuple[list[BlocksDone], ...]
    meters: tuple[Meter, ...]
    measured: list[BlockMeasured]
    index_bytes: dict[InputKey, int]
    claimed: set[tuple[InputKey, int]]
    adapters: dict[InputKey, tuple[int, bool]]
    nbytes: int


def jobs_of(
    group: Group,
    block_count: int,
    measures: tuple[Measure, ...] = (),
    wanted: Container[int] | None = None,
    codings: tuple[Coding, ...] = (),
    piece: int = 0,
) -> Iterator[Job]:
    """Cut a group into jobs of at most ``block_count`` blocks.

    Parameters
    ----------
    piece
        How many of these are in memory at a time; 0 for all.
    wanted
        The blocks that matter; jobs without any are left out. None: all.
    """
    for start in range(0, group.blocks, block_count):
        stop = min(start + block_count, group.blocks)
        if wanted is None or any(block in wanted for block in range(start, stop)):
            yield Job(group=group, start=start, stop=stop, piece=piece, measures=measures, codings=codings)
