"""Action keys: digests of everything that determines a node's value. Equal keys mean equal bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.digest import DIGEST_SIZE, content_digest, record_digest
from mergepipe.operators.contract import Statistic
from mergepipe.plan.access import TensorAccess
from mergepipe.plan.recipe import input_form
from mergepipe.plan.values import InputRef, TensorPlan
from mergepipe.progressive.levels import LEVELS_VERSION

ABSENT = bytes(DIGEST_SIZE)
_BLOCK_TAG = b"mergepipe.merge-block\0"


def block_key(
    recipe: bytes,
    inputs: Sequence[bytes],
    merged_elements: int,
    *,
    reduction: bytes | None = None,
    position: int | None = None,
    anchor: object = None,
) -> bytes:
    """Return the action key of one output block.

    Parameters
    ----------
    recipe
        The tensor's recipe digest; it fixes how many inputs there are, so plain concatenation cannot be ambiguous.
    inputs
        Per slot the input's block digest (32 bytes), `ABSENT` where the slot is no input.
    merged_elements
        How many leading elements are merged; the rest comes from the base.
    reduction
        The digest of what the tensor's reduction gives this block, where there is one.
    position
        The flat index of the block's first element where its place matters: random masks are addressed by it.
    anchor
        The form of the base (`mergepipe.plan.recipe.input_form`) where its block stands for one that is left out of a
        merge that does not use the base otherwise; such inputs are `ABSENT`.
    """
    key = content_digest(b"".join((_BLOCK_TAG, recipe, *inputs, merged_elements.to_bytes(8, "little"))))
    if anchor is not None:
        return record_digest("merge-block-anchored", key, reduction, position, anchor)
    if reduction is None and position is None:
        return key
    return record_digest("merge-block", key, reduction, position)


def code_digest(base: bytes | None, expert: bytes | None, level: int, row_elements: int) -> bytes:
    """Return what stands for an approximation of an expert's block: the code follows from the content of both blocks.

    Parameters
    ----------
    base, expert
        Block digests of the same rows.
    level
        How many stages of the code are read.
    row_elements
        Of the tensor: scales go by rows.
    """
    return record_digest("code-block", LEVELS_VERSION, level, row_elements, base, expert)


def statistic_recipe(statistic: Statistic, tensor: TensorPlan, row_elements: int) -> bytes:
    """Return the digest of all that a statistic of a block depends on, but for the content of its inputs.

    Parameters
    ----------
    row_elements
        The length of a row, where the tiles must hold whole rows; else 0.
    """
    inputs = tuple((slot == 0, _kind(tensor.slots[slot])) for slot in statistic.slots)
    allowed = tensor.params.values["non_finite"]
    code = tensor.operator.code  # of a custom operator, whose statistics may be its own
    return _statistic_recipe(statistic.digest(), code, tensor.work, inputs, row_elements, allowed)


@functools.lru_cache(maxsize=1 << 10, typed=True)  # the same for every layer
def _statistic_recipe(*fields: Any) -> bytes:
    return record_digest("recipe.statistic", *fields)


def _kind(slot: InputRef | None) -> tuple[str, bool] | None:
    """Return how a slot is stored: its dtype, and whether it is a delta (an adapter's)."""
    return None if slot is None else (slot.info.dtype, slot.lora is not None and slot.lora.on is None)


def statistic_key(
    recipe: bytes, inputs: Sequence[bytes], merged_elements: int, position: int | None, settings: tuple[Any, ...] = ()
) -> bytes:
    """Return the key of a statistic of one block from its recipe and its inputs' block digests, as in `block_key`.

    Parameters
    ----------
    settings
        What the numbers of this block depend on besides (`Statistic.block_settings`).
    """
    return record_digest("stat-block", recipe, b"".join(inputs), merged_elements, position, settings)


def tensor_key(tensor: TensorPlan, geometry: Geometry, inputs: Sequence[bytes | None]) -> bytes:
    """Return the action key of an output tensor from the tensor digests of its inputs (None: no input).

    A tensor of which nothing is left out has the key that it has without a budget.
    """
    if tensor.anchored and tensor.common_rows is None and tensor.access is None:
        inputs = (None, *inputs[1:])
    key = _full_key(tensor.recipe, tensor.shape, geometry.block_elements, tensor.common_rows, tuple(inputs))
    if tensor.access is None:
        return key
    anchor = input_form(tensor.base) if tensor.anchored else None
    return record_digest("merge-tensor-access", key, _access_digest(tensor.access.levels), anchor)


# Keys are asked for by all who look at an output, from its plan to its record.


@functools.lru_cache(maxsize=1 << 12)
def _full_key(
    recipe: bytes, shape: tuple[int, ...], block_elements: int, rows: int | None, inputs: tuple[bytes | None, ...]
) -> bytes:
    return record_digest("merge-tensor", recipe, shape, block_elements, rows, inputs)


@functools.lru_cache(maxsize=1 << 12)
def _access_digest(levels: tuple[bytes | None, ...]) -> bytes:
    return TensorAccess(levels=levels).digest()
