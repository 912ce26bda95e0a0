"""What a group reads for statistics and digests, round by round: counted as the engine's passes read it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Set

from mergepipe.engine.limits import kept_blocks
from mergepipe.engine.work import Group, Input, InputKey, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.graph.alike import blocks_bytes
from mergepipe.graph.reductions import KnownReduction, most_rounds, start_reduction
from mergepipe.graph.survey import is_surveyed
from mergepipe.values import dataclass

_NONE: frozenset[int] = frozenset()
_Read = dict[InputKey, set[int]]
_NOTHING: _Read = {}


@dataclass(frozen=True, slots=True)
class IndexReads:
    """Bytes of one input that are read and not merged; of these, ``doubtful`` only if statistics take more rounds."""

    nbytes: int
    doubtful: int


class Rounds:
    """The blocks that the rounds of statistics of a group read.

    The reductions of a group go on together: what several of them ask for in one round is read once. Of each input the
    first blocks are kept in memory and read once; the others are read in every round that asks for them, and to be
    merged once more. How many rounds a reduction takes may depend on what it finds: then those are counted that it
    takes at most, of the inputs that its first round reads.

    Parameters
    ----------
    stages
        Sources whose content is known as soon as they are built.
    hold_limit
        Bytes that a group may keep in memory between its passes.

    Attributes
    ----------
    bounded
        Whether it is known of every reduction how many rounds it takes at most.
    """

    def __init__(self, group: Group, stages: Set[str], hold_limit: int) -> None:
        self._group = group
        self._stages = stages
        self._hold_limit = hold_limit
        self.bounded = True
        self._kept: int | None = None
        self._sure: dict[int, _Read] = {}
        self._later: dict[int, _Read] = {}
        self._survey_later: dict[int, _Read] = {}
        self._surveyed: set[InputKey] = set()

    def add(self, work: TensorWork, found: KnownReduction | None) -> int:
        """Count the rounds of a reduction that is not known; return the bytes of inputs that are measured for certain.

        Parameters
        ----------
        found
            What is known of it; None where the content of an input is not known.
        """
        if found is None:
            return self._add_unknown(work)
        read, nbytes = self._sure.setdefault(found.rounds, {}), 0
        measured: set[tuple[int, int]] = set()
        for statistic in found.statistics:
            for slot in statistic.plan.reads if not statistic.known else ():
                measured.add((slot, statistic.plan.block))
        for slot, block in measured:
            key, grid = self._stored(work, slot), work.recipe.input_grids[slot]
            if grid is None:
                continue  # a statistic is read from inputs
            start, stop = grid.byte_range(block)
            nbytes += stop - start
            if key is not None:
                read.setdefault(key, set()).add(block)
        self._add_later(self._later, work, found.rounds, self._looked_at(work, found))
        return nbytes

    def add_survey(self, works: Iterable[TensorWork]) -> None:
        """Count the rounds that say what budgets buy which are not resolved yet: they are taken before the merge.

        All that is read then is read again to merge it.
        """
        for work in works:
            if not is_surveyed(work.recipe.tensor):
                continue
            slots = range(len(work.inputs))
            self._surveyed |= {key for slot in slots for key in (work.inputs[slot], self._stored(work, slot)) if key}
            if work.recipe.reduces:
                self._add_later(self._survey_later, work, 1, self._all_of(work, slots))

    def is_surveyed(self, key: InputKey) -> bool:
        """Return whether an input, stored or an adapter's, is read to say what a budget buys."""
        return key in self._surveyed

    def _add_unknown(self, work: TensorWork) -> int:
        """Count the rounds of a reduction of which nothing is known."""
        slots: Iterable[int] = range(len(work.inputs))
        read = self._sure.setdefault(1, {})
        for key, blocks in self._all_of(work, slots).items():
            read.setdefault(key, set()).update(blocks)
        with contextlib.suppress(OperatorError):  # the build says it, with the name of the tensor
            slots = {slot for statistic in start_reduction(work.recipe)[1] for slot in statistic.slots}
        self._add_later(self._later, work, 1, self._all_of(work, slots))
        return sum(grid.nbytes for grid in work.recipe.input_grids if grid is not None)

    def _looked_at(self, work: TensorWork, found: KnownReduction) -> _Read:
        """Return what the statistics of a reduction are about that can be foreseen."""
        read: _Read = {}
        for statistic in found.statistics:
            for slot in statistic.plan.reads:
                key = self._stored(work, slot)
                if key is not None:
                    read.setdefault(key, set()).add(statistic.plan.block)
        return read

    def _all_of(self, work: TensorWork, slots: Iterable[int]) -> _Read:
        """Return all blocks of the stored inputs of some slots."""
        stored = {key for slot in slots if (key := self._stored(work, slot)) is not None}
        return {key: set(range(self._group.inputs[key].grid.count)) for key in stored}

    def _add_later(
        self, rounds: dict[int, _Read], work: TensorWork, done: int, blocks: Mapping[InputKey, Set[int]]
    ) -> None:
        """Count the rounds that may come behind so many."""
        most = most_rounds(work.recipe)
        self.bounded &= most is not None
        for number in range(done + 1, (most or done) + 1):
            read = rounds.setdefault(number, {})
            for key, wanted in blocks.items():
                read.setdefault(key, set()).update(block for block in wanted if block >= self._kept_blocks)

    def _stored(self, work: TensorWork, slot: int) -> InputKey | None:
        """Return the stored input of a slot: for an adapter, what its deltas are added to."""
        key = work.inputs[slot]
        adapter = None if key is None else self._group.adapters.get(key)
        return key if adapter is None else adapter.on

    @property
    def _kept_blocks(self) -> int:
        """How many blocks of each input stay in memory from one pass to the next."""
        if self._kept is None:
            self._kept = kept_blocks([source.grid for source in self._group.inputs.values()], self._hold_limit)
        return self._kept

    def survey_reads(self, key: InputKey) -> IndexReads:
        """Return what is read of an input before the merge, to say what budgets buy."""
        grid = self._group.inputs[key].grid
        doubtful = sum(blocks_bytes(grid, read.get(key, _NONE)) for read in self._survey_later.values())
        return IndexReads((grid.nbytes if key in self._surveyed else 0) + doubtful, doubtful)

    def cold_blocks(self, key: InputKey) -> Set[int]:
        """Return the blocks of an input that the first pass behind a survey reads to know what they hold."""
        source = self._group.inputs[key]
        return missing_blocks(source) if self._is_cold(source) and key not in self._surveyed else _NONE

    def index_reads(self, key: InputKey, merged: Set[int], coded: Set[int]) -> IndexReads:
        """Return what is read of an input and not merged.

        Parameters
        ----------
        merged
            The blocks that are read to be merged.
        coded
            Those that were read before to make codes: what they hold is known.
        """
        source, nbytes, doubtful = self._group.inputs[key], 0, 0
        cold = self.cold_blocks(key) - coded
        if not self._has_passes:  # what is cold is hashed as it is merged
            return IndexReads(blocks_bytes(source.grid, cold - merged), 0)
        kept = self._kept_blocks
        sure = {number: read.get(key, _NONE) for number, read in self._sure.items()}
        sure[1] = sure.get(1, _NONE) | cold
        once = _NONE.union(*sure.values()) - merged
        nbytes += blocks_bytes(source.grid, {block for block in once if block < kept})
        for number in sorted({*sure, *self._later}):
            read = {block for block in sure.get(number, _NONE) if block >= kept}
            later = self._later.get(number, _NOTHING).get(key, _NONE)
            nbytes += blocks_bytes(source.grid, read)
            doubtful += blocks_bytes(source.grid, later - read)
        return IndexReads(nbytes + doubtful, doubtful)

    @property
    def _has_passes(self) -> bool:
        """Whether anything is read before the pass that merges."""
        inputs, reduces = self._group.inputs.values(), any(work.recipe.reduces for work in self._group.works)
        return bool(self._sure) or (reduces and any(map(self._is_cold, inputs)))

    def _is_cold(self, source: Input) -> bool:
        """Return whether the content of an input is not known when the group is begun."""
        return source.known is None and source.ref.source not in self._stages


def missing_blocks(source: Input) -> frozenset[int]:
    """Return the blocks of a cold input that must be read to know what they hold."""
    blocks = range(source.grid.count)
    if source.levels is None and not source.earlier:
        return frozenset(blocks)
    return frozenset(block for block in blocks if source.is_missing(block))
