"""Making one block of an output from what a job's reader has of its inputs, and what must be read for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mergepipe.dtypes import is_mergeable
from mergepipe.engine.coding import CodeKey
from mergepipe.engine.kernel import Array, Scratch, all_finite, compute_block, convert, typed
from mergepipe.engine.problems import named, non_finite
from mergepipe.engine.reader import Reader
from mergepipe.engine.work import InputKey, TensorWork
from mergepipe.errors import OperatorError
from mergepipe.graph.blocks import BlockPlan, StatisticPlan
from mergepipe.plan.values import TensorPlan
from mergepipe.progressive.decode import BlockDecoder


def read_slots(work: TensorWork, plan: BlockPlan | StatisticPlan) -> Iterator[tuple[InputKey, int]]:
    """Yield the (input, block) pairs that must be read exactly."""
    for slot in plan.reads:
        key = work.inputs[slot]
        if key is not None:
            yield key, plan.block


def needed_blocks(*pairs: Iterable[tuple[InputKey, int]]) -> dict[InputKey, list[int]]:
    """Return by input the blocks of (input, block) pairs, in order and each once."""
    needed: dict[InputKey, set[int]] = {}
    for key, block in itertools.chain(*pairs):
        found = needed.get(key)
        if found is None:
            needed[key] = {block}
        else:
            found.add(block)
    return {key: sorted(blocks) for key, blocks in needed.items()}


def needed_codes(planned: Iterable[tuple[TensorWork, BlockPlan]]) -> dict[CodeKey, dict[int, int]]:
    """Return by code and block the level that is needed, the best one of all outputs."""
    needed: dict[CodeKey, dict[int, int]] = {}
    for work, plan in planned:
        for slot, level in plan.decodes:
            blocks = needed.setdefault(work.code(slot), {})
            blocks[plan.block] = max(level, blocks.get(plan.block, 0))
    return needed


def copied_block(work: TensorWork, plan: BlockPlan, reader: Reader) -> tuple[InputKey, memoryview]:
    """Return the input that a block is copied from, and the bytes of its block."""
    assert plan.copied is not None, "it is copied"
    key = work.inputs[plan.copied]
    assert key is not None, "a copied block has an input"
    return key, reader.data(key, plan.block)


def make_block(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, target: memoryview) -> None:
    """Write a block of an output, all of whose inputs the reader has, into ``target``.

    Raises
    ------
    OperatorError
        If an input or the result is not finite, and that is not allowed.
    """
    if plan.copied is not None:
        target[:] = copied_block(work, plan, reader)[1][: len(target)]
    else:
        _compute(work, plan, reader, scratch, target)
    check_result(work, plan, reader, scratch, target)


def check_result(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, result: memoryview) -> None:
    """Refuse NaN and infinity in a block that was made, unless they are allowed."""
    tensor = work.recipe.tensor
    if _must_be_finite(tensor) and not all_finite(typed(result, tensor.dtype), scratch):
        found = zip(tensor.slots, block_values(work, plan, reader), strict=True)
        raise non_finite(work.plan, tensor, [(ref, values) for ref, values in found if ref is not None])


def block_values(work: TensorWork, plan: BlockPlan | StatisticPlan, reader: Reader) -> list[Array | None]:
    """Return per slot the values of a block, None where it is not read."""
    reads = plan.reads
    return [reader.values(work, slot, plan.block) if slot in reads else None for slot in range(len(work.inputs))]


def _must_be_finite(tensor: TensorPlan) -> bool:
    return tensor.params.values["non_finite"] == "error" and is_mergeable(tensor.dtype)


def _check_inputs(work: TensorWork, inputs: Sequence[Array | None], scratch: Scratch) -> None:
    """Look for NaN and infinity in what was read."""
    if any(values is not None and not all_finite(values, scratch) for values in inputs):
        tensor = work.recipe.tensor
        found = zip(tensor.slots, inputs, strict=True)
        raise non_finite(work.plan, tensor, [(ref, values) for ref, values in found if ref is not None])


def _compute(work: TensorWork, plan: BlockPlan, reader: Reader, scratch: Scratch, target: memoryview) -> None:
    recipe = work.recipe
    out = typed(target, recipe.tensor.dtype)
    merged = recipe.merged_elements(plan.block)
    read = block_values(work, plan, reader)
    if _must_be_finite(recipe.tensor) and not recipe.operator.shows_non_finite:
        _check_inputs(work, [None if values is None else values[:merged] for values in read], scratch)
    inputs: list[Array | BlockDecoder | None] = [*read]
    for slot, level in plan.decodes:
        inputs[slot] = reader.decoder(work, slot, plan.block, level)
    if merged:
        try:
            compute_block(recipe, plan.block, inputs, plan.sources, work.reduction, out[:merged], scratch)
        except OperatorError as error:
            raise named(work, error) from error
    if merged < out.size:
        base = inputs[0]
        assert isinstance(base, np.ndarray), "rows beyond the common ones come from the base"
        convert(base[merged : out.size], out[merged:])
