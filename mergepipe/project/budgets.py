"""Resolving budgets: the access set of an output as soon as what it follows from is known.

It follows from the plan and the content of the sources alone. The record of an output keeps the one that it was built
with, so that finding out that nothing changed takes neither statistics nor planning; and the catalog keeps those that
were planned last, so that what `plan` showed is not planned again to be built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from mergepipe.cache.budgets import keep_budget, kept_budget
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.digest import record_digest
from mergepipe.graph.given import check_bases
from mergepipe.graph.inputs import source_pins
from mergepipe.graph.outcome_check import fits_numbers, fits_tensors
from mergepipe.graph.prices import are_coded
from mergepipe.plan.access import TensorAccess
from mergepipe.plan.budgeted import without_outcome
from mergepipe.plan.codes import read_codes
from mergepipe.plan.output import plan_digest
from mergepipe.plan.values import BudgetOutcome, OutputPlan
from mergepipe.progressive.levels import CODE_VERSION

if TYPE_CHECKING:
    from mergepipe.graph.survey import Survey

PENDING = "which blocks its budget reads is not known yet"
"""The reason why an output whose statistics are not all known is not up to date."""
# Bumped when the same content may give another access set or another bound, or when these are kept in another form.
PLANNER_VERSION = 1


class _Loss(msgspec.Struct, frozen=True):
    tensor: int
    omitted_bytes: int
    bound: float | None
    expected: float
    omitted_mass: float


class _Bound(msgspec.Struct, frozen=True):
    kind: str
    absolute: float | None
    relative_to_update: float | None
    relative_to_base: float | None


class KnownBudget(msgspec.Struct, frozen=True):
    """The form in which a resolved budget is kept; ``levels`` has the tensors of which anything is left out."""

    key: bytes
    levels: dict[str, list[bytes | None]]
    block_bytes: int
    omitted_blocks: int
    bound: _Bound
    expected: float
    omitted_mass: float
    experts: dict[str, int]
    losses: list[tuple[str, _Loss]]
    uncertainty: float = 0.0


def resolved(
    plan: OutputPlan, index: SourceIndex, catalog: Catalog, recorded: KnownBudget | None = None
) -> OutputPlan:
    """Return a plan with its access set, if all that it follows from is known; else as it is.

    Parameters
    ----------
    recorded
        What the output was built with before.
    """
    if not plan.is_pending:
        return plan
    check_bases(plan, index)
    key = _key(plan, index)
    if key is not None:
        known = recorded if recorded is not None and recorded.key == key else _kept(catalog, key)
        restored = None if known is None else _restored(plan, known)
        deltas = () if restored is None else (c for t in restored.tensors for c in read_codes(plan, t).values())
        if restored is not None and are_coded(deltas, index.codes, index):
            return restored  # otherwise the catalog has lost what codes come to: they are made again
    from mergepipe.graph.survey import known_survey

    survey = known_survey(plan, index, StatisticStore(catalog), index.codes)
    return plan if survey is None else _planned(plan, survey, key, catalog)


def planned(plan: OutputPlan, survey: Survey, index: SourceIndex, catalog: Catalog) -> OutputPlan:
    """Return a plan with the access set that follows from a survey.

    It is kept for the next one who asks, but where a source was not read whole yet: samples are taken without its base.
    """
    return _planned(plan, survey, _key(plan, index), catalog)


def _planned(plan: OutputPlan, survey: Survey, key: bytes | None, catalog: Catalog) -> OutputPlan:
    from mergepipe.plan.budgeted import with_access

    found = with_access(plan, survey)
    if key is not None and catalog.is_writable and found.outcome is not None and found.outcome.is_measured:
        keep_budget(catalog, key, msgspec.msgpack.encode(_as_known(found, found.outcome, key)))
    return found


def _kept(catalog: Catalog, key: bytes) -> KnownBudget | None:
    """Return what the catalog has under this key; what is of another form, or about something else, is absent."""
    data = kept_budget(catalog, key)
    try:
        known = None if data is None else msgspec.msgpack.decode(data, type=KnownBudget)
    except (msgspec.DecodeError, RecursionError):
        return None
    return known if known is not None and known.key == key else None


def _key(plan: OutputPlan, index: SourceIndex) -> bytes | None:
    """Return the digest of all that an access set follows from, None while the content of a source is not known."""
    sources = source_pins(plan, index)
    known: Mapping[str, bytes] = {source: digest for source, digest in sources.items() if digest is not None}
    if len(known) < len(sources):
        return None
    budget = plan.output.budget
    codes = [CODE_VERSION] if budget is not None and budget.uses_levels else []
    return record_digest("budget", PLANNER_VERSION, plan_digest(plan), known, *codes)


def known_budget(plan: OutputPlan, index: SourceIndex) -> KnownBudget | None:
    """Return what a record keeps of a resolved plan; None for one without a budget, or that needs no measuring."""
    outcome = plan.outcome
    if outcome is None or not outcome.is_measured:
        return None
    key = _key(without_outcome(plan), index)
    assert key is not None, "every source of a finished output is known"
    return _as_known(plan, outcome, key)


def _as_known(plan: OutputPlan, outcome: BudgetOutcome, key: bytes) -> KnownBudget:
    bound = outcome.bound
    return KnownBudget(
        key=key,
        levels={t.name: list(t.access.levels) for t in plan.tensors if t.access is not None},
        block_bytes=outcome.block_bytes,
        omitted_blocks=outcome.omitted_blocks,
        bound=_Bound(bound.kind, bound.absolute, bound.relative_to_update, bound.relative_to_base),
        expected=outcome.expected,
        omitted_mass=outcome.omitted_mass,
        uncertainty=outcome.uncertainty,
        experts=dict(outcome.experts),
        losses=[
            (name, _Loss(loss.tensor, loss.omitted_bytes, loss.bound, loss.expected, loss.omitted_mass))
            for name, loss in outcome.losses
        ],
    )


def _restored(plan: OutputPlan, known: KnownBudget) -> OutputPlan | None:
    """Return the plan with what is known of its budget; None where that is not about this plan."""
    from mergepipe.plan.bounds import ErrorBound
    from mergepipe.plan.budgeted import with_outcome
    from mergepipe.plan.selection import TensorLoss

    accesses = {name: TensorAccess(levels=tuple(levels)) for name, levels in known.levels.items()}
    outcome = BudgetOutcome(
        block_bytes=known.block_bytes,
        omitted_blocks=known.omitted_blocks,
        bound=ErrorBound(**msgspec.structs.asdict(known.bound)),
        expected=known.expected,
        omitted_mass=known.omitted_mass,
        uncertainty=known.uncertainty,
        experts=known.experts,
        losses=tuple((name, TensorLoss(**msgspec.structs.asdict(loss))) for name, loss in known.losses),
    )
    fits = fits_tensors(plan, accesses) and fits_numbers(plan, outcome)
    return with_outcome(plan, accesses, outcome) if fits else None
