"""What a run of the engine would read and make, found out without reading: its decisions, gone through block by block.

The same groups, action keys and earlier results as the engine's, so that the figures are those that the run will
report. Where the content of an input is not known yet, or what a reduction comes to, every block that may have to be
read is counted, and the figures are marked as upper limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import DIGEST_SIZE
from mergepipe.engine.work import Group, InputKey, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.graph.alike import alike_blocks, block_digests, blocks_bytes
from mergepipe.graph.blocks import BlockPlan, TensorRecipe, plan_block
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.reductions import KnownReduction, known_reduction
from mergepipe.operators.contract import Reduction
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.project.reads_codes import (
    CodeSizes,
    LostCodes,
    coded_ref,
    codes_beside,
    most_code_bytes,
    recoded_blocks,
)
from mergepipe.project.reads_rounds import Rounds
from mergepipe.values import dataclass

_NONE: frozenset[int] = frozenset()
_WHOLE = frozenset((0,))


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
    lost
        Which codes may have to be made again.
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
        lost: LostCodes,
    ) -> None:
        self._group = group
        self._lost = lost
        self._index = index
        self._store = store
        self._moves = moves
        self._total = total
        # Blocks by input that are read by any output; by those that certainly read it; and by the one that is gone
        # through. Factors of adapters, by their id, are one block.
        self._read: dict[object, set[int]] = {}
        self._claimed: dict[object, set[int]] = {}
        self._own: dict[object, set[int]] = {}
        self._doubtful: set[InputKey | None] = set()  # the inputs of what is not certain
        self._rounds = Rounds(group, frozenset(stages), hold_limit)
        self._codes = CodeSizes(index)

    def count(self) -> None:
        """Go through the group: its tensors in order, then what is read for nothing but digests and statistics."""
        for work in self._group.works:
            self._count_work(work)
        for work, coded in codes_beside(self._group):
            expert = expert_name(work.plan, work.recipe.tensor, coded.slot, coded.expert)
            _read_bytes(self._total, expert, most_code_bytes(coded.expert))
        self._rounds.add_survey(work for work in self._group.works if work.plan.is_pending)
        self._count_index()
        self._total.bounded &= self._rounds.bounded
        for work in self._group.works:
            moves = self._moves[work.plan.output.name]
            # What is read of an input counts for the first output that turns out to need it.
            moves.exact &= self._doubtful.isdisjoint(key for key in work.inputs if key is not None)
            moves.bounded &= self._rounds.bounded

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
            certain = reduction is not None
            if not certain and not work.plan.is_pending:  # measured for its budget, it is known when it is merged
                moves.measured_bytes += self._rounds.add(work, found)
        if not certain:
            self._doubtful.update(work.inputs)
        self._own = {}
        made = moves.computed + moves.copied
        if certain and work.candidates:
            self._count_one_by_one(work, known, reduction, moves)
        else:
            for alike in alike_blocks(recipe, known):
                self._make(work, alike.plan, alike.blocks, moves)
        if work.plan.is_pending and tensor.anchored:  # the base stands for what the budget will leave out
            self._make_up(work, moves)
        if (certain or not work.candidates) and not work.plan.is_pending:
            for what, blocks in self._own.items():
                self._claimed.setdefault(what, set()).update(blocks)
        if moves.computed + moves.copied == made:
            count_cached_factors(work.plan, tensor, moves)

    def _count_one_by_one(
        self, work: TensorWork, known: Sequence[bytes | None], reduction: Reduction | None, moves: Moves
    ) -> None:
        """Count the blocks of a tensor whose keys are known, and of which earlier builds may hold some."""
        alike: dict[tuple[object, ...], list[BlockPlan]] = {}
        for block in range(work.recipe.grid.count):
            plan = plan_block(work.recipe, block, block_digests(work.recipe, known, block), reduction)
            alike.setdefault((self._is_held(work, plan), plan.reads, plan.decodes, plan.copied), []).append(plan)
        for (held, *_), plans in alike.items():
            blocks = [plan.block for plan in plans]
            if held:
                moves.reused += len(blocks)
                count_cached(work.plan, work.recipe, plans[0], blocks, moves, self._codes)
            else:
                self._make(work, plans[0], blocks, moves)

    def _reduction(self, work: TensorWork, known: Sequence[bytes | None]) -> KnownReduction | None:
        try:
            return known_reduction(work.recipe, known, self._store)
        except OperatorError:
            return None  # the build says it, with the name of the tensor

    def _is_held(self, work: TensorWork, plan: BlockPlan) -> bool:
        """Return whether an earlier build holds the result of a block, and note where."""
        holding = next((held for held in work.candidates if held.key(plan.block) == plan.key), None)
        if holding is None:
            return False
        at = plan.block * DIGEST_SIZE
        work.keys[at : at + DIGEST_SIZE] = plan.key
        work.digests[at : at + DIGEST_SIZE] = holding.digest(plan.block)
        work.holdings[plan.block] = holding
        return True

    def _make(self, work: TensorWork, plan: BlockPlan, blocks: Sequence[int], moves: Moves) -> None:
        """Count blocks that are made, all of them as ``plan`` says."""
        size, wanted = blocks_bytes(work.recipe.grid, blocks), frozenset(blocks)
        moves.written += size
        moves.computed += len(blocks) if plan.copied is None else 0
        moves.copied += len(blocks) if plan.copied is not None else 0
        moves.merged_bytes += size if plan.copied is None else 0
        work.changed = True
        for slot in plan.reads:
            key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
            if key is None or ref is None:
                continue
            grid = work.recipe.input_grids[slot]
            if plan.copied is None and grid is not None:
                moves.merged_bytes += blocks_bytes(grid, wanted)
            self._read_slot(work, slot, key, ref, wanted, moves)
        for slot, level in plan.decodes:
            grid = work.recipe.input_grids[slot]
            moves.merged_bytes += 0 if grid is None else blocks_bytes(grid, wanted)
            self._read_code(work, slot, level, wanted, moves)

    def _make_up(self, work: TensorWork, moves: Moves) -> None:
        """Count the base's blocks that may be read in the place of experts'."""
        key, ref = work.inputs[0], work.recipe.tensor.slots[0]
        if key is not None and ref is not None:
            self._read_slot(work, 0, key, ref, frozenset(range(work.recipe.facts.blocks)), moves)

    def _read_code(self, work: TensorWork, slot: int, level: int, blocks: frozenset[int], moves: Moves) -> None:
        """Count the stages of a code; each stage of a block is read once, whoever needs it."""
        plan, tensor = work.plan, work.recipe.tensor
        expert = expert_name(plan, tensor, slot, coded_ref(tensor, slot))
        if len(self._group.works) == 1:
            count = self._codes.bytes_of(plan, tensor, slot, range(level), blocks)
            _read_bytes(self._total, expert, count)
            _read_bytes(moves, expert, count)
            return
        for stage in range(level):
            fresh, own = self._claim((work.code(slot), stage), blocks)
            _read_bytes(self._total, expert, self._codes.bytes_of(plan, tensor, slot, (stage,), fresh))
            _read_bytes(moves, expert, self._codes.bytes_of(plan, tensor, slot, (stage,), own))

    def _read_slot(
        self, work: TensorWork, slot: int, key: InputKey, ref: InputRef, blocks: frozenset[int], moves: Moves
    ) -> None:
        """Count the reading of blocks of an input.

        What another output of the group has read already costs nothing; but an output that may turn out to need less
        does not save the others anything.
        """
        tensor = work.recipe.tensor
        is_base = ref is tensor.base
        expert = None if is_base or not tensor.is_expert(ref) else expert_name(work.plan, tensor, slot, ref)
        adapter = self._group.adapters.get(key)
        if adapter is None:
            self._stored(key, blocks, expert, moves)
            return
        fresh, own = self._claim(id(adapter.factors), _WHOLE)
        _read_bytes(self._total, expert, adapter.factors.nbytes if fresh else 0)
        _read_bytes(moves, expert, adapter.factors.nbytes if own else 0)
        if adapter.on is not None and adapter.lora.on is not None:
            apart = is_base or not tensor.is_expert(adapter.lora.on)
            on = None if apart else expert_name(work.plan, tensor, slot, adapter.lora.on)
            self._stored(adapter.on, blocks, on, moves)

    def _stored(self, key: InputKey, blocks: frozenset[int], expert: str | None, moves: Moves) -> None:
        grid = self._group.inputs[key].grid
        fresh, own = self._claim(key, blocks)
        _read_bytes(self._total, expert, blocks_bytes(grid, fresh))
        _read_bytes(moves, expert, blocks_bytes(grid, own))

    def _claim(self, what: object, blocks: frozenset[int]) -> tuple[Set[int], Set[int]]:
        """Return which of these blocks nobody has read yet, and which this output reads; each is read once."""
        read, own = self._read.setdefault(what, set()), self._own.setdefault(what, set())
        found = blocks - read, blocks - self._claimed.get(what, _NONE) - own
        read |= blocks
        own |= blocks
        return found

    # --- statistics and index -------------------------------------------------------------------------------------

    def _count_index(self) -> None:
        """Count what is read and not merged: all of what is cold, and the blocks that only statistics need."""
        for key, source in self._group.inputs.items():
            found = self._rounds.index_reads(key, self._read.get(key, _NONE))
            self._add_index(key, source.ref.source, found.nbytes, found.doubtful)
        for stored, blocks in recoded_blocks(self._group, self._index, self._lost).items():
            given = self._group.inputs[stored]
            self._add_index(stored, given.ref.source, blocks_bytes(given.grid, blocks))
        measured: set[int] = set()
        for key, adapter in self._group.adapters.items():
            factors = adapter.factors
            if self._rounds.is_surveyed(key) and id(factors) not in measured:
                measured.add(id(factors))
                self._add_index(key, factors.b.ref.source, factors.nbytes)
            if id(factors) not in self._read and (factors.a.known is None or factors.b.known is None):
                self._read[id(factors)] = set(_WHOLE)
                self._add_index(key, factors.b.ref.source, factors.nbytes)

    def _add_index(self, key: InputKey, source: str, count: int, doubtful: int = 0) -> None:
        """Count for the first output that an input was read for."""
        users = (work for work in self._group.works if key in work.inputs)
        self._moves[next(users, self._group.works[0]).plan.output.name].add_index(source, count, doubtful)
        self._total.add_index(source, count, doubtful)


def count_cached(
    plan: OutputPlan,
    recipe: TensorRecipe,
    block: BlockPlan,
    blocks: Sequence[int],
    moves: Moves,
    codes: CodeSizes,
) -> None:
    """Count the planned expert bytes of blocks whose results are there, but for the factors of adapters.

    Parameters
    ----------
    block
        How each of them comes about.
    """
    tensor = recipe.tensor
    if tensor.decision is not Decision.MERGE:
        return
    for slot, count in codes.read(plan, tensor, block, blocks):
        _add(moves.cached, expert_name(plan, tensor, slot, coded_ref(tensor, slot)), count)
    merged = tensor.merged_blocks(plan.geometry)
    for slot, ref in enumerate(tensor.slots):
        if not slot or ref is None or ref is tensor.base or (plan.outcome is not None and slot not in block.reads):
            continue
        stored = ref if ref.lora is None else ref.lora.on
        if stored is None or not tensor.is_expert(stored):
            continue
        grid = stored.grid(plan.geometry)
        read = [number for number in blocks if number < min(merged, grid.count)]
        _add(moves.cached, expert_name(plan, tensor, slot, stored), blocks_bytes(grid, read))


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
    codes = CodeSizes(index)
    for alike in alike_blocks(recipe, known):
        count_cached(plan, recipe, alike.plan, alike.blocks, moves, codes)
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
