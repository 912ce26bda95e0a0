"""The SQLite file of the catalog: schema, opening, and errors in words.

The rollback journal is used and not the write-ahead log: readers then write nothing, and it works on file systems
without shared memory maps. A catalog that is damaged is set aside and started anew: losing it costs time and nothing
else. One of an earlier version is brought up to this one where that is known how, else set aside; one of a later
version is refused, because the newer mergepipe that wrote it still needs it. SQLite checks no content, so rows whose
damage could reach a result carry a seal.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

from blake3 import blake3

from mergepipe.cache.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION
from mergepipe.errors import CacheError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import remove_tree
from mergepipe.fsio.locks import has_locks
from mergepipe.values import dataclass

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SEAL_BYTES = 8
# Versions count by ones: a number beyond this is damage, and not a version to come.
_LAST_VERSION = 1000

class CatalogState(Enum):
    """What a catalog was found to be when it was opened."""

    OPEN = "open"
    MISSING = "missing"
    OLDER = "older"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDatabase:
    """A catalog, as far as there is one.

    Attributes
    ----------
    connection
        None if there is none to be used, which only a reader sees.
    state
        What was found under its name.
    notice
        What became of it, in words, where that is worth telling.
    """

    connection: sqlite3.Connection | None
    state: CatalogState
    notice: str | None = None


def open_database(path: Path, *, create: bool) -> OpenedDatabase:
    """Open the catalog; one that is damaged or of an earlier version is begun anew, or brought up to this version.

    Parameters
    ----------
    create
        Whether to make it where it is missing or unusable; the caller holds the build lock then. A reader leaves it
        as it is, and sees an empty one.

    Raises
    ------
    CacheError
        If a newer mergepipe wrote it, or it cannot be opened.
    StorageError
        If the file system refuses.
    """
    found = _look_at(path, owner=create)
    if isinstance(found, sqlite3.Connection):
        return OpenedDatabase(connection=found, state=CatalogState.OPEN)
    state, version = found
    if not create:
        return OpenedDatabase(connection=None, state=state, notice=_unread(state, version))
    if version in MIGRATIONS and _migrated(path, version):
        notice = f"the catalog of the cache was of an earlier mergepipe (version {version}): it was taken over"
        return OpenedDatabase(connection=_connect(path), state=state, notice=notice)
    said: str | None = None
    if state is not CatalogState.MISSING:
        _set_aside(path)
        is_damaged = state is CatalogState.DAMAGED
        why = "could not be read" if is_damaged else f"was of an earlier mergepipe (version {version})"
        said = f"the catalog of the cache {why}: it was set aside as `{_aside(path).name}`, and a new one is begun"
    connection = _connect(path)
    crash_point("catalog.created")
    with guarded(path), connection:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    return OpenedDatabase(connection=connection, state=state, notice=said)


def _unread(state: CatalogState, version: int) -> str | None:
    """Return what a reader is told of a catalog that it sees as an empty one."""
    if state is CatalogState.MISSING:
        return None
    if version in MIGRATIONS:
        return "the catalog of the cache is of an earlier mergepipe: what it knows counts from the next build on"
    why = "cannot be read" if state is CatalogState.DAMAGED else f"is of an earlier mergepipe (version {version})"
    return f"the catalog of the cache {why}: the next build begins a new one"


def _migrated(path: Path, version: int) -> bool:
    """Bring a catalog up to this version, in one transaction; return False if it turns out to be damaged."""
    steps = " ".join(MIGRATIONS[number] for number in range(version, SCHEMA_VERSION))
    with guarded(path):
        connection = _connection(path, owner=True)
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in (*_DAMAGED, sqlite3.SQLITE_ERROR):  # such as a full disk: it stays as it is
                raise
            return False
        finally:
            connection.close()
    return True


def seal(*columns: object) -> bytes:
    """Return a short checksum over the columns of a row (bytes, text and integers)."""
    parts: list[bytes] = []
    for column in columns:
        data = column if isinstance(column, bytes) else str(column).encode("utf-8", "surrogateescape")
        parts += (b"%d:" % len(data), data)
    return blake3(b"".join(parts)).digest()[:_SEAL_BYTES]


def is_sealed(row: Sequence[object]) -> bool:
    """Return whether a row, its seal last, is what was written."""
    return seal(*row[:-1]) == row[-1]


def _connection(path: Path, *, owner: bool) -> sqlite3.Connection:
    """Open the file, without SQLite's locks where the file system has none.

    There the lock of the cache keeps writers apart (`mergepipe.fsio.locks`). A reader then ignores the journal, which a
    writer may be using: what it sees half-written fails its seal, or is an error.
    """
    target: str | Path = path
    if not has_locks(path.parent):
        target = f"{path.absolute().as_uri()}?{'nolock=1' if owner else 'immutable=1'}"
    connection = sqlite3.connect(target, timeout=60, isolation_level=None, check_same_thread=False, uri=target != path)
    connection.text_factory = lambda data: str(data, "utf-8", "replace")  # damaged text then fails its seal
    return connection


def copy_catalog(source: Path, target: Path) -> None:
    """Copy a catalog as it is between two transactions; the caller holds both caches.

    Raises
    ------
    StorageError, CacheError
        If one of them cannot be read, or written.
    """
    with contextlib.ExitStack() as stack:
        with guarded(source):
            old = stack.enter_context(contextlib.closing(_connection(source, owner=True)))
            old.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        with guarded(target):
            old.backup(stack.enter_context(contextlib.closing(_connection(target, owner=True))))


def _connect(path: Path) -> sqlite3.Connection:
    with guarded(path):
        connection = _connection(path, owner=True)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def _look_at(path: Path, *, owner: bool) -> sqlite3.Connection | tuple[CatalogState, int]:
    """Open a catalog of this version; else return what is there instead, with its version.

    Raises
    ------
    CacheError, StorageError
        If it cannot be opened for another reason, such as permissions: that says nothing about its content. If a newer
        mergepipe wrote it.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):  # a process killed while it made it
        return CatalogState.MISSING, 0
    with guarded(path):
        connection = _connection(path, owner=owner)
        version = 0
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if version == SCHEMA_VERSION:
                return connection
        except sqlite3.OperationalError:
            connection.close()
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            version = 0  # not a database, or a malformed one
        connection.close()
    if SCHEMA_VERSION < version <= _LAST_VERSION:
        raise CacheError(
            f"the cache `{path.parent}` was written by a newer mergepipe:"
            f" its catalog has version {version}, and this one knows versions up to {SCHEMA_VERSION}",
            hint="upgrade mergepipe, use another `--cache-dir`, or delete the cache (it costs time, never results)",
            path=str(path),
            version=version,
            supported=SCHEMA_VERSION,
        )
    return (CatalogState.OLDER if 0 < version < SCHEMA_VERSION else CatalogState.DAMAGED), version


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".unusable")


def set_aside(path: Path) -> None:
    """Take a catalog that turned out to be damaged out of use; the caller holds the build lock.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    if os.path.lexists(path):
        _set_aside(path)


def _set_aside(path: Path) -> None:
    try:
        remove_tree(_aside(path))
        path.replace(_aside(path))
        crash_point("catalog.set-aside")
        path.with_name(path.name + "-journal").unlink(missing_ok=True)
    except OSError as error:
        fail_storage(error, path, "set aside the unusable catalog")


@contextlib.contextmanager
def guarded(path: Path, *, owner: bool = False) -> Iterator[None]:
    """Turn SQLite's errors into ours, with the operating system's reason where writing is what failed.

    Parameters
    ----------
    owner
        Whether this process holds the cache: a catalog that turns out to be damaged is then set aside, so that the
        next run begins a new one.

    Raises
    ------
    StorageError
        If the disk is full, a limit is hit, or the file system refuses.
    CacheError
        For everything else.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        # The lowest byte is the kind of an error; the rest says more, such as which index is damaged.
        if owner and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
            _set_aside(path)
        else:
            _probe_writing(path)
        raise CacheError(
            f"the catalog `{path}` cannot be used: {error}",
            hint="run again; if it happens again, delete the cache directory (it costs time, never results)",
            path=str(path),
        ) from error


def _probe_writing(path: Path) -> None:
    """Find the reason behind SQLite's "disk I/O error" or "disk is full" by writing as much as it would."""
    probe = path.with_name("probe.tmp")
    size = (path.stat().st_size if path.exists() else 0) + (1 << 17)
    try:
        with probe.open("wb") as file:
            for _ in range(0, size, 1 << 16):
                file.write(b"\0" * (1 << 16))
    except OSError as error:
        fail_storage(error, path, "write")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
