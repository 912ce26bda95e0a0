"""mergekit's merge methods: what each takes, with its defaults, and what it does with the base model.

Facts of mergekit 0.1.5 (and 0.1.4 where they are the same). A parameter that is the same for all models is looked up
without the settings beside a model; one per model is looked up with them, and not for the base of a method that works
with differences from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from mergepipe.signatures import Scalar
from mergepipe.values import dataclass


class BaseRole(enum.Enum):
    """What a method does with the base model."""

    INPUT = "input"
    """It is an input like every other, with parameters of its own."""
    ORIGIN = "origin"
    """What the others are compared with; required."""
    OPTIONAL_ORIGIN = "optional origin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a method: its default is None where it must be given."""

    name: str
    default: Scalar | None = None
    per_model: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A merge method.

    Attributes
    ----------
    name
        Its name in mergekit, which is that of our operator.
    base
        What it does with the base model.
    parameters
        Those that change what it computes.
    without_effect
        Names of those that it accepts and that change nothing.
    experts
        The fewest and the most models beside the base (of `BaseRole.INPUT`: with it); None for no limit.
    """

    name: str
    base: BaseRole
    parameters: tuple[Parameter, ...] = ()
    without_effect: tuple[str, ...] = ()
    experts: tuple[int, int | None] = (1, None)

    def parameter(self, name: str) -> Parameter | None:
        """Return the parameter of this name that changes what the method computes."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


_WEIGHT = Parameter(name="weight", per_model=True)
_DENSITY = Parameter(name="density", default=1.0, per_model=True)
_GAMMA = Parameter(name="gamma", default=0.01, per_model=True)
_EPSILON = Parameter(name="epsilon", default=0.15, per_model=True)
_MASK = ("int8_mask",)


def _on_deltas(name: str, *extra: Parameter, normalize: bool = False, rescale: bool = False) -> Method:
    shared = (
        Parameter(name="normalize", default=normalize),
        Parameter(name="rescale", default=rescale),
        Parameter(name="lambda", default=1.0),
    )
    parameters = (*shared, _WEIGHT, _DENSITY, *extra)
    return Method(name=name, base=BaseRole.ORIGIN, parameters=parameters, without_effect=_MASK)


_TABLE = (
    Method(
        name="linear",
        base=BaseRole.INPUT,
        parameters=(Parameter(name="normalize", default=True), _WEIGHT),
    ),
    Method(name="slerp", base=BaseRole.ORIGIN, parameters=(Parameter(name="t"),), experts=(1, 1)),
    Method(
        name="nuslerp",
        base=BaseRole.OPTIONAL_ORIGIN,
        parameters=(
            Parameter(name="nuslerp_row_wise", default=False),
            Parameter(name="nuslerp_flatten", default=True),
            _WEIGHT,
        ),
        experts=(2, 2),
    ),
    Method(
        name="multislerp",
        base=BaseRole.OPTIONAL_ORIGIN,
        parameters=(Parameter(name="normalize_weights", default=True), Parameter(name="eps", default=1e-8), _WEIGHT),
    ),
    Method(
        name="karcher",
        base=BaseRole.INPUT,
        parameters=(Parameter(name="max_iter", default=10), Parameter(name="tol", default=1e-5)),
    ),
    Method(
        name="passthrough",
        base=BaseRole.INPUT,
        parameters=(Parameter(name="scale", default=1.0, per_model=True),),
        experts=(1, 1),
    ),
    Method(
        name="task_arithmetic",
        base=BaseRole.ORIGIN,
        parameters=(Parameter(name="normalize", default=False), Parameter(name="lambda", default=1.0), _WEIGHT),
        without_effect=(*_MASK, "rescale", "density"),  # nothing is dropped, so that nothing is made up for
    ),
    _on_deltas("ties", normalize=True),
    _on_deltas("dare_linear", rescale=True),
    _on_deltas("dare_ties", rescale=True),
    _on_deltas("breadcrumbs", _GAMMA),
    _on_deltas("breadcrumbs_ties", _GAMMA),
    _on_deltas("della", _EPSILON, normalize=True, rescale=True),
    _on_deltas("della_linear", _EPSILON, rescale=True),
    Method(
        name="sce",
        base=BaseRole.ORIGIN,
        parameters=(Parameter(name="select_topk", default=1.0),),
        without_effect=_MASK,
    ),
    Method(
        name="model_stock",
        base=BaseRole.ORIGIN,
        parameters=(Parameter(name="filter_wise", default=False),),
        experts=(2, None),
    ),
    Method(name="nearswap", base=BaseRole.ORIGIN, parameters=(Parameter(name="t"),), experts=(1, 1)),
    Method(name="arcee_fusion", base=BaseRole.ORIGIN, experts=(1, 1)),
    Method(name="ram", base=BaseRole.ORIGIN, parameters=(Parameter(name="epsilon", default=1e-5),)),
    Method(
        name="ramplus_tl",
        base=BaseRole.ORIGIN,
        parameters=(
            Parameter(name="r", default=0.1),
            Parameter(name="alpha", default=0.2),
            Parameter(name="epsilon", default=1e-5),
        ),
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _TABLE}
UNKNOWN = Method(name="", base=BaseRole.INPUT)
"""Stands for a method that is none of these: nothing is known of its parameters."""
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
"""Those that drop elements at random."""
KNOWN_PARAMETERS = frozenset(
    name for method in _TABLE for name in (*(parameter.name for parameter in method.parameters), *method.without_effect)
)


def our_value(parameter: str, value: Scalar) -> Scalar:
    """Return a value of mergekit's as it is written for our operator.

    Its `rescale` keeps the sum of magnitudes, which is one of the two ways that ours know.
    """
    return "l1" if parameter == "rescale" and value is True else value
