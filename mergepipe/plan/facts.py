"""The shape of what is merged of a tensor, as operators count it."""

from __future__ import annotations

import functools
import math

from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.operators.contract import TensorFacts
from mergepipe.plan.values import TensorPlan


def tensor_facts(tensor: TensorPlan, geometry: Geometry) -> TensorFacts:
    """Return the facts of a merged tensor; rows beyond the common ones are not merged and do not count."""
    return _facts(tensor.dtype, tensor.shape, tensor.common_rows, geometry)


@functools.lru_cache(maxsize=1 << 12)  # asked for again and again, and the same for every layer
def _facts(dtype: str, shape: tuple[int, ...], common_rows: int | None, geometry: Geometry) -> TensorFacts:
    layout = grid(dtype, shape, geometry)
    merged_rows = layout.rows if common_rows is None else common_rows
    elements = merged_rows * layout.row_elements
    row_elements = shape[-1] if len(shape) > 1 else elements
    return TensorFacts(
        elements=elements,
        rows=elements // row_elements if row_elements else 0,
        row_elements=row_elements,
        columns=math.prod(shape[1:]) if len(shape) > 1 and elements else 1,
        blocks=layout.count if common_rows is None else -(-common_rows // layout.block_rows),
    )
