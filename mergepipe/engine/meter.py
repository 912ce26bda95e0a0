"""Counting what was read, computed and written. Counters are measured where the work happens, never derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.work import Group, InputKey


@dataclass(slots=True)
class Meter:
    """What one output's build did; jobs count into their own meter, and the run adds them up.

    Attributes
    ----------
    expert_bytes, base_bytes
        Bytes read to merge. Bytes that were read once to hash and to merge count here.
    index_bytes
        Source bytes that were read only to hash them.
    written
        Bytes written to shards.
    computed, copied, cached
        Output blocks computed; copied from a source without arithmetic; taken from earlier builds.
    expert_blocks, borrowed
        (expert, block) pairs read to merge; not read for this output because another one of the same run read them.
    adapter_bytes, borrowed_bytes
        The part of ``expert_bytes`` that were factors of adapters; bytes of expert blocks that the borrowed pairs have.
    merged_bytes, measured_bytes, moved_bytes
        Bytes of inputs and results of the blocks that were computed; of the inputs of blocks of which statistics were
        taken, whatever further statistics these led to; and of results that were copied from packs.
    reading_seconds, measuring_seconds, merging_seconds
        Seconds of all workers together: reading and hashing, for the first output that a job works for; statistics; and
        making blocks and writing them.
    """

    expert_bytes: int = 0
    base_bytes: int = 0
    index_bytes: int = 0
    written: int = 0
    computed: int = 0
    copied: int = 0
    cached: int = 0
    expert_blocks: int = 0
    borrowed: int = 0
    adapter_bytes: int = 0
    borrowed_bytes: int = 0
    merged_bytes: int = 0
    measured_bytes: int = 0
    moved_bytes: int = 0
    reading_seconds: float = 0.0
    measuring_seconds: float = 0.0
    merging_seconds: float = 0.0

    @classmethod
    def of(cls, values: tuple[float, ...]) -> Meter:
        """Return a meter of these `values`."""
        return cls(*values)  # type: ignore[arg-type]

    def values(self) -> tuple[float, ...]:
        """Return all counts, in their order."""
        return tuple([getattr(self, name) for name in self.__slots__])

    def add(self, other: Meter) -> None:
        """Add another meter's counts to this one."""
        for name in self.__slots__:
            if more := getattr(other, name):
                setattr(self, name, getattr(self, name) + more)


@dataclass(frozen=True, slots=True)
class RunMeters:
    """What a run counts: by output its meter, and by source the output that it is hashed for."""

    meters: Mapping[str, Meter]
    users: Mapping[str, str]

    def owner(self, group: Group, key: InputKey) -> Meter:
        """Return the meter of the first output that an input was read for."""
        for work in group.works:
            if key in work.inputs:
                return self.meters[work.plan.output.name]
        if group.works:  # what an adapter is added to
            return self.meters[group.works[0].plan.output.name]
        return self.meters[self.users[group.inputs[key].ref.source]]
