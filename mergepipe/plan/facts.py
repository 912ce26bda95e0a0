"""The shape of what is merged of a tensor, as operators count it."""

from __future__ import annotations

import math

from mergepipe.checkpoints.geometry import Geometry
from mergepipe.operators.contract import TensorFacts
from mergepipe.plan.values import TensorPlan


def tensor_facts(tensor: TensorPlan, geometry: Geometry) -> TensorFacts:
    """Return the facts of a merged tensor; rows beyond the common ones are not merged and do not count."""
    shape, layout = tensor.shape, tensor.grid(geometry)
    merged_rows = layout.rows if tensor.common_rows is None else tensor.common_rows
    elements = merged_rows * layout.row_elements
    row_elements = shape[-1] if len(shape) > 1 else elements
    return TensorFacts(
        elements=elements,
        rows=elements // row_elements if row_elements else 0,
        row_elements=row_elements,
        columns=math.prod(shape[1:]) if len(shape) > 1 and elements else 1,
        blocks=tensor.merged_blocks(geometry),
    )
