"""ram and ramplus_tl: what one expert alone changed is added whole, what several changed is averaged among them.

An element of an expert counts as changed where the magnitude of its delta exceeds ``epsilon``. Source: Reinforced
Agent Merging, arXiv:2601.13572.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from mergepipe.digest import record_digest
from mergepipe.operators.contract import (
    Array,
    BlockInputs,
    Operator,
    Prepared,
    Reducing,
    Reduction,
    Statistic,
    TensorFacts,
    TensorParams,
)
from mergepipe.operators.influence import Influence, additive
from mergepipe.operators.numerics import rounded
from mergepipe.signatures import BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec
from mergepipe.values import dataclass

_SOURCE = "Reinforced Agent Merging, arXiv:2601.13572"
_EPSILON_DOC = "The magnitude of a delta above which an element counts as changed."


@dataclass(frozen=True, kw_only=True)
class RamPrepared(Prepared):
    """Besides which experts are inputs: the threshold, and how unique changes are made stronger.

    Attributes
    ----------
    epsilon
        In the work dtype.
    strength, limit
        ``r`` and ``alpha``, in the work dtype; 0 where nothing is made stronger.
    work
        The work dtype, in which the factors are computed.
    """

    epsilon: float
    strength: float = 0.0
    limit: float = 0.0
    work: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCounts(Statistic):
    """How many elements of a block each expert changed alone, and how many together with others.

    Two little-endian signed 64-bit integers per expert, in the order of ``slots``: alone, shared.
    """

    name: ClassVar[str] = "ram.changes"
    version: ClassVar[int] = 1
    deltas_only: ClassVar[bool] = True
    slots: tuple[int, ...]
    epsilon: float

    def settings(self) -> tuple[Any, ...]:
        """Return the threshold; see `Statistic.settings`."""
        return (self.epsilon,)

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Count; see `Statistic.measure`."""
        experts = [slot - 1 for slot in self.slots if slot]
        totals = [0] * (2 * len(experts))
        for inputs in tiles:
            masks, count = _changes(inputs, experts, self.epsilon)
            if count is None:
                continue
            alone = count == 1
            for place, expert in enumerate(experts):
                mask = masks.get(expert)
                if mask is not None:
                    changed = int(inputs.xp.count_nonzero(mask))
                    mask &= alone
                    unique = int(inputs.xp.count_nonzero(mask))
                    totals[2 * place] += unique
                    totals[2 * place + 1] += changed - unique
        return struct.pack(f"<{len(totals)}q", *totals)


class Ram(Operator):
    """The base, plus what one expert alone changed, plus the average of what several changed.

    ``base + sum_i delta_i m_i / max(count, 1)`` with ``m_i = |delta_i| > epsilon`` and ``count = sum_i m_i``: each
    term is divided first, then the terms are summed in expert order. Elements that nobody changed are the base's; the
    base listed among the experts changes nothing.
    """

    signature: ClassVar = OperatorSignature(
        name="ram",
        summary="add what one expert alone changed, average what several changed",
        base=BasePolicy.REQUIRED,
        params=(
            ParamSpec(name="epsilon", kind=ParamKind.REAL, default=1e-5, low=0.0, gradient=True, doc=_EPSILON_DOC),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "delta_i = x_i - base, m_i = |delta_i| > epsilon, count = sum(m_i)",
            "y = base + sum(delta_i m_i / max(count, 1))",
        ),
        source=_SOURCE,
        locality="A changed block of an expert or of the base is computed again, and no other.",
        edge_cases=(
            "A delta of magnitude epsilon exactly is no change; epsilon = 0 takes every element that differs.",
            "NaN in an expert passes through, though it counts as no change (`non_finite` is `allow`).",
        ),
        differences=(
            "With five experts and more mergekit adds up the last few elements of a tensor in another order.",
        ),
    )
    version: ClassVar = 1
    uses_base: ClassVar = True

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the threshold and which experts are inputs; see `Operator.prepare`."""
        (epsilon,) = rounded((params.number("epsilon"),), work)
        return RamPrepared(coefficients=_all_but_the_base(params), epsilon=epsilon, work=work)

    def apply(self, inputs: BlockInputs, prepared: Prepared, reduction: Reduction | None = None) -> Array:
        """Return the base with all changes; see `Operator.apply`."""
        assert isinstance(prepared, RamPrepared)
        return _merged(inputs, prepared, reduction.value if reduction else None)

    def influence(self, prepared: Prepared, facts: TensorFacts, reduction: Reduction | None = None) -> Influence:
        """Return 1, or how much stronger an expert's own changes are, and a bound for whole blocks (``mean``).

        Of an element, let p experts that are read have changed it, and q others. The merged moves are the means of
        p + q and of p deltas, and differ by ``q / (p + q)`` times the difference of two means, of q and of p deltas: by
        at most ``sqrt(q / (p (p + q)))``, which is below 1, times the root of the sum of all squared deltas
        (Cauchy-Schwarz); for p = 0 the mean of q deltas is at most that root. Where p = 1 and that expert's own
        changes are multiplied by f >= 1 (ramplus_tl), the factor is ``sqrt(f^2 - (2 f - 1) / (q + 1)) <= f``; where
        p = 0 and q = 1 it is f. So a block moves by at most ``max(f) sqrt(sum(n_i^2))``. Alone, an expert's change is
        added as it is: additive. See `Operator.influence`.
        """
        owns = prepared.coefficients
        if reduction is not None:
            owns = tuple(f if live else 0.0 for f, live in zip(reduction.value, prepared.live, strict=True))
        if sum(prepared.live) <= 1:
            return additive(owns, base=None)
        spread = tuple(max(owns) if live else 0.0 for live in prepared.live)
        return Influence(factors=owns, kind="mean", spread=spread)

    def copied_input(self, prepared: Prepared, present: tuple[bool, ...]) -> int | None:
        """Return the base where no delta is left; see `Operator.copied_input`."""
        return None if any(present) else -1


class RamPlus(Ram):
    """As `Ram`, with what an expert alone changed made stronger where much of its change is shared.

    The factor of expert i is ``1 + r min(shared_i / max(alone_i, epsilon), alpha)``: ``alone_i`` and ``shared_i`` count
    the elements of the whole tensor that it changed alone and together with others. The counts are exact; the factor
    is computed in the work dtype, each step rounded. They are taken anew where a block, ``epsilon`` or the set of
    experts changes, not where ``r`` or ``alpha`` do.
    """

    signature: ClassVar = OperatorSignature(
        name="ramplus_tl",
        summary="as `ram`, with what one expert alone changed made stronger",
        base=BasePolicy.REQUIRED,
        params=(
            ParamSpec(
                name="r",
                kind=ParamKind.REAL,
                default=0.1,
                low=0.0,
                gradient=True,
                doc="How much stronger, per unit of the ratio of shared changes to those of one expert alone.",
            ),
            ParamSpec(
                name="alpha",
                kind=ParamKind.REAL,
                default=0.2,
                low=0.0,
                gradient=True,
                doc="The largest ratio that counts.",
            ),
            ParamSpec(
                name="epsilon",
                kind=ParamKind.REAL,
                default=1e-5,
                low=0.0,
                low_open=True,
                gradient=True,
                doc=_EPSILON_DOC,
            ),
        ),
    )
    reference: ClassVar = OperatorReference(
        formula=(
            "delta_i = x_i - base, m_i = |delta_i| > epsilon, count = sum(m_i)",
            "factor_i = 1 + r min(shared_i / max(alone_i, epsilon), alpha)",
            "y = base + sum(delta_i m_i (factor_i where count = 1, else 1 / count))",
        ),
        source=_SOURCE + " (tensor-local variant)",
        locality=(
            "A changed block is counted again; the other blocks of the tensor are computed again only where a factor "
            "came out different."
        ),
        passes=(1, 2),
        statistics="per block and expert: how many elements it changed alone, how many together with others",
        edge_cases=(
            "An expert that changed nothing alone has the factor 1 + r alpha if it shares changes, 1 if not.",
            "One expert, r = 0 or alpha = 0: as `ram`, and nothing is counted.",
        ),
        differences=(
            "mergekit does not bound r, alpha and epsilon; here r and alpha are at least 0, epsilon is above 0.",
            "With five experts and more mergekit adds up the last few elements of a tensor in another order.",
        ),
    )
    version: ClassVar = 1

    def prepare(self, params: TensorParams, work: str) -> Prepared:
        """Return the threshold and how unique changes are made stronger; see `Operator.prepare`."""
        values = (params.number(name) for name in ("epsilon", "r", "alpha"))
        epsilon, strength, limit = rounded(values, work)
        return RamPrepared(
            coefficients=_all_but_the_base(params), epsilon=epsilon, strength=strength, limit=limit, work=work
        )

    def reduces(self, prepared: Prepared, facts: TensorFacts) -> bool:
        """Return whether any factor may differ from 1; see `Operator.reduces`."""
        assert isinstance(prepared, RamPrepared)
        return prepared.strength != 0 and prepared.limit != 0 and sum(prepared.live) > 1

    def reduce(self, prepared: Prepared, facts: TensorFacts, slots: Sequence[bool]) -> Reducing:
        """Return the factor of each expert; see `Operator.reduce`."""
        assert isinstance(prepared, RamPrepared)
        experts = [index for index, there in enumerate(slots[1:]) if there]
        factors = [1.0] * len(prepared.coefficients)
        if len(experts) > 1:  # what one expert changed is shared with nobody
            statistic = ChangeCounts(slots=(0, *(index + 1 for index in experts)), epsilon=prepared.epsilon)
            values = yield (statistic,)
            totals = [0] * (2 * len(experts))
            for block in values[statistic]:
                totals = [a + b for a, b in zip(totals, struct.unpack(f"<{len(totals)}q", block), strict=True)]
            for place, index in enumerate(experts):
                factors[index] = _factor(totals[2 * place], totals[2 * place + 1], prepared)
        else:
            yield ()
        return Reduction(value=tuple(factors), key=record_digest("ramplus_tl", tuple(factors)))

    def rounds(self, prepared: Prepared, facts: TensorFacts) -> int:
        """Return one; see `Operator.rounds`."""
        del prepared, facts
        return 1


def _factor(alone: int, shared: int, prepared: RamPrepared) -> float:
    """Return ``1 + r min(shared / max(alone, epsilon), alpha)``, rounded to the work dtype after each step."""
    work = prepared.work
    divisor, dividend = rounded((max(float(alone), prepared.epsilon), float(shared)), work)
    (ratio,) = rounded((dividend / divisor,), work)
    (more,) = rounded((prepared.strength * min(ratio, prepared.limit),), work)
    return rounded((1.0 + more,), work)[0]


def _all_but_the_base(params: TensorParams) -> tuple[float, ...]:
    return tuple(0.0 if index == params.base_expert else 1.0 for index in range(len(params.experts)))


def _changes(inputs: BlockInputs, experts: Sequence[int], epsilon: float) -> tuple[dict[int, Array], Array | None]:
    """Return where each expert with a delta changed an element, and how many did (work dtype), None for nobody."""
    masks: dict[int, Array] = {}
    count = None
    for index in experts:
        if not inputs.has(index):
            continue
        size = inputs.delta(index, 0)
        inputs.xp.abs(size, out=size)
        masks[index] = size > epsilon
        if count is None:
            count = inputs.scratch(1)
            count[...] = masks[index]
        else:
            count += masks[index]
    return masks, count


def _merged(inputs: BlockInputs, prepared: RamPrepared, factors: tuple[float, ...] | None) -> Array:
    xp, experts = inputs.xp, range(len(prepared.coefficients))
    masks, count = _changes(inputs, experts, prepared.epsilon)
    if count is None:
        out = inputs.scratch(2)
        out[...] = inputs.base
        return out
    one = xp.asarray(1.0, dtype=inputs.dtype)
    xp.maximum(count, one, out=count)
    alone = count == 1 if factors and any(factor != 1 for factor in factors) else None
    out = None
    for index, mask in masks.items():
        term = inputs.delta(index, 2 if out is None else 0)
        term *= mask  # a product, so that NaN stays
        if len(masks) > 1:
            term /= count
        if factors and alone is not None and factors[index] != 1:
            term *= xp.where(alone, xp.asarray(factors[index], dtype=inputs.dtype), one)
        out = term if out is None else xp.add(out, term, out=out)
    out += inputs.base
    return out
