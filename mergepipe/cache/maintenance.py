"""Looking after the cache: what it holds, and removing what is not needed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.statistics import forget_statistics, statistic_bytes
from mergepipe.errors import fail_storage
from mergepipe.fsio.durable import remove_tree

_DAY_NS = 86_400 * 1_000_000_000


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


def prune(catalog: Catalog, *, max_bytes: int | None, max_age_days: float | None) -> dict[str, int]:
    """Remove packs by age and size, least recently used first, and always what killed builds left.

    Statistics go all together, where with the packs that are left they would be too much.

    The catalog forgets a pack before its file is removed, so that it never names bytes that are not there. Published
    outputs keep their bytes: they are links or copies.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    layout = catalog.layout
    removed = 0
    removed_bytes = _clear(layout.staging) + _clear(layout.quarantine)
    catalog.drop_all_staged()
    sizes = _sizes(layout.packs)
    known = dict(catalog.pack_names())
    for file in sizes.keys() - {f"{name}.safetensors" for name in known}:
        removed, removed_bytes = removed + 1, removed_bytes + sizes[file]
        remove_tree(layout.packs / file)
    left = sum(sizes.get(f"{name}.safetensors", 0) for name in known)
    oldest = time.time_ns() - max_age_days * _DAY_NS if max_age_days is not None else None
    for name, used_at in known.items():
        too_old = oldest is not None and used_at < oldest
        too_much = max_bytes is not None and left > max_bytes
        if too_old or too_much:
            catalog.drop_pack(name)
            remove_tree(layout.packs / f"{name}.safetensors")
            size = sizes.get(f"{name}.safetensors", 0)
            removed, removed_bytes, left = removed + 1, removed_bytes + size, left - size
    taken = statistic_bytes(catalog)
    if max_bytes is not None and left + taken > max_bytes:  # too much together
        forget_statistics(catalog)
        removed_bytes, taken = removed_bytes + taken, 0
    return {"removed": removed, "removed_bytes": removed_bytes, "kept_bytes": left + taken}


def _sizes(folder: Path) -> dict[str, int]:
    """Return the files of a folder with their sizes in bytes."""
    sizes = {}
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # a build renames shards while we look
                sizes[path.name] = path.lstat().st_size
    except OSError as error:
        fail_storage(error, folder, "look into")
    return sizes


def _clear(folder: Path) -> int:
    """Remove everything in a folder; return the bytes."""
    sizes = _sizes(folder)
    for name in sizes:
        remove_tree(folder / name)
    return sum(sizes.values())
