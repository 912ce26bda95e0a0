"""What looking after a cache found and did: plain values with a stable JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.maintenance import Pruning
from mergepipe.project.caches_used import References
from mergepipe.project.reports import Json, PruneReport
from mergepipe.values import dataclass


def prune_report(
    pruning: Pruning | None, layout: CacheLayout, found: References | None, *, dry_run: bool
) -> PruneReport:
    """Return what pruning removed; None where there is no cache."""
    path = str(layout.root)
    if pruning is None:
        return PruneReport(path=path, dry_run=dry_run)
    return PruneReport(
        path=path,
        removed=len(pruning.packs),
        removed_bytes=pruning.removed_bytes,
        kept_bytes=pruning.kept_bytes,
        kept=pruning.kept,
        leftover_bytes=pruning.leftover_bytes,
        statistic_bytes=pruning.statistic_bytes,
        linked_bytes=sum(pack.nbytes for pack in pruning.packs if pack.is_linked),
        packs=tuple((pack.file, pack.nbytes, pack.reason) for pack in pruning.packs),
        codes=tuple((code.file, code.nbytes, code.reason) for code in pruning.codes),
        locks=found.locks if found else (),
        missing_locks=found.missing if found else (),
        dry_run=dry_run,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheProblem:
    """Something in a cache that is not what it should be.

    Attributes
    ----------
    kind
        ``pack`` (a file), ``missing`` (a pack that is recorded and not there), ``code`` (a progressive pack), ``rows``
        (of one table of the catalog, that all have the same fault) or ``catalog`` (all of it).
    where
        The file in the cache directory, or the table.
    what
        What is wrong, in words.
    repair
        What is done about it.
    facts
        ``pack``, ``code``, ``table``, ``count``, ``linked``.
    """

    kind: str
    where: str
    what: str
    repair: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The place and what is wrong there."""
        return f"{self.where}: {self.what}"

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {"kind": self.kind, "where": self.where, "message": self.what, "repair": self.repair, **self.facts}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPacks:
    """The packs of a cache: how many were hashed, their bytes, and what was found.

    ``unknown`` are those that no result lies in: no problem, and pruning removes them. ``foreign`` are files in their
    folder that are no packs: nothing touches them.
    """

    checked: int = 0
    bytes: int = 0
    damaged: int = 0
    missing: int = 0
    unknown: int = 0
    foreign: int = 0

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCodes:
    """The progressive packs of a cache: how many were read whole, their bytes, and what was found.

    ``foreign`` are files in their folder that are none: nothing touches them.
    """

    checked: int = 0
    bytes: int = 0
    damaged: int = 0
    foreign: int = 0

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCheck:
    """What `cache verify` found.

    Attributes
    ----------
    path
        The cache directory.
    catalog
        ``sound``, ``repaired`` (rows are damaged), ``damaged`` (all of it), ``older`` (of an earlier mergepipe: not
        looked into) or ``missing``.
    rows
        The rows that were checked, by table.
    dry_run
        Whether nothing was taken out of use.
    """

    path: str
    packs: CheckedPacks
    codes: CheckedCodes = CheckedCodes()
    catalog: str
    rows: Mapping[str, int]
    problems: tuple[CacheProblem, ...]
    seconds: float
    dry_run: bool

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "path": self.path,
            "ok": self.ok,
            "dry_run": self.dry_run,
            "packs": self.packs.as_json(),
            "codes": self.codes.as_json(),
            "catalog": {"state": self.catalog, "rows": dict(self.rows)},
            "problems": [problem.as_json() for problem in self.problems],
            "seconds": round(self.seconds, 6),
        }
