"""Looking after the cache: what it holds, and removing what is not needed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.code_files import StoredCode, code_folder, is_needed
from mergepipe.cache.layout import CODE_FILE, CODE_SCRAP, PACK_FILE, STAGED_FILE, CacheLayout
from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.statistics import forget_statistics, statistic_bytes
from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree
from mergepipe.values import dataclass

_DAY_NS = 86_400 * 1_000_000_000
_SUFFIX = ".safetensors"
_SCRAP = re.compile(r"catalog\.db\.unusable|probe\.tmp|reserve")
_DAMAGED = re.compile(f"{PACK_FILE.pattern}|{CODE_FILE.pattern}")


def cache_info(catalog: Catalog) -> dict[str, int]:
    """Return counts and bytes of packs, codes, staged and quarantined shards, and of the catalog."""
    layout = catalog.layout
    packs, codes = _sizes(layout.packs, PACK_FILE), code_folder(layout).codes
    return {
        "packs": len(packs),
        "pack_bytes": sum(packs.values()),
        "codes": len(codes),
        "code_bytes": sum(code.nbytes for code in codes),
        "staged_bytes": sum(_sizes(layout.staging, STAGED_FILE).values()),
        "quarantined_bytes": sum(_sizes(layout.quarantine, _DAMAGED).values()),
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
        Of packs, codes and statistics together.
    max_age_days
        How long ago a pack or a code may have been used last.
    keep
        The names of the packs that somebody needs; None if that is not asked. Codes are needed as long as both tensors
        that they follow from are those of source files.
    """

    max_bytes: int | None = None
    max_age_days: float | None = None
    keep: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedPack:
    """A pack, or a code, that is removed.

    Attributes
    ----------
    file
        Its name in the folder of packs, or of codes.
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
    packs, codes
        Shards, and progressive packs, in the order in which they go.
    leftover_bytes
        Of what killed builds and damage left: staged and quarantined shards, a catalog that was set aside.
    statistic_bytes
        Of the statistics, 0 if they stay.
    kept
        The bytes of ``packs``, ``codes`` and ``statistics`` that stay.
    """

    packs: tuple[PrunedPack, ...]
    codes: tuple[PrunedPack, ...]
    leftover_bytes: int
    statistic_bytes: int
    kept: Mapping[str, int]

    @property
    def kept_bytes(self) -> int:
        """The bytes of all that stays."""
        return sum(self.kept.values())

    @property
    def removed_bytes(self) -> int:
        """The bytes of all that is removed."""
        return sum(pack.nbytes for pack in (*self.packs, *self.codes)) + self.leftover_bytes + self.statistic_bytes


def plan_prune(catalog: Catalog, limits: PruneLimits) -> Pruning:
    """Return what pruning removes; changes nothing.

    Packs go by reachability, age and size, the least recently used first, and always those that nothing is known of.
    Codes go by the same, and by size before packs: they are made again from the sources alone. Statistics go all
    together, where with the packs that are left they would be too much. Files whose names are not of our form are
    somebody else's, and stay.
    """
    layout = catalog.layout
    files = _sizes(layout.packs, PACK_FILE)
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
    codes, coded = _pruned_codes(catalog, limits, left + taken, oldest)
    too_much = limits.max_bytes is not None and left + coded + taken > limits.max_bytes  # together
    return Pruning(
        packs=tuple(packs),
        codes=codes,
        leftover_bytes=sum(sum(_sizes(folder, own).values()) for folder, own in _left_in(layout))
        + sum(_scraps(layout).values()),
        statistic_bytes=taken if too_much else 0,
        kept={"packs": left, "codes": coded, "statistics": 0 if too_much else taken},
    )


def _pruned_codes(
    catalog: Catalog, limits: PruneLimits, others: int, oldest: float | None
) -> tuple[tuple[PrunedPack, ...], int]:
    """Return the codes that are removed, and the bytes of those that stay beside so many bytes of other things."""
    digests = None if limits.keep is None else {digest for (digest,) in catalog.rows("SELECT digest FROM tensors", ())}
    going: list[tuple[StoredCode, str]] = []
    staying: list[StoredCode] = []
    for code in sorted(code_folder(catalog.layout).codes, key=lambda code: (code.used_at_ns, code.key)):
        if digests is not None and not is_needed(code, digests):
            going.append((code, "unreferenced"))
        elif oldest is not None and code.used_at_ns < oldest:
            going.append((code, "age"))
        else:
            staying.append(code)
    left = sum(code.nbytes for code in staying)
    for code in staying if limits.max_bytes is not None else ():
        if others + left <= (limits.max_bytes or 0):
            break
        going.append((code, "size"))
        left -= code.nbytes
    return tuple(
        PrunedPack(file=code.path.name, nbytes=code.nbytes, reason=reason, is_linked=False) for code, reason in going
    ), left


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
    outputs keep their bytes: they are links or copies. What the catalog need not be told goes first: on a full disk
    there is no room to tell it anything. The caller holds the cache.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    layout, pruning = catalog.layout, plan_prune(catalog, limits)
    for folder, own in _left_in(layout):
        for name in _sizes(folder, own):
            remove_tree(folder / name)
    for scrap in _scraps(layout):
        remove_tree(layout.root / scrap)
    for code in pruning.codes:
        if code.reason != "unreferenced":  # what it comes to stays known
            _remove(layout.progressive / code.file)
    for pack in pruning.packs:
        if pack.reason == "unknown":
            _remove(layout.packs / pack.file)
    catalog.drop_all_staged()
    for pack in pruning.packs:
        if pack.reason != "unknown":
            catalog.drop_pack(pack.file.removesuffix(_SUFFIX))
            crash_point("prune.forgotten")
            if PACK_FILE.fullmatch(pack.file):  # a damaged row may name anything
                _remove(layout.packs / pack.file)
    for code in pruning.codes:
        if code.reason == "unreferenced":
            CodeStore(catalog).forget(bytes.fromhex(code.file.removesuffix(".planes")))
            crash_point("prune.forgotten")
            _remove(layout.progressive / code.file)
    if pruning.statistic_bytes:
        forget_statistics(catalog)
    return pruning


def _remove(path: Path) -> None:
    remove_tree(path)
    crash_point("prune.removed")


def _left_in(layout: CacheLayout) -> tuple[tuple[Path, re.Pattern[str]], ...]:
    """Return the folders in which killed builds and damage leave files, with the form of these files' names."""
    return (layout.staging, STAGED_FILE), (layout.quarantine, _DAMAGED), (layout.progressive, CODE_SCRAP)


def _scraps(layout: CacheLayout) -> Mapping[str, int]:
    """Return what else lies there of builds that were killed, and of a catalog that was damaged, with its bytes."""
    return _sizes(layout.root, _SCRAP)


def _sizes(folder: Path, own: re.Pattern[str]) -> dict[str, int]:
    """Return the files of a folder whose names have a form, with their sizes in bytes."""
    try:
        return {name: size for name, size in _entries(folder) if own.fullmatch(name)}
    except OSError as error:
        fail_storage(error, folder, "look into")


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # a build renames shards while we look
            yield path.name, path.lstat().st_size
