"""DELLA: drop elements of the deltas at random, small magnitudes more often (Deep et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from mergepipe.operators.contract import TensorParams
from mergepipe.operators.masks import mask_key
from mergepipe.operators.sparse import MOST_ELECTING, SparseTaskArithmetic
from mergepipe.operators.sparse_params import EPSILON, SEED, signature
from mergepipe.operators.sparsifiers import ByRank, Sparsifier
from mergepipe.signatures import OperatorReference

_LOCALITY = (
    "Ranks are those within a row, and blocks hold whole rows: a changed block is computed again, and with rescale "
    "`l1` the others too if the factor changed. A 1-D tensor in several blocks is ranked as a whole."
)
_STATISTICS = (
    "with rescale `l1` per expert and block: the sums of magnitudes before and after; for a 1-D tensor in several "
    "blocks all of its magnitudes"
)
_KEPT = (
    "delta_i = x_i - base; rank of |delta_i| within its row of m elements, 1 the smallest, equal ones by index",
    "p = (density_i - epsilon_i) + 2 epsilon_i (rank - 1) / (m - 1); d_i = delta_i where u < p, else 0",
    "t_i = w_i (r_i d_i); r_i = sum|delta_i| / sum|d_i| (`l1`), 1 / p for each element (`density`), or 1 (false)",
)
_EDGE_CASES = (
    "density 1 leaves a delta as it is.",
    "density - epsilon <= 0 or density + epsilon >= 1 (with density < 1) is an error at plan time.",
    "Rows are those of the last dimension; a 1-D tensor is one row. In a row of one element p is density.",
    "A 1-D tensor that lies in several blocks is ranked in memory, up to 2^24 elements; longer ones are refused.",
    "u is that of `dare_linear`: from seed, output tensor, source name and flat index.",
    "rescale `l1`: exact sums over the tensor, their ratio rounded once; 1 where either is below 1e-7.",
)
_DIFFERENCES = (
    "mergekit draws from torch's global generator, and ranks equal magnitudes in any order.",
    "mergekit ranks tensors of more than two dimensions along dimension 1.",
    "mergekit stops with an error where a row has one element.",
    "mergekit calculates p in float32 steps, float64 is used here.",
)


class _Della(SparseTaskArithmetic):
    """Keeps elements with probabilities that grow with the rank of their magnitude."""

    names: ClassVar = True

    def sparsifier(self, params: TensorParams, index: int) -> Sparsifier:
        """Return the share, its spread and the stream; see `SparseTaskArithmetic.sparsifier`."""
        own = params.experts[index]
        key = mask_key(int(params.values["seed"]), params.tensor, params.sources[index])
        return ByRank(density=float(own["density"]), epsilon=float(own["epsilon"]), key=key)


class Della(_Della):
    """Drop elements of each delta at random, small ones more often, elect a sign, average what agrees.

    The random numbers are those of `masks`, the election is that of `ties`.
    """

    signature: ClassVar = signature(
        "della",
        "drop at random, small magnitudes more often, elect a sign, average what agrees",
        EPSILON,
        SEED,
        normalize=True,
        rescale="l1",
        max_experts=MOST_ELECTING,
    )
    reference: ClassVar = OperatorReference(
        formula=(
            *_KEPT,
            "s = sign of sum(t_i), + where 0; agree_i = sign(t_i) equals s",
            "y = base + lambda sum(t_i agree_i) / sum(w_i agree_i), without the divisor where normalize is false",
        ),
        source="Deep et al. 2024, DELLA-Merging, with the election of TIES (Yadav et al. 2023)",
        locality=_LOCALITY,
        passes=(1, 2),
        statistics=_STATISTICS,
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = True


class DellaLinear(_Della):
    """Drop elements of each delta at random, small ones more often, then add up.

    The random numbers are those of `masks`.
    """

    signature: ClassVar = signature(
        "della_linear",
        "drop at random, small magnitudes more often, then add up",
        EPSILON,
        SEED,
        normalize=False,
        rescale="l1",
    )
    reference: ClassVar = OperatorReference(
        formula=(*_KEPT, "y = base + lambda sum(t_i), divided by sum(w_i) where normalize is true"),
        source="Deep et al. 2024, DELLA-Merging",
        locality=_LOCALITY,
        passes=(1, 2),
        statistics=_STATISTICS,
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = False
