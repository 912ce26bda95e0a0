"""Looking after the cache: what it holds, and removing what is not needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.statistics import forget_statistics, statistic_bytes
from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree

_DAY_NS = 86_400 * 1_000_000_000
_SUFFIX = ".safetensors"
_SCRAPS = ("catalog.db.unusable", "probe.tmp", "reserve")


def cache_info(catalog: Catalog) -> dict[str, int]:
    """Return counts and bytes of packs, staged and quarantined shards, and of the catalog."""
    layout = catalog.layout
    packs = _sizes(layout.packs)
    return {
        "packs": len(packs),
        "pack_bytes": sum(packs.values()),
        "staged_bytes": sum(_sizes(layout.staging).values()),
        "quarantined_bytes": sum(_sizes(layout.quarantine).values()),
        "catalog_bytes": layout.catalog.stat().st_size if layout.catalog.exists() else 0,
        "files": catalog.count("files"),
        "results": catalog.count("results"),
        "statistic_bytes": statistic_bytes(catalog),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneLimits:
    """What may stay in the cache.

    Attributes
    ----------
    max_bytes
        Of packs and statistics together.
    max_age_days
        How long ago a pack may have been used last.
    keep
        The names of the packs that somebody needs; None if that is not asked.
    """

    max_bytes: int | None = None
    max_age_days: float | None = None
    keep: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPack:
    """A pack that is removed.

    Attributes
    ----------
    file
        Its name in the folder of packs.
    nbytes
        Its size.
    reason
        ``unknown`` (no result lies in it), ``unreferenced``, ``age`` or ``size``.
    is_linked
        Whether another name holds its bytes too, such as a published file: then removing it frees nothing yet.
    """

    file: str
    nbytes: int
    reason: str
    is_linked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What is removed from a cache.

    Attributes
    ----------
    packs
        In the order in which they go.
    leftover_bytes
        Of what killed builds and damage left: staged and quarantined shards, a catalog that was set aside.
    statistic_bytes
        Of the statistics, 0 if they stay.
    kept_bytes
        Of packs and statistics that stay.
    """

    packs: tuple[PrunedPack, ...]
    leftover_bytes: int
    statistic_bytes: int
    kept_bytes: int

    @property
    def removed_bytes(self) -> int:
        """The bytes of all that is removed."""
        return sum(pack.nbytes for pack in self.packs) + self.leftover_bytes + self.statistic_bytes


def plan_prune(catalog: Catalog, limits: PruneLimits) -> Pruning:
    """Return what pruning removes; changes nothing.

    Packs go by reachability, age and size, the least recently used first, and always those that nothing is known of.
    Statistics go all together, where with the packs that are left they would be too much.
    """
    layout = catalog.layout
    files = _sizes(layout.packs)
    known = {f"{name}{_SUFFIX}": used_at for name, used_at in catalog.pack_names()}
    left = sum(files.get(file, 0) for file in known)
    oldest = None if limits.max_age_days is None else time.time_ns() - limits.max_age_days * _DAY_NS
    packs = [_pruned(layout, file, files[file], "unknown") for file in sorted(files.keys() - known.keys())]
    for file, used_at in known.items():
        reason = None
        if limits.keep is not None and file.removesuffix(_SUFFIX) not in limits.keep:
            reason = "unreferenced"
        elif oldest is not None and used_at < oldest:
            reason = "age"
        elif limits.max_bytes is not None and left > limits.max_bytes:
            reason = "size"
        if reason is not None:
            packs.append(_pruned(layout, file, files.get(file, 0), reason))
            left -= files.get(file, 0)
    taken = statistic_bytes(catalog)
    too_much = limits.max_bytes is not None and left + taken > limits.max_bytes  # together
    return Pruning(
        packs=tuple(packs),
        leftover_bytes=sum(sum(_sizes(folder).values()) for folder in (layout.staging, layout.quarantine))
        + sum(_scraps(layout).values()),
        statistic_bytes=taken if too_much else 0,
        kept_bytes=left + (0 if too_much else taken),
    )


def _pruned(layout: CacheLayout, file: str, nbytes: int, reason: str) -> PrunedPack:
    try:
        stat = (layout.packs / file).lstat()
    except OSError:
        return PrunedPack(file=file, nbytes=nbytes, reason=reason, is_linked=False)
    is_linked = (layout.packs / file).is_file() and stat.st_nlink > 1
    return PrunedPack(file=file, nbytes=nbytes, reason=reason, is_linked=is_linked)


def prune(catalog: Catalog, limits: PruneLimits) -> Pruning:
    """Remove what `plan_prune` says.

    The catalog forgets a pack before its file is removed, so that it never names bytes that are not there. Published
    outputs keep their bytes: they are links or copies. The caller holds the cache.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    layout, pruning = catalog.layout, plan_prune(catalog, limits)
    for folder in (layout.staging, layout.quarantine):
        for name in _sizes(folder):
            remove_tree(folder / name)
    for scrap in _scraps(layout):
        remove_tree(layout.root / scrap)
    catalog.drop_all_staged()
    for pack in pruning.packs:
        if pack.reason != "unknown":
            catalog.drop_pack(pack.file.removesuffix(_SUFFIX))
            crash_point("prune.forgotten")
        remove_tree(layout.packs / pack.file)
        crash_point("prune.removed")
    if pruning.statistic_bytes:
        forget_statistics(catalog)
    return pruning


def _scraps(layout: CacheLayout) -> Mapping[str, int]:
    """Return what else lies there of builds that were killed, and of a catalog that was damaged, with its bytes."""
    sizes = _sizes(layout.root)
    return {name: sizes[name] for name in _SCRAPS if name in sizes}


def _sizes(folder: Path) -> dict[str, int]:
    """Return the files of a folder with their sizes in bytes."""
    try:
        return dict(_entries(folder))
    except OSError as error:
        fail_storage(error, folder, "look into")


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # a build renames shards while we look
            yield path.name, path.lstat().st_size
