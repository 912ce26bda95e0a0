"""The contract between operators and everything that runs them: prepare, reduce, apply.

An operator is a value without state. For each tensor it is *prepared* once from the resolved parameters (what is
checked there stops a build before any weight is read), then *applied* block by block; a tensor-wide *reduction* of
statistics of the blocks may come between the two. It never opens a file, and its result for an element depends on
nothing but the inputs, the parameters and the reduction: not on how elements are grouped into calls.

Inputs come widened to the work dtype (float32, or float64 where an input is float64), multiplications and additions
are separate operations in expert order, and the caller rounds once to the output dtype.

How a tensor is cut: *blocks* are what is read, hashed and cached; an operator sees *tiles* of a block, in order, each
an array of consecutive elements (1-D). Where an operator or a statistic is `rowwise`, tiles hold whole rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from mergepipe.digest import record_digest
from mergepipe.operators.influence import Influence
from mergepipe.operators.inputs import Array, BlockInputs
from mergepipe.signatures import OperatorReference, OperatorSignature, Scalar
from mergepipe.values import dataclass

__all__ = ["Array", "BlockInputs"]  # defined elsewhere, and part of the contract


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
    tensor, sources
        The output tensor's name and the experts' source names, for operators with `names`; otherwise empty.
    """

    values: Mapping[str, Scalar]
    experts: tuple[Mapping[str, Scalar], ...]
    base_expert: int | None = None
    tensor: str = ""
    sources: tuple[str, ...] = ()

    def number(self, name: str) -> float:
        """Return an output-wide number."""
        return float(self.values[name])

    def column(self, name: str) -> tuple[float, ...]:
        """Return a per-expert number for every expert, in expert order."""
        return tuple(float(expert[name]) for expert in self.experts)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What an operator needs of the parameters while it is applied to one tensor. Operators may extend it.

    Attributes
    ----------
    coefficients
        The factor of each expert, in expert order, rounded to the work dtype. An expert whose factor is 0 is not
        an input: it is not read. Operators without weights put 1, and 0 for the base among the experts where it is
        a zero delta.
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
class TensorFacts:
    """The shape of the part of a tensor that is merged, as operators count it. It depends on nothing else.

    Attributes
    ----------
    elements
        How many elements are merged (those beyond common rows are not).
    rows, row_elements
        Rows of the last dimension and elements in each; a 1-D or 0-D tensor is one row here, unlike in the block
        geometry.
    columns
        Elements at each index of the first dimension: the period of the flat index along it; 1 where the tensor is
        1-D or 0-D.
    blocks
        How many blocks hold merged elements.
    """

    elements: int
    rows: int
    row_elements: int
    columns: int
    blocks: int

    @property
    def splits_row(self) -> bool:
        """Whether the only row lies in several blocks: a long 1-D tensor, which no tile holds whole."""
        return self.rows == 1 and self.blocks > 1


# --- reductions ---------------------------------------------------------------------------------------------------


class Statistic(ABC):
    """Numbers about one block of some inputs, as bytes; computed once per content and kept in the cache.

    Statistics are values: frozen dataclasses whose fields, with `name` and `version`, say all that the numbers depend
    on besides the content of the blocks of `slots`, the dtypes and the work dtype. Put into `slots` only inputs that
    matter: two outputs, or two settings of a parameter, share what has equal slots and fields.

    Attributes
    ----------
    name, version
        Part of the key; the version is bumped whenever the numbers change.
    slots
        The inputs that they are about: 0 is the base, i + 1 the expert i. The tiles hold these alone (`base` is None
        if 0 is not among them).
    deltas_only
        Whether only the deltas matter: then a base is read only for blocks where some delta is not zero.
    rowwise
        Whether the tiles must hold whole rows.
    positional
        Whether the numbers depend on where in the tensor a block lies (random masks do).
    widens
        As `Operator.widens`.
    widens_base
        Whether it takes the base's values from slot 0 as they come: in the stored dtype too, where no expert of the
        tile is given as its delta.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    deltas_only: ClassVar[bool] = False
    rowwise: ClassVar[bool] = False
    positional: ClassVar[bool] = False
    widens: ClassVar[bool] = False
    widens_base: ClassVar[bool] = False
    slots: tuple[int, ...]

    @abstractmethod
    def settings(self) -> tuple[Any, ...]:
        """Return what the numbers depend on besides the inputs: numbers, text, bytes, tuples of them."""

    def block_settings(self, block: int) -> tuple[Any, ...]:
        """Return what the numbers of one block depend on besides: part of the key of that block alone."""
        del block
        return ()

    @abstractmethod
    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the numbers about a block from its tiles, in order; each is valid until the next is asked for.

        The result must be small beside the block (a few percent of its bytes at most), and the same on every machine.
        """

    def digest(self) -> bytes:
        """Return the part of the key that does not depend on the inputs."""
        return record_digest("statistic", self.name, self.version, self.settings())


StatisticValues = Mapping["Statistic", Iterable[bytes]]
"""By statistic the numbers of every block that is merged, in block order; may be gone through several times."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a tensor's statistics came to: what `Operator.apply` takes besides the inputs.

    Attributes
    ----------
    value
        Whatever the operator likes (coefficients, thresholds).
    key
        A digest of all of it that is the same for every block. Equal keys mean equal results for equal inputs, so put
        in what `apply` uses (rounded coefficients), not what it was made from: then blocks stay cached when a change
        of the inputs leaves it as it was.
    block_keys
        What differs between blocks (how many equal magnitudes are kept in this one), or empty.
    """

    value: Any
    key: bytes
    block_keys: Sequence[bytes] = ()

    def digest(self, block: int) -> bytes:
        """Return the reduction's part of the action key of a block."""
        return record_digest("reduction", self.key, self.block_keys[block] if self.block_keys else b"")


Reducing = Generator[Sequence[Statistic], StatisticValues, Reduction]
"""Yields the statistics that are needed next, is sent their values, returns the reduction; may ask several times."""


class Operator(ABC):
    """One merge method.

    Attributes
    ----------
    signature
        Its name, inputs and parameters; validated by the Mergefile parser and shown in the reference.
    reference
        Formula, locality, edge cases: what the reference says besides.
    version
        Part of every action key; bumped whenever the operator's numbers change.
    uses_base
        Whether the base, where there is one, is an input of the formula. If so the operator works on deltas: an expert
        block that equals the base's block contributes nothing and is not read. (Without a base, `BlockInputs.base` is
        None and every expert's values are given.)
    ignores_base
        Whether a base given beside it has no part in the output at all: the expert alone defines the tensors.
    names
        Whether the result depends on the names of the tensor and of the experts' sources, and on where in the tensor
        an element lies: random masks do.
    shows_non_finite
        Whether NaN and infinity in any input always show in the result, so that looking at that finds them. Where a
        mask or a comparison may leave such an element out, the inputs are looked at instead.
    widens
        Whether it takes experts by `BlockInputs.delta` and `BlockInputs.value` alone, each once, so that they may come
        in their stored dtypes: then no pass over memory is spent on widened copies of all of them.
    sums_deltas
        Whether deltas enter by nothing but their sum, weighted with ``Prepared.coefficients``, and it takes sums of
        some of them (`BlockInputs.sums`): those of approximations are faster to make together.
    code
        The digest of the code that it is made of, part of every action key; empty for built-in operators, whose
        `version` says the same.
    """

    signature: ClassVar[OperatorSignature]
    reference: ClassVar[OperatorReference]
    version: ClassVar[int]
    uses_base: ClassVar[bool]
    ignores_base: ClassVar[bool] = False
    names: ClassVar[bool] = False
    shows_non_finite: ClassVar[bool] = False
    widens: ClassVar[bool] = False
    sums_deltas: ClassVar[bool] = False
    code: ClassVar[bytes] = b""

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

    def check(self, prepared: Prepared, facts: TensorFacts) -> None:
        """Check that a tensor of this shape can be merged; called before any weight is read.

        Raises
        ------
        OperatorError
            If not, with a hint.
        """
        del prepared, facts

    def rowwise(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether `apply` needs tiles that hold whole rows. A row that `splits_row` is never whole."""
        del prepared, facts
        return False

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether a tensor-wide reduction is needed before `apply`."""
        del prepared, facts
        return False

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Reduce the statistics of a tensor's blocks; called where `reduces` says so.

        Parameters
        ----------
        slots
            Whether each slot (0: the base, i + 1: expert i) is an input of this tensor; ask for no others.
        """
        raise NotImplementedError(f"{self.signature.name} has no reduction")

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int | None:
        """Return how often `reduce` asks for statistics at most, for the limits that a plan states; None: not known.

        What it inherits is not believed of a class that has a `reduce` of its own. Where a later round may look at
        inputs of a block that the first does not look at, it is not known.
        """
        del prepared, facts
        return None

    @abstractmethod
    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the merged values (work dtype, ``inputs.shape``); valid until the next call with the same scratch."""

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return how much each expert's delta moves the result; with the full read's reduction where there is one."""
        del facts, reduction
        return Influence(factors=tuple(abs(value) for value in prepared.coefficients), kind="none")

    def rests_at_base(self, prepared: Prepared) -> bool:
        """Return whether the merge of experts that are all the base is the base.

        Asked of an operator that does not use the base, for blocks of which a budget leaves out every expert: they are
        copied from the base then, and computed from it where not.
        """
        del prepared
        return False

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
