"""A cache directory on its own: what it holds, making it smaller, and checking it.

Nothing of this needs a Mergefile that can be read, or the code of custom operators: several projects may share a cache,
and the one whose folder we are in may be broken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.code_files import drop_scraps
from mergepipe.cache.layout import CacheLayout
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.errors import CacheError, StorageError
from mergepipe.fsio.locks import exclusive
from mergepipe.project.caches_used import references, remember_project
from mergepipe.project.reports import CacheInfo, PruneReport
from mergepipe.reporting import Reporter, SilentReporter

if TYPE_CHECKING:
    from mergepipe.project.caches_report import CacheCheck


class ProjectCache:
    """A cache directory, seen from a project. Made by `open_cache`, and by a project for itself."""

    def __init__(
        self, layout: CacheLayout, lock_path: Path | None, reporter: Reporter, workers: int, geometry: Geometry
    ) -> None:
        self._layout = layout
        self._lock_path = lock_path
        self._reporter = reporter
        self._workers = workers
        self._geometry = geometry

    def info(self) -> CacheInfo:
        """Return what the cache directory holds; nothing where there is none.

        Raises
        ------
        CacheError
            If the directory is something else, or a newer mergepipe wrote it.
        """
        from mergepipe.cache.maintenance import cache_info

        self._is_there()
        with opened(self._layout, self._geometry, self._reporter, create=False) as catalog:
            return CacheInfo(path=str(self._layout.root), **cache_info(catalog))

    def prune(
        self,
        max_bytes: int | None = None,
        max_age_days: float | None = None,
        *,
        unreferenced: bool = False,
        keep: Sequence[Path | str] = (),
        dry_run: bool = False,
    ) -> PruneReport:
        """Remove packs that are not needed, and everything left over from killed builds.

        A build that runs holds the cache: it is waited for.

        Parameters
        ----------
        max_bytes
            Remove the least recently used packs until the rest is within this size; 0 removes all.
        max_age_days
            Remove packs that were not used for this many days.
        unreferenced
            Remove packs that no lock names: not the lock of this project, not that of any other that builds with this
            cache, not those in ``keep``; and that no output holds which was published from this cache and still exists.
        keep
            Further locks, or folders with a ``Mergefile.lock``.
        dry_run
            Remove nothing, and report what would be removed.

        Raises
        ------
        MergepipeError
            If a lock that may name packs cannot be read: nothing is removed then.
        """
        from mergepipe.cache.maintenance import PruneLimits, plan_prune, prune
        from mergepipe.project.caches_report import prune_report
        from mergepipe.project.publication import links_changing

        if not self._is_there():
            return prune_report(None, self._layout, None, dry_run=dry_run)
        with self._held(read_only=dry_run), self._opened_to_change(dry_run=dry_run) as catalog:
            found = references(catalog, self._lock_path, keep) if unreferenced else None
            names = None if found is None else found.names
            limits = PruneLimits(max_bytes=max_bytes, max_age_days=max_age_days, keep=names)
            if dry_run:
                pruning = plan_prune(catalog, limits)
            else:
                with links_changing(catalog):
                    pruning = prune(catalog, limits)
        return prune_report(pruning, self._layout, found, dry_run=dry_run)

    def verify(self, *, dry_run: bool = False) -> CacheCheck:
        """Hash every pack, check every row of the catalog, and take out of use what is damaged.

        The next build makes anew what it needs of that. A build that runs holds the cache: it is waited for.

        Parameters
        ----------
        dry_run
            Take nothing out of use, and report what is damaged.

        Raises
        ------
        MergepipeError
            If the directory is no cache, a newer mergepipe wrote it, or the file system refuses.
        """
        from mergepipe.project.caches_verify import check_cache, nothing_to_check

        if not self._is_there():
            return nothing_to_check(self._layout, dry_run=dry_run)
        with self._held(read_only=dry_run):
            return check_cache(self._layout, self._geometry, self._workers, self._reporter, dry_run=dry_run)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Return whether there is anything; refuse a directory that is no cache, before anything in it is removed."""
        if not os.path.lexists(self._layout.root):
            return False
        if not self._layout.is_cache():
            raise CacheError(
                f"`{self._layout.root}` is not a cache of mergepipe",
                hint="`--cache-dir` names one; without it, the cache is `.mergecache` beside the Mergefile",
                path=str(self._layout.root),
            )
        return True

    @contextlib.contextmanager
    def _held(self, *, read_only: bool) -> Iterator[None]:
        """Hold the cache; whoever only reads does without where nothing can be written, and so nothing be changed."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(holding(self._layout, self._reporter))
            except StorageError:
                if not read_only:
                    raise
            yield

    @contextlib.contextmanager
    def _opened_to_change(self, *, dry_run: bool) -> Iterator[Catalog]:
        with opened(self._layout, self._geometry, self._reporter, create=not dry_run) as catalog:
            yield catalog


def open_cache(
    cache_dir: Path | str,
    *,
    lock_path: Path | str | None = None,
    reporter: Reporter | None = None,
    workers: int | None = None,
    geometry: Geometry = GEOMETRY_1,
) -> ProjectCache:
    """Return a cache directory to look after; nothing is opened, or made, before that is asked for.

    Parameters
    ----------
    lock_path
        The lock of the project that it is seen from, whether there is one or not; None without a project.
    reporter, workers, geometry
        As for `mergepipe.open`.
    """
    from mergepipe.project.session import processors

    layout = CacheLayout(Path(os.path.abspath(cache_dir)))  # noqa: PTH100 - resolve() would follow links
    lock = None if lock_path is None else Path(os.path.abspath(lock_path))  # noqa: PTH100 - as above
    return ProjectCache(layout, lock, reporter or SilentReporter(), workers or processors(), geometry)


@contextlib.contextmanager
def holding(layout: CacheLayout, reporter: Reporter) -> Iterator[list[bool]]:
    """Hold the cache; the list that it yields has an entry if another process had to be waited for.

    Raises
    ------
    CacheError, StorageError
        If it cannot be locked.
    """
    waited: list[bool] = []

    def waiting() -> None:
        waited.append(True)
        reporter.warn(f"waiting for another build that holds the cache `{layout.root}`")

    with exclusive(layout.lock, on_wait=waiting, warn=reporter.warn):
        yield waited


@contextlib.contextmanager
def opened(layout: CacheLayout, geometry: Geometry, reporter: Reporter, *, create: bool) -> Iterator[Catalog]:
    """Open the catalog, and tell what became of one that could not be used as it was.

    Raises
    ------
    CacheError
        If a newer mergepipe wrote it, or it cannot be opened.
    """
    catalog = Catalog(layout, geometry.block_elements, create=create)
    try:
        if catalog.notice:
            reporter.warn(catalog.notice)
        yield catalog
    finally:
        catalog.close()


@contextlib.contextmanager
def writing(
    layout: CacheLayout, lock_path: Path, geometry: Geometry, reporter: Reporter
) -> Iterator[tuple[Catalog, bool]]:
    """Hold the cache for a project and open its catalog for writing; also say whether another process was waited for.

    What killed processes left of packs in the making goes: nobody goes on with that, and no other process writes here.
    """
    layout.create()
    with holding(layout, reporter) as waited, opened(layout, geometry, reporter, create=True) as catalog:
        remember_project(layout, lock_path)
        drop_scraps(layout)
        yield catalog, bool(waited)
