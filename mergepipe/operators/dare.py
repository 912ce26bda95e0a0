"""DARE: drop elements of the deltas at random and rescale the others (Yu et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from mergepipe.operators.contract import TensorParams
from mergepipe.operators.masks import mask_key
from mergepipe.operators.sparse import MOST_ELECTING, SparseTaskArithmetic
from mergepipe.operators.sparse_params import SEED, signature
from mergepipe.operators.sparsifiers import AtRandom, Sparsifier
from mergepipe.signatures import OperatorReference

_LOCALITY = (
    "A changed block is computed again and no other; with rescale `l1`, the others too if the factor changed, "
    "for which the changed block's sums are taken and folded with the kept ones."
)
_STATISTICS = "none; with rescale `l1` per expert and block: the sums of magnitudes before and after"
_KEPT = (
    "delta_i = x_i - base; d_i = delta_i where u < density_i, else 0; u from the stream of (seed, tensor, source)",
    "t_i = w_i (r_i d_i); r_i = 1 / density_i (`density`), sum|delta_i| / sum|d_i| (`l1`), or 1 (false)",
)
_EDGE_CASES = (
    "density 1 leaves a delta as it is.",
    (
        "Masks depend on seed, output tensor, source name and flat index alone: not on blocks, threads or machines. "
        "Two experts from one source have one mask."
    ),
    "rescale `l1`: exact sums over the tensor, their ratio rounded once; 1 where either is below 1e-7.",
)
_DIFFERENCES = (
    "mergekit draws from torch's global generator: the same shares, other elements.",
    "mergekit's rescale is `l1` and on by default; the paper's `density` is the default here.",
)


class _Dare(SparseTaskArithmetic):
    """Keeps elements at random."""

    names: ClassVar = True

    def sparsifier(self, params: TensorParams, index: int) -> Sparsifier:
        """Return the share and the stream; see `SparseTaskArithmetic.sparsifier`."""
        key = mask_key(int(params.values["seed"]), params.tensor, params.sources[index])
        return AtRandom(density=float(params.experts[index]["density"]), key=key)


class DareLinear(_Dare):
    """Drop elements of each delta at random, make up for them, add up.

    The masks are those of `masks`: addressed by place, so that any block can be computed alone.
    """

    signature: ClassVar = signature(
        "dare_linear", "drop at random, then add up", SEED, normalize=False, rescale="density"
    )
    reference: ClassVar = OperatorReference(
        formula=(*_KEPT, "y = base + lambda sum(t_i), divided by sum(w_i) where normalize is true"),
        source="Yu et al. 2023, Language Models are Super Mario (DARE)",
        locality=_LOCALITY,
        passes=(1, 2),
        statistics=_STATISTICS,
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = False


class DareTies(_Dare):
    """Drop elements of each delta at random, make up for them, elect a sign, add up what agrees.

    The masks are those of `masks`, the election is that of `ties`.
    """

    signature: ClassVar = signature(
        "dare_ties",
        "drop at random, elect a sign, add up what agrees",
        SEED,
        normalize=False,
        rescale="density",
        max_experts=MOST_ELECTING,
    )
    reference: ClassVar = OperatorReference(
        formula=(
            *_KEPT,
            "s = sign of sum(t_i), + where 0; agree_i = sign(t_i) equals s",
            "y = base + lambda sum(t_i agree_i), divided by sum(w_i agree_i) where normalize is true",
        ),
        source="Yu et al. 2023, with the election of TIES (Yadav et al. 2023)",
        locality=_LOCALITY,
        passes=(1, 2),
        statistics=_STATISTICS,
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = True
