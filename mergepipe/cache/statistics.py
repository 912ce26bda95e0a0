"""Statistics of blocks, kept by content: the numbers that reductions are made of.

A row holds a *chunk*: the numbers of up to `CHUNK` adjacent blocks of one tensor under one statistic, each with its
key. A value is found by its key alone; which tensor it was taken from only says where to look. Losing rows costs time.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence, Set

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import seal
from mergepipe.digest import DIGEST_SIZE
from mergepipe.errors import CacheError, InternalError
from mergepipe.values import dataclass

CHUNK = 64
_KEPT_VERSIONS = 4  # rows of one chunk and owner: enough to go back and forth between versions of an expert
_KEPT_BYTES = 1 << 16  # of a row's data; larger rows are read again when they are gone through
_PENDING_BYTES = 1 << 25  # of new rows in memory before they are written, where no limit is set


@dataclass(slots=True)
class _Row:
    """One chunk: in the catalog (``id``), in memory (``data``), or both."""

    chunk: int
    keys: bytes
    sizes: tuple[int, ...]
    data: bytes | None
    id: int | None

    def values(self, data: bytes) -> Iterator[bytes]:
        at = 0
        for size in self.sizes:
            yield data[at : at + size]
            at += size


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rows are looked for: under a recipe and the names of the tensors, those of the same sources first."""

    recipe: bytes
    place: bytes
    owner: bytes


class StatisticStore:
    """All statistics of a cache. New ones stay in memory until `flush`, or until they have ``pending_bytes``."""

    def __init__(self, catalog: Catalog, pending_bytes: int = _PENDING_BYTES) -> None:
        self._catalog = catalog
        self._most_pending = pending_bytes
        self._pending: list[tuple[_Place, _Row]] = []
        self._pending_bytes = 0
        self._used: set[int] = set()

    def table(self, recipe: bytes, place: bytes, owner: bytes, count: int) -> StatisticTable:
        """Return the numbers of one statistic for the blocks of one tensor, as far as they are known.

        Parameters
        ----------
        recipe
            All that the numbers depend on besides the content of the blocks.
        place
            The digest of the names of the source tensors: where to look.
        owner
            The digest of the names of the sources: whose versions are counted. Where it has none, the rows of others
            are looked through: a source may have got another name.
        count
            How many blocks there are.
        """
        where = _Place(recipe, place, owner)
        found = [row for at, row in reversed(self._pending) if at == where]
        found += self._rows("AND owner = ?", where, owner)
        return StatisticTable(self, where, count, found or self._rows("", where))

    def _rows(self, condition: str, where: _Place, *values: bytes) -> list[_Row]:
        rows = self._catalog.sealed_rows(
            f"SELECT {_COLUMNS}, id, seal FROM statistics"
            f" WHERE recipe = ? AND place = ? AND block_elements = ? {condition} ORDER BY id DESC",
            (where.recipe, where.place, self._catalog.block_elements, *values),
        )
        found = []
        for _, _, _, chunk, keys, sizes, data, number in rows:
            kept = data if len(data) <= _KEPT_BYTES else None
            found.append(_Row(chunk, keys, struct.unpack(f"<{len(sizes) // 4}I", sizes), kept, number))
        return found

    def add(self, where: _Place, row: _Row) -> None:
        """Take a new row."""
        self._pending.append((where, row))
        self._pending_bytes += len(row.data or b"")
        if self._pending_bytes > self._most_pending:
            self.flush()

    def use(self, row: _Row) -> None:
        """Keep a row as long as this store lives: a table goes through it."""
        if row.id is not None:
            self._used.add(row.id)

    def flush(self) -> None:
        """Write new rows to the catalog, and forget the oldest of each chunk."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending:
            return
        with self._catalog.transaction() as db:
            for where, row in pending:
                row.id = db.execute(
                    f"INSERT INTO statistics ({_COLUMNS}, id, seal, block_elements)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, NULL, x'', ?)",
                    (*_columns(where, row), self._catalog.block_elements),
                ).lastrowid
                sealed = seal(*_columns(where, row), row.id)
                db.execute("UPDATE statistics SET seal = ? WHERE id = ?", (sealed, row.id))
                self.use(row)
                self._forget_old(db, where, row.chunk)
        for _, row in pending:
            if len(row.data or b"") > _KEPT_BYTES:
                row.data = None

    def _forget_old(self, db: sqlite3.Connection, where: _Place, chunk: int) -> None:
        rows = db.execute(
            "SELECT id FROM statistics"
            " WHERE recipe = ? AND place = ? AND owner = ? AND chunk = ? AND block_elements = ? ORDER BY id DESC",
            (where.recipe, where.place, where.owner, chunk, self._catalog.block_elements),
        ).fetchall()
        old = [(number,) for (number,) in rows[_KEPT_VERSIONS:] if number not in self._used]
        db.executemany("DELETE FROM statistics WHERE id = ?", old)

    def data(self, row: _Row) -> bytes:
        """Return a row's data, from memory or from the catalog."""
        if row.data is not None:
            return row.data
        found = self._catalog.sealed_rows(
            f"SELECT {_COLUMNS}, id, seal FROM statistics WHERE id = ?", (row.id,)
        )
        if not found or found[0][4] != row.keys:
            raise CacheError(
                "statistics in the catalog vanished or were damaged during the build",
                hint="run the build again; they are taken anew where they are missing",
            )
        data: bytes = found[0][6]
        return data


_COLUMNS = "recipe, place, owner, chunk, keys, sizes, data"


def _columns(where: _Place, row: _Row) -> tuple[object, ...]:
    assert row.data is not None, "a new row has its data in memory"
    sizes = struct.pack(f"<{len(row.sizes)}I", *row.sizes)
    return where.recipe, where.place, where.owner, row.chunk, row.keys, sizes, row.data


class StatisticTable:
    """The numbers of one statistic for the blocks of one tensor. Complete once every block was entered.

    `holds` may be called, and `known` looked at, by any thread; all else belongs to the thread that owns the catalog.
    """

    def __init__(self, store: StatisticStore, where: _Place, count: int, rows: Sequence[_Row]) -> None:
        self._store = store
        self._where = where
        self._count = count
        self._known: dict[bytes, tuple[_Row, int]] = {}
        self._by_keys = {row.keys: row for row in reversed(rows)}
        for row in rows:
            for index in range(len(row.sizes)):
                self._known.setdefault(row.keys[index * DIGEST_SIZE : (index + 1) * DIGEST_SIZE], (row, index))
        self._settled: list[_Row | None] = [None] * -(-count // CHUNK)
        self._open: dict[int, dict[int, tuple[bytes, bytes | None]]] = {}

    def holds(self, key: bytes) -> bool:
        """Return whether a block's numbers are known from earlier."""
        return key in self._known

    @property
    def known(self) -> Set[bytes]:
        """The keys of blocks whose numbers are known from earlier."""
        return self._known.keys()

    @property
    def complete(self) -> bool:
        """Whether every block was entered."""
        return None not in self._settled

    def enter(self, block: int, key: bytes, value: bytes | None) -> None:
        """Enter a block's key and its numbers, None where they are known from earlier."""
        chunk, index = divmod(block, CHUNK)
        if self._settled[chunk] is not None:
            return
        entries = self._open.setdefault(chunk, {})
        entries[index] = (key, value)
        if len(entries) == min(CHUNK, self._count - chunk * CHUNK):
            self._settle(chunk, [entries[i] for i in range(len(entries))])
            del self._open[chunk]

    def _settle(self, chunk: int, entries: Sequence[tuple[bytes, bytes | None]]) -> None:
        keys = b"".join(key for key, _ in entries)
        row = self._by_keys.get(keys)
        if row is None:
            values = [self._earlier(key) if value is None else value for key, value in entries]
            row = _Row(chunk, keys, tuple(map(len, values)), b"".join(values), None)
            self._store.add(self._where, row)
        self._store.use(row)
        self._settled[chunk] = row

    def _earlier(self, key: bytes) -> bytes:
        row, index = self._known[key]
        start = sum(row.sizes[:index])
        return self._store.data(row)[start : start + row.sizes[index]]

    def __iter__(self) -> Iterator[bytes]:
        """Yield the numbers of every block in order."""
        for row in self._settled:
            if row is None:
                raise InternalError("statistics are gone through before all blocks were measured")
            yield from row.values(self._store.data(row))


def statistic_bytes(catalog: Catalog) -> int:
    """Return the bytes of all statistics in the catalog."""
    rows = catalog.rows("SELECT coalesce(sum(length(keys) + length(sizes) + length(data)), 0) FROM statistics", ())
    return int(rows[0][0]) if rows else 0


def forget_statistics(catalog: Catalog) -> None:
    """Drop all statistics, and give their space back; they are taken again where they are needed."""
    with catalog.transaction() as db:
        db.execute("DELETE FROM statistics")
    catalog.shrink()
