"""What an operator sees of a tile: the values of the base and of the experts, or their deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from mergepipe.values import dataclass

Array = Any
"""An array of the namespace in use: `numpy.ndarray` on the CPU, `torch.Tensor` on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """The inputs of one tile, all of one shape ``(n,)`` and of the work dtype.

    Attributes
    ----------
    xp
        The array namespace.
    base
        The base's values, or None where the operator does not use them or the caller does not need them.
    experts
        Each expert's values in expert order. None where an expert is no input; and, for an operator of deltas, where
        its delta is zero. Arrays may be shared between entries and must not be written to. For what `widens` they may
        be of their stored dtype: `delta` and `value` widen them.
    deltas
        Per expert its delta where that is what is stored (an adapter), else None; the entry of `experts` is None then.
    shape, dtype
        Of the arrays, for operators that are left without any.
    non_finite
        Whether infinities and NaN may be among the values, so that equal values must not be subtracted blindly.
    sums
        Of an operator that `sums_deltas`: sums of weighted deltas of further experts, which are no entries of
        ``experts`` and ``deltas``. They may be written to.
    scratch
        Returns the n-th of a few arrays of that shape and dtype to write into and to return: fresh memory costs more
        than the arithmetic. The same number is the same array within a call, and between calls of one worker. Numbers
        below 100 are the operator's; `delta` and `value` take the one that they are given.
    start
        The flat index of the first element in the output tensor.
    block
        The number of the block that the tile belongs to.
    row_elements
        As in `TensorFacts`; where the operator is rowwise, ``n`` is a multiple of it.
    memo
        Empty at the beginning of a block, and the same mapping for its later tiles: for counts that go on.
    """

    xp: Any
    base: Array | None
    experts: tuple[Array | None, ...]
    shape: tuple[int, ...]
    dtype: Any
    non_finite: bool
    scratch: Callable[[int], Array]
    deltas: tuple[Array | None, ...] = ()
    sums: tuple[Array, ...] = ()
    start: int = 0
    block: int = 0
    row_elements: int = 1
    memo: dict[Any, Any] = field(default_factory=dict)

    def has(self, index: int) -> bool:
        """Return whether an expert has a delta that is not known to be zero."""
        return self.experts[index] is not None or self.stored_delta(index) is not None

    def stored_delta(self, index: int) -> Array | None:
        """Return an expert's delta where it is stored as one."""
        return self.deltas[index] if self.deltas else None

    def delta(self, index: int, number: int) -> Array:
        """Write an expert's delta, ``expert - base``, into a scratch array and return it; `has` must be true.

        Without a base it is the expert's value itself.
        """
        out, stored = self.scratch(number), self.stored_delta(index)
        array: Any = self.experts[index]
        if stored is not None:
            out[...] = stored
        elif self.base is None:
            out[...] = array
        else:
            if array.dtype != self.dtype:
                out[...] = array
                array = out
            # infinity minus infinity: where the expert equals the base, the delta is zero
            equal = array == self.base if self.non_finite else None
            self.xp.subtract(array, self.base, out=out)
            if equal is not None:
                out[equal] = 0
        return out

    def value(self, index: int, number: int) -> Array:
        """Return an expert's value, which must not be written to; what is not stored so is put into a scratch array."""
        array, stored = self.experts[index], self.stored_delta(index)
        if array is not None and array.dtype != self.dtype:
            out = self.scratch(number)
            out[...] = array
            return out
        if array is not None:
            return array
        if stored is None:
            return self.base
        return self.xp.add(self.base, stored, out=self.scratch(number))
