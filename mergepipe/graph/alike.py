"""Blocks of a tensor that come about alike: planned once for all of them, so that a plan costs no step for each.

How a block comes about (`mergepipe.graph.blocks.plan_block`) follows from which of its inputs are equal, at which level
each is read, and how many of its elements are merged; only its key takes the digests themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.digest import DIGEST_SIZE, digest_at
from mergepipe.graph.blocks import BlockPlan, TensorRecipe, plan_block
from mergepipe.graph.prices import have_equal
from mergepipe.plan.access import EXACT
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EXACT = bytes([EXACT])
_FEW = 4  # so many blocks are sooner planned one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeBlocks:
    """Blocks of a tensor that come about alike.

    Attributes
    ----------
    plan
        That of the first of them, without its key.
    blocks
        Their numbers, in order.
    """

    plan: BlockPlan
    blocks: tuple[int, ...]


def alike_blocks(recipe: TensorRecipe, known: Sequence[bytes | None]) -> Iterator[AlikeBlocks]:
    """Yield the blocks of an output tensor, those that come about alike together.

    Parameters
    ----------
    known
        Per slot the packed block digests, or None where there is no input or its content is not known: such blocks are
        taken to be like no others.
    """
    count = recipe.grid.count
    if count <= _FEW:
        groups: Collection[Sequence[int]] = [(block,) for block in range(count)]
    else:
        rows, found = _forms(recipe, known), dict[bytes, list[int]]()
        data, size = rows.tobytes(), rows.shape[1] * rows.itemsize
        for block in range(count):
            found.setdefault(data[block * size : (block + 1) * size], []).append(block)
        groups = found.values()
    for blocks in groups:
        plan = plan_block(recipe, blocks[0], block_digests(recipe, known, blocks[0]), keyed=False)
        yield AlikeBlocks(plan=plan, blocks=tuple(blocks))


def block_digests(recipe: TensorRecipe, known: Sequence[bytes | None], block: int) -> list[bytes | None]:
    """Return per slot the digest of a block; where it is not known, one that nothing else has."""
    found: list[bytes | None] = []
    for slot, (packed, layout) in enumerate(zip(known, recipe.input_grids, strict=True)):
        if packed is not None:
            found.append(digest_at(packed, block))
        else:
            found.append(b"slot %d" % slot if layout is not None and block < layout.count else None)
    return found


def _forms(recipe: TensorRecipe, known: Sequence[bytes | None]) -> Array:
    """Return a row for each block; blocks of equal rows come about alike. int64 ``(blocks, columns)``."""
    import numpy as np

    tensor, layout = recipe.tensor, recipe.grid
    first_rows = np.arange(layout.count) * layout.block_rows
    rows = np.minimum(layout.block_rows, layout.rows - first_rows)
    common = layout.rows if tensor.common_rows is None else tensor.common_rows
    columns = [*_equal_inputs(recipe, known), rows, np.clip(common - first_rows, 0, rows)]
    if tensor.access is not None:
        read = [
            levels.ljust(layout.count, _EXACT)[: layout.count] for levels in tensor.access.levels if levels is not None
        ]
        columns += [np.frombuffer(levels, np.uint8) for levels in read]
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)


def _equal_inputs(recipe: TensorRecipe, known: Sequence[bytes | None]) -> Iterator[Array]:
    """Yield for each slot which one is the first that has the same block, by block; -1 where it has no such block."""
    import numpy as np

    count = recipe.grid.count
    earlier: list[tuple[int, str, Array]] = []
    compared = have_equal(known, count)
    for slot, (ref, packed, layout) in enumerate(zip(recipe.tensor.slots, known, recipe.input_grids, strict=True)):
        first = np.full(count, -1)
        if ref is not None and packed is not None:
            digests = np.frombuffer(packed, np.uint64).reshape(-1, DIGEST_SIZE // 8)[:count]
            first[: len(digests)] = slot
            for number, dtype, other in reversed(earlier) if compared else ():  # the first one is written last
                if dtype == ref.info.dtype:
                    have = min(len(digests), len(other))
                    first[:have][(digests[:have] == other[:have]).all(axis=1)] = number
            earlier.append((slot, ref.info.dtype, digests))
        elif layout is not None:
            first[: layout.count] = slot
        yield first


def blocks_bytes(layout: BlockGrid, blocks: Collection[int]) -> int:
    """Return the bytes of some blocks, each named once."""
    whole = layout.block_rows * layout.row_bytes
    last = layout.count - 1
    short = whole * layout.count - layout.nbytes if last in blocks else 0
    return whole * len(blocks) - short
