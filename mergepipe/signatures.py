"""What an operator takes: its parameters, their types and ranges, and the inputs that it needs.

The Mergefile is validated against these values, and the operators' reference is generated from them; so that neither
the parser nor the docs need to import an operator's arithmetic.
"""

from __future__ import annotations

import enum

from mergepipe.values import dataclass

Scalar = bool | int | float | str
ParamValue = Scalar | tuple[float, ...]
"""A resolved scalar, or a gradient: anchors interpolated over the layers."""


class ParamKind(enum.Enum):
    """The type of a parameter's value."""

    REAL = "number"
    INTEGER = "integer"
    FLAG = "true or false"
    CHOICE = "one of a list"


class Scope(enum.Enum):
    """Where a parameter may be given."""

    OUTPUT = "output"
    """One value for all experts: in `params` of an output or of a rule."""
    EXPERT = "expert"
    """A value per expert: beside the expert, in a rule's `experts`, or in `params` for all of them."""


class BasePolicy(enum.Enum):
    """What an operator does with a base."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    """It defines the output's tensors and side files, and is not an input unless listed as an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of an operator.

    Attributes
    ----------
    name, kind, scope
        How it is written, its type, and where it may be given.
    default
        The value where none is given; None means that it must be given.
    low, high
        Closed bounds of a number, None for no bound.
    low_open, high_open
        Whether the bound itself is excluded.
    choices
        The allowed values of a `ParamKind.CHOICE`; `False` may be among them.
    gradient
        Whether a list of anchors over the layers is allowed.
    doc
        One sentence for the reference.
    """

    name: str
    kind: ParamKind
    scope: Scope = Scope.OUTPUT
    default: Scalar | None = None
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    choices: tuple[Scalar, ...] = ()
    gradient: bool = False
    doc: str = ""

    def range_text(self) -> str:
        """Return the allowed values in words, for messages: ``a number > 0 and <= 1``."""
        if self.kind is ParamKind.CHOICE:
            return "one of " + ", ".join(f'"{c}"' if isinstance(c, str) else str(c).lower() for c in self.choices)
        if self.kind is ParamKind.FLAG:
            return "true or false"
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.low_open else '>='} {self.low:g}")
        if self.high is not None:
            bounds.append(f"{'<' if self.high_open else '<='} {self.high:g}")
        noun = "an integer" if self.kind is ParamKind.INTEGER else "a finite number"
        text = " ".join((noun, " and ".join(bounds))).strip()
        return text + (", or a list of them over the layers" if self.gradient else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSignature:
    """The inputs and parameters of an operator.

    Attributes
    ----------
    name, summary
        Its name in a Mergefile, and one line of what it computes.
    base
        Whether a base must be given.
    min_experts, max_experts
        How many experts it takes; None for no upper limit.
    params
        Its own parameters, without the common ones (`COMMON_PARAMS`).
    """

    name: str
    summary: str
    base: BasePolicy
    params: tuple[ParamSpec, ...]
    min_experts: int = 1
    max_experts: int | None = None

    def all_params(self) -> dict[str, ParamSpec]:
        """Return every parameter that the operator takes, by name, the common ones last."""
        return {spec.name: spec for spec in (*self.params, *COMMON_PARAMS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorReference:
    """What the operators' reference says of one operator, besides its parameters; sentences without line breaks.

    Attributes
    ----------
    formula
        The formula in plain text, one line each.
    source
        The paper or project that defines it.
    locality
        What a change of one block of one expert costs: which blocks are read and computed again.
    statistics
        Which statistics of the blocks are taken and kept, or "none".
    passes
        The fewest and the most times that a tensor's inputs are gone through: to merge, and before it for statistics
        in so many rounds as they take. For float32 arithmetic, and an expert that differs from the base.
    edge_cases
        What happens at the edges: zero vectors, equal magnitudes, parameters at their bounds.
    differences
        How results differ from mergekit 0.1.5 run in float32, or nothing.
    """

    formula: tuple[str, ...]
    source: str
    locality: str
    statistics: str = "none"
    passes: tuple[int, int] = (1, 1)
    edge_cases: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


COMMON_PARAMS = (
    ParamSpec(
        name="missing",
        kind=ParamKind.CHOICE,
        choices=("error", "base"),
        default="error",
        doc="What an expert without one of the base's tensors means: an error, or a delta of zero.",
    ),
    ParamSpec(
        name="rows",
        kind=ParamKind.CHOICE,
        choices=("equal", "common"),
        default="equal",
        doc="For embeddings and heads of other row counts: an error, or merge the rows that all have.",
    ),
    ParamSpec(
        name="non_finite",
        kind=ParamKind.CHOICE,
        choices=("error", "allow"),
        default="error",
        doc="Whether NaN and infinity in an input stop the build or pass through.",
    ),
    ParamSpec(
        name="numerics",
        kind=ParamKind.CHOICE,
        choices=("float32",),
        default="float32",
        doc="The arithmetic profile: float32 steps, each rounded once (float64 where an input is float64).",
    ),
)
