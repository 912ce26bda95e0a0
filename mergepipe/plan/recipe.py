"""The recipe of a tensor: the part of its action key that does not depend on the inputs' content."""

from __future__ import annotations

from mergepipe.digest import record_digest
from mergepipe.operators.contract import Operator
from mergepipe.plan.values import Decision, TensorPlan


def recipe_digest(operator: Operator, tensor: TensorPlan) -> bytes:
    """Return the digest of operator, version, parameters, dtypes and decision: all that turns inputs into values.

    Names do not enter, so equal work on equal content is done once, wherever it appears. A tensor that is only
    copied does not depend on the operator.
    """
    if tensor.decision is Decision.EQUAL:
        return record_digest("recipe.equal", tensor.dtype)
    return record_digest(
        "recipe.merge",
        operator.signature.name,
        operator.version,
        tensor.params.values,
        tensor.params.experts,
        tensor.work,
        tensor.dtype,
        tuple(slot.info.dtype if slot else None for slot in tensor.slots),
    )
