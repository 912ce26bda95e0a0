"""Naming what is wrong with the numbers: which source, which tensor, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mergepipe.engine.meter import Meter
from mergepipe.engine.work import TensorWork
from mergepipe.errors import InternalError, OperatorError, PlanError
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan


def non_finite(
    plan: OutputPlan, tensor: TensorPlan, inputs: Sequence[tuple[InputRef, np.ndarray[Any, Any] | None]]
) -> OperatorError:
    """Return the error for a result that is not finite: an input that is not, or an overflow of the output dtype."""
    for ref, values in inputs:
        if values is not None and not _is_finite(values):
            return OperatorError(
                f"tensor `{ref.info.name}` of source `{ref.source}` holds NaN or infinity",
                hint='repair the source, or set `non_finite = "allow"` in the params to pass such values through',
                tensor=ref.info.name,
                source=ref.source,
                output=plan.output.name,
            )
    other = 'write another dtype, such as `write.dtype = "bfloat16"`' if tensor.dtype == "F16" else "lower its weights"
    return OperatorError(
        f"tensor `{tensor.name}` of output `{plan.output.name}` has values too large for {tensor.dtype}",
        hint=f'{other}, or set `non_finite = "allow"` in the params',
        tensor=tensor.name,
        output=plan.output.name,
        dtype=tensor.dtype,
    )


def _is_finite(values: np.ndarray[Any, Any]) -> bool:
    with np.errstate(invalid="ignore"):  # a signalling NaN is just what is looked for
        return bool(np.isfinite(values.astype(np.float64)).all())


def named(work: TensorWork, error: OperatorError) -> OperatorError:
    """Return an operator's error with the tensor and the output that it is about."""
    name, output = work.name, work.plan.output.name
    if error.facts.get("tensor") == name:
        return error
    facts = {**error.facts, "tensor": name, "output": output}
    return OperatorError(f"tensor `{name}` of output `{output}`: {error.message}", hint=error.hint, **facts)


def input_difference(tensor: TensorPlan, digests: Sequence[bytes | None]) -> None:
    """Check that sources that must hold the same bytes do.

    Raises
    ------
    PlanError
        Naming the tensor and the first source that differs.
    """
    base = tensor.base
    for ref, digest in zip(tensor.experts, digests[1:], strict=True):
        if ref is not None and base is not None and digest != digests[0]:
            raise PlanError(
                f"tensor `{tensor.name}` ({tensor.dtype}) cannot be merged, and `{ref.source}` holds other values"
                f" than `{base.source}`",
                hint="only F64, F32, F16 and BF16 tensors are merged; any other must be the same in every source",
                tensor=tensor.name,
                source=ref.source,
            )


def check_reads(plan: OutputPlan, meter: Meter) -> None:
    """Check that a run read of the experts what the output's budget planned, and no more.

    Raises
    ------
    InternalError
        If not: then nothing may be published.
    """
    if plan.outcome is None:
        return
    planned, read = plan.outcome.block_bytes, meter.expert_bytes - meter.adapter_bytes
    used = read + meter.borrowed_bytes  # of what another output read, each block counts for both
    # What equals the base, or another expert's block, is free; of samples that is found by reading alone.
    exact = not any(tensor.sampled for tensor in plan.tensors)
    complete = plan.outcome.is_measured and not meter.cached and exact
    if used > planned or (used < planned and complete):
        raise InternalError(
            f"output `{plan.output.name}` was to read {planned:,} bytes of expert blocks, and {used:,} were used",
            hint="please report this; nothing was published",
            output=plan.output.name,
            planned=planned,
            read=read,
        )
