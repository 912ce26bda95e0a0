"""The recipe of a tensor: the part of its action key that does not depend on the inputs' content.

Names do not enter, so equal work on equal content is done once, wherever it appears.
"""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.digest import record_digest
from mergepipe.operators.contract import Operator, TensorParams


def merge_recipe(
    operator: Operator, params: bytes, work: str, dtype: str, input_dtypes: Sequence[str | None]
) -> bytes:
    """Return the digest of operator, version, parameters and dtypes.

    Parameters
    ----------
    params
        The digest of the tensor's resolved parameters (`params_digest`).
    input_dtypes
        Per slot the dtype of the input, None where there is none.
    """
    return record_digest(
        "recipe.merge", operator.signature.name, operator.version, params, work, dtype, tuple(input_dtypes)
    )


def params_digest(params: TensorParams) -> bytes:
    """Return the digest of resolved parameters."""
    return record_digest("params", params.values, params.experts, params.base_expert)


def equal_recipe(dtype: str) -> bytes:
    """Return the digest for a tensor that is only copied: it does not depend on the operator."""
    return record_digest("recipe.equal", dtype)
