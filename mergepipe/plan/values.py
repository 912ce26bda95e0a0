"""The values that a plan is made of. All are frozen; printing one shows all that it decides."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import BlockGrid, Geometry, grid
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.mergefile.schema import Output
from mergepipe.operators.contract import Operator, Prepared, TensorParams
from mergepipe.plan.access import TensorAccess
from mergepipe.plan.layout import ShardLayout
from mergepipe.plan.parts import Part
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.plan.bounds import ErrorBound
    from mergepipe.plan.selection import TensorLoss


class Decision(enum.Enum):
    """How an output tensor comes about."""

    MERGE = "merge"
    """The operator computes it."""
    EQUAL = "equal"
    """It is no floating point tensor that can be merged: copied, and every source must hold the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRef:
    """The stored factors that a slot's values are computed from (`mergepipe.checkpoints.lowrank.lora_rows`).

    Attributes
    ----------
    a, b
        The factors, ``(r, n)`` and ``(m, r)``: the delta is ``scaling * (b @ a)``, ``(m, n)``.
    transposed
        Whether the delta is transposed to ``(n, m)`` (fan-in-fan-out layers and embeddings).
    on
        The tensor that the delta is added to where the slot's *value* is needed; None where the delta itself is what
        the operator uses: it works on deltas, and the adapter applies to the output's base.
    """

    a: InputRef
    b: InputRef
    scaling: float
    transposed: bool
    on: InputRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRef:
    """A tensor of a source that an output tensor reads.

    Attributes
    ----------
    info
        Its name in the source's own file, which may differ from the output tensor's. With ``lora`` it is the tensor
        that the factors stand for: name, dtype and shape of the one that they apply to, and no bytes of its own.
    lora
        The stored factors, where there is no stored tensor.
    levels
        A byte for each block, 0 for those that are never read, where the tensor was measured by samples and a budget
        leaves blocks out; None where it is read whole.
    coded_only
        Whether it is there as a code of its delta alone, in a progressive checkpoint: it has no bytes to be read.
    """

    source: str
    info: TensorInfo
    lora: LoraRef | None = None
    levels: bytes | None = None
    coded_only: bool = False

    @property
    def stored(self) -> tuple[InputRef, ...]:
        """The stored tensors that it is made of: itself, or factors and what their product is added to."""
        if self.lora is None:
            return (self,)
        return (self.lora.a, self.lora.b, *([self.lora.on] if self.lora.on is not None else []))

    def grid(self, geometry: Geometry) -> BlockGrid:
        """Return the block grid of this input (the same rows as the output's, in bytes of its own dtype)."""
        return grid(self.info.dtype, self.info.shape, geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Everything that determines one output tensor, but for the content of its inputs.

    Attributes
    ----------
    name, dtype, shape
        Of the output; dtype is a header name such as ``BF16``.
    decision
        Merged, or copied because it cannot be merged.
    base
        The base's tensor where the operator or the decision uses it, or rows beyond the common ones come from it.
    experts
        One per expert in expert order; None where the expert is no input (weight 0, or missing with a zero delta).
    operator
        What merges it: the output's operator, or that of the slice that the tensor belongs to.
    base_source
        The source whose reads count as base reads: the declared base, also where it is listed as an expert. None
        without one.
    part, layer
        The output's part (slice) that makes it, and its layer in the output; None outside the layers.
    params, prepared
        The resolved parameters, and what the operator made of them.
    work
        ``float32`` or ``float64``.
    recipe
        The digest of all that turns inputs into values (`mergepipe.plan.recipe`).
    common_rows
        With ``rows = "common"`` and differing row counts: how many leading rows are merged; otherwise None.
    anchored
        Whether ``base`` is there to stand for blocks that a budget leaves out, though the operator does not use it.
    access
        Which blocks of the experts it is made from; None for all of them, and while a budget is not resolved.
    sampled
        Whether samples of its inputs say which blocks a budget reads (`mergepipe.plan.sampling`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    decision: Decision
    base: InputRef | None
    experts: tuple[InputRef | None, ...]
    operator: Operator
    base_source: str | None
    part: int
    layer: int | None
    params: TensorParams
    prepared: Prepared
    work: str
    recipe: bytes
    common_rows: int | None = None
    anchored: bool = False
    access: TensorAccess | None = None
    sampled: bool = False

    @property
    def slots(self) -> tuple[InputRef | None, ...]:
        """The base and the experts in one row: slot 0 and slots 1 to n."""
        return (self.base, *self.experts)

    @property
    def uses_base(self) -> bool:
        """Whether a base is an input of the formula."""
        return self.operator.uses_base and self.base_source is not None

    def is_expert(self, ref: InputRef) -> bool:
        """Return whether reading this input counts as an expert read: the base listed as an expert does not."""
        return ref.source != self.base_source

    def grid(self, geometry: Geometry) -> BlockGrid:
        """Return the block grid of the output tensor."""
        return grid(self.dtype, self.shape, geometry)

    def merged_blocks(self, geometry: Geometry) -> int:
        """Return how many blocks have rows that are merged; those behind them are the base's."""
        layout = self.grid(geometry)
        return layout.count if self.common_rows is None else -(-self.common_rows // layout.block_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the output tensor."""
        return grid(self.dtype, self.shape, Geometry()).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOrigin:
    """Which layer of which source a layer of an output is made in the place of."""

    source: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOutcome:
    """What a budget came to.

    Attributes
    ----------
    block_bytes
        Bytes of expert blocks in the access set; the factors of adapters, which are always read, not among them.
    omitted_blocks
        The (expert, block) pairs that are left out.
    bound
        How far the output may be from the full-read merge.
    expected
        The error if what is left out were orthogonal: an estimate.
    uncertainty
        The standard error of that estimate where deltas were measured by samples, else 0.
    omitted_mass
        The share of the length of all deltas that is left out, 0 to 1.
    experts
        By expert the bytes that are read, adapters' factors among them.
    losses
        The tensors that lose most, first those that lose more.
    is_measured
        Whether it was planned from the content of the sources, so that the bytes that a build reads are known exactly.
    """

    block_bytes: int
    omitted_blocks: int
    bound: ErrorBound
    expected: float
    omitted_mass: float
    experts: Mapping[str, int]
    losses: tuple[tuple[str, TensorLoss], ...]
    is_measured: bool = True
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """The plan of one output: what is read, what is computed, and where it goes.

    Attributes
    ----------
    operator
        The output's; a slice may have another one, see `TensorPlan.operator`.
    parts
        One per slice; a single one without slices.
    tensors
        In natural name order.
    sources
        The checkpoints that it uses, by source name: the base first, then experts in expert order.
    definer
        The source whose config the output takes, and without slices its tensors too.
    stack
        With slices, where each layer comes from; otherwise empty: the layers are the definer's.
    layout
        How the tensors are distributed over shards.
    decisions
        Policy decisions in words: dropped tensors, missing tensors taken as zero deltas. Part of the record.
    notes
        What was ignored in the sources' folders. It depends on files that do not count: no part of any record.
    expert_bytes, base_bytes
        What a full-read merge reads of experts and of the base, in bytes.
    expert_blocks
        The (expert, block) pairs of a full read.
    outcome
        What the output's budget came to; None without a budget, and while it is not resolved.
    """

    output: Output
    operator: Operator
    geometry: Geometry
    parts: tuple[Part, ...]
    tensors: tuple[TensorPlan, ...]
    sources: Mapping[str, Checkpoint]
    definer: str
    stack: tuple[LayerOrigin, ...]
    layout: ShardLayout
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    expert_bytes: int
    base_bytes: int
    expert_blocks: int
    outcome: BudgetOutcome | None = None

    @property
    def is_pending(self) -> bool:
        """Whether it is not known yet which blocks the output's budget buys."""
        return self.outcome is None and self.output.is_budgeted

    @property
    def buys_levels(self) -> bool:
        """Whether its budget may read approximations of blocks."""
        return self.output.budget is not None and self.output.budget.uses_levels

    @property
    def is_inexact(self) -> bool:
        """Whether anything of the experts is left out or approximated; false while a budget is not resolved."""
        return any(tensor.access is not None for tensor in self.tensors)

    @property
    def planned_bytes(self) -> int:
        """Bytes that are read of the experts, adapters among them; of a full read while a budget is not resolved."""
        return self.expert_bytes if self.outcome is None else self.outcome.block_bytes + self.adapter_bytes

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the factors of adapters."""
        return sum(
            self.factor_bytes(tensor, slot) for tensor in self.tensors for slot in tensor.experts if slot is not None
        )

    def factor_bytes(self, tensor: TensorPlan, slot: InputRef) -> int:
        """Return the bytes of an adapter's factors, for a merged tensor that takes it as an expert; else 0."""
        if tensor.decision is not Decision.MERGE or slot.lora is None:
            return 0
        stop = tensor.merged_blocks(self.geometry)
        factors = [ref for ref in (slot.lora.a, slot.lora.b) if tensor.is_expert(ref)]
        return sum(_bytes(slot, ref, 0, stop, self.geometry) for ref in factors)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of its parts, each once."""
        return tuple({id(part.operator): part.operator for part in self.parts}.values())

    def expert_cost(self, tensor: TensorPlan, slot: InputRef) -> tuple[int, int]:
        """Return the (bytes, blocks) that a full read takes of an expert for a merged tensor; (0, 0) for the base."""
        if tensor.decision is not Decision.MERGE or slot is tensor.base:
            return 0, 0
        stop = tensor.merged_blocks(self.geometry)
        blocks = min(stop, slot.grid(self.geometry).count) if tensor.is_expert(slot) else 0
        return sum(_bytes(slot, ref, 0, stop, self.geometry) for ref in slot.stored if tensor.is_expert(ref)), blocks

    def base_cost(self, tensor: TensorPlan, slot: InputRef) -> int:
        """Return the bytes that the access takes of the base for a merged tensor; 0 for an expert."""
        if tensor.decision is not Decision.MERGE:
            return 0
        layout, first, is_base = tensor.grid(self.geometry), 0, slot is tensor.base
        if is_base and not tensor.uses_base:  # for the rows behind the common ones, and for what is left out
            first = layout.count if tensor.common_rows is None else tensor.common_rows // layout.block_rows
        stored = [ref for ref in slot.stored if is_base or not tensor.is_expert(ref)]
        cost = sum(_bytes(slot, ref, first, layout.count, self.geometry) for ref in stored)
        if is_base and tensor.anchored and tensor.access is not None:
            left_out = [block for block in range(first) if tensor.access.inexact(block)]
            cost += sum(_bytes(slot, ref, b, b + 1, self.geometry) for ref in stored for b in left_out)
        return cost

    @property
    def blocks(self) -> int:
        """How many blocks the output has."""
        return sum(tensor.grid(self.geometry).count for tensor in self.tensors)


def _bytes(slot: InputRef, ref: InputRef, first: int, stop: int, geometry: Geometry) -> int:
    """Return the bytes of a stored part of a slot that a range of the slot's blocks takes, as far as it has them.

    The factors of an adapter are read whole, once, whatever the range.
    """
    layout = ref.grid(geometry)
    if slot.lora is not None and ref is not slot.lora.on:
        return layout.nbytes if first < min(stop, slot.grid(geometry).count) else 0
    stop = min(stop, layout.count)
    return layout.byte_range(stop - 1)[1] - layout.byte_range(first)[0] if first < stop else 0


def first_users(plans: Iterable[OutputPlan]) -> dict[str, str]:
    """Return by source the output that uses it first: what is read for no merge in particular counts for that one."""
    users: dict[str, str] = {}
    for plan in plans:
        for source in plan.sources:
            users.setdefault(source, plan.output.name)
    return users
