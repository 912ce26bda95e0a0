"""What a run of the engine would read and make, found out without reading: its decisions, gone through block by block.

The same groups, action keys and earlier results as the engine's, so that the figures are those that the run will
report. Where the content of an input is not known yet, or what a reduction comes to, every block that may have to be
read is counted, and the figures are marked as upper limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import DIGEST_SIZE
from mergepipe.engine.work import Group, InputKey, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.graph.alike import alike_blocks, block_digests, blocks_bytes
from mergepipe.graph.blocks import BlockPlan, plan_block
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.reductions import KnownReduction, known_reduction
from mergepipe.operators.contract import Reduction
from mergepipe.plan.values import InputRef
from mergepipe.project.moves import Moves, expert_name
from mergepipe.project.reads_cached import count_cached, count_cached_factors
from mergepipe.project.reads_codes import (
    CodeSizes,
    LostCodes,
    coded_ref,
    codes_beside,
    in_levels,
    most_code_bytes,
    recoded_blocks,
)
from mergepipe.project.reads_rounds import Rounds

_NONE: frozenset[int] = frozenset()
_WHOLE = frozenset((0,))


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
        # Inputs that it may read in levels, whoever reads them whole.
        self._apart: Set[object] = _NONE
        self._doubtful: set[InputKey | None] = set()  # the inputs of what is not certain
        self._rounds = Rounds(group, frozenset(stages), hold_limit)
        self._codes = CodeSizes(index)

    def count(self) -> None:
        """Go through the group: its tensors in order, then what is read for nothing but digests and statistics."""
        for work in self._group.works:
            self._count_work(work)
        for work, coded in codes_beside(self._group):
            expert = expert_name(work.plan, work.recipe.tensor, coded.slot, coded.expert)
            self._total.add_read(expert, most_code_bytes(coded, self._index))
        self._count_survey([work for work in self._group.works if work.plan.is_pending])
        self._count_index()
        self._total.bounded &= self._rounds.bounded
        for work in self._group.works:
            moves = self._moves[work.plan.output.name]
            # What is read of an input counts for the first output that turns out to need it.
            moves.exact &= self._doubtful.isdisjoint(key for key in work.inputs if key is not None)
            moves.exact &= not self._lost.may_be_back(self._group)
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
        self._apart = in_levels(work)
        made = moves.computed + moves.copied
        if certain and work.candidates:
            self._count_one_by_one(work, known, reduction, moves)
        else:
            for alike in alike_blocks(recipe, known):
                self._make(work, alike.plan, alike.blocks, moves)
        if work.plan.is_pending and tensor.anchored:  # the base stands for what the budget will leave out
            self._make_up(work, moves)
        if work.plan.is_pending:  # others may have to read what it turns out not to
            self._doubtful.update(work.inputs)
        elif certain or not work.candidates:
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
            self._total.add_read(expert, count)
            moves.add_read(expert, count)
            return
        for stage in range(level):
            fresh, own = self._claim((work.code(slot), stage), blocks)
            self._total.add_read(expert, self._codes.bytes_of(plan, tensor, slot, (stage,), fresh))
            moves.add_read(expert, self._codes.bytes_of(plan, tensor, slot, (stage,), own))

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
        self._total.add_read(expert, adapter.factors.nbytes if fresh else 0)
        moves.add_read(expert, adapter.factors.nbytes if own else 0)
        if adapter.on is not None and adapter.lora.on is not None:
            apart = is_base or not tensor.is_expert(adapter.lora.on)
            on = None if apart else expert_name(work.plan, tensor, slot, adapter.lora.on)
            self._stored(adapter.on, blocks, on, moves)

    def _stored(self, key: InputKey, blocks: frozenset[int], expert: str | None, moves: Moves) -> None:
        grid = self._group.inputs[key].grid
        fresh, own = self._claim(key, blocks)
        self._total.add_read(expert, blocks_bytes(grid, fresh))
        moves.add_read(expert, blocks_bytes(grid, own))

    def _claim(self, what: object, blocks: frozenset[int]) -> tuple[Set[int], Set[int]]:
        """Return which of these blocks nobody has read yet, and which this output reads; each is read once."""
        read, own = self._read.setdefault(what, set()), self._own.setdefault(what, set())
        claimed = _NONE if what in self._apart else self._claimed.get(what, _NONE)
        found = blocks - read, blocks - claimed - own
        read |= blocks
        own |= blocks
        return found

    # --- statistics and index -------------------------------------------------------------------------------------

    def _count_survey(self, works: Sequence[TensorWork]) -> None:
        """Count what is read for the budgets of some works: before the merge, and for these alone."""
        self._rounds.add_survey(works)
        for key, source in self._group.inputs.items() if works else ():
            found = self._rounds.survey_reads(key)
            self._add_index(works, key, source.ref.source, found.nbytes, found.doubtful)
        measured = {
            id(adapter.factors): (key, adapter.factors)
            for key, adapter in self._group.adapters.items()
            if self._rounds.is_surveyed(key)
        }
        for key, factors in measured.values():
            self._add_index(works, key, factors.b.ref.source, factors.nbytes)

    def _count_index(self) -> None:
        """Count what else is read and not merged: all of what is cold, and the blocks that only statistics need."""
        works, coded = self._group.works, recoded_blocks(self._group, self._lost)
        for key, source in self._group.inputs.items():
            # Whoever makes codes reads all that is cold beside them.
            before = coded.get(key, _NONE) | self._rounds.cold_blocks(key) if coded else _NONE
            found = self._rounds.index_reads(key, self._read.get(key, _NONE), before)
            count = found.nbytes + blocks_bytes(source.grid, before)
            self._add_index(works, key, source.ref.source, count, found.doubtful)
        for key, adapter in self._group.adapters.items():
            factors = adapter.factors
            if id(factors) not in self._read and (factors.a.known is None or factors.b.known is None):
                self._read[id(factors)] = set(_WHOLE)
                self._add_index(works, key, factors.b.ref.source, factors.nbytes)

    def _add_index(
        self, works: Sequence[TensorWork], key: InputKey, source: str, count: int, doubtful: int = 0
    ) -> None:
        """Count for the first output that an input was read for."""
        users = (work for work in works if key in work.inputs)
        self._moves[next(users, works[0]).plan.output.name].add_index(source, count, doubtful)
        self._total.add_index(source, count, doubtful)
