"""Experts that are there as codes alone: whether these are against the base that they are merged onto, and norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mergepipe.cache.given import GivenCode
from mergepipe.cache.sources import SourceIndex
from mergepipe.checkpoints.place import GET_AGAIN
from mergepipe.digest import format_digest
from mergepipe.errors import PackError, PlanError
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_WIDER = 1.0 + 2.0**-21
"""More than what rounding differences to float32 can take off the square of a norm."""


def check_bases(plan: OutputPlan, index: SourceIndex) -> None:
    """Check that the progressive checkpoints of an output were packed against its base, as far as that is known.

    Raises
    ------
    PlanError
        If one was packed against another.
    PackError
        If one is damaged.
    """
    for source, checkpoint in plan.sources.items():
        if checkpoint.standalone is None:
            continue
        for tensor in plan.tensors:
            base = tensor.base
            if base is None or index.tensor(base.source, base.info) is None:
                continue
            if index.digest(base.source) == checkpoint.standalone.base:
                continue
            for ref in tensor.experts:
                if ref is not None and ref.source == source:
                    checked_code(plan, base, ref, index)


def checked_code(plan: OutputPlan, base: InputRef, expert: InputRef, index: SourceIndex) -> GivenCode | None:
    """Return the code of an expert's tensor that is there as a code alone; None for any other.

    Raises
    ------
    PlanError
        If it is a code against another tensor than the base's.
    PackError
        If it is damaged.
    """
    if not expert.coded_only:
        return None
    own = index.tensor(base.source, base.info)
    given = index.given.code(expert.source, expert.info)
    if given is not None and own == given.header.base_digest:
        known = index.codes.header(index.codes.key(given.header.base_digest, given.header.expert_digest))
        if known is not None and known != given.header.seal:
            raise PackError(
                f"`{given.header.path}` is no code of the expert that it names: that was coded here, and differs",
                hint=GET_AGAIN,
                path=given.header.path,
            )
    if given is not None and own is not None and own != given.header.base_digest:
        whole, value = index.digest(base.source), index.given.standalone(expert.source)
        if whole is None or value is None or whole == value.base:  # that of the tensor is all that is known, or differs
            raise _other_base(plan, base, expert, f"tensor `{base.info.name}` ", given.header.base_digest, own)
        raise _other_base(plan, base, expert, "", value.base, whole)
    return given


def _other_base(plan: OutputPlan, base: InputRef, expert: InputRef, part: str, packed: bytes, here: bytes) -> PlanError:
    return PlanError(
        f"output `{plan.output.name}`: the progressive checkpoint `{expert.source}` was packed against another base"
        f" than `{base.source}`\n"
        f"  {part}that it was packed against: {format_digest(packed)}\n"
        f"  {part}of `{base.source}`: {format_digest(here)}",
        hint="give the base that it was packed against, or get one that was packed against this base",
        output=plan.output.name,
        source=expert.source,
        tensor=expert.info.name,
        expected=format_digest(packed),
        got=format_digest(here),
    )


def given_squares(tensor: TensorPlan, index: SourceIndex) -> dict[int, Array]:
    """Return by expert the squares of the norms of deltas that are there as codes alone, float64 ``(blocks,)``."""
    import numpy as np

    found = {}
    for number, ref in enumerate(tensor.experts):
        given = index.given.code(ref.source, ref.info) if ref is not None and ref.coded_only else None
        if ref is None or given is None or tensor.base is None:
            continue
        squares = np.asarray(given.squares, np.float64)
        narrow = "F64" not in (ref.info.dtype, tensor.base.info.dtype)
        found[number] = squares * _WIDER if narrow and tensor.work == "float64" else squares
    return found
