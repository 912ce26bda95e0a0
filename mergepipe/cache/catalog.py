"""The catalog: what is known of source blocks, of finished results and of published outputs.

One row holds a whole tensor with packed arrays of block digests (32 bytes each), never one row per block. Rows about
a source file count only while the file's identity holds; rows about results name a pack that exists, because they
are written after it is.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.cache.database import guarded, is_sealed, open_database, seal
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.records import Published, Result, SourceFile, StagedTensor, TensorDigests, TensorSamples
from mergepipe.fsio.identity import FileIdentity

# How many earlier results of a tensor under one recipe are asked for a block: enough to switch between branches.
_CANDIDATES = 8
_ASKED = 500  # keys in one question: SQLite takes at least 999


class Catalog:
    """Reads and writes the catalog of one cache directory.

    Parameters
    ----------
    layout
        The cache directory.
    block_elements
        The block geometry whose digests are meant.
    create
        False opens it for reading: a missing catalog is then an empty one, and nothing may be recorded.

    Attributes
    ----------
    state, notice
        What was found under its name, and what became of that in words, where it is worth telling.
    """

    def __init__(self, layout: CacheLayout, block_elements: int, *, create: bool) -> None:
        self.layout = layout
        self.block_elements = block_elements
        self._owner = create
        self._path = layout.catalog
        opened = open_database(layout.catalog, create=create)
        self._db, self.state, self.notice = opened.connection, opened.state, opened.notice
        self._candidates: dict[object, tuple[Result, ...]] = {}  # until something is written
        self._packs_there: dict[str, bool] = {}  # the same

    @property
    def is_writable(self) -> bool:
        """Whether anything may be recorded."""
        return self._owner

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()

    def rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none where there is no catalog."""
        if self._db is None:
            return []
        with guarded(self._path, owner=self._owner):
            return self._db.execute(query, values).fetchall()

    def shrink(self) -> None:
        """Give the space of dropped rows back to the file system."""
        assert self._db is not None, "the catalog is open for reading only"
        with guarded(self._path, owner=self._owner):
            self._db.execute("VACUUM")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run statements that become visible together or not at all; an inner transaction is part of the outer one.

        A commit costs two flushes of the disk, so what belongs together goes into one.
        """
        assert self._db is not None, "the catalog is open for reading only"
        self._candidates.clear()
        self._packs_there.clear()
        if self._db.in_transaction:
            yield self._db
            return
        with guarded(self._path, owner=self._owner):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    # --- source files ---------------------------------------------------------------------------------------------

    def sealed_rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return the rows of a query whose last column is their seal, without it; a damaged row counts as absent."""
        return [row[:-1] for row in self.rows(query, values) if is_sealed(row)]

    def rows_of_keys(
        self, query: str, keys: Sequence[bytes], order: str = "", *, sealed: bool = True
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of many keys, of which the seals are right, in few questions; the query ends with ``IN``."""
        ask = self.sealed_rows if sealed else self.rows
        for start in range(0, len(keys), _ASKED):
            some = keys[start : start + _ASKED]
            yield from ask(f"{query} ({', '.join('?' * len(some))}) {order}", some)

    def _path_key(self, path: Path) -> bytes:
        """Return the path relative to the project where it lies inside, so that a moved project keeps its catalog."""
        root = self.layout.root.parent
        return os.fsencode(os.path.relpath(path, root) if path.is_relative_to(root) else path)

    def _trusted_file(self, file: SourceFile) -> int | None:
        rows = self.rows(
            "SELECT id, path, size, mtime_ns, ctime_ns, inode, header, read_at_ns, seal FROM files"
            " WHERE path = ? AND block_elements = ?",
            (self._path_key(file.path), self.block_elements),
        )
        for file_id, *sealed in rows:
            if not is_sealed(sealed) or not isinstance(file_id, int):
                continue
            _, size, mtime_ns, ctime_ns, inode, header, read_at_ns, _ = sealed
            known = FileIdentity(size, mtime_ns, ctime_ns, inode)
            racy = file.identity.is_racy(read_at_ns)
            if known == file.identity and header == file.header and not racy:
                return file_id
        return None

    def tensor_digests(self, file: SourceFile) -> Mapping[str, bytes]:
        """Return the digests of the file's tensors as far as they are known and may be trusted."""
        row = self._trusted_file(file)
        if row is None:
            return {}
        rows = self.sealed_rows("SELECT file, name, digest, seal FROM tensors WHERE file = ?", (row,))
        return {name: digest for _, name, digest in rows}

    def block_digests(self, file: SourceFile) -> Mapping[str, bytes]:
        """Return the packed block digests of the file's tensors, as far as they are known.

        The caller checks that they hash to the tensors' digests.
        """
        row = self._trusted_file(file)
        return {} if row is None else dict(self.rows("SELECT name, blocks FROM tensors WHERE file = ?", (row,)))

    def tensor_samples(self, file: SourceFile) -> Mapping[str, TensorSamples]:
        """Return what is known of the file's tensors by samples and single blocks, as far as it may be trusted."""
        row = self._trusted_file(file)
        if row is None:
            return {}
        rows = self.sealed_rows("SELECT file, name, samples, blocks, seal FROM samples WHERE file = ?", (row,))
        return {name: TensorSamples(name=name, samples=samples, blocks=blocks) for _, name, samples, blocks in rows}

    def record_tensors(
        self, file: SourceFile, read_at_ns: int, tensors: Iterable[TensorDigests], samples: Iterable[TensorSamples] = ()
    ) -> None:
        """Record digests of a file's tensors; rows about an earlier content of the file are dropped.

        Parameters
        ----------
        samples
            Those of tensors that were not read whole; each takes the place of an earlier one.
        """
        row = self._trusted_file(file)
        with self.transaction() as db:
            if row is None:
                path = self._path_key(file.path)
                db.execute(
                    "DELETE FROM files WHERE path = ? AND block_elements = ?", (path, self.block_elements)
                )
                i = file.identity
                facts = (path, i.size, i.mtime_ns, i.ctime_ns, i.inode, file.header, read_at_ns)
                row = db.execute(
                    "INSERT INTO files (path, size, mtime_ns, ctime_ns, inode, header, read_at_ns, seal,"
                    " block_elements) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*facts, seal(*facts), self.block_elements),
                ).lastrowid
                # Where a file's row was removed by hand, those of its tensors are left, and its number is given again.
                db.execute("DELETE FROM tensors WHERE file = ?", (row,))
                db.execute("DELETE FROM samples WHERE file = ?", (row,))
            db.executemany(
                "INSERT OR REPLACE INTO tensors (file, name, digest, blocks, seal) VALUES (?, ?, ?, ?, ?)",
                [(row, t.name, t.digest, t.blocks, seal(row, t.name, t.digest)) for t in tensors],
            )
            db.executemany(
                "INSERT OR REPLACE INTO samples (file, name, samples, blocks, seal) VALUES (?, ?, ?, ?, ?)",
                [(row, s.name, s.samples, s.blocks, seal(row, s.name, s.samples, s.blocks)) for s in samples],
            )

    def forget_file(self, path: Path) -> None:
        """Drop everything recorded about a source file."""
        with self.transaction() as db:
            db.execute("DELETE FROM files WHERE path = ?", (self._path_key(path),))

    # --- results --------------------------------------------------------------------------------------------------

    def result(self, key: bytes) -> Result | None:
        """Return a finished tensor by its action key."""
        return self.results([key]).get(key)

    def results(self, keys: Iterable[bytes]) -> dict[bytes, Result]:
        """Return finished tensors by their action keys: those of these that there are, as `result` returns each.

        What lies in a pack that somebody removed is not there.
        """
        found: dict[bytes, Result] = {}
        query, order = f"SELECT {_RESULT_COLUMNS}, seal FROM results WHERE key IN", "ORDER BY key, pack, tensor"
        for row in self.rows_of_keys(query, list(keys), order):
            result = _result(row)
            if self.has_pack(result.pack):
                found.setdefault(result.key, result)
        return found

    def candidates(self, output: str, tensor: str, recipe: bytes, shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return earlier results for a tensor of this name, recipe and shape, which may hold blocks of it.

        The output's own come first, then those of others with the same recipe; the newest of each first.
        """
        wanted = (recipe, tensor, _shape_text(shape), self.block_elements, output, _CANDIDATES)
        found = self._candidates.get(wanted)
        if found is None:  # a build asks before it begins, and when it does
            rows = self.sealed_rows(
                f"SELECT {_RESULT_COLUMNS}, seal FROM results"
                " WHERE recipe = ? AND tensor = ? AND shape = ? AND block_elements = ?"
                " ORDER BY output = ? DESC, rowid DESC LIMIT ?",
                wanted,
            )
            found = self._candidates[wanted] = tuple(r for r in map(_result, rows) if self.has_pack(r.pack))
        return found

    def record_pack(self, name: str, identity: FileIdentity, results: Iterable[Result], staged: str) -> None:
        """Commit a finished pack with its results, and drop the staging rows of the shard that it was.

        This is the only commit point of a merge: call it when the pack is on the disk under its final name.
        """
        with self.transaction() as db:
            _insert_pack(db, name, identity)
            self._insert_results(db, results)
            db.execute("DELETE FROM staged WHERE shard = ?", (staged,))

    def record_results(self, results: Iterable[Result]) -> None:
        """Record further results that lie in packs which are recorded already."""
        with self.transaction() as db:
            self._insert_results(db, results)

    def _insert_results(self, db: sqlite3.Connection, results: Iterable[Result]) -> None:
        rows = [
            (
                *(r.key, r.output, r.tensor, r.dtype, _shape_text(r.shape), r.recipe, r.digest),
                *(r.block_keys, r.block_digests, r.pack, r.offset),
            )
            for r in results
        ]
        db.executemany(
            f"INSERT OR REPLACE INTO results ({_RESULT_COLUMNS}, seal, block_elements)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*row, seal(*row), self.block_elements) for row in rows],
        )

    def record_pack_identity(self, name: str, identity: FileIdentity) -> None:
        """Record what a pack that was checked, or linked just now, looks like."""
        with self.transaction() as db:
            _insert_pack(db, name, identity)

    def correct_pack_identity(self, name: str, identity: FileIdentity) -> None:
        """Record what a pack looks like that was found to be right, without counting that as a use of it."""
        with self.transaction() as db:
            db.execute(
                "UPDATE packs SET size = ?, mtime_ns = ?, ctime_ns = ?, inode = ? WHERE name = ?",
                (identity.size, identity.mtime_ns, identity.ctime_ns, identity.inode, name),
            )

    def has_pack(self, name: str) -> bool:
        """Return whether a pack lies in the cache, whatever is known of it; until something is written, it stays so."""
        found = self._packs_there.get(name)
        if found is None:
            found = self._packs_there[name] = os.path.lexists(self.layout.packs / f"{name}.safetensors")
        return found

    def pack_identity(self, name: str) -> FileIdentity | None:
        """Return what a pack looked like when it was last checked."""
        rows = self.rows("SELECT size, mtime_ns, ctime_ns, inode FROM packs WHERE name = ?", (name,))
        return FileIdentity(*rows[0]) if rows else None

    def pack_names(self) -> tuple[tuple[str, int], ...]:
        """Return (name, time of last use in ns) of all packs, least recently used first."""
        return tuple(self.rows("SELECT name, used_at_ns FROM packs ORDER BY used_at_ns, name", ()))

    def drop_pack(self, name: str) -> None:
        """Forget a pack and every result in it."""
        with self.transaction() as db:
            db.execute("DELETE FROM packs WHERE name = ?", (name,))

    # --- staging --------------------------------------------------------------------------------------------------

    def staged(self, shard: str) -> Mapping[str, StagedTensor]:
        """Return the blocks that an unfinished build has written to a staged shard, by tensor."""
        rows = self.rows("SELECT tensor, block_keys, block_digests FROM staged WHERE shard = ?", (shard,))
        return {
            row[0]: StagedTensor(tensor=row[0], block_keys=row[1], block_digests=row[2])
            for row in rows
        }

    def record_staged(self, shard: str, tensors: Iterable[StagedTensor]) -> None:
        """Record blocks as they land in staging. Whoever uses them re-hashes them first."""
        with self.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO staged (shard, tensor, block_keys, block_digests) VALUES (?, ?, ?, ?)",
                [(shard, tensor.tensor, tensor.block_keys, tensor.block_digests) for tensor in tensors],
            )

    def drop_staged(self, shards: Iterable[str]) -> None:
        """Forget the staging rows of these shards."""
        with self.transaction() as db:
            db.executemany("DELETE FROM staged WHERE shard = ?", [(shard,) for shard in shards])

    def drop_all_staged(self) -> None:
        """Forget every staging row; the staged files are gone."""
        with self.transaction() as db:
            db.execute("DELETE FROM staged")

    # --- published outputs ----------------------------------------------------------------------------------------

    def published(self, directory: Path) -> Published | None:
        """Return what was last published into a directory from this cache."""
        path = self._path_key(directory)
        rows = self.sealed_rows("SELECT path, key, files, record, seal FROM published WHERE path = ?", (path,))
        return Published(key=rows[0][1], files=rows[0][2], record=rows[0][3]) if rows else None

    def record_published(self, directory: Path, published: Published) -> None:
        """Record what is being published into a directory."""
        row = (self._path_key(directory), published.key, published.files, published.record)
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO published (path, key, files, record, seal) VALUES (?, ?, ?, ?, ?)",
                (*row, seal(*row)),
            )

    def published_places(self) -> tuple[Path, ...]:
        """Return every directory, of any project, that something is on record as published into."""
        rows = self.sealed_rows("SELECT path, key, files, record, seal FROM published ORDER BY path", ())
        return tuple(self.layout.root.parent / os.fsdecode(path) for path, *_ in rows)

    def count(self, table: str) -> int:
        """Return the number of rows of a table of the catalog (a name from the schema, never user input)."""
        rows = self.rows(f"SELECT count(*) FROM {table}", ())
        return int(rows[0][0]) if rows else 0


_RESULT_COLUMNS = "key, output, tensor, dtype, shape, recipe, digest, block_keys, block_digests, pack, offset"


def _insert_pack(db: sqlite3.Connection, name: str, identity: FileIdentity) -> None:
    db.execute(
        "INSERT INTO packs (name, size, mtime_ns, ctime_ns, inode, used_at_ns) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (name) DO UPDATE SET size = excluded.size, mtime_ns = excluded.mtime_ns,"
        " ctime_ns = excluded.ctime_ns, inode = excluded.inode, used_at_ns = excluded.used_at_ns",
        (name, identity.size, identity.mtime_ns, identity.ctime_ns, identity.inode, time.time_ns()),
    )


def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(str(size) for size in shape)


def _result(row: tuple[Any, ...]) -> Result:
    key, output, tensor, dtype, shape, recipe, digest, block_keys, block_digests, pack, offset = row
    return Result(
        key=key,
        output=output,
        tensor=tensor,
        dtype=dtype,
        shape=tuple(int(size) for size in str(shape).split(",") if size),
        recipe=recipe,
        digest=digest,
        block_keys=block_keys,
        block_digests=block_digests,
        pack=pack,
        offset=offset,
    )
