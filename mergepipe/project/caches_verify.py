"""Checking a cache: every byte of its packs, every row of its catalog; what is damaged is taken out of use.

Nothing is lost by that but time: a build makes anew what it needs, from sources that it hashes anew where it must.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.code_files import CodeCheck, StoredCode, check_code, code_folder, sealed_keys
from mergepipe.cache.database import CatalogState, set_aside
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.pack_check import PackCheck, PackRun, pack_folder
from mergepipe.cache.packs import PackStore
from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.row_check import RowChecker, RowFault, catalog_fault
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.fsio.identity import FileIdentity
from mergepipe.project.caches_report import CacheCheck, CacheProblem, CheckedCodes, CheckedPacks
from mergepipe.reporting import Reporter
from mergepipe.units import format_count

if TYPE_CHECKING:
    from mergepipe.engine.kernel import Scratch


def nothing_to_check(layout: CacheLayout, *, dry_run: bool) -> CacheCheck:
    """Return what is found where there is no cache."""
    return CacheCheck(
        path=str(layout.root),
        packs=CheckedPacks(),
        catalog="missing",
        rows={},
        problems=(),
        seconds=0.0,
        dry_run=dry_run,
    )


def check_cache(
    layout: CacheLayout, geometry: Geometry, workers: int, reporter: Reporter, *, dry_run: bool
) -> CacheCheck:
    """Check a cache, and unless it is a dry run take out of use what is damaged. The caller holds it.

    Raises
    ------
    MergepipeError
        If a newer mergepipe wrote it, or the file system refuses.
    """
    started = time.monotonic()
    if not dry_run and _state(layout, geometry) is CatalogState.OLDER:
        catalog = Catalog(layout, geometry.block_elements, create=True)  # taken over, or set aside
        reporter.warn(catalog.notice or "")
        catalog.close()
    with contextlib.closing(Catalog(layout, geometry.block_elements, create=False)) as catalog:
        fault = _fault(catalog)
        is_usable = catalog.state is CatalogState.OPEN and fault is None
        checks = _open_checks(catalog, geometry, is_usable=is_usable)
        _hash(checks, workers, reporter)
        coded = _check_codes(code_folder(layout).codes, workers, reporter)
        known = {name for name, _ in catalog.pack_names()} if is_usable else set()
        damaged = [check for check in checks if check.fault is not None]
        missing = sorted(known - {check.name for check in checks})
        lost = frozenset([*missing, *(check.name for check in damaged)])
        contents = {check.name: check.contents for check in checks if check.fault is None and check.name in known}
        rows = RowChecker(catalog, contents, lost, sealed_keys(coded))
        faults = list(rows.faults()) if is_usable else []
        strays = pack_folder(layout).strays
        state = catalog.state
    if not dry_run:
        _repair(layout, geometry, fault, damaged, missing, faults)
        _take_out(layout, geometry, _unfit(coded))
        _remember_identities(layout, geometry, checks, known)
    of_files = [*_pack_problems(damaged, missing), *_code_problems(_unfit(coded))]
    return CacheCheck(
        path=str(layout.root),
        packs=CheckedPacks(
            checked=len(checks),
            bytes=sum(check.nbytes for check in checks),
            damaged=len(damaged),
            missing=len(missing),
            unknown=len({check.name for check in checks} - known) if is_usable else 0,
            foreign=strays,
        ),
        codes=_checked_codes(coded, code_folder(layout).foreign),
        catalog=_catalog_word(state, fault, faults),
        rows=rows.rows,
        problems=(*_catalog_problems(fault), *of_files, *_row_problems(faults)),
        seconds=time.monotonic() - started,
        dry_run=dry_run,
    )


def _state(layout: CacheLayout, geometry: Geometry) -> CatalogState:
    with contextlib.closing(Catalog(layout, geometry.block_elements, create=False)) as catalog:
        return catalog.state


def _fault(catalog: Catalog) -> str | None:
    if catalog.state is CatalogState.DAMAGED:
        return "it is no catalog, or cannot be read"
    return catalog_fault(catalog) if catalog.state is CatalogState.OPEN else None


def _catalog_word(state: CatalogState, fault: str | None, faults: Sequence[RowFault]) -> str:
    if fault is not None:
        return "damaged"
    if state is not CatalogState.OPEN:
        return str(state.value)
    return "repaired" if faults else "sound"


# --- packs ------------------------------------------------------------------------------------------------------------


def _open_checks(catalog: Catalog, geometry: Geometry, *, is_usable: bool) -> list[PackCheck]:
    checks = []
    for name in pack_folder(catalog.layout).names:
        # A pack's digest is stated in the geometry of the build that made it.
        rows = catalog.rows("SELECT DISTINCT block_elements FROM results WHERE pack = ?", (name,)) if is_usable else []
        sizes = [size for (size,) in rows if isinstance(size, int) and size > 0]
        own = Geometry(block_elements=sizes[0]) if len(sizes) == 1 else geometry
        checks.append(PackCheck(name=name, path=catalog.layout.packs / f"{name}.safetensors", geometry=own))
    return checks


def _hash(checks: Sequence[PackCheck], workers: int, reporter: Reporter) -> None:
    """Hash all packs, each by all workers."""
    from mergepipe.engine.pool import WorkerPool  # numpy is imported only to hash

    pool = WorkerPool(workers)
    reporter.begin("checking packs", sum(_size(check) for check in checks))
    last = None
    try:
        for run, digests in pool.run(_hash_run, _runs(checks)):
            if last is not None and run.pack is not last:
                last.finish()
            last = run.pack
            last.take(run, digests)
            reporter.advance(run.nbytes)
    finally:
        reporter.end()
        pool.close()
    for check in checks:
        check.finish()


def _size(check: PackCheck) -> int:
    try:
        return check.path.lstat().st_size
    except OSError:
        return 0


def _runs(checks: Sequence[PackCheck]) -> Iterator[PackRun]:
    for check in checks:
        check.open()
        yield from check.runs()


def _hash_run(run: PackRun, scratch: Scratch) -> tuple[PackRun, bytes | str]:
    return run, run.hash(scratch.buffer("check", run.nbytes))


def _check_codes(codes: Sequence[StoredCode], workers: int, reporter: Reporter) -> list[CodeCheck]:
    """Read all progressive packs, several at once."""
    from mergepipe.engine.pool import WorkerPool

    if not codes:
        return []
    checks = []
    pool = WorkerPool(workers)
    reporter.begin("checking codes", sum(code.nbytes for code in codes))
    try:
        for check in pool.run(lambda code, _: check_code(code), codes):
            checks.append(check)
            reporter.advance(check.code.nbytes)
    finally:
        reporter.end()
        pool.close()
    return checks


def _unfit(checks: Sequence[CodeCheck]) -> list[CodeCheck]:
    return [check for check in checks if check.fault is not None]


def _checked_codes(checks: Sequence[CodeCheck], foreign: int) -> CheckedCodes:
    nbytes = sum(check.code.nbytes for check in checks)
    return CheckedCodes(checked=len(checks), bytes=nbytes, damaged=len(_unfit(checks)), foreign=foreign)


# --- repairing --------------------------------------------------------------------------------------------------------


def _repair(
    layout: CacheLayout,
    geometry: Geometry,
    fault: str | None,
    damaged: Sequence[PackCheck],
    missing: Sequence[str],
    faults: Sequence[RowFault],
) -> None:
    """Take out of use what is damaged. A pack that shares its bytes with an output is renamed, which touches both."""
    if fault is None and not damaged and not missing and not faults:
        return
    if fault is not None:
        set_aside(layout.catalog)
    with contextlib.closing(Catalog(layout, geometry.block_elements, create=True)) as catalog:
        packs = PackStore(catalog, geometry)
        for check in damaged:
            packs.quarantine(check.name)
        with catalog.transaction() as db:
            for name in missing:
                catalog.drop_pack(name)
            for row in faults:
                db.execute(f"DELETE FROM {row.table} WHERE rowid = ?", (row.row,))


def _take_out(layout: CacheLayout, geometry: Geometry, unfit: Sequence[CodeCheck]) -> None:
    """Take progressive packs out of use; what is known of them in the catalog stays, for they are made again."""
    if unfit:
        with contextlib.closing(Catalog(layout, geometry.block_elements, create=True)) as catalog:
            for check in unfit:
                CodeStore(catalog).quarantine(bytes.fromhex(check.code.key))


def _remember_identities(
    layout: CacheLayout, geometry: Geometry, checks: Sequence[PackCheck], known: set[str]
) -> None:
    """Record what right packs look like now, so that the next build need not hash them; that is no use of them."""
    right = [check for check in checks if check.fault is None and check.name in known]
    if not right:
        return
    with contextlib.closing(Catalog(layout, geometry.block_elements, create=True)) as catalog:
        for check in right:
            identity = FileIdentity.at(check.path)
            if identity is not None and identity == check.identity != catalog.pack_identity(check.name):
                catalog.correct_pack_identity(check.name, identity)


# --- in words ---------------------------------------------------------------------------------------------------------


def _catalog_problems(fault: str | None) -> Iterator[CacheProblem]:
    if fault is not None:
        repair = "set aside as `catalog.db.unusable`; a new one is begun, and the next build reads all sources again"
        yield CacheProblem(kind="catalog", where="catalog.db", what=fault, repair=repair)


def _pack_problems(damaged: Sequence[PackCheck], missing: Sequence[str]) -> Iterator[CacheProblem]:
    for check in damaged:
        repair = "moved to `quarantine`; the next build makes anew what it needs of it"
        what = check.fault or ""
        if check.is_linked:
            what += ", and an output that is the same file is damaged like it"
        where = os.path.join("packs", check.path.name)
        facts = {"pack": check.name, "linked": check.is_linked}
        yield CacheProblem(kind="pack", where=where, what=what, repair=repair, facts=facts)
    for name in missing:
        repair = "its entries are dropped; the next build makes anew what it needs of it"
        where = os.path.join("packs", f"{name}.safetensors")
        yield CacheProblem(kind="missing", where=where, what="it is not there", repair=repair, facts={"pack": name})


def _code_problems(unfit: Sequence[CodeCheck]) -> Iterator[CacheProblem]:
    for check in unfit:
        yield CacheProblem(
            kind="code",
            where=os.path.join("progressive", check.code.path.name),
            what=check.fault or "",
            repair="moved to `quarantine`; a build that reads it makes it again from the sources",
            facts={"code": check.code.key},
        )


def _row_problems(faults: Sequence[RowFault]) -> Iterator[CacheProblem]:
    counts: Mapping[tuple[str, str], int] = Counter((fault.table, fault.why) for fault in faults)
    for (table, why), count in sorted(counts.items()):
        yield CacheProblem(
            kind="rows",
            where=f"catalog.db, table `{table}`",
            what=f"{format_count(count, 'row')}, {'which' if count == 1 else 'each of which'} {why}",
            repair="dropped; the next build finds out anew what it needs of it",
            facts={"table": table, "count": count},
        )
