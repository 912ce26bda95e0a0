"""Signatures of the operators that can be declared and not run yet.

A Mergefile that uses one is checked in full and then told that the operator is not supported yet. Names, defaults and
ranges are those of the published methods as this project defines them; an operator leaves this list when it arrives.
"""

from __future__ import annotations

from mergepipe.signatures import BasePolicy, OperatorSignature, ParamKind, ParamSpec, Scalar, Scope

_RESCALE_DOC = (
    "What makes up for dropped elements: `l1` keeps the sum of magnitudes, `density` divides by the share that is kept."
)
_WEIGHT = ParamSpec(
    name="weight",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=1.0,
    gradient=True,
    doc="The expert's coefficient; negative ones are allowed.",
)
_DENSITY = ParamSpec(
    name="density",
    kind=ParamKind.REAL,
    scope=Scope.EXPERT,
    default=1.0,
    low=0.0,
    low_open=True,
    high=1.0,
    gradient=True,
    doc="The share of the expert's delta that is kept.",
)
_GAMMA = ParamSpec(
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
_DELLA_EPSILON = ParamSpec(
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
_LAMBDA = ParamSpec(
    name="lambda",
    kind=ParamKind.REAL,
    default=1.0,
    gradient=True,
    doc="The factor of the combined delta.",
)
_SEED = ParamSpec(
    name="seed",
    kind=ParamKind.INTEGER,
    default=0,
    low=0.0,
    doc="What the random masks are drawn from, together with the names of the tensor and the expert.",
)


def _flag(name: str, doc: str, *, default: bool) -> ParamSpec:
    return ParamSpec(name=name, kind=ParamKind.FLAG, default=default, doc=doc)


def _normalize(*, default: bool) -> ParamSpec:
    return _flag("normalize", "Whether to divide by the sum of the weights that take part.", default=default)


def _rescale(default: Scalar) -> ParamSpec:
    choices = ("l1", "density", False)
    return ParamSpec(name="rescale", kind=ParamKind.CHOICE, choices=choices, default=default, doc=_RESCALE_DOC)


def _positive(name: str, default: float, doc: str) -> ParamSpec:
    return ParamSpec(name=name, kind=ParamKind.REAL, default=default, low=0.0, low_open=True, gradient=True, doc=doc)


def _on_deltas(name: str, summary: str, *extra: ParamSpec, normalize: bool, rescale: Scalar) -> OperatorSignature:
    """Return a method that drops elements of the deltas, combines them and adds them to the base."""
    return OperatorSignature(
        name=name,
        summary=summary,
        base=BasePolicy.REQUIRED,
        params=(_normalize(default=normalize), _rescale(rescale), _LAMBDA, _WEIGHT, _DENSITY, *extra),
        available=False,
    )


_DELTA_BASED = (
    _on_deltas(
        "ties", "Keep the largest magnitudes, elect a sign, average what agrees.", normalize=True, rescale=False
    ),
    _on_deltas("dare_linear", "Drop at random, then add up.", _SEED, normalize=False, rescale="density"),
    _on_deltas(
        "dare_ties",
        "Drop at random, elect a sign, add up what agrees.",
        _SEED,
        normalize=False,
        rescale="density",
    ),
    _on_deltas(
        "della",
        "Drop at random, small magnitudes more often, elect a sign, average what agrees.",
        _DELLA_EPSILON,
        _SEED,
        normalize=True,
        rescale="l1",
    ),
    _on_deltas(
        "della_linear",
        "Drop at random, small magnitudes more often, then add up.",
        _DELLA_EPSILON,
        _SEED,
        normalize=False,
        rescale="l1",
    ),
    _on_deltas(
        "breadcrumbs", "Drop the largest and the smallest, then add up.", _GAMMA, normalize=False, rescale=False
    ),
    _on_deltas(
        "breadcrumbs_ties",
        "Drop the largest and the smallest, elect a sign, add up what agrees.",
        _GAMMA,
        normalize=False,
        rescale=False,
    ),
    OperatorSignature(
        name="sce",
        summary="Select the elements that vary most between experts, calculate weights, erase what disagrees in sign.",
        base=BasePolicy.REQUIRED,
        params=(
            ParamSpec(
                name="select_topk",
                kind=ParamKind.REAL,
                default=1.0,
                low=0.0,
                low_open=True,
                high=1.0,
                gradient=True,
                doc="The share of the elements that is selected.",
            ),
        ),
        available=False,
    ),
)

UPCOMING: tuple[OperatorSignature, ...] = _DELTA_BASED
