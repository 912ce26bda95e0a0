"""What a run does for an output, as the engine's meter counts it; and which expert bytes count for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan
from mergepipe.values import dataclass


@dataclass(slots=True, kw_only=True)
class Moves:
    """What a run does for one output, counted as the engine's meter counts it.

    Attributes
    ----------
    to_read, cached, index
        By expert: bytes of its blocks to be read to merge; bytes of planned blocks whose results are in the cache; and
        bytes that are read only to index it, or to take statistics.
    expert_bytes, base_bytes, index_bytes, written
        As in `mergepipe.engine.meter.Meter`.
    computed, copied, reused
        Output blocks.
    merged_bytes, measured_bytes
        Bytes of inputs and results of the blocks that are computed, and of inputs of those whose statistics are taken:
        what time is estimated from.
    moved_bytes
        Bytes of results that are copied from packs.
    doubtful_bytes
        Bytes of `index_bytes` that are read only if statistics take more rounds than they mostly do.
    exact
        Whether all figures follow from what is known; otherwise they are upper limits. `index_bytes` alone may be
        passed, by what is counted as read to merge and turns out not to be merged: what is read in all is not.
    bounded
        False where nobody knows how often a custom operator goes through its inputs: then what is read is no limit.
    """

    to_read: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)
    expert_bytes: int = 0
    base_bytes: int = 0
    index_bytes: int = 0
    written: int = 0
    computed: int = 0
    copied: int = 0
    reused: int = 0
    merged_bytes: int = 0
    measured_bytes: int = 0
    moved_bytes: int = 0
    doubtful_bytes: int = 0
    exact: bool = True
    bounded: bool = True

    def add_index(self, source: str, count: int, doubtful: int = 0) -> None:
        """Count bytes of a source that are read only to index it, or to take statistics."""
        self.doubtful_bytes += doubtful
        if count:
            self.index_bytes += count
            add_bytes(self.index, source, count)

    def add_read(self, expert: str | None, count: int) -> None:
        """Count bytes that are read to merge: an expert's, or the base's (None)."""
        if expert is None:
            self.base_bytes += count
        else:
            self.expert_bytes += count
            add_bytes(self.to_read, expert, count)


def expert_name(plan: OutputPlan, tensor: TensorPlan, slot: int, ref: InputRef) -> str:
    """Return the expert that the bytes of an input count for: what stands for one may be another's."""
    experts = plan.parts[tensor.part].experts
    named = {expert.source for part in plan.parts for expert in part.experts}
    return ref.source if ref.source in named or not slot else experts[slot - 1].source


def expert_cost(plan: OutputPlan, tensor: TensorPlan) -> Iterator[tuple[str, int]]:
    """Yield expert and bytes of a full read for every expert of a tensor."""
    for slot, ref in enumerate(tensor.slots):
        if slot and ref is not None:
            yield expert_name(plan, tensor, slot, ref), plan.expert_cost(tensor, ref)[0]


def add_bytes(counts: dict[str, int], name: str, count: int) -> None:
    """Add bytes to what is counted under a name; none add no name."""
    if count:
        counts[name] = counts.get(name, 0) + count
