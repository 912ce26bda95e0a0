"""How large jobs are, and what memory that takes. Pure: the plan shows the same numbers that the engine uses."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.errors import PlanError
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.plan.codes import coded_slots, read_codes
from mergepipe.plan.values import OutputPlan
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

# Elements that a thread works on at a time: a whole block of geometry 1. Threads wait for one another between any two
# calls, so that few calls matter most: with four experts 2^16 takes two of them 25% longer for `ties`, 2^17 15%.
TILE_ELEMENTS = 1 << 18
# Those of a process, which waits for nobody, and of a thread where memory is limited to less than `_AMPLE` bytes. What
# an additive merge has at hand for a tile then takes 1 MiB. With a second cache of 2 MiB `task_arithmetic` takes 2.3 s
# (2.6 with 2^18), `linear` 1.8 (2.0), `ties` 9.0 (9.5), `dare_linear` 4.5 (4.7); with one of 1 MiB all sizes take as
# long.
SMALL_TILE = 1 << 16
_AMPLE = 1 << 29
# Elements per job and input: 2 MiB of bf16, the read size that was measured to be best.
JOB_ELEMENTS = 1 << 20
# Elements of each input that are in memory at a time: what was just read still lies in the processor's second cache
# when it is hashed. Where that can be, a job has several such pieces, for each job costs some work by itself.
PIECE_ELEMENTS = 1 << 19
LONG_ELEMENTS = 1 << 21
# Of a job that only hashes.
HASH_ELEMENTS = 1 << 22
# Jobs per worker in flight: enough that no worker waits, few enough that memory stays bounded. Outcomes are taken in
# order, and jobs of small tensors lie among large ones: with 3 of them workers waited for a tenth of the time.
JOBS_AHEAD = 8
# Jobs that a worker process begins while it does another: the disk works on what they read. With an empty page cache
# eight experts at 10% in levels took 5.2 s without, 4.5 s with one and 4.2 s with two, in blocks 3.0, 2.5 and 2.1.
BEGUN_AHEAD = 2
# Worker processes are forked where so many bytes are gone through; for less, threads are as quick.
FORK_BYTES = 256 << 20
# What groups may keep between their passes where no limit is set: the inputs of a layer of a 0.5B model with four
# experts. Of larger ones the first blocks are kept, the others are read again, from the page cache.
HOLD_BYTES = 96 << 20
# What new statistics may take before they are written, where no limit is set.
PENDING_BYTES = 1 << 25
# What a reduction keeps of decoded tables of magnitudes (`operators.ranks`): joined, and as they are being joined.
_TABLE_BYTES = 24 << 20
# What a worker process has of its own besides the weights: pages of the interpreter that it writes to.
_PROCESS_BYTES = 24 << 20
# The interpreter with numpy and the catalog, measured on an empty project; for the estimate only.
_FIXED_BYTES = 90 << 20
# What a tensor takes in plan, graph, work and manifest, measured on a model of 100,000 tensors from three sources.
_TENSOR_BYTES = 9_000
_LEAST_BYTES = 1 << 20  # what every process has
_WIDE_BYTES = 16  # a worker's tile buffers and temporaries per input, for each element of a tile
# What a worker needs to code deltas, and to decode them, beside what grows with the block: measured 1.9 and 1.2 MiB.
_CODING_BYTES = 4 << 20
# Of an element of a block that is being coded: its delta, the base widened, and copies of units that are not zero. Of
# one in float64 it is twice as much.
_CODED_ELEMENT = 20
# The tables of one decoder, and what it keeps of a block.
_DECODER_BYTES = 320 << 10
# What a pack in the making, or one that is read, keeps of a block, and what writing or reading its header takes.
_HEADER_BYTES = 2 * 308
# What planning keeps of a block of an expert that may be read at several levels: prices, hull and order.
_PRICED_BYTES = 700


@dataclass(frozen=True, slots=True)
class JobSizes:
    """How many blocks of a group a job takes.

    Attributes
    ----------
    whole
        Of a job that has all of them in memory at once.
    blocks, piece
        Of a job that goes through them piece by piece, and how many a piece has.
    """

    whole: int
    blocks: int
    piece: int


Member = tuple[OutputPlan, TensorRecipe]
"""A tensor of an output."""


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


def job_sizes(members: Sequence[Member], inputs: Sequence[BlockGrid], workers: int, memory: int | None) -> JobSizes:
    """Return how many blocks jobs of such a group take; parameters as of `group_blocks`."""
    whole = group_blocks(members, inputs, workers, memory)
    grids = [*inputs, *(recipe.grid for _, recipe in members)]
    elements = max((grid.block_rows * grid.row_elements for grid in grids), default=1)
    piece = min(whole, max(1, PIECE_ELEMENTS // elements))
    blocks = (LONG_ELEMENTS if members else HASH_ELEMENTS) // elements
    return JobSizes(whole, max(whole, blocks) if memory is None else whole, piece)


def group_blocks(members: Sequence[Member], inputs: Sequence[BlockGrid], workers: int, memory: int | None) -> int:
    """Return how many blocks a job of tensors takes that are worked on together; parameters as in `job_blocks`."""
    grids = [*inputs, *(recipe.grid for _, recipe in members)]
    elements = max(grid.block_rows * grid.row_elements for grid in grids)
    if memory is None:
        return job_blocks(elements, 0, workers, None)
    coded = _coded(members)
    memory = max(0, memory - workers * _making_bytes(members, coded))
    return job_blocks(elements, sum(map(block_bytes, grids)) + sum(map(code_bytes, coded)), workers, memory)


def code_bytes(grid: BlockGrid) -> int:
    """Return what all stages of the code of a block take at most: 8 bits an element, scales, points and padding."""
    elements = min(grid.block_rows, grid.rows) * grid.row_elements
    return elements + elements // 16 + 1024


def _coded(members: Sequence[Member]) -> list[BlockGrid]:
    """Return the grids of the deltas that may be read from codes, each delta once."""
    found: dict[tuple[str, str, str, str], BlockGrid] = {}
    for plan, recipe in members:
        for one in (*coded_slots(plan, recipe.tensor), *read_codes(plan, recipe.tensor).values()):
            key = (one.base.source, one.base.info.name, one.expert.source, one.expert.info.name)
            found[key] = one.expert.grid(plan.geometry)
    return list(found.values())


def block_bytes(grid: BlockGrid) -> int:
    """Return the bytes of a full block."""
    return grid.block_bytes


def _largest(grid: BlockGrid) -> int:
    """Return the bytes of the largest block: a small tensor is one block, and a short one."""
    return min(block_bytes(grid), grid.nbytes)


def tile_elements(memory: int | None) -> int:
    """Return how many elements a thread works on at a time under a limit in bytes, None for none.

    No result depends on it.
    """
    return TILE_ELEMENTS if memory is None or memory >= _AMPLE else SMALL_TILE


def takes_processes(workers: int, memory: int | None, nbytes: int) -> bool:
    """Return whether workers are processes, where there can be any; else they are threads.

    Parameters
    ----------
    memory
        The limit in bytes, None for none. A process takes `_PROCESS_BYTES` more than a thread: where memory is scarce,
        that is given to weights.
    nbytes
        Bytes to go through, those of inputs and those that are made.
    """
    return workers > 1 and nbytes >= FORK_BYTES and (memory is None or memory >= _AMPLE)


def begun_ahead(memory: int | None) -> int:
    """Return how many jobs a worker process begins while it does another; none where memory is limited."""
    return BEGUN_AHEAD if memory is None else 0


def kept_blocks(inputs: Sequence[BlockGrid], limit: int) -> int:
    """Return how many blocks of each of its inputs a group keeps between its passes.

    Parameters
    ----------
    limit
        Bytes that all groups may keep (`hold_bytes`). One alone takes half of them, that the next may begin meanwhile.
    """
    counts = range(1, 1 + max((grid.count for grid in inputs), default=0))
    return bisect.bisect_right(counts, limit // 2, key=lambda count: kept_bytes(inputs, count))


def kept_bytes(inputs: Sequence[BlockGrid], count: int) -> int:
    """Return the bytes of the first ``count`` blocks of each input."""
    return sum(min(grid.nbytes, count * block_bytes(grid)) for grid in inputs)


def hold_bytes(memory: int | None) -> int:
    """Return how many bytes of inputs groups may keep between their passes."""
    return HOLD_BYTES if memory is None else memory // 2


def pending_bytes(memory: int | None) -> int:
    """Return how many bytes of new statistics wait in memory before they are written."""
    return PENDING_BYTES if memory is None else max(1 << 20, min(PENDING_BYTES, memory // 16))


def job_memory(plans: Sequence[OutputPlan], memory: int | None) -> int | None:
    """Return how many bytes the buffers of jobs may take, None for no limit.

    Where tensors have several passes, half of the limit is for what is kept between them.
    """
    if memory is None:
        return None
    reduces = any(recipe.reduces for members in _members(plans).values() for _, recipe in members)
    return memory // 2 if reduces else memory


def _members(plans: Sequence[OutputPlan]) -> dict[str, list[Member]]:
    """Return by tensor name what is worked on together: what several outputs read is in memory once."""
    members: dict[str, list[Member]] = {}
    for plan in plans:
        for tensor in plan.tensors:
            members.setdefault(tensor.name, []).append((plan, TensorRecipe.of(tensor, plan.geometry)))
    return members


def least_memory(plans: Sequence[OutputPlan]) -> tuple[int, str, int]:
    """Return the smallest memory limit with which these outputs can be built in one run, in bytes.

    Returns
    -------
    tuple
        The limit, the tensor that needs it, and how many inputs that has: one worker holds a block of each, and of
        what is made of them. Where tensors have several passes, half of the limit is for what is kept between them.
    """
    found, reduces = (0, "", 0), False
    for name, members in _members(plans).items():
        recipes = [recipe for _, recipe in members]
        inputs = _inputs(recipes)
        # One buffer takes the results of all outputs in turn.
        made = max(_largest(recipe.grid) for recipe in recipes)
        made += sum(map(code_bytes, _coded(members)))
        found = max(found, (sum(map(_largest, inputs)) + made, name, len(inputs)))
        reduces |= any(recipe.reduces for recipe in recipes)
    return found[0] * (2 if reduces else 1), found[1], found[2]


def fitting_workers(plans: Sequence[OutputPlan], workers: int, memory: int | None) -> int:
    """Return how many of the workers can be at work at once within a memory limit; one at least."""
    if memory is None:
        return workers
    return max(1, min(workers, memory // max(1, least_memory(plans)[0])))


def check_memory(plans: Sequence[OutputPlan], memory: int | None) -> None:
    """Refuse a memory limit in which not even one block of a tensor can be merged.

    Raises
    ------
    PlanError
        With the numbers. Never for what fits in a megabyte, which every process has.
    """
    if memory is None or not plans:
        return
    least, tensor, inputs = least_memory(plans)
    if least > max(memory, _LEAST_BYTES):
        rounded = -(-least // _LEAST_BYTES)
        raise PlanError(
            f"a memory limit of {format_bytes(memory)} is too small: `{tensor}` takes {format_bytes(least)}, for one"
            f" block of each of its {inputs} inputs and of what is made of them",
            hint=f"give `--memory '{rounded} MiB'` or more, or merge fewer experts or outputs at a time",
            tensor=tensor,
            needed=least,
            limit=memory,
        )


def peak_memory(plans: Sequence[OutputPlan], workers: int, memory: int | None) -> int:
    """Return an upper estimate of the memory of a process that builds these outputs in one run, in bytes."""
    members, limit, nbytes = _members(plans), memory, 0
    workers = fitting_workers(plans, workers, memory)
    kept, waiting, tile = hold_bytes(memory), pending_bytes(memory), _WIDE_BYTES * tile_elements(memory)
    reduces = any(recipe.reduces for group in members.values() for _, recipe in group)
    if reduces and memory is not None:
        memory //= 2
    largest, held, headers, priced = 0, [0], [0], 0
    for group in members.values():
        recipes, coded = [recipe for _, recipe in group], _coded(group)
        inputs = _inputs(recipes)
        grids = [*inputs, *(recipe.grid for recipe in recipes)]
        nbytes += sum(grid.nbytes for grid in grids)
        blocks = min(group_blocks(group, inputs, workers, memory), max(grid.count for grid in grids))
        # One buffer takes the results of all outputs in turn.
        one = sum(min(blocks * block_bytes(grid), grid.nbytes) for grid in inputs)
        one += max(min(blocks * block_bytes(recipe.grid), recipe.grid.nbytes) for recipe in recipes)
        one += max(_making_bytes(group, coded), _reading_bytes(coded, blocks, 1 + begun_ahead(limit)))
        largest = max(largest, one + (len(inputs) + 1) * tile)
        headers.append(sum(grid.count for grid in coded) * _HEADER_BYTES)
        priced += sum(grid.count for grid in coded) * _PRICED_BYTES
        if any(recipe.reduces for recipe in recipes):
            held.append(kept_bytes(inputs, kept_blocks(inputs, kept)))
    # What is kept between the passes over a tensor, of as many as have jobs in flight. Buffers are handed on to smaller
    # inputs, so that they may together be larger than what is kept in them: twice was never exceeded in measurements.
    keeps = min(2 * kept, sum(sorted(held)[-(JOBS_AHEAD * workers + 1) :]))
    keeps += sum(sorted(headers)[-(JOBS_AHEAD * workers + 1) :]) + priced
    tensors = sum(len(plan.tensors) for plan in plans)
    reducing = waiting + _TABLE_BYTES if reduces else 0
    largest += _PROCESS_BYTES if takes_processes(workers, limit, nbytes) else 0
    return _FIXED_BYTES + tensors * _TENSOR_BYTES + workers * largest + keeps + reducing


def _making_bytes(members: Sequence[Member], coded: Sequence[BlockGrid]) -> int:
    """Return what a worker needs to make the code of a block, beside the blocks themselves."""
    slots = [slot for _, recipe in members for slot in recipe.tensor.slots if slot is not None]
    each = _CODED_ELEMENT * (2 if any(slot.info.dtype == "F64" for slot in slots) else 1)
    elements = max((min(grid.block_rows, grid.rows) * grid.row_elements for grid in coded), default=0)
    return _CODING_BYTES + each * elements if coded else 0


def _reading_bytes(coded: Sequence[BlockGrid], blocks: int, jobs: int) -> int:
    """Return what a worker needs to read codes of the blocks of some jobs and to decode them."""
    found = sum(jobs * min(blocks, grid.count) * code_bytes(grid) + _DECODER_BYTES for grid in coded)
    return found + (_CODING_BYTES if coded else 0)


def _inputs(recipes: Sequence[TensorRecipe]) -> list[BlockGrid]:
    """Return the grids of the inputs of a group, each input once: factors of adapters, and what they are added to."""
    found: dict[tuple[str, str], BlockGrid] = {}
    for recipe in recipes:
        for slot in recipe.tensor.slots:
            for ref in slot.stored if slot is not None else ():
                found[ref.source, ref.info.name] = ref.grid(recipe.geometry)
    return list(found.values())
