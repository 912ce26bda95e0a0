"""Operators that merge the base with exactly one other checkpoint: which one it is."""

from __future__ import annotations

from mergepipe.errors import OperatorError
from mergepipe.operators.contract import TensorParams


def only_expert(params: TensorParams, operator: str) -> int:
    """Return the index of the one expert that is not the base; the base may be listed beside it.

    Raises
    ------
    OperatorError
        If there are two such experts, or none.
    """
    others = [index for index in range(len(params.experts)) if index != params.base_expert]
    if len(others) == 1:
        return others[0]
    raise OperatorError(
        f"`{operator}` merges the base with exactly one other checkpoint; {len(others) or 'none'} of the experts "
        f"{'is' if not others else 'are'} not the base",
        hint="list one expert (and the base beside it, if you like); chain outputs to merge more",
        experts=len(params.experts),
    )
