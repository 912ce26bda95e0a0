"""Which packs of a cache somebody needs: what locks name, and what published outputs hold.

A cache may be shared. So every project that builds leaves a note in it, with the place of its lock: what the locks of
other projects name is then known too, wherever pruning is started from.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.digest import record_digest
from mergepipe.errors import LockError, MergefileError, MergepipeError, StorageError, fail_storage, raise_collected
from mergepipe.fsio.durable import replace_file
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.reader import read_lock
from mergepipe.project.facts import known_output
from mergepipe.values import dataclass

LOCK_NAME = "Mergefile.lock"
_NOTE = re.compile(r"[0-9a-f]{32}")
_LONGEST = 1 << 16  # bytes of a path


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What is needed.

    Attributes
    ----------
    names
        Of packs.
    locks
        The locks that were read, as absolute paths.
    missing
        Those that do not exist: of projects that were removed, or lie on a disk that is not there.
    """

    names: frozenset[str] = frozenset()
    locks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def remember_project(layout: CacheLayout, lock_path: Path) -> None:
    """Note in a cache that a project builds with it; a note that cannot be written is left for the next build.

    Parameters
    ----------
    lock_path
        Absolute; it need not exist yet.
    """
    note, place = _note(layout, lock_path), _place(layout, lock_path)
    with contextlib.suppress(OSError):
        if read_regular(note, _LONGEST) == place:
            return
    with contextlib.suppress(OSError, StorageError):
        layout.projects.mkdir(exist_ok=True)
        replace_file(note, place)


def _place(layout: CacheLayout, lock_path: Path) -> bytes:
    """Return the form in which a note has a path: relative inside the project of the cache, which may be moved."""
    root = layout.root.parent
    return os.fsencode(os.path.relpath(lock_path, root) if lock_path.is_relative_to(root) else lock_path)


def _note(layout: CacheLayout, lock_path: Path) -> Path:
    return layout.projects / record_digest("project", _place(layout, lock_path)).hex()[:32]


def references(catalog: Catalog, lock_path: Path | None, keep: Sequence[Path | str]) -> References:
    """Return the packs that locks name, and those of outputs that were published from this cache and still exist.

    Parameters
    ----------
    lock_path
        The lock of this project, if there is one.
    keep
        Further locks, or folders with one; these must exist.

    Raises
    ------
    MergefileError
        If there is no lock at all, or one of ``keep`` does not exist.
    LockError
        If a lock cannot be read: what it names is not known then.
    """
    named, errors = [], []
    for path in map(Path, keep):
        place = path / LOCK_NAME if path.is_dir() else path
        if os.path.lexists(place):
            named.append(Path(os.path.abspath(place)))  # noqa: PTH100 - resolve() would follow links
        else:
            hint = f"name a lock, or a folder with a `{LOCK_NAME}`"
            errors.append(MergefileError(f"there is no lock `{place}` to keep the packs of", hint=hint, path=str(path)))
    raise_collected(errors)
    noted = list(_noted(catalog.layout))
    places = dict.fromkeys([*named, *([lock_path] if lock_path else []), *noted])
    names: set[str] = set()
    read: dict[bool, list[str]] = {True: [], False: []}
    for place in places:
        found = _names_in(place, catalog.layout, noted)
        names |= found or set()
        read[found is not None].append(str(place))
    names |= set(_published(catalog))
    if not read[True]:
        raise MergefileError(
            f"no lock says which packs of the cache `{catalog.layout.root}` are needed",
            hint="name locks with `--keep LOCK`, or prune by `--max-age` or `--max-size`",
        )
    return References(names=frozenset(names), locks=tuple(read[True]), missing=tuple(read[False]))


def _names_in(place: Path, layout: CacheLayout, noted: Iterable[Path]) -> set[str] | None:
    """Return the packs that a lock names, None if it does not exist."""
    try:
        lock = read_lock(place)
    except MergepipeError as error:
        hint = "restore it, or build there; until then, prune by `--max-age` or `--max-size`"
        if place in noted:
            note = os.path.relpath(_note(layout, place), layout.root)
            hint += f". If that project does not matter any more, delete `{note}` in the cache"
        raise LockError(
            f"which packs are needed is not known: {error.message}", hint=hint, path=str(place)
        ) from error
    return None if lock is None else {shard.digest.hex() for output in lock.outputs for shard in output.shards}


def _noted(layout: CacheLayout) -> Iterator[Path]:
    """Yield the locks of the projects that build with a cache, in the order of their paths."""
    try:
        notes = sorted(layout.projects.iterdir()) if layout.projects.is_dir() else []
        is_note = {note: _NOTE.fullmatch(note.name) and note.is_file() and not note.is_symlink() for note in notes}
        places = sorted({read_regular(note, _LONGEST) for note in notes if is_note[note]})
    except OSError as error:
        fail_storage(error, layout.projects, "look into")
    for place in places:
        if place and b"\0" not in place:
            yield Path(os.path.normpath(layout.root.parent / os.fsdecode(place)))


def _published(catalog: Catalog) -> Iterator[str]:
    """Yield the packs of the outputs that were published from this cache and are still there."""
    for place in catalog.published_places():
        known = known_output(catalog, place) if place.is_dir() else None
        yield from (file.digest.hex() for file in known.files if file.is_shard) if known else ()
