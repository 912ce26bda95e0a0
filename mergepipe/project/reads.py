"""What a run of the engine would read and make, found out without reading: its decisions, gone through block by block.

The same groups, action keys and earlier results as the engine's, so that the figures are those that the run will
report. Where the content of an input is not known yet, or what a reduction comes to, every block that may have to be
read is counted, and the figures are marked as upper limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import DIGEST_SIZE, digest_at
from mergepipe.engine.work import Group, InputKey, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.graph.blocks import BlockPlan, TensorRecipe, plan_block
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.reductions import KnownReduction, known_reduction
from mergepipe.operators.contract import Reduction
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan


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
    exact
        Whether all figures follow from what is known; otherwise they are upper limits, but for `index_bytes`.
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
    exact: bool = True

    def add_index(self, source: str, count: int) -> None:
        """Count bytes of a source that are read only to index it, or to take statistics."""
        if count:
            self.index_bytes += count
            _add(self.index, source, count)


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


class GroupReads:
    """What one group of a run reads.

    Parameters
    ----------
    stages
        Sources whose content is known as soon as they are built: they are not read to index them.
    moves, total
        Where what is read is added: by output name, and for all of them together.
    hold_limit
        Bytes that a group may keep in memory between its passes.
    """

    def __init__(
        self,
        group: Group,
        index: SourceIndex,
        store: StatisticStore,
        moves: Mapping[str, Moves],
        total: Moves,
        stages: Iterable[str],
        hold_limit: int,
    ) -> None:
        self._group = group
        self._index = index
        self._store = store
        self._moves = moves
        self._total = total
        self._stages = frozenset(stages)
        self._hold_limit = hold_limit
        # What is read by any output; by those that certainly read it; and by the one that is gone through.
        self._read: set[object] = set()
        self._claimed: set[object] = set()
        self._own: set[object] = set()
        self._measured: set[tuple[InputKey, int]] = set()
        self._measures = False

    def count(self) -> None:
        """Go through the group: its tensors in order, then what is read for nothing but digests and statistics."""
        for work in self._group.works:
            self._count_work(work)
        self._count_index()

    # --- merging --------------------------------------------------------------------------------------------------

    def _count_work(self, work: TensorWork) -> None:
        recipe, tensor = work.recipe, work.recipe.tensor
        moves = self._moves[work.plan.output.name]
        known = [slot_blocks(slot, self._index) if slot else None for slot in tensor.slots]
        certain = all(packed is not None for packed, slot in zip(known, tensor.slots, strict=True) if slot is not None)
        reduction: Reduction | None = None
        if recipe.reduces:
            found = self._reduction(work, known) if certain else None
            reduction = found.reduction if found else None
            if reduction is None:
                self._count_statistics(work, found, moves)
                certain = False
        moves.exact &= certain
        self._own = set()
        made, plans = moves.computed + moves.copied, dict[object, BlockPlan]()
        for block in range(recipe.grid.count):
            digests = self._digests(work, known, block)
            if certain:
                plan = plan_block(recipe, block, digests, reduction)
                if self._is_held(work, plan, moves):
                    continue
            else:
                omitted = tensor.access.omitted(block) if tensor.access is not None else ()
                alike = (*digests, recipe.merged_elements(block), recipe.elements(block), *omitted)
                plan = plans.get(alike) or plan_block(recipe, block, digests)
                plans[alike] = plan
            self._make(work, plan, block, moves)
        if certain or not work.candidates:
            self._claimed |= self._own
        if moves.computed + moves.copied == made:
            count_cached_factors(work.plan, tensor, moves)

    def _reduction(self, work: TensorWork, known: Sequence[bytes | None]) -> KnownReduction | None:
        try:
            return known_reduction(work.recipe, known, self._store)
        except OperatorError:
            return None  # the build says it, with the name of the tensor

    def _digests(self, work: TensorWork, known: Sequence[bytes | None], block: int) -> list[bytes | None]:
        """Return per slot the digest of a block; where it is not known, one that nothing else has."""
        found: list[bytes | None] = []
        for slot, (packed, grid) in enumerate(zip(known, work.recipe.input_grids, strict=True)):
            if packed is not None:
                found.append(digest_at(packed, block))
            else:
                found.append(b"slot %d" % slot if grid is not None and block < grid.count else None)
        return found

    def _is_held(self, work: TensorWork, plan: BlockPlan, moves: Moves) -> bool:
        """Count a block whose result an earlier build holds; return whether there is such a one."""
        holding = next((held for held in work.candidates if held.key(plan.block) == plan.key), None)
        if holding is None:
            return False
        moves.reused += 1
        at = plan.block * DIGEST_SIZE
        work.keys[at : at + DIGEST_SIZE] = plan.key
        work.digests[at : at + DIGEST_SIZE] = holding.digest(plan.block)
        work.holdings[plan.block] = holding
        count_cached(work.plan, work.recipe, plan, moves)
        return True

    def _make(self, work: TensorWork, plan: BlockPlan, block: int, moves: Moves) -> None:
        """Count a block that is made."""
        size = _size(work.recipe.grid.byte_range(block))
        moves.written += size
        moves.computed += plan.copied is None
        moves.copied += plan.copied is not None
        moves.merged_bytes += size if plan.copied is None else 0
        work.changed = True
        for slot in plan.reads:
            key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
            if key is None or ref is None:
                continue
            grid = work.recipe.input_grids[slot]
            if plan.copied is None and grid is not None:
                moves.merged_bytes += _size(grid.byte_range(block))
            self._read_slot(work, slot, key, ref, block, moves)

    def _read_slot(self, work: TensorWork, slot: int, key: InputKey, ref: InputRef, block: int, moves: Moves) -> None:
        """Count the reading of a block of an input.

        What another output of the group has read already costs nothing; but an output that may turn out to need less
        does not save the others anything.
        """
        tensor = work.recipe.tensor
        is_base = ref is tensor.base
        expert = None if is_base or not tensor.is_expert(ref) else expert_name(work.plan, tensor, slot, ref)
        adapter = self._group.adapters.get(key)
        if adapter is None:
            self._stored(key, block, expert, moves)
            return
        self._claim(id(adapter.factors), adapter.factors.nbytes, expert, moves)
        if adapter.on is not None and adapter.lora.on is not None:
            apart = is_base or not tensor.is_expert(adapter.lora.on)
            on = None if apart else expert_name(work.plan, tensor, slot, adapter.lora.on)
            self._stored(adapter.on, block, on, moves)

    def _stored(self, key: InputKey, block: int, expert: str | None, moves: Moves) -> None:
        self._claim((key, block), _size(self._group.inputs[key].grid.byte_range(block)), expert, moves)

    def _claim(self, what: object, count: int, expert: str | None, moves: Moves) -> None:
        """Count what is read once for all outputs of the group."""
        if what not in self._read:
            self._read.add(what)
            _read_bytes(self._total, expert, count)
        if what not in self._claimed and what not in self._own:
            _read_bytes(moves, expert, count)
        self._own.add(what)

    # --- statistics and index -------------------------------------------------------------------------------------

    def _count_statistics(self, work: TensorWork, found: KnownReduction | None, moves: Moves) -> None:
        """Count what is read for a reduction that is not known; its later passes cannot be foreseen."""
        self._measures = True
        if found is None:
            grids = [grid for grid in work.recipe.input_grids if grid is not None]
            moves.measured_bytes += sum(grid.nbytes for grid in grids)
            pairs = [(key, block) for key in self._keys(work) for block in range(self._group.inputs[key].grid.count)]
            self._measured.update(pairs)
            return
        missing = {(slot, s.plan.block) for s in found.statistics if not s.known for slot in s.plan.reads}
        for slot, block in missing:
            key, grid = work.inputs[slot], work.recipe.input_grids[slot]
            if key is None or grid is None:
                continue  # a statistic is read from inputs
            moves.measured_bytes += _size(grid.byte_range(block))
            adapter = self._group.adapters.get(key)
            stored = key if adapter is None else adapter.on
            if stored is not None:
                self._measured.add((stored, block))

    def _keys(self, work: TensorWork) -> Iterator[InputKey]:
        """Yield the stored inputs of a tensor."""
        for key in work.inputs:
            adapter = self._group.adapters.get(key) if key is not None else None
            stored = key if adapter is None else adapter.on
            if stored is not None:
                yield stored

    def _count_index(self) -> None:
        """Count what is read and not merged: all of what is cold, and the blocks that only statistics need."""
        held = self._measures and self._group.input_bytes <= self._hold_limit
        once = held or not self._measures
        for key, source in self._group.inputs.items():
            cold = source.known is None and source.ref.source not in self._stages
            blocks = range(source.grid.count)
            read = [b for b in blocks if (cold and source.is_missing(b)) or (key, b) in self._measured]
            unclaimed = [block for block in read if not once or (key, block) not in self._read]
            self._add_index(key, source.ref.source, sum(_size(source.grid.byte_range(b)) for b in unclaimed))
        for key, adapter in self._group.adapters.items():
            factors = adapter.factors
            if id(factors) not in self._read and (factors.a.known is None or factors.b.known is None):
                self._read.add(id(factors))
                self._add_index(key, factors.b.ref.source, factors.nbytes)

    def _add_index(self, key: InputKey, source: str, count: int) -> None:
        """Count for the first output that an input was read for."""
        users = (work for work in self._group.works if key in work.inputs)
        self._moves[next(users, self._group.works[0]).plan.output.name].add_index(source, count)
        self._total.add_index(source, count)


def count_cached(plan: OutputPlan, recipe: TensorRecipe, block: BlockPlan, moves: Moves) -> None:
    """Count the planned expert bytes of a block whose result is there, but for the factors of adapters."""
    tensor = recipe.tensor
    if tensor.decision is not Decision.MERGE or block.block >= tensor.merged_blocks(plan.geometry):
        return
    for slot, ref in enumerate(tensor.slots):
        if not slot or ref is None or ref is tensor.base or (plan.outcome is not None and slot not in block.reads):
            continue
        stored = ref if ref.lora is None else ref.lora.on
        if stored is None or not tensor.is_expert(stored):
            continue
        grid = stored.grid(plan.geometry)
        if block.block < grid.count:
            _add(moves.cached, expert_name(plan, tensor, slot, stored), _size(grid.byte_range(block.block)))


def count_cached_factors(plan: OutputPlan, tensor: TensorPlan, moves: Moves) -> None:
    """Count the factors of adapters of a tensor of which no block is made."""
    for slot, ref in enumerate(tensor.slots):
        if slot and ref is not None and ref.lora is not None:
            _add(moves.cached, expert_name(plan, tensor, slot, ref), plan.factor_bytes(tensor, ref))


def count_clean(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex, moves: Moves) -> None:
    """Count a tensor whose result is there as a whole."""
    recipe = TensorRecipe.of(tensor, plan.geometry)
    moves.reused += recipe.grid.count
    if plan.outcome is None:
        for expert, count in expert_cost(plan, tensor):
            _add(moves.cached, expert, count)
        return
    known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    for block in range(recipe.grid.count):
        digests = [digest_at(packed, block) for packed in known]
        count_cached(plan, recipe, plan_block(recipe, block, digests), moves)
    count_cached_factors(plan, tensor, moves)


def _read_bytes(moves: Moves, expert: str | None, count: int) -> None:
    if expert is None:
        moves.base_bytes += count
    else:
        moves.expert_bytes += count
        _add(moves.to_read, expert, count)


def _add(counts: dict[str, int], name: str, count: int) -> None:
    if count:
        counts[name] = counts.get(name, 0) + count


def _size(extent: tuple[int, int]) -> int:
    return extent[1] - extent[0]
