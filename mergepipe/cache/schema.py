"""The tables of the catalog, and what brings those of earlier versions up to this one."""

from __future__ import annotations

from collections.abc import Mapping

SCHEMA_VERSION = 6

_SAMPLES = """
CREATE TABLE samples (
    file INTEGER NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    samples BLOB NOT NULL,
    blocks BLOB NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY (file, name)
);
"""
_CODES = """
CREATE TABLE codes (
    key BLOB PRIMARY KEY,
    sizes BLOB NOT NULL,
    residuals BLOB NOT NULL,
    header BLOB NOT NULL,
    seal BLOB NOT NULL
);
"""
_BUDGETS = """
CREATE TABLE budgets (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    data BLOB NOT NULL,
    seal BLOB NOT NULL
);
"""
_TABLES = """
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

SCHEMA = f"{_TABLES} {_SAMPLES} {_CODES} {_BUDGETS}"
"""What makes the tables of a new catalog."""

TABLES = frozenset(
    ("files", "tensors", "samples", "codes", "packs", "results", "staged", "statistics", "measured", "published",
     "budgets")
)  # fmt: skip
"""The tables of a catalog."""

# What brings a catalog of an earlier version to the next one; those before the first of these are set aside.
# Version 5 takes samples of blocks with long rows at other places (they are taken again), and has codes of deltas.
MIGRATIONS: Mapping[int, str] = {3: _SAMPLES, 4: f"DELETE FROM samples; {_CODES}", 5: _BUDGETS}
