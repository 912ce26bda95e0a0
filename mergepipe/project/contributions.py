"""What each expert contributed to a finished output, in numbers that add up over tensors, modules and layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from mergepipe.plan.values import OutputPlan, TensorPlan
from mergepipe.project.reports import Json
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.contributions import TensorContributions


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare:
    """What one expert contributed to some tensors.

    Attributes
    ----------
    norm
        The norm of its delta, over the tensors of which it is an input.
    norm_share
        The norm of its delta times its weight, as a share of the sum of these over all experts, 0 to 1; where the
        operator has no weights they are 1. None where all are 0.
    cosine
        Of its delta with the update, -1 to 1; None where either is 0.
    sign_agreement
        In which share of the elements that are not zero in both, its delta has the sign of the update; None without
        such elements.
    """

    source: str
    norm: float | None
    norm_share: float | None
    cosine: float | None
    sign_agreement: float | None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What the experts contributed to some tensors; norms are Frobenius norms over the elements that are merged.

    Attributes
    ----------
    base_norm
        None where there is no base: the update is the output itself then, and deltas are the experts' values.
    update_norm
        Of the output less the base, as stored; ``update_relative`` is it divided by that of the base, None where that
        is 0 or there is none. All of it is None for tensors some of which have a base, and some not.
    sign_agreement
        In which share of the elements that are not zero in both, two experts' deltas have the same sign, over all
        pairs of experts, also where a budget leaves them out; about a half where they have nothing to do with each
        other. None with less than two experts.
    experts
        In expert order.
    """

    base_norm: float | None
    update_norm: float | None
    update_relative: float | None
    sign_agreement: float | None
    experts: tuple[ExpertShare, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "base_norm": self.base_norm,
            "update_norm": self.update_norm,
            "update_relative": self.update_relative,
            "sign_agreement": self.sign_agreement,
            "experts": [expert.as_json() for expert in self.experts],
        }


@dataclass(slots=True)
class _ExpertSums:
    square: float = 0.0
    weighted: float = 0.0
    along: float = 0.0
    same: int = 0
    both: int = 0


@dataclass(slots=True)
class ContributionSums:
    """Adds up what was measured of tensors, in the order in which they are added."""

    tensors: int = 0
    bases: int = 0
    base: float = 0.0
    update: float = 0.0
    same: int = 0
    both: int = 0
    experts: dict[str, _ExpertSums] = field(default_factory=dict)

    def add(self, plan: OutputPlan, tensor: TensorPlan, found: TensorContributions) -> None:
        """Add one tensor."""
        self.tensors += 1
        self.bases += found.base is not None
        self.base += found.base or 0.0
        self.update += found.update
        self.same += found.same
        self.both += found.both
        members = plan.parts[tensor.part].experts
        for place, expert in enumerate(found.experts):
            own = self.experts.setdefault(members[expert].source, _ExpertSums())
            own.square += found.deltas[place]
            own.weighted += found.deltas[place] * tensor.prepared.coefficients[expert] ** 2
            own.along += found.along[place]
            own.same += found.update_same[place]
            own.both += found.update_both[place]

    def total(self, order: Iterable[str] = ()) -> Contribution:
        """Return what they come to; experts in this order, those that are not in it behind.

        Updates of a base and whole values, of tensors without one, are no sum: of both together nothing is told.
        """
        names = list(dict.fromkeys((*(source for source in order if source in self.experts), *self.experts)))
        if 0 < self.bases < self.tensors:
            return Contribution(
                base_norm=None, update_norm=None, update_relative=None, sign_agreement=None,
                experts=tuple(map(_untold, names)),
            )  # fmt: skip
        update = _root(self.update)
        weighted = {source: _root(own.weighted) for source, own in self.experts.items()}
        known = [value for value in weighted.values() if value is not None]
        whole = math.fsum(known) if len(known) == len(weighted) else 0.0
        has_base = self.bases == self.tensors > 0
        base = _root(self.base) if has_base else None
        return Contribution(
            base_norm=base,
            update_norm=update,
            update_relative=_divided(update, base),
            sign_agreement=_divided(self.same, self.both),
            experts=tuple(
                _share(source, self.experts[source], self.update, _divided(weighted[source], whole))
                for source in names
            ),
        )


def _untold(source: str) -> ExpertShare:
    return ExpertShare(source=source, norm=None, norm_share=None, cosine=None, sign_agreement=None)


def _share(source: str, own: _ExpertSums, update: float, norm_share: float | None) -> ExpertShare:
    lengths = _root(own.square), _root(update)
    product = None if None in lengths else (lengths[0] or 0.0) * (lengths[1] or 0.0)
    cosine = _divided(own.along, product)
    return ExpertShare(
        source=source,
        norm=lengths[0],
        norm_share=norm_share,
        cosine=None if cosine is None else max(-1.0, min(1.0, cosine)),
        sign_agreement=_divided(own.same, own.both),
    )


def _root(square: float) -> float | None:
    return math.sqrt(square) if math.isfinite(square) and square >= 0 else None


def _divided(part: float | None, whole: float | None) -> float | None:
    if part is None or not whole:
        return None
    value = part / whole
    return value if math.isfinite(value) else None


def total_contribution(
    plan: OutputPlan, found: Mapping[str, TensorContributions], names: Iterable[str] | None = None
) -> Contribution | None:
    """Return what the experts contributed to the tensors of these names, all by default; None if none was measured."""
    wanted = None if names is None else frozenset(names)
    sums = ContributionSums()
    for tensor in plan.tensors:
        if tensor.name in found and (wanted is None or tensor.name in wanted):
            sums.add(plan, tensor, found[tensor.name])
    return sums.total(plan.output.expert_sources) if sums.tensors else None
