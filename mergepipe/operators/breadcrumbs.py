"""Model breadcrumbs: drop the largest and the smallest magnitudes (Davari and Belilovsky 2023)."""

from __future__ import annotations

from typing import ClassVar

from mergepipe.operators.contract import TensorParams
from mergepipe.operators.sparse import MOST_ELECTING, SparseTaskArithmetic
from mergepipe.operators.sparse_params import GAMMA, signature
from mergepipe.operators.sparsifiers import ByMagnitude, Sparsifier
from mergepipe.signatures import OperatorReference

_LOCALITY = (
    "A changed block is read for its table, folded with the kept tables of all others. Blocks are computed again where "
    "they changed, or all of them if a threshold changed."
)
_KEPT = (
    "k = max(1, int(density_i n)) kept, top = min(int(gamma_i n), n - k) dropped",
    "delta_i = x_i - base; d_i = the k magnitudes after the top largest of |delta_i|, others 0; t_i = w_i (r_i d_i)",
)
_EDGE_CASES = (
    "density 1 leaves a delta as it is, also its largest magnitudes: gamma has no effect then.",
    "Where density + gamma > 1 fewer of the largest are dropped, so that k are kept.",
    "gamma 0 drops none of the largest.",
    "At both thresholds those of the equal magnitudes are kept that have the lowest flat index.",
    (
        "rescale `l1`: one factor for each delta, sum of magnitudes before / after (exact sums, rounded once), 1 where "
        "either is below 1e-7; `density`: 1 / density; 1 also where all n elements are kept."
    ),
)
_DIFFERENCES = (
    "mergekit keeps arbitrary ones among equal magnitudes at the thresholds.",
    "mergekit keeps nothing where density n < 1; at least one element is kept here.",
)


class _Breadcrumbs(SparseTaskArithmetic):
    """Keeps magnitudes between two thresholds."""

    def sparsifier(self, params: TensorParams, index: int) -> Sparsifier:
        """Return the shares kept and dropped; see `SparseTaskArithmetic.sparsifier`."""
        own = params.experts[index]
        return ByMagnitude(density=float(own["density"]), gamma=float(own["gamma"]))


class Breadcrumbs(_Breadcrumbs):
    """Drop the largest and the smallest magnitudes of each delta, then add up.

    Exact thresholds from tables of the blocks (`magnitudes`); see `reference` for the counts and edge cases.
    """

    signature: ClassVar = signature(
        "breadcrumbs",
        "drop the largest and the smallest, then add up",
        GAMMA,
        normalize=False,
        rescale=False,
    )
    reference: ClassVar = OperatorReference(
        formula=(*_KEPT, "y = base + lambda sum(t_i), divided by sum(w_i) where normalize is true"),
        source="Davari and Belilovsky 2023, Model Breadcrumbs",
        locality=_LOCALITY,
        passes=(1, 4),
        statistics="per expert and block: a table of the magnitudes; none where every density is 1",
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = False


class BreadcrumbsTies(_Breadcrumbs):
    """Drop the largest and the smallest magnitudes of each delta, elect a sign, add up what agrees.

    Exact thresholds from tables of the blocks (`magnitudes`); the election is that of `ties`.
    """

    signature: ClassVar = signature(
        "breadcrumbs_ties",
        "drop the largest and the smallest, elect a sign, add up what agrees",
        GAMMA,
        normalize=False,
        rescale=False,
        max_experts=MOST_ELECTING,
    )
    reference: ClassVar = OperatorReference(
        formula=(
            *_KEPT,
            "s = sign of sum(t_i), + where 0; agree_i = sign(t_i) equals s",
            "y = base + lambda sum(t_i agree_i), divided by sum(w_i agree_i) where normalize is true",
        ),
        source="Davari and Belilovsky 2023, Model Breadcrumbs, with the election of TIES (Yadav et al. 2023)",
        locality=_LOCALITY,
        passes=(1, 4),
        statistics="per expert and block: a table of the magnitudes; none where every density is 1",
        edge_cases=_EDGE_CASES,
        differences=_DIFFERENCES,
    )
    elects: ClassVar = True
