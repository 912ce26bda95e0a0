"""The SQLite file of the catalog: schema, opening, and errors in words.

The rollback journal is used and not the write-ahead log: readers then write nothing, and it works on file systems
without shared memory maps. A catalog that is damaged, or that another version wrote, is set aside and started anew:
losing it costs time and nothing else. SQLite checks no content, so rows whose damage could reach a result carry a seal.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from mergepipe.errors import CacheError, fail_storage

SCHEMA_VERSION = 4
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SEAL_BYTES = 8

_SCHEMA = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY,
    path BLOB NOT NULL,
    block_elements INTEGER NOT NULL,
    size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    header BLOB NOT NULL,
    read_at_ns INTEGER NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE (path, block_elements)
);
CREATE TABLE tensors (
    file INTEGER NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    digest BLOB NOT NULL,
    blocks BLOB NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY (file, name)
);
CREATE TABLE samples (
    file INTEGER NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    samples BLOB NOT NULL,
    blocks BLOB NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY (file, name)
);
CREATE TABLE packs (
    name TEXT PRIMARY KEY,
    size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    used_at_ns INTEGER NOT NULL
);
CREATE TABLE results (
    key BLOB NOT NULL,
    pack TEXT NOT NULL REFERENCES packs (name) ON DELETE CASCADE,
    output TEXT NOT NULL,
    tensor TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,
    block_elements INTEGER NOT NULL,
    recipe BLOB NOT NULL,
    digest BLOB NOT NULL,
    block_keys BLOB NOT NULL,
    block_digests BLOB NOT NULL,
    offset INTEGER NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY (key, pack, tensor)
);
CREATE INDEX results_by_recipe ON results (recipe, tensor);
CREATE INDEX results_by_pack ON results (pack);
CREATE TABLE staged (
    shard TEXT NOT NULL,
    tensor TEXT NOT NULL,
    block_keys BLOB NOT NULL,
    block_digests BLOB NOT NULL,
    PRIMARY KEY (shard, tensor)
);
CREATE TABLE statistics (
    id INTEGER PRIMARY KEY,
    recipe BLOB NOT NULL,
    place BLOB NOT NULL,
    owner BLOB NOT NULL,
    block_elements INTEGER NOT NULL,
    chunk INTEGER NOT NULL,
    keys BLOB NOT NULL,
    sizes BLOB NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL
);
CREATE INDEX statistics_by_place ON statistics (recipe, place, owner, chunk);
CREATE TABLE measured (
    name TEXT PRIMARY KEY,
    value REAL NOT NULL
);
CREATE TABLE published (
    path BLOB PRIMARY KEY,
    key BLOB NOT NULL,
    files BLOB NOT NULL,
    record BLOB NOT NULL,
    seal BLOB NOT NULL
);
"""


def open_database(path: Path, *, create: bool) -> sqlite3.Connection | None:
    """Open the catalog, starting anew where it is damaged or of another version.

    Parameters
    ----------
    create
        Whether to make it where it is missing or unusable; the caller holds the build lock then.

    Returns
    -------
    sqlite3.Connection or None
        None if there is no usable catalog and ``create`` is false.
    """
    if path.exists():
        connection = _open_existing(path)
        if connection is not None:
            return connection
        if create:
            _set_aside(path)
    if not create:
        return None
    connection = _connect(path)
    with guarded(path), connection:
        connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    return connection


def seal(*columns: object) -> bytes:
    """Return a short checksum over the columns of a row (bytes, text and integers)."""
    hasher = blake3()
    for column in columns:
        data = column if isinstance(column, bytes) else str(column).encode("utf-8", "surrogateescape")
        hasher.update(b"%d:" % len(data) + data)
    return hasher.digest()[:_SEAL_BYTES]


def is_sealed(row: Sequence[object]) -> bool:
    """Return whether a row, its seal last, is what was written."""
    return seal(*row[:-1]) == row[-1]


def _connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    connection.text_factory = lambda data: str(data, "utf-8", "replace")  # damaged text then fails its seal
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    with guarded(path):
        connection = _connection(path)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def _open_existing(path: Path) -> sqlite3.Connection | None:
    """Open a catalog that is there; return None if it is damaged or of another version.

    Raises
    ------
    CacheError, StorageError
        If it cannot be opened for another reason, such as permissions: that says nothing about its content.
    """
    with guarded(path):
        connection = _connection(path)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == SCHEMA_VERSION:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                return connection
        except sqlite3.OperationalError:
            connection.close()
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            pass  # not a database, or a malformed one
        connection.close()
    return None


def _set_aside(path: Path) -> None:
    try:
        path.replace(path.with_name(path.name + ".unusable"))
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
