"""What a job reads to merge, counted once for all outputs that are made of it."""

from __future__ import annotations

from collections.abc import Iterable

from mergepipe.engine.adapters import AdapterInput
from mergepipe.engine.coding import CodeKey
from mergepipe.engine.meter import Meter
from mergepipe.engine.reader import Reader
from mergepipe.engine.work import Group, InputKey, TensorWork
from mergepipe.graph.blocks import BlockPlan


class Claims:
    """Counts what a job reads to merge; a block that another output of the job counted already is borrowed.

    Attributes
    ----------
    claimed
        The (input, block) pairs that were counted.
    adapters
        By key of an adapter's tensor the index of the work that used it first, and whether as an expert.
    """

    def __init__(self, group: Group, reader: Reader) -> None:
        self._group = group
        self._reader = reader
        self.claimed: set[tuple[InputKey, int]] = set()
        self._stages: set[tuple[CodeKey, int, int]] = set()
        self._approximated: set[tuple[InputKey, int]] = set()
        self.adapters: dict[InputKey, tuple[int, bool]] = {}
        self._kinds = [
            [self._kind(number, slot) for slot in range(len(work.inputs))] for number, work in enumerate(group.works)
        ]

    def count(self, number: int, plans: Iterable[BlockPlan], meter: Meter) -> None:
        """Count for the work of this number."""
        tensor = self._group.works[number].recipe.tensor
        kinds = self._kinds[number]
        for plan in plans:
            if plan.coded:
                self._coded(self._group.works[number], plan, meter)
            for slot in plan.reads:
                kind = kinds[slot]
                if kind is None:
                    continue
                key, adapter, is_base, is_expert = kind
                if adapter is None:
                    self._stored((key, plan.block), meter, expert=is_expert, pair=is_expert)
                    continue
                # Its factors' bytes are counted once, by the thread that runs the build.
                self.adapters.setdefault(key, (number, is_expert))
                if is_expert:
                    self._pair((key, plan.block), meter)
                on = adapter.lora.on
                if on is not None and adapter.on is not None:
                    expert = not is_base and tensor.is_expert(on)
                    self._stored((adapter.on, plan.block), meter, expert=expert, pair=False)

    def _coded(self, work: TensorWork, plan: BlockPlan, meter: Meter) -> None:
        """Count the stages of codes, each once, as they were planned."""
        for slot, level in plan.decodes:
            code = work.code(slot)
            for stage, count in enumerate(self._reader.code_bytes(code, plan.block)[:level]):
                first = (code, plan.block, stage) not in self._stages
                self._stages.add((code, plan.block, stage))
                meter.expert_bytes += count if first else 0
                meter.borrowed_bytes += 0 if first else count
            pair = (code[1], plan.block)  # the block itself is not read: it is not claimed
            first = pair not in self._approximated
            self._approximated.add(pair)
            meter.expert_blocks += first
            meter.borrowed += not first

    def _kind(self, number: int, slot: int) -> tuple[InputKey, AdapterInput | None, bool, bool] | None:
        """Return a slot's key, its adapter, and whether it is the base, or an expert; None if it has no input."""
        work = self._group.works[number]
        key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
        if key is None or ref is None:
            return None
        is_base = ref is work.recipe.tensor.base
        return key, self._group.adapters.get(key), is_base, not is_base and work.recipe.tensor.is_expert(ref)

    def _pair(self, pair: tuple[InputKey, int], meter: Meter) -> None:
        """Count an (expert, block) pair."""
        first = pair not in self.claimed
        self.claimed.add(pair)
        meter.expert_blocks += first
        meter.borrowed += not first

    def _stored(self, block: tuple[InputKey, int], meter: Meter, *, expert: bool, pair: bool) -> None:
        """Count the bytes of a stored block, unless they were, and where asked for the pair."""
        count = self._reader.block_bytes(*block)
        first = block not in self.claimed
        self.claimed.add(block)
        if not first:
            meter.borrowed_bytes += count if expert else 0
        elif expert:
            meter.expert_bytes += count
        else:
            meter.base_bytes += count
        if pair:
            meter.expert_blocks += first
            meter.borrowed += not first
