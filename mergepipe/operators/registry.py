"""The operators by name: those that run, and the signatures of those that can only be declared yet."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from mergepipe.errors import InternalError
from mergepipe.operators.contract import Operator
from mergepipe.signatures import OperatorSignature


@functools.cache
def operators() -> Mapping[str, Operator]:
    """Return every operator that can run, by name."""
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

    runnable: tuple[Operator, ...] = (
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
    return {operator.signature.name: operator for operator in runnable}


@functools.cache
def signatures() -> Mapping[str, OperatorSignature]:
    """Return the signature of every operator that a Mergefile may name."""
    from mergepipe.operators.upcoming import UPCOMING

    table = {name: operator.signature for name, operator in operators().items()}
    return table | {signature.name: signature for signature in UPCOMING}


def operator(name: str) -> Operator:
    """Return the operator of this name.

    Raises
    ------
    InternalError
        If it cannot run: the Mergefile parser should have said so.
    """
    try:
        return operators()[name]
    except KeyError:
        raise InternalError(f"operator `{name}` reached the planner but cannot run") from None
