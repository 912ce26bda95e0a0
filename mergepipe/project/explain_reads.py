"""What is read of each input of a tensor, what is left out, and which share of the output's error that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.progressive import CodePrices
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import digest_at
from mergepipe.graph.blocks import BlockPlan, TensorRecipe, plan_block
from mergepipe.graph.histogram import coded_prices
from mergepipe.graph.inputs import slot_blocks
from mergepipe.lockfile.assemble import finite
from mergepipe.plan.access import EXACT, OMITTED, level_name
from mergepipe.plan.codes import read_codes
from mergepipe.plan.values import BudgetOutcome, Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.project.explain_values import ErrorShare, InputReads

if TYPE_CHECKING:
    from mergepipe.plan.selection import TensorLoss

Losses = Mapping[str, ErrorShare]


def tensor_reads(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex) -> tuple[InputReads | None, ...]:
    """Return per slot what a merge reads of it; None for a slot that is no input.

    Reads are those of a build from nothing, whatever the cache holds.
    """
    recipe = TensorRecipe.of(tensor, plan.geometry)
    packed = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    known = all(blocks is not None for slot, blocks in zip(tensor.slots, packed, strict=True) if slot is not None)
    if not known or tensor.decision is Decision.EQUAL:
        return tuple(_planned(plan, tensor, slot) for slot in range(len(tensor.slots)))
    codes = read_codes(plan, tensor)
    prices = coded_prices(codes, index)
    counts = [_Counts(plan, recipe, slot, prices.get(slot)) for slot in range(len(tensor.slots))]
    for block in range(recipe.grid.count):
        digests = [digest_at(blocks, block) for blocks in packed]
        planned = plan_block(recipe, block, digests)
        for slot, count in enumerate(counts):
            if digests[slot] is not None and (slot == 0 or recipe.merged_rows(block)):
                count.add(block, slot, planned)
    return tuple(count.total() for count in counts)


class _Counts:
    """Counts what becomes of the blocks of one slot."""

    def __init__(self, plan: OutputPlan, recipe: TensorRecipe, slot: int, prices: CodePrices | None) -> None:
        self._plan, self._recipe, self._slot, self._prices = plan, recipe, slot, prices
        self._ref = recipe.tensor.slots[slot]
        self._found = dict.fromkeys(("blocks", "read", "omitted", "zero", "shared"), 0)
        self._bytes = {"read": 0, "omitted": 0}
        self._levels: dict[int, tuple[int, int]] = {}
        self._missing = 0.0

    def add(self, block: int, slot: int, planned: BlockPlan) -> None:
        """Count one block, as it is planned."""
        what = next((name for name in ("omitted", "zero", "shared") if slot in getattr(planned, name)), None)
        self._found["blocks"] += 1
        level = next((level for coded, level in planned.decodes if coded == slot), None)
        if what is None and level is not None:
            self._approximate(block, level)
            return
        if what is None and slot in planned.reads:
            what = "read"
        if what is not None:
            self._found[what] += 1
        if what in self._bytes and self._ref is not None:
            start, stop = self._ref.grid(self._plan.geometry).byte_range(block)
            size = stop - start if self._ref.lora is None else 0
            self._bytes[what] += size
            self._count(EXACT if what == "read" else OMITTED, size if what == "read" else 0)

    def _approximate(self, block: int, level: int) -> None:
        assert self._prices is not None, "a code that is read has prices"
        size = int(self._prices.sizes[:level, block].sum())
        self._found["read"] += 1
        self._bytes["read"] += size
        self._missing += float(self._prices.residuals[level - 1, block]) ** 2
        self._count(level, size)

    def _count(self, level: int, size: int) -> None:
        blocks, total = self._levels.get(level, (0, 0))
        self._levels[level] = blocks + 1, total + size

    def total(self) -> InputReads | None:
        """Return the counts."""
        if self._ref is None:
            return None
        factors = _factor_bytes(self._plan, self._ref) if self._ref.lora is not None and self._found["read"] else 0
        return InputReads(
            **self._found,
            bytes_read=self._bytes["read"] + factors,
            bytes_omitted=self._bytes["omitted"],
            is_known=True,
            levels=self._level_counts() if self._plan.buys_levels and self._slot else None,
            residual=math.sqrt(self._missing) if self._levels.keys() - {OMITTED, EXACT} else None,
        )

    def _level_counts(self) -> dict[str, dict[str, int]]:
        return {
            level_name(level): {"blocks": blocks, "bytes": size}
            for level, (blocks, size) in sorted(self._levels.items())
        }


def _factor_bytes(plan: OutputPlan, ref: InputRef) -> int:
    assert ref.lora is not None, "only an adapter has factors"
    return sum(factor.grid(plan.geometry).nbytes for factor in (ref.lora.a, ref.lora.b))


def _planned(plan: OutputPlan, tensor: TensorPlan, slot: int) -> InputReads | None:
    """Return what is read of a slot as far as shapes and the access set tell."""
    ref = tensor.slots[slot]
    if ref is None:
        return None
    grid = ref.grid(plan.geometry)
    stop = min(tensor.merged_blocks(plan.geometry) if slot else grid.count, grid.count)
    omitted = 0
    if slot and tensor.access is not None:
        omitted = sum(tensor.access.omits(slot - 1, block) for block in range(stop))
    cost = plan.base_cost(tensor, ref) if slot == 0 else plan.expert_cost(tensor, ref)[0]
    if tensor.decision is Decision.EQUAL:
        cost = grid.nbytes
    return InputReads(
        blocks=stop,
        read=stop - omitted,
        omitted=omitted,
        zero=0,
        shared=0,
        bytes_read=cost if not omitted else cost * (stop - omitted) // stop,
        bytes_omitted=0 if not omitted else cost * omitted // stop,
        is_known=False,
    )


def error_shares(plan: OutputPlan, index: SourceIndex, catalog: Catalog) -> Losses | None:
    """Return by tensor what each loses by the output's budget; None without one, and while it is not resolved.

    Where the statistics that the budget was planned from are gone, only the tensors that lose most are known; others
    are left out.
    """
    outcome = plan.outcome
    if outcome is None:
        return None
    found: Mapping[str, ErrorShare] = {}
    if plan.is_inexact:
        found = _all_losses(plan, index, catalog) or dict(_named(plan, outcome.losses))
    complete = not plan.is_inexact or len(found) > len(outcome.losses)
    exact = {
        tensor.name: _EXACT
        for tensor in plan.tensors
        if tensor.name not in found and (complete or tensor.access is None)
    }
    return {**exact, **found}


_EXACT = ErrorShare(
    kind="exact", omitted_bytes=0, bound=0.0, bound_share=0.0, expected=0.0, expected_share=0.0, omitted_mass=0.0
)


def _all_losses(plan: OutputPlan, index: SourceIndex, catalog: Catalog) -> dict[str, ErrorShare] | None:
    from mergepipe.graph.survey import known_survey
    from mergepipe.plan.budgeted import reading_of, without_outcome

    pending = without_outcome(plan)
    survey = known_survey(pending, index, StatisticStore(catalog), index.codes)
    budget = plan.output.budget
    if survey is None or budget is None:
        return None
    reading = reading_of(pending, survey)
    selection = reading.order.cut(reading.order.count(budget, reading.expert_bytes))
    return dict(_named(plan, [(reading.tensors[loss.tensor], loss) for loss in selection.losses()]))


def _named(plan: OutputPlan, losses: Sequence[tuple[str, TensorLoss]]) -> list[tuple[str, ErrorShare]]:
    outcome = plan.outcome
    assert outcome is not None, "only a resolved plan loses anything"
    return [(name, _error_share(loss, outcome)) for name, loss in losses]


def _error_share(loss: TensorLoss, outcome: BudgetOutcome) -> ErrorShare:
    bound, expected = finite(loss.bound), finite(loss.expected)
    whole = outcome.bound
    return ErrorShare(
        kind=whole.kind if bound is not None else "none",
        omitted_bytes=loss.omitted_bytes,
        bound=bound,
        bound_share=_square_share(bound, finite(whole.absolute)),
        expected=expected,
        expected_share=_square_share(expected, finite(outcome.expected)),
        omitted_mass=loss.omitted_mass,
    )


def _square_share(part: float | None, whole: float | None) -> float | None:
    return min(1.0, (part / whole) ** 2) if part is not None and whole else None
