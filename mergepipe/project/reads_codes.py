"""What a run reads of progressive codes, and for packs that are gone: counted as the engine counts it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.cache.code_files import has_codes
from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import DIGEST_SIZE
from mergepipe.engine.limits import code_bytes
from mergepipe.engine.work import Group, Input, InputKey, TensorWork
from mergepipe.graph.blocks import BlockPlan
from mergepipe.graph.histogram import coded_prices
from mergepipe.plan.codes import Coded, coded_slots, read_codes
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.engine.coding import CodeInput

    Array = np.ndarray[Any, Any]

_MOST_OF_BF16 = 0.55
"""A pack is at most this share of a tensor in bf16 (docs/formats/progressive.md)."""


class CodeSizes:
    """The bytes of the stages of the codes that one group, or one tensor, reads."""

    def __init__(self, index: SourceIndex) -> None:
        self._index = index
        self._found: dict[tuple[str, str, str, str], Array] = {}  # bytes up to each stage, ``(stages + 1, blocks)``

    def bytes_of(
        self, plan: OutputPlan, tensor: TensorPlan, slot: int, stages: Sequence[int], blocks: Collection[int]
    ) -> int:
        """Return the bytes of adjacent stages (from 0) of some blocks of a slot's code.

        Raises
        ------
        CacheError
            If the catalog has lost them.
        """
        if not blocks:
            return 0
        ref, base = coded_ref(tensor, slot), tensor.base
        assert base is not None, "a code is that of a delta against a base"
        name = (base.source, base.info.name, ref.source, ref.info.name)
        sizes = self._found.get(name)
        if sizes is None:
            sizes = _up_to_each(coded_prices({slot: Coded(slot=slot, expert=ref, base=base)}, self._index)[slot].sizes)
            self._found[name] = sizes
        if len(blocks) == 1:
            (block,) = blocks
            return int(sizes[stages[-1] + 1, block] - sizes[stages[0], block])
        at = list(blocks)
        return int((sizes[stages[-1] + 1, at] - sizes[stages[0], at]).sum())

    def read(
        self, plan: OutputPlan, tensor: TensorPlan, block: BlockPlan, blocks: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the slots of which codes are read, and the bytes that this takes for blocks that come about alike."""
        for slot, level in block.decodes:
            yield slot, self.bytes_of(plan, tensor, slot, range(level), blocks)


def _up_to_each(sizes: Array) -> Array:
    """Return what the first so many stages of each block take, from none to all."""
    import numpy as np

    found = np.zeros((len(sizes) + 1, *sizes.shape[1:]), np.int64)
    np.cumsum(sizes, axis=0, out=found[1:])
    return found


def coded_ref(tensor: TensorPlan, slot: int) -> InputRef:
    """Return the expert's tensor that a slot of a code stands for."""
    ref = tensor.slots[slot]
    assert ref is not None, "a code is that of an expert's delta"
    return ref


def most_code_bytes(coded: Coded, index: SourceIndex) -> int:
    """Return what the stages of the code of a delta take, at most where that is not known yet."""
    base, expert = (index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert))
    prices = index.codes.prices(index.codes.key(base, expert)) if base is not None and expert is not None else None
    grid = coded.expert.grid(index.geometry)
    return grid.count * code_bytes(grid) if prices is None else int(prices.sizes.sum())


def in_levels(work: TensorWork) -> frozenset[InputKey]:
    """Return the inputs of which a budget that is not resolved may buy levels."""
    wanted = coded_slots(work.plan, work.recipe.tensor) if work.plan.is_pending else ()
    return frozenset(work.code(coded.slot)[1] for coded in wanted)


def codes_beside(group: Group) -> Iterator[tuple[TensorWork, Coded]]:
    """Yield, each once, the codes that budgets may buy which are not resolved, of what others of the group read, too.

    Each output reads a block in one way, and together they may read it in both.
    """
    pending = [work for work in group.works if work.plan.is_pending]
    if not pending or len(group.works) == 1:
        return
    readers = Counter(key for work in group.works for key in _stored(group, work))
    found: set[tuple[InputKey, InputKey]] = set()
    for work in pending:
        for coded in coded_slots(work.plan, work.recipe.tensor):
            code = work.code(coded.slot)
            if readers[code[1]] > 1 and code not in found:
                found.add(code)
                yield work, coded


def _stored(group: Group, work: TensorWork) -> set[InputKey | None]:
    """Return the stored inputs of a work: for an adapter, what its deltas are added to."""
    adapters = {key: group.adapters.get(key) for key in work.inputs if key is not None}
    return {key if adapter is None else adapter.on for key, adapter in adapters.items()}


class LostCodes:
    """Says which packs are gone, or may be, of deltas that were coded before: they are made again.

    One is kept for all runs of a build: what the first of them makes, the next ones have.
    """

    def __init__(self, index: SourceIndex) -> None:
        self._index = index
        self._any: bool | None = None
        self._made: set[bytes] = set()
        self._made_before: set[bytes] = set()

    def begin_run(self) -> None:
        """Begin the next run of the build."""
        self._made_before |= self._made

    def of(self, group: Group) -> list[CodeInput]:
        """Return those of the codes that a group reads of which the packs are not there now."""
        codes = self._index.codes
        found = [code for code in group.codes.values() if not code.is_given and not codes.has_pack(code.stored)]
        self._made.update(code.stored for code in found)
        return found

    def may_be_back(self, group: Group) -> bool:
        """Return whether an earlier run may have made any of these again."""
        return any(code.stored in self._made_before for code in group.codes.values())

    def may_have(self, coded: Coded) -> bool:
        """Return whether a delta may be one of them; while its content is not known, it may be any."""
        base, expert = (self._index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert))
        codes = self._index.codes
        if base is not None and expert is not None:
            key = codes.key(base, expert)
            return not codes.has_pack(key) and codes.prices(key) is not None
        if self._any is None:
            self._any = codes.has_lost_packs()
        return self._any


def recoded_blocks(group: Group, lost: LostCodes) -> dict[InputKey, set[int]]:
    """Return by input the blocks that are read to make the packs of a group again that are gone."""
    found: dict[InputKey, set[int]] = {}
    for code in lost.of(group):
        blocks = set(_differing(code))
        found.setdefault(code.base.key, set()).update(blocks)
        found.setdefault(code.expert.key, set()).update(blocks)
    for work in (work for work in group.works if work.plan.is_pending):
        for coded in coded_slots(work.plan, work.recipe.tensor):
            if not coded.expert.coded_only and lost.may_have(coded):
                for key in work.code(coded.slot):
                    found.setdefault(key, set()).update(range(group.inputs[key].grid.count))
    return found


class PackRoom:
    """Counts the room that the packs take which a run makes, each once.

    Parameters
    ----------
    left_out
        Sources whose content may not be made yet: of their deltas nothing is counted.
    """

    def __init__(self, index: SourceIndex, left_out: Collection[str] = ()) -> None:
        self._index = index
        self._left_out = frozenset(left_out)
        self._counted: set[tuple[Path, str, Path, str]] = set()
        self._any_packs = has_codes(index.codes.layout)

    def of(self, plan: OutputPlan, tensor: TensorPlan, *, is_new: bool = True) -> tuple[int, int]:
        """Return the bytes of a tensor's packs that are not there and were not counted yet: exact, or an upper limit.

        While a budget is not resolved, of all deltas that are not coded yet.

        Parameters
        ----------
        is_new
            Whether nothing is known that the tensor could turn out to be, so that it is made in any case.

        Returns
        -------
        tuple
            Those that may be made; and of them those that are, whatever the inputs turn out to be.
        """
        wanted = coded_slots(plan, tensor) if plan.is_pending else read_codes(plan, tensor).values()
        found = [
            self._bytes(coded, is_read=not plan.is_pending, is_new=is_new)
            for coded in wanted
            if not coded.expert.coded_only and not {coded.base.source, coded.expert.source} & self._left_out
        ]
        return sum(size for size, _ in found), sum(size for size, is_made in found if is_made)

    def _bytes(self, coded: Coded, *, is_read: bool, is_new: bool) -> tuple[int, bool]:
        """Return what a pack takes that is not there, and whether it is made for certain: to plan, or to be read."""
        index, base, expert = self._index, coded.base, coded.expert
        name = (index.file(base.source, base.info).path, base.info.name)
        pair = (*name, index.file(expert.source, expert.info).path, expert.info.name)
        if pair in self._counted:
            return 0, False
        self._counted.add(pair)
        # A pack of numbers of 32 or 64 bits takes no more than one of 16 bits for each element.
        most = math.ceil(_MOST_OF_BF16 * 2 * math.prod(expert.info.shape))
        known = index.tensor(base.source, base.info), index.tensor(expert.source, expert.info)
        if known[0] is None or known[1] is None:
            return most, is_new and not self._any_packs  # its content may be one of which there is a pack
        key = index.codes.key(known[0], known[1])
        if index.codes.has_pack(key):
            return 0, False
        prices = index.codes.prices(key)
        if prices is not None:  # coded before: the pack is made again only where it is read
            from mergepipe.progressive.header import header_bytes  # numpy comes with it

            size = header_bytes(len(expert.info.shape), prices.sizes.shape[1]) + int(prices.sizes.sum())
            return size, is_read and is_new
        # The code of a delta that is zero is little more than a header.
        return most, known[0] != known[1] and (is_new or not is_read)


def _differing(code: CodeInput) -> Iterator[int]:
    """Yield the blocks in which a delta is not known to be zero."""
    same = code.base.ref.info.dtype == code.expert.ref.info.dtype
    for block in range(code.expert.grid.count):
        if not same or _digest(code.base, block) != _digest(code.expert, block):
            yield block


def _digest(source: Input, block: int) -> bytes:
    known = source.known or b""
    return known[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE]
