"""What a run need not read, because earlier builds hold the results."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.cache.sources import SourceIndex
from mergepipe.graph.alike import alike_blocks, blocks_bytes
from mergepipe.graph.blocks import BlockPlan, TensorRecipe
from mergepipe.graph.inputs import slot_blocks
from mergepipe.plan.values import Decision, OutputPlan, TensorPlan
from mergepipe.project.moves import Moves, add_bytes, expert_cost, expert_name
from mergepipe.project.reads_codes import CodeSizes, coded_ref


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
        add_bytes(moves.cached, expert_name(plan, tensor, slot, coded_ref(tensor, slot)), count)
    merged = tensor.merged_blocks(plan.geometry)
    for slot, ref in enumerate(tensor.slots):
        if not slot or ref is None or ref is tensor.base or (plan.outcome is not None and slot not in block.reads):
            continue
        stored = ref if ref.lora is None else ref.lora.on
        if stored is None or not tensor.is_expert(stored):
            continue
        grid = stored.grid(plan.geometry)
        read = [number for number in blocks if number < min(merged, grid.count)]
        add_bytes(moves.cached, expert_name(plan, tensor, slot, stored), blocks_bytes(grid, read))


def count_cached_factors(plan: OutputPlan, tensor: TensorPlan, moves: Moves) -> None:
    """Count the factors of adapters of a tensor of which no block is made."""
    for slot, ref in enumerate(tensor.slots):
        if slot and ref is not None and ref.lora is not None:
            add_bytes(moves.cached, expert_name(plan, tensor, slot, ref), plan.factor_bytes(tensor, ref))


def count_clean(plan: OutputPlan, tensor: TensorPlan, index: SourceIndex, moves: Moves) -> None:
    """Count a tensor whose result is there as a whole."""
    recipe = TensorRecipe.of(tensor, plan.geometry)
    moves.reused += recipe.grid.count
    if plan.outcome is None:
        for expert, count in expert_cost(plan, tensor):
            add_bytes(moves.cached, expert, count)
        return
    known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
    codes = CodeSizes(index)
    for alike in alike_blocks(recipe, known):
        count_cached(plan, recipe, alike.plan, alike.blocks, moves, codes)
    count_cached_factors(plan, tensor, moves)
