"""Room on disks: what a build takes where, and what is free there, before it begins.

Shards are written in the cache. An output directory on the same file system shares their bytes (links); on another one
they are copied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.sources import SourceIndex
from mergepipe.engine.limits import check_memory, hold_bytes
from mergepipe.errors import MergepipeError, StorageError, raise_collected
from mergepipe.fsio.durable import remove_tree
from mergepipe.plan.values import OutputPlan
from mergepipe.project.build import Prepared
from mergepipe.project.forecast import Forecast, forecast, is_settled, other_layouts
from mergepipe.project.reads_codes import PackRoom
from mergepipe.project.stages import Plans, record_place
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

# More than the header of a progressive pack takes by itself, and for each block.
_CODE_HEADER = 8192
_CODE_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """One file system that a build writes to.

    Attributes
    ----------
    path
        The cache, or the directory of the first output there.
    cache
        Whether the cache lies there.
    outputs
        The names of the outputs whose directories lie there and are written.
    needed, certain, codes
        Bytes that the build takes there, at most; what it takes whatever its inputs turn out to be; and what the codes
        of deltas take that it makes whatever these are, at most where their size is not known.
    free
        Bytes that are free, as `df` says it; None where the system does not say.
    limit
        Bytes that this user can really write: root may use what is kept back for it.
    """

    path: Path
    cache: bool
    outputs: tuple[str, ...]
    needed: int
    certain: int
    free: int | None
    limit: int | None
    codes: int = 0

    @property
    def fits(self) -> bool:
        """Whether there is room for the build."""
        return self.free is None or self.needed <= self.free


def disk_space(plans: Plans, forecasts: Mapping[str, Forecast], cache: Path) -> tuple[DiskSpace, ...]:
    """Return the file systems that a build of these outputs writes to: that of the cache first.

    Parameters
    ----------
    cache
        The cache directory; it need not be there yet.
    """
    made = [plan for plan in plans.plans if not forecasts[plan.output.name].unchanged]
    device = _device(cache)
    places: dict[int, list[OutputPlan]] = {device: []}
    for plan in made:
        if plan.output.publish:
            places.setdefault(_device(record_place(plans.mergefile, plan.output)), []).append(plan)
    found = []
    for number, there in places.items():
        own = number == device
        room = [forecasts[plan.output.name] for plan in made] if own else []
        copies = [] if own else [(_size(plan), _is_certain(plan, plans, forecasts)) for plan in there]
        path = cache if own else record_place(plans.mergefile, there[0].output)
        free, limit = _free(path)
        found.append(
            DiskSpace(
                path=path,
                cache=own,
                outputs=tuple(plan.output.name for plan in there),
                needed=sum(one.cache_bytes for one in room) + sum(size for size, _ in copies),
                certain=sum(one.certain_bytes for one in room) + sum(size for size, certain in copies if certain),
                free=free,
                limit=limit,
                codes=sum(one.code_bytes for one in room),
            )
        )
    return tuple(found)


def _is_certain(plan: OutputPlan, plans: Plans, forecasts: Mapping[str, Forecast]) -> bool:
    """Return whether an output's directory is written whatever its inputs turn out to be, from the cache alone too."""
    return forecasts[plan.output.name].certain_bytes > 0 or not record_place(plans.mergefile, plan.output).exists()


def _size(plan: OutputPlan) -> int:
    return sum(shard.size for shard in plan.layout.shards)


def room_for_build(
    plans: Plans, prepared: Mapping[str, Prepared], index: SourceIndex, catalog: Catalog, memory: int | None
) -> None:
    """Refuse a build of these outputs for which there is no room on a disk or in memory, before anything is read.

    Where there is little, what killed builds left of other layouts goes now, and not when all is written. The caller
    holds the cache. See `check_room` and `mergepipe.engine.limits.check_memory`.
    """
    if all(is_settled(one) for one in prepared.values()):
        return
    if memory is None and not _has_headers(plans, index) and _has_plenty(plans, catalog.layout.root):
        return  # to know what the build does exactly takes as long as a tenth of a small one
    _drop_other_layouts((one.plan for one in prepared.values()), catalog)
    forecasts = forecast(plans, prepared, index, catalog, hold_bytes(memory)).outputs
    check_memory([plan for plan in plans.plans if not forecasts[plan.output.name].unchanged], memory)
    check_room(disk_space(plans, forecasts, catalog.layout.root))


def _drop_other_layouts(plans: Iterable[OutputPlan], catalog: Catalog) -> None:
    left = [path for plan in plans for path in other_layouts(plan, catalog.layout)]
    if left:
        catalog.drop_staged(path.stem for path in left)
    for path in left:
        remove_tree(path)


def _has_headers(plans: Plans, index: SourceIndex) -> bool:
    """Return whether there are progressive checkpoints: the forecast reads their headers, and the runs count them."""
    return any(index.given.standalone(source) is not None for plan in plans.plans for source in plan.sources)


def _has_plenty(plans: Plans, cache: Path) -> bool:
    """Return whether every disk that is written to has room for whatever a build of all outputs may write."""
    most = sum(most_room(plan) for plan in plans.plans)
    places = [record_place(plans.mergefile, plan.output) for plan in plans.plans if plan.output.publish]
    disks = {_device(path): path for path in (*places, cache)}
    limits = [_free(path)[1] for path in disks.values()]
    return all(limit is None or most <= limit for limit in limits)


def most_room(plan: OutputPlan) -> int:
    """Return bytes that an output's new shards and progressive packs never take more of, on any one disk."""
    inputs = [slot.grid(plan.geometry) for tensor in plan.tensors for slot in tensor.slots if slot is not None]
    # An element of a code takes little more than a byte, and one that is stored no less.
    return _size(plan) + sum(2 * grid.nbytes + _CODE_HEADER + _CODE_BLOCK * grid.count for grid in inputs)


def room_for_codes(plans: Iterable[OutputPlan], index: SourceIndex, cache: Path, stages: Collection[str] = ()) -> None:
    """Refuse to measure the deltas of outputs where there is no room for their codes, before anything is read.

    Parameters
    ----------
    cache
        The cache directory.
    stages
        The names of the sources that are outputs themselves; what their deltas take is not known.

    Raises
    ------
    StorageError
        If the codes that are not there yet take more than there is, counted at most where they are not known.
    """
    room = PackRoom(index, stages)
    codes = sum(room.of(plan, tensor)[1] for plan in plans if plan.is_pending for tensor in plan.tensors)
    free, limit = _free(cache)
    check_room(
        [DiskSpace(path=cache, cache=True, outputs=(), needed=codes, certain=0, codes=codes, free=free, limit=limit)]
    )


def check_room(disks: Iterable[DiskSpace]) -> None:
    """Refuse a build that cannot end but with a full disk.

    Raises
    ------
    StorageError
        For each file system without the room that the build certainly takes.
    """
    errors: list[MergepipeError] = []
    for disk in disks:
        needed = disk.certain + disk.codes
        if disk.limit is None or needed <= disk.limit:
            continue
        place = "`--cache-dir`" if disk.cache else "the output"
        without = ', or do without codes: `precision = "blocks"` in the budget, `sweep --precision blocks`'
        errors.append(
            StorageError(
                f"No space left for this build at `{disk.path}`: it writes {_writes(disk)} there, and"
                f" {format_bytes(disk.limit)} are free",
                hint="nothing was read or written; free some space there, build fewer outputs at a time, or point"
                f" {place} at another disk{without if disk.codes else ''}",
                path=str(disk.path),
                needed=needed,
                codes=disk.codes,
                free=disk.limit,
            )
        )
    raise_collected(errors)


def _writes(disk: DiskSpace) -> str:
    codes = f"up to {format_bytes(disk.codes)} of codes of deltas" if disk.codes else ""
    shards = format_bytes(disk.certain) if disk.certain or not codes else ""
    return " and ".join(part for part in (shards, codes) if part)


def _existing(path: Path) -> Path:
    """Return the nearest folder above a place, or itself, that is there."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def _device(path: Path) -> int:
    return _existing(path).stat().st_dev


def _free(path: Path) -> tuple[int | None, int | None]:
    """Return the bytes that are free, and those that this user can write; None where the system does not say."""
    try:
        stat = os.statvfs(_existing(path))
    except OSError:
        return None, None
    limit = stat.f_bfree if os.geteuid() == 0 else stat.f_bavail
    return stat.f_bavail * stat.f_frsize, limit * stat.f_frsize
