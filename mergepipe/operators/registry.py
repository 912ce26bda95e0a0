"""The built-in operators by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mergepipe.errors import InternalError
from mergepipe.operators.contract import Operator
from mergepipe.signatures import OperatorSignature


@functools.cache
def operators() -> Mapping[str, Operator]:
    """Return every built-in operator, by name."""
    from mergepipe.operators.additive import Linear, Passthrough, TaskArithmetic
    from mergepipe.operators.arcee import ArceeFusion
    from mergepipe.operators.breadcrumbs import Breadcrumbs, BreadcrumbsTies
    from mergepipe.operators.dare import DareLinear, DareTies
    from mergepipe.operators.della import Della, DellaLinear
    from mergepipe.operators.karcher import Karcher
    from mergepipe.operators.model_stock import ModelStock
    from mergepipe.operators.multislerp import MultiSlerp
    from mergepipe.operators.nearswap import NearSwap
    from mergepipe.operators.nuslerp import NuSlerp
    from mergepipe.operators.ram import Ram, RamPlus
    from mergepipe.operators.sce import Sce
    from mergepipe.operators.slerp import Slerp
    from mergepipe.operators.ties import Ties

    found: tuple[Operator, ...] = (
        Linear(),
        TaskArithmetic(),
        Passthrough(),
        Ties(),
        DareLinear(),
        DareTies(),
        Della(),
        DellaLinear(),
        Breadcrumbs(),
        BreadcrumbsTies(),
        NearSwap(),
        Ram(),
        RamPlus(),
        ArceeFusion(),
        Sce(),
        Slerp(),
        NuSlerp(),
        MultiSlerp(),
        Karcher(),
        ModelStock(),
    )
    return {operator.signature.name: operator for operator in found}


@functools.cache
def signatures() -> Mapping[str, OperatorSignature]:
    """Return the signature of every built-in operator, by name: what a Mergefile is checked against."""
    return {name: operator.signature for name, operator in operators().items()}


def operator(name: str) -> Operator:
    """Return the operator of this name.

    Raises
    ------
    InternalError
        If there is none: the Mergefile parser should have said so.
    """
    try:
        return operators()[name]
    except KeyError:
        raise InternalError(f"operator `{name}` is none of the built-in ones") from None
