"""Signatures for the parser's tests: three small ones that mirror the built-in operators, and the upcoming ones."""

from __future__ import annotations

from mergepipe.operators.upcoming import UPCOMING
from mergepipe.signatures import BasePolicy, OperatorSignature, ParamKind, ParamSpec, Scope

WEIGHT = ParamSpec(name="weight", kind=ParamKind.REAL, scope=Scope.EXPERT, default=1.0, gradient=True)
SCALE = ParamSpec(name="scale", kind=ParamKind.REAL, scope=Scope.EXPERT, default=1.0, gradient=True)
LAMBDA = ParamSpec(name="lambda", kind=ParamKind.REAL, default=1.0, gradient=True)


def _normalize(*, default: bool) -> ParamSpec:
    return ParamSpec(name="normalize", kind=ParamKind.FLAG, default=default)


LINEAR = OperatorSignature(
    name="linear", summary="", base=BasePolicy.OPTIONAL, params=(_normalize(default=True), WEIGHT)
)
TASK_ARITHMETIC = OperatorSignature(
    name="task_arithmetic",
    summary="",
    base=BasePolicy.REQUIRED,
    params=(_normalize(default=False), LAMBDA, WEIGHT),
)
PASSTHROUGH = OperatorSignature(
    name="passthrough", summary="", base=BasePolicy.OPTIONAL, params=(SCALE,), max_experts=1
)
SIGNATURES = {signature.name: signature for signature in (LINEAR, TASK_ARITHMETIC, PASSTHROUGH, *UPCOMING)}
