"""TIES: trim, elect a sign, merge what agrees (Yadav et al. 2023)."""

from __future__ import annotations

from typing import ClassVar

from mergepipe.operators.contract import TensorParams
from mergepipe.operators.sparse import MOST_ELECTING, SparseTaskArithmetic
from mergepipe.operators.sparse_params import signature
from mergepipe.operators.sparsifiers import ByMagnitude, Sparsifier
from mergepipe.signatures import OperatorReference


class Ties(SparseTaskArithmetic):
    """Keep the largest magnitudes of each delta, elect a sign for each element, average what agrees.

    Of each tensor exactly ``k = max(1, int(density n))`` elements are kept, among equal magnitudes those of the lowest
    flat index. Thresholds are exact: they come from tables of the blocks (`magnitudes`), so that neither a tensor
    is sorted nor held.
    """

    signature: ClassVar = signature(
        "ties",
        "keep the largest magnitudes, elect a sign, average what agrees",
        normalize=True,
        rescale=False,
        max_experts=MOST_ELECTING,
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "delta_i = x_i - base; d_i = the k largest |delta_i| of the tensor, others 0; k = max(1, int(density_i n))",
            "t_i = w_i (r_i d_i); s = sign of sum(t_i), + where 0; agree_i = sign(t_i) equals s",
            "y = base + lambda sum(t_i agree_i) / sum(w_i agree_i), without the divisor where normalize is false",
        ),
        source="Yadav et al. 2023, TIES-Merging; signs and divisors weighted as in mergekit",
        locality=(
            "A changed block is read for its table, folded with the kept tables of all others. Blocks are computed "
            "again where they changed, or all of them if a threshold changed."
        ),
        passes=(1, 4),
        statistics="per expert and block: a table of the magnitudes; none where every density is 1",
        edge_cases=(
            "density 1 leaves a delta as it is: not rescaled, without statistics.",
            "Among equal magnitudes at the threshold those of the lowest flat index are kept.",
            "A zero weighted delta has no sign: it neither agrees nor counts in the divisor.",
            "A negative weight turns an expert's vote around.",
            (
                "Where nothing agrees the divisor is 1; also where agreeing weights of both signs cancel "
                "(their sum within 1e-6 of the sum of their magnitudes)."
            ),
            "The base among the experts has no vote.",
            (
                "rescale `l1`: one factor for each delta, sum of magnitudes before / after (exact sums, rounded once), "
                "1 where either is below 1e-7; `density`: 1 / density; 1 also where all n elements are kept."
            ),
        ),
        differences=(
            "mergekit keeps arbitrary ones among equal magnitudes at the threshold.",
            "mergekit divides by sums of weights that nearly cancel.",
        ),
    )
    elects: ClassVar = True

    def sparsifier(self, params: TensorParams, index: int) -> Sparsifier:
        """Return the share of the largest magnitudes; see `SparseTaskArithmetic.sparsifier`."""
        return ByMagnitude(density=float(params.experts[index]["density"]))
