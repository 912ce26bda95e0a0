"""sce: select the elements that vary most, calculate the experts' weights, erase what disagrees in sign."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar

from mergepipe.digest import record_digest
from mergepipe.operators.contract import (
    Array,
    BlockInputs,
    Operator,
    Prepared,
    Reducing,
    Reduction,
    Statistic,
    StatisticValues,
    TensorFacts,
    TensorParams,
)
from mergepipe.operators.influence import ROOT_OF_2, Influence, additive
from mergepipe.operators.numerics import ordered_sum, rounded
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.operators.spread import Selected

# Both as mergekit has them, and in the units of the weights: sums of mean squares and of weights below these are not
# divided by.
_LEAST_SQUARES = 1e-6
_LEAST_WEIGHT = 1e-6
# The deltas of a tile are kept together, and operators have so many arrays.
_MOST_EXPERTS = 64


@dataclass(frozen=True, kw_only=True)
class ScePrepared(Prepared):
    """Besides which experts are inputs: how many there are without the base, the share to select, the work dtype."""

    experts: int
    share: float
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """The weights of the experts (0 for those that are no inputs), and which elements are selected.

    ``selected`` is None where all are; ``nothing`` says that none is. ``experts`` are those with a slot in the tensor,
    in the order in which the statistics took them.
    """

    weights: tuple[float, ...]
    experts: tuple[int, ...] = ()
    selected: Selected | None = None
    nothing: bool = False

    def reduction(self) -> Reduction:
        """Return it as a reduction; blocks differ in how many elements at the edge are taken."""
        if self.selected is None:
            return Reduction(value=self, key=record_digest("sce", self.weights, self.nothing))
        keys = [b"" if taken < 0 else taken.to_bytes(8, "little") for taken in self.selected.taken]
        key = record_digest("sce", self.weights, self.nothing, self.selected.edge.pattern)
        return Reduction(value=self, key=key, block_keys=keys)


class Sce(Operator):
    """The base plus a weighted average of the deltas, of the elements that vary most between the experts.

    *Select*: of the n elements whose (biased) variance over the experts is not zero, the ``int(n select_topk)`` with
    the largest; among equal ones those of the lowest flat index. With ``select_topk = 1`` all elements, those without
    variance too. *Calculate*: an expert's weight is the mean square of its selected deltas over the tensor, divided by
    the sum of those of all experts; equal weights where that sum is below 1e-6. *Erase*: where the sum of the selected
    deltas is positive or 0, the positive ones stay, else the negative ones. The result is
    ``base + sum(delta_i c_i) / max(sum(c_i), 1e-6)`` over the experts that stay.

    The base among the experts is none of them; another expert's zero delta counts in the variance. Variances and sums
    of squares are computed in float64 (see `mergepipe.operators.spread`), the rest in the work dtype, sums in expert
    order. Source: FuseChat's SCE, arXiv:2408.07990.
    """

    signature: ClassVar = OperatorSignature(
        name="sce",
        summary="select the elements that vary most between experts, calculate weights, erase what disagrees in sign",
        base=BasePolicy.REQUIRED,
        max_experts=_MOST_EXPERTS,
        params=(
            ParamSpec(
                name="select_topk",
                kind=ParamKind.REAL,
                default=1.0,
                low=0.0,
                low_open=True,
                high=1.0,
                gradient=True,
                doc="The share of the elements that is selected, of those that vary between the experts.",
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "delta_i = x_i - base; v: how many variances over i are not 0; selected: the int(v select_topk) largest",
            "c_i = mean(delta_i^2) / sum of all means, delta_i being 0 where not selected",
            "m_i = delta_i and the sum of all delta_i have the same sign",
            "y = base + sum(delta_i c_i m_i) / max(sum(c_i m_i), 1e-6)",
        ),
        source="SCE of FuseChat, arXiv:2408.07990",
        locality=(
            "A changed block is measured again; the other blocks of the tensor are computed again where a weight, the "
            "variance at the edge or the block's share of equal variances came out different."
        ),
        passes=(2, 4),
        statistics=(
            "per block: a table of the variances, and each expert's sum of squares over what is selected; with "
            "select_topk = 1 the sums alone"
        ),
        edge_cases=(
            "Mean squares that sum to less than 1e-6 (small deltas) give equal weights.",
            "int(v select_topk) = 0, or a single expert and select_topk below 1: nothing is selected, y is the base.",
            "Of equal variances at the edge those of the lowest flat index are selected.",
            "A sum of deltas of 0 counts as positive.",
            "What is not finite passes through and does not count in the weights (`non_finite` is `allow`).",
        ),
        differences=(
            "mergekit multiplies v by select_topk in float32 and may select an element more or less of 2^24 and more.",
            "mergekit selects any of the elements of equal variance, and sums squares in float32.",
            "select_topk = 0 is refused; NaN in one element spoils the whole tensor in mergekit.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return which experts are inputs, and the share; see `Operator.prepare`."""
        count = len(params.experts)
        experts = count - (params.base_expert is not None)
        share = params.number("select_topk")
        varies = share >= 1 or experts > 1  # a single expert has no variance: nothing would be selected
        coefficients = tuple(1.0 if varies and index != params.base_expert else 0.0 for index in range(count))
        return ScePrepared(coefficients=coefficients, experts=experts, share=share, work=work)

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether weights differ or elements are selected; see `Operator.reduces`."""
        return facts.elements > 0 and sum(prepared.live) > 1

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the weights and what is selected; see `Operator.reduce`."""
        assert isinstance(prepared, ScePrepared)
        experts = [index for index, there in enumerate(slots[1:]) if there]
        weights = [0.0] * len(prepared.coefficients)
        if not experts:
            yield ()
            return Fusion(weights=tuple(weights), nothing=True).reduction()
        selected = None
        if prepared.share < 1:
            selected = yield from _select(prepared, experts)
            if selected is None:
                return Fusion(weights=tuple(weights), nothing=True).reduction()
        squares = yield from _squares(prepared, experts, selected)
        for index, weight in zip(experts, _weights(squares, facts.elements, prepared), strict=True):
            weights[index] = weight
        return Fusion(weights=tuple(weights), experts=tuple(experts), selected=selected).reduction()

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return the rounds of the selection, if there is one, and that of the sums; see `Operator.rounds`."""
        from mergepipe.operators.magnitudes import most_rounds

        assert isinstance(prepared, ScePrepared)
        return 1 + (most_rounds(prepared.work, facts.elements) if prepared.share < 1 else 0)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the base plus the average of what is selected and agrees; see `Operator.apply`."""
        assert isinstance(prepared, ScePrepared)
        fusion = reduction.value if reduction else Fusion(weights=prepared.coefficients)
        experts = [index for index, live in enumerate(prepared.live) if live and inputs.has(index)]
        if fusion.nothing or not experts:
            out = inputs.scratch(0)
            out[...] = inputs.base
            return out
        deltas = _selected_deltas(inputs, prepared, fusion, experts)
        return _average(inputs, deltas, [fusion.weights[index] for index in experts])

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return the weights of the full read, and a bound for whole blocks (``mean``). See `Operator.influence`.

        With or without some deltas, a merged element's move is 0 or a weighted mean of deltas of one sign (times a
        factor of at most 1), so its magnitude is at most that of one of them, ``|d_p|`` or ``|d_q|``. If both moves
        have one sign they differ by at most the larger magnitude. If not, p and q are two experts, and
        ``|d_p| + |d_q| <= sqrt(2 (d_p^2 + d_q^2))``. The sum of squares over the elements of a block is at most
        ``2 sum(n_i^2)``. An omitted delta, however small, may change what is selected and which sign wins: the bound
        is about all deltas of the block.
        """
        assert isinstance(prepared, ScePrepared)
        weights = reduction.value.weights if reduction is not None else prepared.coefficients
        if sum(prepared.live) <= 1 or (reduction is not None and reduction.value.nothing):
            return additive(weights)
        spread = tuple(ROOT_OF_2 if live else 0.0 for live in prepared.live)
        return Influence(factors=tuple(weights), kind="mean", spread=spread)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where no delta is left; see `Operator.copied_input`."""
        return None if any(present) else -1


def _select(
    prepared: ScePrepared, experts: Sequence[int]
) -> Generator[Sequence[Statistic], StatisticValues, Selected | None]:
    """Return which elements vary most, None if none is selected."""
    from mergepipe.operators.magnitudes import population, select
    from mergepipe.operators.spread import ALL, Selected, Spread

    spread = Spread(slots=(0, *(index + 1 for index in experts)), experts=prepared.experts)
    values = yield (spread,)
    everything = population(values[spread])
    count = int((everything.elements - everything.zeros) * prepared.share)
    if not count:
        return None
    found = yield from select({spread: (count,)}, values=values)
    (selection,) = found[spread]
    at_edge = count - selection.above
    taken = zip(selection.taken(at_edge).tolist(), selection.equal.tolist(), strict=True)
    places = tuple(ALL if some == equal else some for some, equal in taken)
    return Selected(edge=selection.edge(at_edge), taken=places)


def _squares(
    prepared: ScePrepared, experts: Sequence[int], selected: Selected | None
) -> Generator[Sequence[Statistic], StatisticValues, list[float]]:
    """Return each expert's sum of squares over what is selected."""
    from mergepipe.operators.spread import Squares, total_squares

    if selected is None:  # one statistic for each expert: they stay the same whoever else is merged
        alone = [Squares(slots=(0, index + 1)) for index in experts]
        values = yield alone
        return [total_squares(values[statistic], 1)[0] for statistic in alone]
    slots = (0, *(index + 1 for index in experts))
    statistic = Squares(slots=slots, experts=prepared.experts, selected=selected)
    values = yield (statistic,)
    return total_squares(values[statistic], len(experts))


def _weights(squares: Sequence[float], elements: int, prepared: ScePrepared) -> tuple[float, ...]:
    """Return the weights in the work dtype, each step rounded to it."""
    means = rounded((square / elements for square in squares), prepared.work)
    total = ordered_sum(means, prepared.work)
    if total < _LEAST_SQUARES:
        return rounded((1 / prepared.experts for _ in means), prepared.work)
    return rounded((mean / total for mean in means), prepared.work)


def _selected_deltas(inputs: BlockInputs, prepared: ScePrepared, fusion: Fusion, experts: Sequence[int]) -> list[Array]:
    """Return the deltas, 0 where not selected, in scratch arrays from 2 on."""
    if fusion.selected is None:
        return [inputs.delta(index, 2 + place) for place, index in enumerate(experts)]
    from mergepipe.operators.spread import variance

    variances = variance(inputs, fusion.experts, prepared.experts)
    mask = fusion.selected.mask(inputs, variances)
    deltas = [inputs.scratch(2 + place) for place in range(len(experts))]  # where `variance` left them
    for delta in deltas:
        delta *= mask  # a product, so that NaN stays
    return deltas


def _average(inputs: BlockInputs, deltas: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the base plus the weighted average of the deltas that have the sign of their sum."""
    xp = inputs.xp
    out, term, total = inputs.scratch(0), inputs.scratch(1), inputs.scratch(2 + len(deltas))
    out[...] = deltas[0]
    for delta in deltas[1:]:
        out += delta
    sign = inputs.scratch(3 + len(deltas))
    sign[...] = out >= 0
    sign *= 2
    sign -= 1
    zero = xp.asarray(0.0, dtype=inputs.dtype)
    out[...] = 0
    total[...] = 0
    for delta, weight in zip(deltas, weights, strict=True):
        delta *= sign
        xp.maximum(delta, zero, out=delta)
        term[...] = delta > 0
        term *= weight
        total += term
        delta *= weight
        out += delta
    xp.maximum(total, xp.asarray(_LEAST_WEIGHT, dtype=inputs.dtype), out=total)
    out /= total
    out *= sign
    out += inputs.base
    return out
