"""Whether stored tensors hold the values that they should."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from support.cases.errors import CaseError
from support.cases.tensors import Tensor

BIT_EXACT = "bit_exact"
DEFAULT_TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


def check_tolerance(tolerance: Any, where: str) -> None:
    """Check that a tolerance is one of the forms that `difference` knows.

    Raises
    ------
    CaseError
        If not.
    """
    if tolerance != BIT_EXACT and not (isinstance(tolerance, Mapping) and set(tolerance) <= {"rtol", "atol"}):
        raise CaseError(f"{where}: the harness does not know the tolerance {tolerance!r}")


def difference(name: str, got: Tensor, want: Tensor, tolerance: Any) -> str | None:
    """Return how a tensor differs from what it should be, None if it does not (by more than the tolerance)."""
    if got.shape != want.shape:
        return f"{name}: the shape is {list(got.shape)}, expected {list(want.shape)}"
    if tolerance == BIT_EXACT:
        return _bit_difference(name, got, want)
    if got.is_float != want.is_float:
        return f"{name}: the dtype is {got.dtype}, expected {want.dtype}"
    if not got.is_float:
        return _bit_difference(name, got, want)
    return _value_difference(name, got.array(), want.array(), tolerance)


def _bit_difference(name: str, got: Tensor, want: Tensor) -> str | None:
    if got.dtype != want.dtype:
        return f"{name}: the dtype is {got.dtype}, expected {want.dtype}"
    if got.data == want.data:
        return None
    first = next(i for i, (a, b) in enumerate(zip(got.data, want.data, strict=True)) if a != b)
    return f"{name}: not bit for bit as expected; the first byte that differs is {first} of {len(got.data)}"


def _value_difference(
    name: str, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: Mapping[str, float]
) -> str | None:
    close = np.isclose(got, want, rtol=tolerance.get("rtol", 0.0), atol=tolerance.get("atol", 0.0), equal_nan=True)
    if close.all():
        return None
    where = tuple(int(i) for i in np.argwhere(~close)[0])
    count = f"{int((~close).sum())} of {close.size} values"
    return f"{name}: {count} differ; at {list(where)} it is {got[where]}, expected {want[where]}"


def set_differences(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    tolerance: Any,
    *,
    optional: Collection[str] = (),
    unchecked: Collection[str] = (),
) -> Iterator[str]:
    """Yield how a checkpoint differs from the expected one.

    Parameters
    ----------
    optional
        Names that may be absent from either side.
    unchecked
        Names that must be there and whose values are free.
    """
    names = set(want) | set(unchecked)
    yield from (f"{name}: missing from the output" for name in sorted(names - set(got) - set(optional)))
    yield from (f"{name}: not expected in the output" for name in sorted(set(got) - names - set(optional)))
    for name in sorted(set(got) & set(want) - set(unchecked)):
        if problem := difference(name, got[name], want[name], tolerance):
            yield problem
