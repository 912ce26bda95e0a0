"""From plans and finished outputs to the records of lock and manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.digest import digest_at, source_digest
from mergepipe.dtypes import DTYPES
from mergepipe.engine.meter import Meter
from mergepipe.engine.results import FinishedOutput
from mergepipe.graph.alike import alike_blocks
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.histogram import Histogram, added, tensor_histograms
from mergepipe.graph.inputs import slot_blocks, source_pins
from mergepipe.lockfile.records import (
    UNKNOWN_DIGEST,
    LockedExpert,
    LockedFile,
    LockedLevels,
    LockedOutput,
    LockedRule,
    LockedShard,
    LockedSideFile,
    LockedSlice,
    LockedSource,
    LockedTensor,
)
from mergepipe.mergefile.schema import ExpertRef, Rule, Source
from mergepipe.plan.access import level_name
from mergepipe.plan.parts import Part
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVELS_VERSION
from mergepipe.values import dataclass

FULL_BUDGET = "full"
EXACT_BOUND: Mapping[str, str | float] = {"kind": "exact", "absolute": 0.0, "relative_to_update": 0.0}


def locked_source(source: Source, checkpoint: Checkpoint, digest: bytes | None, *, files: bool = False) -> LockedSource:
    """Return the record of a source; its files only where asked for.

    The lock leaves the files out: it must not change when a source is sharded in another way. The manifest has them.
    """
    return LockedSource(
        name=source.name,
        location=location(source),
        digest=digest or UNKNOWN_DIGEST,
        tensors=len(checkpoint.stored),
        bytes=checkpoint.nbytes,
        files=tuple(LockedFile(name=f.name, bytes=f.identity.size) for f in checkpoint.files) if files else (),
    )


def location(source: Source) -> dict[str, str]:
    """Return where a source is, as declared."""
    return source.location


def declared_output(plan: OutputPlan, tokenizer: str | None, index: SourceIndex | None) -> LockedOutput:
    """Return an output's record without results: everything that is known before the merge.

    Without an index the digests of its sources stay unknown.
    """
    output, pins = plan.output, source_pins(plan, index) if index else {}
    return LockedOutput(
        name=output.name,
        path=output.path if output.publish else None,
        operator=output.operator,
        operator_version=plan.operator.version,
        code={operator.signature.name: operator.code for operator in plan.operators if operator.code},
        numerics=str(output.params.get("numerics", "float32")),
        base=output.base,
        experts=tuple(map(_expert, output.experts)),
        params=dict(output.params),
        slices=tuple(_slice(part) for part in plan.parts if part.slice is not None),
        rules=tuple(_rule(rule) for rule in output.rules),
        budget=FULL_BUDGET if output.budget is None else output.budget.text(),
        levels_version=LEVELS_VERSION if plan.buys_levels else None,
        write=_write(plan, tokenizer),
        sources={source: pins.get(source) or UNKNOWN_DIGEST for source in plan.sources},
        expert_bytes_full=plan.expert_bytes,
        expert_bytes_planned=plan.planned_bytes,
        bound=_bound(plan),
        digest=UNKNOWN_DIGEST,
        shards=(),
        side_files=(),
        tensors=(),
    )


def _bound(plan: OutputPlan) -> Mapping[str, str | float]:
    """Return the bound of a plan; what is not known of it is left out."""
    if plan.outcome is None:
        return EXACT_BOUND
    bound = plan.outcome.bound
    numbers = {"absolute": finite(bound.absolute), "relative_to_update": finite(bound.relative_to_update)}
    return {"kind": bound.kind, **{name: value for name, value in numbers.items() if value is not None}}


def finite(value: float | None) -> float | None:
    """Return a number, None for one that is not finite: a bound that is infinite is none."""
    return None if value is None or not math.isfinite(value) else value


def _expert(expert: ExpertRef) -> LockedExpert:
    return LockedExpert(source=expert.source, params=dict(expert.params), layers=_range(expert.layers))


def _slice(part: Part) -> LockedSlice:
    declared = (part.output.slices or ())[part.slice or 0]
    return LockedSlice(
        layers=f"{declared.layers[0]}..{declared.layers[1]}",
        operator=declared.operator,
        operator_version=None if declared.operator is None else part.operator.version,
        base=declared.base,
        base_layers=_range(declared.base_layers),
        experts=tuple(map(_expert, declared.experts)),
        params=dict(declared.params),
        rules=tuple(map(_rule, declared.rules)),
    )


def _range(layers: tuple[int, int] | None) -> str | None:
    return None if layers is None else f"{layers[0]}..{layers[1]}"


def _rule(rule: Rule) -> LockedRule:
    return LockedRule(
        match=rule.match,
        layers=_range(rule.layers),
        params=dict(rule.params),
        experts={name: dict(params) for name, params in rule.experts.items()},
    )


def _write(plan: OutputPlan, tokenizer: str | None) -> dict[str, str | int]:
    write = plan.output.write
    facts: dict[str, str | int] = {"shard_size": write.shard_size}
    if write.dtype is not None:
        facts["dtype"] = DTYPES[write.dtype].long_name or write.dtype
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer
    return dict(sorted(facts.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentCounts:
    """What the content of the inputs makes of the access set, whatever any run read.

    Attributes
    ----------
    total, zero, shared
        (expert, block) pairs: all of them; those with a zero delta; those equal to an earlier input of the block.
    omitted
        Those that a budget leaves out.
    levels
        How precisely those are read that carry content of their own, where a budget buys levels; else None.
    """

    total: int
    zero: int
    shared: int
    omitted: int = 0
    levels: Histogram | None = None

    @property
    def read(self) -> int:
        """Pairs in the access set that carry content of their own."""
        return self.total - self.zero - self.shared - self.omitted


def content_counts(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> ContentCounts:
    """Return the counts of one tensor; every input must be known."""
    if tensor.decision is Decision.EQUAL:
        return ContentCounts(total=0, zero=0, shared=0)
    recipe = TensorRecipe.of(tensor, plan.geometry)
    packed = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    total = zero = shared = omitted = 0
    for alike in alike_blocks(recipe, packed):
        planned, count = alike.plan, len(alike.blocks)
        if recipe.merged_rows(planned.block):
            total += count * sum(
                slot is not None and tensor.is_expert(slot) and digest_at(blocks, planned.block) is not None
                for slot, blocks in zip(tensor.experts, packed[1:], strict=True)
            )
        zero += count * len(planned.zero)
        shared += count * sum(_is_expert_slot(tensor, slot) for slot in planned.shared)
        omitted += count * len(planned.omitted)
    levels = added(tensor_histograms(plan, tensor, index)) if plan.buys_levels else None
    return ContentCounts(total=total, zero=zero, shared=shared, omitted=omitted, levels=levels)


def _is_expert_slot(tensor: TensorPlan, slot: int) -> bool:
    ref = tensor.slots[slot]
    return ref is not None and tensor.is_expert(ref)


def locked_output(
    declared: LockedOutput,
    finished: FinishedOutput,
    counts: Mapping[str, ContentCounts],
    side_files: Mapping[str, bytes],
) -> LockedOutput:
    """Return an output's whole record.

    Parameters
    ----------
    counts
        By tensor name.
    side_files
        By file name the content digest.
    """
    return LockedOutput(
        **{name: getattr(declared, name) for name in _DECLARED},
        digest=source_digest((tensor.name, tensor.digest) for tensor in finished.tensors),
        shards=tuple(
            LockedShard(name=shard.shard.name, digest=shard.digest, bytes=shard.shard.size) for shard in finished.shards
        ),
        side_files=tuple(LockedSideFile(name=name, digest=digest) for name, digest in sorted(side_files.items())),
        tensors=tuple(
            LockedTensor(
                name=tensor.name,
                digest=tensor.digest,
                read=counts[tensor.name].read,
                total=counts[tensor.name].total,
                levels=_locked_levels(counts[tensor.name].levels),
            )
            for tensor in finished.tensors
        ),
    )


def _locked_levels(levels: Histogram | None) -> LockedLevels | None:
    """Return what the lock says of the levels of a tensor; nothing where no block of an expert is its own."""
    if not levels:
        return None
    return LockedLevels(
        bytes=sum(count.bytes for count in levels.values()),
        blocks={level: count.blocks for level, count in levels.items()},
    )


def locked_levels(output: LockedOutput) -> dict[str, int] | None:
    """Return by the name of a level how many expert blocks of an output have it; None where it has no levels."""
    return tensor_levels(output, output.tensors)


def tensor_levels(output: LockedOutput, tensors: Iterable[LockedTensor]) -> dict[str, int] | None:
    """Return the same of some of its tensors."""
    if output.levels_version is None:
        return None
    found: dict[int, int] = {}
    for tensor in tensors:
        for level, count in tensor.levels.blocks.items() if tensor.levels is not None else ():
            found[level] = found.get(level, 0) + count
    return {level_name(level): found[level] for level in sorted(found)}


_DECLARED = (
    "name", "path", "operator", "operator_version", "numerics", "base", "experts", "params", "slices", "rules",
    "budget", "levels_version", "write", "sources", "code", "expert_bytes_full", "expert_bytes_planned", "bound",
)  # fmt: skip


def block_facts(plan: OutputPlan, meter: Meter) -> dict[str, int]:
    """Return the counts of output blocks by what became of them."""
    return {"total": plan.blocks, "computed": meter.computed, "cached": meter.cached, "copied": meter.copied}


def expert_block_facts(counts: Mapping[str, ContentCounts], meter: Meter) -> dict[str, int]:
    """Return the counts of (expert, block) pairs: by content, and by what this run did.

    ``shared`` are pairs whose content was read under another name: an earlier input's, or another output's.
    """
    return {
        "total": sum(count.total for count in counts.values()),
        "read": meter.expert_blocks,
        "omitted": sum(count.omitted for count in counts.values()),
        "zero": sum(count.zero for count in counts.values()),
        "shared": sum(count.shared for count in counts.values()) + meter.borrowed,
    }
