"""The values that graph nodes carry. Node ids are structural; arrays and file handles never live in the graph."""

from __future__ import annotations

import enum

from mergepipe.cache.records import Result
from mergepipe.values import dataclass

NodeId = tuple[str | int, ...]


class State(enum.Enum):
    """What a build has to do for a node."""

    CACHED = "cached"
    """Its value is known; nothing."""
    DIRTY = "dirty"
    """Its inputs are known and its value is not: compute it."""
    COLD = "cold"
    """The content of an input is not known: read it, then decide."""
    ZERO = "zero"
    """A block of an expert that equals the base's: a zero delta, not read."""
    OMITTED = "omitted"
    """A block outside the access set: not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNode:
    """A tensor (``block`` None) or a block of a source: its bytes, and its digest if known."""

    source: str
    tensor: str
    block: int | None
    nbytes: int
    digest: bytes | None
    state: State

    @property
    def id(self) -> NodeId:
        """``("read", source, tensor[, block])``."""
        tail = () if self.block is None else (self.block,)
        return ("read", self.source, self.tensor, *tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNode:
    """An output tensor: its action key once all inputs are known, and its result once there is one."""

    output: str
    tensor: str
    key: bytes | None
    result: Result | None

    @property
    def id(self) -> NodeId:
        """``("tensor", output, tensor)``."""
        return ("tensor", self.output, self.tensor)

    @property
    def state(self) -> State:
        """Cached with a result, cold without a key, dirty otherwise."""
        if self.key is None:
            return State.COLD
        return State.CACHED if self.result is not None else State.DIRTY


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeNode:
    """An output block: its action key, and where its bytes already lie if they do."""

    output: str
    tensor: str
    block: int
    key: bytes | None
    state: State

    @property
    def id(self) -> NodeId:
        """``("merge", output, tensor, block)``."""
        return ("merge", self.output, self.tensor, self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticNode:
    """A statistic of a block: numbers about its inputs, kept by their content.

    Attributes
    ----------
    number
        Which of the statistics that the reduction asks for, in order.
    name
        The kind of statistic.
    """

    output: str
    tensor: str
    number: int
    name: str
    block: int
    key: bytes
    state: State

    @property
    def id(self) -> NodeId:
        """``("stat", output, tensor, number, block)``."""
        return ("stat", self.output, self.tensor, self.number, self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceNode:
    """What a tensor's statistics come to: its action key once all inputs are known."""

    output: str
    tensor: str
    key: bytes | None
    state: State

    @property
    def id(self) -> NodeId:
        """``("reduce", output, tensor)``."""
        return ("reduce", self.output, self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputNode:
    """A whole output."""

    output: str

    @property
    def id(self) -> NodeId:
        """``("output", output)``."""
        return ("output", self.output)


Node = ReadNode | StatisticNode | ReduceNode | MergeNode | TensorNode | OutputNode
