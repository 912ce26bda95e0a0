"""What the engine returns: outputs whose shards are in packs."""

from __future__ import annotations

from mergepipe.engine.meter import Meter
from mergepipe.plan.layout import Shard
from mergepipe.plan.values import OutputPlan
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTensor:
    """An output tensor whose bytes are in a pack: its action key, its digest, and packed those of its blocks.

    ``cached`` is whether all of its blocks came from earlier builds; a tensor without blocks is made anew.
    """

    name: str
    key: bytes
    digest: bytes
    block_digests: bytes
    cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard that is in a pack."""

    shard: Shard
    pack: str
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOutput:
    """An output whose shards are all in packs, ready to be published."""

    plan: OutputPlan
    tensors: tuple[FinishedTensor, ...]
    shards: tuple[FinishedShard, ...]
    meter: Meter
