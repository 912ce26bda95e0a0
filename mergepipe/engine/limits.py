"""How large jobs are, and what memory that takes. Pure: the plan shows the same numbers that the engine uses."""

from __future__ import annotations

from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.plan.values import OutputPlan

# Elements per job and input: 2 MiB of bf16, the read size that was measured to be best.
JOB_ELEMENTS = 1 << 20
# What groups may keep between their passes where no limit is set: the inputs of one large tensor of an 8B model with
# eight experts.
HOLD_BYTES = 1 << 30
# The interpreter with numpy, networkx and the catalog, measured on an empty project; for the estimate only.
_FIXED_BYTES = 90 << 20
# What a tensor takes in plan, graph, work and manifest, measured on a model of 100,000 tensors from three sources.
_TENSOR_BYTES = 9_000
_WIDE_BYTES = 1 << 20  # a worker's tile buffers and temporaries per input


def job_blocks(block_elements: int, block_bytes: int, workers: int, memory: int | None) -> int:
    """Return how many blocks a job takes: a read of good size, within the memory that is allowed.

    Parameters
    ----------
    block_elements
        Elements of the largest block.
    block_bytes
        Bytes of one block of every input and of the output together.
    memory
        Bytes that the buffers of all workers may take, None for no limit.
    """
    blocks = max(1, JOB_ELEMENTS // max(1, block_elements))
    if memory is not None:
        blocks = max(1, min(blocks, memory // workers // max(1, block_bytes)))
    return blocks


def block_bytes(grid: BlockGrid) -> int:
    """Return the bytes of a full block."""
    return grid.block_rows * grid.row_bytes


def peak_memory(plan: OutputPlan, workers: int, memory: int | None) -> int:
    """Return an estimate of the peak memory of a build, in bytes."""
    reducing = [recipe for t in plan.tensors if (recipe := TensorRecipe.of(t, plan.geometry)).reduces]
    held = max((sum(grid.nbytes for grid in recipe.input_grids if grid) for recipe in reducing), default=0)
    kept = HOLD_BYTES if memory is None else memory // 2
    if reducing and memory is not None:
        memory //= 2
    largest = 0
    for tensor in plan.tensors:
        out = tensor.grid(plan.geometry)
        grids = [slot.grid(plan.geometry) for slot in tensor.slots if slot is not None] + [out]
        one = sum(min(block_bytes(grid), grid.nbytes) for grid in grids)
        blocks = min(job_blocks(out.block_rows * out.row_elements, one, workers, memory), max(1, out.count))
        largest = max(largest, blocks * one + len(grids) * _WIDE_BYTES)
    # What is kept between the passes over a tensor: of this one and the next, as far as it may be.
    keeps = min(kept, 2 * held) if held <= kept else 0
    return _FIXED_BYTES + len(plan.tensors) * _TENSOR_BYTES + workers * largest + keeps
