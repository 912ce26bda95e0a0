"""Action keys: digests of everything that determines a node's value. Equal keys mean equal bytes."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.digest import DIGEST_SIZE, content_digest, record_digest
from mergepipe.plan.values import TensorPlan

ABSENT = bytes(DIGEST_SIZE)
_BLOCK_TAG = b"mergepipe.merge-block\0"


def block_key(recipe: bytes, inputs: Sequence[bytes], merged_elements: int) -> bytes:
    """Return the action key of one output block.

    Parameters
    ----------
    recipe
        The tensor's recipe digest; it fixes how many inputs there are, so plain concatenation cannot be ambiguous.
    inputs
        Per slot the input's block digest (32 bytes), `ABSENT` where the slot is no input.
    merged_elements
        How many leading elements are merged; the rest comes from the base.
    """
    return content_digest(b"".join((_BLOCK_TAG, recipe, *inputs, merged_elements.to_bytes(8, "little"))))


def tensor_key(tensor: TensorPlan, geometry: Geometry, inputs: Sequence[bytes | None]) -> bytes:
    """Return the action key of an output tensor from the tensor digests of its inputs (None: no input)."""
    return record_digest(
        "merge-tensor", tensor.recipe, tensor.shape, geometry.block_elements, tensor.common_rows, tuple(inputs)
    )
