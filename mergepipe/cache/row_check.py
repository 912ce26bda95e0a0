"""Checking the rows of a catalog: their seals, their lengths, and that what they say of one another holds.

A row that is damaged could never reach a result, since whoever uses one checks it. But it hides what was known, and
it stays until somebody removes it.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergepipe.cache.budgets import unpacked
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import is_sealed
from mergepipe.cache.pack_check import Content
from mergepipe.cache.schema import TABLES
from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.digest import DIGEST_SIZE, tensor_digest
from mergepipe.dtypes import DTYPES
from mergepipe.errors import CacheError, FormatError
from mergepipe.fsio.identity import FileIdentity
from mergepipe.progressive.levels import LEVELS
from mergepipe.values import dataclass

_PAGE = 32  # rows at once: one of statistics may have megabytes
_PACK = re.compile(r"[0-9a-f]{64}")
_COLUMNS: Mapping[str, str] = {
    "files": "path, size, mtime_ns, ctime_ns, inode, header, read_at_ns, seal",
    "tensors": "file, name, digest, seal, blocks",
    "samples": "file, name, samples, blocks, seal",
    "codes": "key, sizes, residuals, header, seal",
    "packs": "name",
    "results": "key, output, tensor, dtype, shape, recipe, digest, block_keys, block_digests, pack, offset, seal,"
    " block_elements",
    "staged": "shard, tensor, block_keys, block_digests",
    "statistics": "recipe, place, owner, chunk, keys, sizes, data, id, seal",
    "measured": "name, value",
    "published": "path, key, files, record, seal",
    "budgets": "key, data, seal",
}
_SEAL = "fails its checksum"
_LENGTH = "has lists of the wrong length"
_CONTENT = "does not hash to its digest"
_FORM = "cannot be unpacked"

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each tensor of a source file."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that is not what it should be: where it is, and what is wrong, in words that follow "a row"."""

    table: str
    row: int
    why: str


def catalog_fault(catalog: Catalog) -> str | None:
    """Return why a catalog cannot be used at all, in words; None for one that is sound as a database."""
    try:
        found = [str(text) for (text,) in catalog.rows("PRAGMA integrity_check(1)", ())]
        names = {name for (name,) in catalog.rows("SELECT name FROM sqlite_schema WHERE type = 'table'", ())}
    except CacheError as error:
        return error.message.rpartition(": ")[2]
    if found != ["ok"]:
        return found[0].split("\n")[0] if found else "it cannot be checked"
    missing = sorted(TABLES - names)
    return f"it has no table `{missing[0]}`" if missing else None


@dataclass(slots=True)
class RowChecker:
    """Checks every row of a catalog.

    Parameters
    ----------
    contents
        By the name of each pack that is right, what lies in it (`mergepipe.cache.pack_check`).
    lost
        The packs that are damaged or gone: the rows about what lies in them go with them, and are not looked at.
    codes
        By the key of each progressive pack that is right, the digest of its header.
    """

    catalog: Catalog
    contents: Mapping[str, Mapping[int, set[Content]]]
    lost: frozenset[str]
    codes: Mapping[bytes, bytes] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    _shapes: dict[int, Shapes | None] = field(default_factory=dict)
    _elements: dict[int, int] = field(default_factory=dict)

    def faults(self) -> Iterator[RowFault]:
        """Yield what is wrong, table by table; `rows` has the number of rows of each table then."""
        checks: Mapping[str, Callable[[Sequence[Any]], str | None]] = {
            "files": self._file,
            "tensors": self._tensor,
            "samples": self._sample,
            "codes": self._code,
            "packs": self._pack,
            "results": self._result,
            "staged": lambda row: _pairs(row[2], row[3]),
            "statistics": _statistic,
            "measured": _measured,
            "published": lambda row: None if is_sealed(row) else _SEAL,
            "budgets": _budget,
        }
        for table, check in checks.items():
            self.rows[table] = 0
            for number, *row in self._pages(table):
                self.rows[table] += 1
                why = check(row)
                if why is not None:
                    yield RowFault(table, number, why)

    def _pages(self, table: str) -> Iterator[tuple[Any, ...]]:
        last = -(2**63)
        while page := self.catalog.rows(
            f"SELECT rowid, {_COLUMNS[table]} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT {_PAGE}", (last,)
        ):
            yield from page
            last = page[-1][0]

    # --- sources --------------------------------------------------------------------------------------------------

    def _file(self, row: Sequence[Any]) -> str | None:
        return None if is_sealed(row) else _SEAL

    def _tensor(self, row: Sequence[Any]) -> str | None:
        file, name, digest, _, blocks = row
        if not is_sealed(row[:4]):
            return _SEAL
        if not _is_packed(blocks) or len(digest) != DIGEST_SIZE:
            return _LENGTH
        shapes, elements = self._source(file)
        if elements is None:
            return "belongs to no file"
        if shapes is None or name not in shapes:
            return None  # the file is gone or another one: the row is not used before it is compared with it
        dtype, shape = shapes[name]
        if len(blocks) != _block_bytes(dtype, shape, elements):
            return _LENGTH
        return None if tensor_digest(dtype, shape, blocks) == digest else _CONTENT

    def _sample(self, row: Sequence[Any]) -> str | None:
        file, name, samples, blocks, _ = row
        if not is_sealed(row):
            return _SEAL
        if not (_is_packed(samples) and _is_packed(blocks)):
            return _LENGTH
        shapes, elements = self._source(file)
        if elements is None:
            return "belongs to no file"
        if shapes is None or name not in shapes:
            return None
        right = _block_bytes(*shapes[name], elements)
        return None if {len(samples), len(blocks)} <= {0, right} else _LENGTH

    def _code(self, row: Sequence[Any]) -> str | None:
        key, sizes, residuals, header, _ = row
        if not is_sealed(row):
            return _SEAL
        if not len(key) == len(header) == DIGEST_SIZE:
            return _LENGTH
        if len(sizes) % (4 * LEVELS) or len(residuals) != 2 * len(sizes):  # four and eight bytes each
            return _LENGTH
        return None if self.codes.get(key, header) == header else "does not say what its pack says"

    def _source(self, file: int) -> tuple[Shapes | None, int | None]:
        """Return the shapes in a source file, if it is the one that was read, and the block size of its row."""
        if file not in self._shapes:
            rows = self.catalog.rows(
                "SELECT block_elements, path, size, mtime_ns, ctime_ns, inode, header FROM files WHERE id = ?", (file,)
            )
            if not rows:
                return None, None
            elements, path, size, mtime_ns, ctime_ns, inode, header = rows[0]
            self._elements[file] = elements
            self._shapes[file] = None
            if isinstance(path, bytes) and isinstance(elements, int) and elements > 0:
                place = self.catalog.layout.root.parent / os.fsdecode(path)
                self._shapes[file] = _shapes(place, FileIdentity(size, mtime_ns, ctime_ns, inode), header)
        return self._shapes[file], self._elements[file]

    # --- results --------------------------------------------------------------------------------------------------

    def _pack(self, row: Sequence[Any]) -> str | None:
        (name,) = row
        return None if isinstance(name, str) and _PACK.fullmatch(name) else "names no pack"

    def _result(self, row: Sequence[Any]) -> str | None:
        *_, dtype, shape, _, digest, keys, digests, pack, offset, _, elements = row
        if pack in self.lost:
            return None
        if not is_sealed(row[:-1]):
            return _SEAL
        sizes = _dimensions(shape)
        if sizes is None or dtype not in DTYPES or not isinstance(elements, int) or elements < 1:
            return _SEAL
        if not len(keys) == len(digests) == _block_bytes(dtype, sizes, elements):
            return _LENGTH
        if tensor_digest(dtype, sizes, digests) != digest:
            return _CONTENT
        if pack not in self.contents:
            return "names a pack that is not there"
        if (dtype, sizes, digest) not in self.contents[pack].get(offset, ()):
            return "does not say what lies in its pack"
        return None


def _is_packed(data: object) -> bool:
    return isinstance(data, bytes) and len(data) % DIGEST_SIZE == 0


def _pairs(keys: object, digests: object) -> str | None:
    """Return what is wrong with two lists of digests that go together."""
    if not (isinstance(keys, bytes) and isinstance(digests, bytes)):
        return _LENGTH
    return None if len(keys) == len(digests) and _is_packed(keys) else _LENGTH


def _statistic(row: Sequence[Any]) -> str | None:
    *_, keys, sizes, data, _, _ = row
    if not is_sealed(row):
        return _SEAL
    if len(sizes) % 4 or len(keys) != len(sizes) // 4 * DIGEST_SIZE:
        return _LENGTH
    return None if sum(struct.unpack(f"<{len(sizes) // 4}I", sizes)) == len(data) else _LENGTH


def _budget(row: Sequence[Any]) -> str | None:
    key, data, _ = row
    if not is_sealed(row):
        return _SEAL
    if not isinstance(key, bytes) or len(key) != DIGEST_SIZE:
        return _LENGTH
    return _FORM if unpacked(data) is None else None


def _measured(row: Sequence[Any]) -> str | None:
    _, value = row
    return None if isinstance(value, int | float) and 0 < value < math.inf else "is no duration"


def _dimensions(shape: object) -> tuple[int, ...] | None:
    try:
        return tuple(int(size) for size in str(shape).split(",") if size)
    except ValueError:
        return None


@lru_cache(maxsize=1 << 12)
def _block_bytes(dtype: str, shape: tuple[int, ...], elements: int) -> int:
    """Return the bytes of a tensor's packed block digests."""
    return grid(dtype, shape, Geometry(block_elements=elements)).count * DIGEST_SIZE


def _shapes(path: Path, identity: FileIdentity, header: object) -> Shapes | None:
    """Return dtypes and shapes from the header of a source file; None if it is not the file that is meant."""
    if FileIdentity.at(path) != identity:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = read_header(fd, path, identity.size, label="source")
    except (OSError, FormatError):
        return None
    finally:
        os.close(fd)
    return {info.name: (info.dtype, info.shape) for info in found.tensors} if found.digest == header else None
