"""The parameters that the operators share which drop elements of deltas."""

from __future__ import annotations

from mergepipe.signatures import BasePolicy, OperatorSignature, ParamKind, ParamSpec, Scalar, Scope

WEIGHT = ParamSpec(
    name="weight",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=1.0,
    gradient=True,
    doc="The expert's coefficient; negative ones are allowed, and an expert of weight 0 is not read.",
)
DENSITY = ParamSpec(
    name="density",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=1.0,
    low=0.0,
    low_open=True,
    high=1.0,
    gradient=True,
    doc="The share of the expert's delta that is kept; at 1 the delta is left as it is.",
)
GAMMA = ParamSpec(
    name="gamma",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=0.01,
    low=0.0,
    high=1.0,
    high_open=True,
    gradient=True,
    doc="The share of the largest magnitudes that is dropped.",
)
EPSILON = ParamSpec(
    name="epsilon",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=0.15,
    low=0.0,
    high=0.5,
    high_open=True,
    gradient=True,
    doc="How far the keep probability moves from `density` with the rank of a magnitude within its row.",
)
SEED = ParamSpec(
    name="seed",
    kind=ParamKind.INTEGER,
    default=0,
    low=0.0,
    doc="What the random masks are drawn from, together with the names of the tensor and of the expert's source.",
)
_LAMBDA = ParamSpec(
    name="lambda",
    kind=ParamKind.REAL,
    default=1.0,
    gradient=True,
    doc="The factor of the combined delta.",
)


def signature(
    name: str,
    summary: str,
    *extra: ParamSpec,
    normalize: bool,
    rescale: Scalar,
    max_experts: int | None = None,
) -> OperatorSignature:
    """Return the signature of a method that drops elements of the deltas, combines them and adds them to the base."""
    return OperatorSignature(
        name=name,
        summary=summary,
        base=BasePolicy.REQUIRED,
        max_experts=max_experts,
        params=(
            ParamSpec(
                name="normalize",
                kind=ParamKind.FLAG,
                default=normalize,
                doc="Whether to divide by the sum of the weights that take part.",
            ),
            ParamSpec(
                name="rescale",
                kind=ParamKind.CHOICE,
                choices=("l1", "density", False),
                default=rescale,
                doc=(
                    "What makes up for dropped elements: `l1` keeps the sum of magnitudes, `density` divides by the "
                    "share that is kept (in della by each element's own keep probability)."
                ),
            ),
            _LAMBDA,
            WEIGHT,
            DENSITY,
            *extra,
        ),
    )
