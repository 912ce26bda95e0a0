"""The recipe of a tensor: the part of its action key that does not depend on the inputs' content.

Names do not enter, so equal work on equal content is done once, wherever it appears.
"""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.digest import record_digest
from mergepipe.operators.contract import Operator, TensorParams
from mergepipe.plan.values import InputRef


def merge_recipe(
    operator: Operator, params: bytes, work: str, dtype: str, inputs: Sequence[object]
) -> bytes:
    """Return the digest of operator, version, parameters and dtypes.

    Parameters
    ----------
    params
        The digest of the tensor's resolved parameters (`params_digest`).
    inputs
        Per slot the form of the input (`input_form`), None where there is none.
    """
    made_of = (operator.code,) if operator.code else ()
    return record_digest(
        "recipe.merge", operator.signature.name, operator.version, *made_of, params, work, dtype, tuple(inputs)
    )


def input_form(ref: InputRef | None) -> object:
    """Return how an input is stored: its dtype; of an adapter, all but the content that makes values of its factors.

    The dtype of what a delta is added to is None where the delta itself is the input.
    """
    if ref is None or ref.lora is None:
        return None if ref is None else ref.info.dtype
    lora = ref.lora
    on = None if lora.on is None else lora.on.info.dtype
    return ("lora", lora.a.info.dtype, lora.b.info.dtype, lora.scaling, lora.transposed, on)


def params_digest(params: TensorParams) -> bytes:
    """Return the digest of resolved parameters; names are part of it where the operator depends on them."""
    named = (params.tensor, params.sources) if params.tensor else ()
    return record_digest("params", params.values, params.experts, params.base_expert, *named)


def equal_recipe(dtype: str) -> bytes:
    """Return the digest for a tensor that is only copied: it does not depend on the operator."""
    return record_digest("recipe.equal", dtype)
