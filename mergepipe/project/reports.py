"""What the Python API returns and the command line prints: plain values with a stable JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mergepipe.lockfile.assemble import finite
from mergepipe.plan.values import OutputPlan
from mergepipe.values import dataclass

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far the output may be from the full-read merge: ``exact``, ``certified``, ``estimated`` or ``none``."""

    kind: str
    absolute: float | None
    relative_to_update: float | None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"kind": self.kind, "absolute": self.absolute, "relative_to_update": self.relative_to_update}


EXACT = Bound(kind="exact", absolute=0.0, relative_to_update=0.0)


def bound_of(plan: OutputPlan) -> Bound:
    """Return what is known of the distance between a planned output and its full-read merge."""
    if plan.outcome is None:
        return Bound(kind="none", absolute=None, relative_to_update=None) if plan.is_pending else EXACT
    found = plan.outcome.bound
    return Bound(
        kind=found.kind,
        absolute=finite(found.absolute),
        relative_to_update=finite(found.relative_to_update),
    )


def budget_notes(plan: OutputPlan) -> tuple[str, ...]:
    """Return what is worth saying of a budget that limits nothing, though it was meant to."""
    budget, outcome = plan.output.budget, plan.outcome
    if budget is None or outcome is None or not budget.max_error or plan.is_inexact or not plan.expert_blocks:
        return ()
    why = f"`{plan.output.operator}` has no bound that is known to be within it when less is read"
    return (f"max_error {budget.max_error:g}: everything is read, {why}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReport:
    """What a build did for one output.

    Attributes
    ----------
    state
        ``built`` or ``unchanged``.
    path, digest
        The output directory as the Mergefile says (None for an output that is not published), and the digest of its
        tensors.
    expert_bytes
        ``full``, ``planned``, ``read``: bytes of expert blocks of a full read, of the access set, and really read.
    blocks
        ``total``, ``computed``, ``cached``, ``copied``.
    expert_blocks
        ``total``, ``read``, ``omitted``, ``zero``, ``shared``.
    levels
        By level (``omitted``, planes, ``exact``) the expert blocks that carry content of their own; None where the
        budget buys whole blocks.
    decisions
        Policy decisions, such as dropped tensors.
    notes
        What is worth knowing of its budget.
    """

    name: str
    state: str
    path: str | None
    digest: str
    operator: str
    expert_bytes: Mapping[str, int]
    base_bytes_read: int
    index_bytes_read: int
    bytes_written: int
    blocks: Mapping[str, int]
    expert_blocks: Mapping[str, int]
    bound: Bound
    seconds: float
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    levels: Mapping[str, int] | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "state": self.state,
            "path": self.path,
            "digest": self.digest,
            "operator": self.operator,
            "expert_bytes": dict(self.expert_bytes),
            "base_bytes_read": self.base_bytes_read,
            "index_bytes_read": self.index_bytes_read,
            "bytes_written": self.bytes_written,
            "blocks": dict(self.blocks),
            "expert_blocks": dict(self.expert_blocks),
            "levels": None if self.levels is None else dict(self.levels),
            "bound": self.bound.as_json(),
            "seconds": round(self.seconds, 6),
            "decisions": list(self.decisions),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did.

    ``signed`` says of each output whether it was signed now (else it was before, as it is); None where none was to be.
    """

    lock_path: str
    lock_changed: bool
    outputs: Mapping[str, OutputReport]
    signed: Mapping[str, bool] | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "lock": {"path": self.lock_path, "changed": self.lock_changed},
            "outputs": {name: output.as_json() for name, output in self.outputs.items()},
            **({} if self.signed is None else {"signed": dict(self.signed)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStatus:
    """Whether an output is what a build would make.

    Attributes
    ----------
    state
        ``up-to-date``, ``stale``, or ``unbuilt``.
    path
        Its directory; None for an output that is not published.
    reasons
        Why it is not up to date, in words.
    """

    name: str
    state: str
    path: str | None
    reasons: tuple[str, ...]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"state": self.state, "path": self.path, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """The status of some outputs and of the lock (``current``, ``outdated``, ``missing``, or ``unverified``)."""

    lock_path: str
    lock_state: str
    outputs: Mapping[str, OutputStatus]

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "lock": {"path": self.lock_path, "state": self.lock_state},
            "outputs": {name: output.as_json() for name, output in self.outputs.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """What the cache directory holds: counts and bytes."""

    path: str
    packs: int
    pack_bytes: int
    codes: int = 0
    code_bytes: int = 0
    staged_bytes: int
    quarantined_bytes: int
    catalog_bytes: int
    files: int
    results: int
    statistic_bytes: int

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What pruning removed, or would remove.

    Attributes
    ----------
    path
        The cache directory.
    removed, removed_bytes, kept_bytes
        The number of packs and the bytes of all that was removed; the bytes of packs, codes and statistics that are
        left.
    kept
        The bytes that are left of ``packs``, ``codes`` and ``statistics``.
    leftover_bytes, statistic_bytes, linked_bytes
        Of the bytes that were removed, those that killed builds and damage had left, those of statistics, and those of
        packs whose bytes a published output still holds, so that removing them frees nothing.
    packs
        The packs: file name, bytes, and reason (``unknown``, ``unreferenced``, ``age``, ``size``).
    codes
        The same of progressive packs; none of them is unknown.
    locks, missing_locks
        Where reachability was asked for: the locks that were read, and those that do not exist.
    dry_run
        Whether nothing was removed.
    """

    path: str = ""
    removed: int = 0
    removed_bytes: int = 0
    kept_bytes: int = 0
    leftover_bytes: int = 0
    statistic_bytes: int = 0
    linked_bytes: int = 0
    packs: tuple[tuple[str, int, str], ...] = ()
    codes: tuple[tuple[str, int, str], ...] = ()
    locks: tuple[str, ...] = ()
    missing_locks: tuple[str, ...] = ()
    dry_run: bool = False
    kept: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "kept": dict(self.kept),
            "packs": [{"file": file, "bytes": nbytes, "reason": reason} for file, nbytes, reason in self.packs],
            "codes": [{"file": file, "bytes": nbytes, "reason": reason} for file, nbytes, reason in self.codes],
            "locks": list(self.locks),
            "missing_locks": list(self.missing_locks),
        }
