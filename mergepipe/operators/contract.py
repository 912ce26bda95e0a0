"""The contract between operators and everything that runs them: prepare, reduce, apply.

An operator is a value without state. For each tensor it is *prepared* once from the resolved parameters (what is
checked there stops a build before any weight is read), then *applied* block by block; a tensor-wide *reduction* of
per-block partials may come between the two. It never opens a file, and its result for an element depends on nothing
but the inputs there, the parameters and the reduction: not on how blocks are grouped into calls.

Inputs come widened to the work dtype (float32, or float64 where an input is float64), multiplications and additions
are separate operations in expert order, and the caller rounds once to the output dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mergepipe.signatures import OperatorSignature, Scalar

Array = Any
"""An array of the namespace in use: `numpy.ndarray` on the CPU, `torch.Tensor` on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParams:
    """The parameters of one output tensor, resolved: gradients interpolated, rules applied.

    Attributes
    ----------
    values
        The output-wide parameters by name, the common ones among them.
    experts
        The per-expert parameters by name, in expert order.
    base_expert
        Which expert is the base itself, None if it is not listed.
    """

    values: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    base_expert: int | None = None

    def number(self, name: str) -> float:
        """Return an output-wide number."""
        return float(self.values[name])

    def column(self, name: str) -> tuple[float, ...]:
        """Return a per-expert number for every expert, in expert order."""
        return tuple(float(expert[name]) for expert in self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What an operator needs of the parameters while it is applied to one tensor.

    Attributes
    ----------
    coefficients
        The factor of each expert, in expert order, rounded to the work dtype. An expert whose factor is 0 is not
        an input: it is not read.
    divisor
        What the sum is divided by; 1 where nothing is normalised.
    scale
        What the sum (of deltas) is multiplied by at the end.
    """

    coefficients: tuple[float, ...]
    divisor: float = 1.0
    scale: float = 1.0

    @property
    def live(self) -> tuple[bool, ...]:
        """Whether each expert is an input, in expert order."""
        return tuple(value != 0 for value in self.coefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """The inputs of one call of `Operator.apply`, all of one shape and of the work dtype.

    Attributes
    ----------
    xp
        The array namespace.
    base
        The base's values, or None where the operator does not use them.
    experts
        Each expert's values in expert order. None where an expert is no input; and, for an operator of deltas, where
        its delta is zero. Arrays may be shared between entries and must not be written to.
    shape, dtype
        Of the arrays, for operators that are left without any.
    non_finite
        Whether infinities and NaN may be among the values, so that equal values must not be subtracted blindly.
    scratch
        Returns the n-th of a few arrays of that shape and dtype to write into and to return: fresh memory costs more
        than the arithmetic. The same number is the same array within a call, and between calls of one worker.
    """

    xp: Any
    base: Array | None
    experts: tuple[Array | None, ...]
    shape: tuple[int, ...]
    dtype: Any
    non_finite: bool
    scratch: Callable[[int], Array]


class Operator(ABC):
    """One merge method.

    Attributes
    ----------
    signature
        Its name, inputs and parameters; validated by the Mergefile parser and shown in the reference.
    version
        Part of every action key; bumped whenever the operator's numbers change.
    uses_base
        Whether the base is an input of the formula. If so the operator works on deltas: an expert block that equals
        the base's block contributes nothing and is not read.
    ignores_base
        Whether a base given beside it has no part in the output at all: the expert alone defines the tensors.
    reduces
        Whether it needs a tensor-wide reduction before it can be applied.
    """

    signature: ClassVar[OperatorSignature]
    version: ClassVar[int]
    uses_base: ClassVar[bool]
    ignores_base: ClassVar[bool] = False
    reduces: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return what `apply` needs; called once per tensor, before any weight is read.

        Parameters
        ----------
        work
            The work dtype, ``float32`` or ``float64``: coefficients are rounded to it.

        Raises
        ------
        OperatorError
            If the parameters have no usable result, such as weights that sum to zero.
        """

    def partial(self, inputs: BlockInputs, prepared: Prepared) -> bytes:
        """Return this block's part of the reduction; cached by the digests of the inputs alone."""
        raise NotImplementedError(f"{self.signature.name} has no reduction")

    def reduce(self, partials: tuple[bytes, ...], prepared: Prepared) -> Any:
        """Fold the partials of a tensor's blocks, in block order, into what `apply` takes."""
        raise NotImplementedError(f"{self.signature.name} has no reduction")

    @abstractmethod
    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Any = None) -> Array:
        """Return the merged values (work dtype, ``inputs.shape``); valid until the next call with the same scratch."""

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return which input the result equals bit for bit, or None if it must be computed.

        Parameters
        ----------
        present
            Whether each expert's entry in `BlockInputs.experts` would be there.

        Returns
        -------
        int or None
            -1 for the base, or an index into the experts.
        """
        del prepared, present
        return None
