"""Text to lock: accepts whatever layout a merge tool or an editor left, and nothing that mergepipe did not write.

Every problem is a `LockError` that names the lock, the line where it can be found, and the key path. The first problem
stops the reading: a lock is written by a program, so one wrong value puts the whole in doubt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from mergepipe.errors import LockError
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.records import (
    LOCATION_KEYS,
    REVISION,
    VERSION,
    LockedExpert,
    LockedFile,
    LockedLevels,
    LockedOutput,
    LockedRule,
    LockedShard,
    LockedSideFile,
    LockedSlice,
    LockedSource,
    LockedTensor,
    Lockfile,
)
from mergepipe.lockfile.tables import Document, Table

_CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?:[ \t].*)?\r?$", re.MULTILINE)
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_BLOCKS = re.compile(r"(\S+) (0|[1-9][0-9]*)/(0|[1-9][0-9]*)")
_LEVELS = re.compile(r"(0|[1-9][0-9]{0,30}) B((?:, [1-9][0-9]{0,30} (?:omitted|exact|at level [1-9][0-9]{0,2}))*)")
_LEVEL_WORDS = {"omitted": 0, "exact": 255}
LARGEST_LOCK = 256 << 20
"""Bytes of a lock: that of a million tensors has less."""
_REGENERATE = "restore it from version control, or delete it and run `mergepipe build` to write it anew"

_OUTPUT_KEYS = (
    *("path", "publish", "operator", "operator_version", "code", "numerics", "base", "experts"),
    *("params", "budget", "levels_version", "levels", "write"),
    *("sources", "slices", "rules", "expert_bytes_full", "expert_bytes_planned", "bound", "digest", "shards"),
    *("side_files", "tensors"),
)


def read_lock(path: Path) -> Lockfile | None:
    """Return the lock at ``path``, or None if there is no file.

    Raises
    ------
    LockError
        If the file cannot be read, or `parse_lock` refuses it.
    """
    try:
        data = read_regular(path, LARGEST_LOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise LockError(f"cannot read the lock `{path}`: {reason}", file=str(path)) from error
    return parse_lock(data, path)


def parse_lock(text: str | bytes, path: Path) -> Lockfile:
    """Return the lock that ``text`` holds; ``path`` is for messages.

    Line ends, key order, comments and the order of tables are free. A higher ``revision`` is accepted and what it
    added is ignored; a higher ``version`` is not.

    Raises
    ------
    LockError
        For conflict markers, text that is not TOML, another version, missing, unknown or wrong values.
    """
    decoded = text if isinstance(text, str) else _decode(text, path)
    _refuse_conflicts(decoded, path)
    data = _load(decoded, path)
    document = Document(text=decoded, path=path, hint=_REGENERATE)
    top = Table(document, (), data)
    _check_version(top, path)
    document.lenient = top.optional_integer("revision", 0) > REVISION
    top.allow("version", "revision", "geometry", "sources", "outputs")
    return Lockfile(
        geometry=top.integer("geometry"),
        sources=tuple(_source(name, table) for name, table in top.optional_table("sources").tables()),
        outputs=tuple(_output(name, table) for name, table in top.optional_table("outputs").tables()),
    )


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors put a byte order mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error(path, line, "is not UTF-8 text", hint=_REGENERATE) from error


def _error(path: Path, line: int | None, problem: str, *, hint: str) -> LockError:
    place = f"{path}" if line is None else f"{path}:{line}"
    return LockError(f"{place}: {problem}", hint=hint, file=str(path), line=line)


def _refuse_conflicts(text: str, path: Path) -> None:
    conflict = _CONFLICT.search(text)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        raise _error(
            path,
            line,
            f"git conflict marker `{conflict[1]}`",
            hint=f"resolve the Mergefile first, then delete `{path.name}` and run `mergepipe build` to regenerate it",
        )


def _load(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise _error(path, None, "lists or tables are nested too deeply", hint=_REGENERATE) from error
    except ValueError as error:  # TOMLDecodeError is one; so is what an integer of thousands of digits raises
        message = str(error)
        place = _TOML_PLACE.search(message)
        line = int(place[1]) if place and place[1] else None
        problem = message[: place.start()] if place and line is not None else message
        raise _error(path, line, f"not valid TOML: {problem}", hint=_REGENERATE) from error


def _check_version(top: Table, path: Path) -> None:
    version = top.integer("version")
    if version != VERSION:
        raise LockError(
            f"{path}: is a lock of format version {version}, and this mergepipe reads version {VERSION}",
            hint="upgrade mergepipe, or use the one that wrote the lock" if version > VERSION else _REGENERATE,
            file=str(path),
            expected=VERSION,
            got=version,
        )


def _source(name: str, table: Table) -> LockedSource:
    table.allow(*LOCATION_KEYS, "digest", "tensors", "bytes", "files")
    return LockedSource(
        name=name,
        location={key: table.text(key) for key in LOCATION_KEYS if key in table},
        digest=table.pin("digest"),
        tensors=table.integer("tensors"),
        bytes=table.integer("bytes"),
        files=tuple(map(_file, table.optional_array("files"))),
    )


def _file(table: Table) -> LockedFile:
    table.allow("name", "bytes")
    return LockedFile(name=table.text("name"), bytes=table.integer("bytes"))


def _output(name: str, table: Table) -> LockedOutput:
    table.allow(*_OUTPUT_KEYS)
    return LockedOutput(
        name=name,
        path=_path(table),
        operator=table.text("operator"),
        operator_version=table.integer("operator_version"),
        numerics=table.text("numerics"),
        base=table.text("base") if "base" in table else None,
        experts=tuple(map(_expert, table.array("experts"))),
        params=table.optional_table("params").params(),
        slices=tuple(map(_slice, table.optional_array("slices"))),
        rules=tuple(map(_rule, table.optional_array("rules"))),
        budget=table.text("budget"),
        write=table.optional_table("write").texts_and_integers(),
        sources=table.optional_table("sources").pins(),
        code=table.optional_table("code").digests(),
        expert_bytes_full=table.integer("expert_bytes_full"),
        expert_bytes_planned=table.integer("expert_bytes_planned"),
        bound=_bound(table.optional_table("bound")),
        digest=table.digest("digest"),
        shards=tuple(map(_shard, table.array("shards"))),
        side_files=tuple(map(_side_file, table.array("side_files"))),
        tensors=_tensors(table.table("tensors"), _levels(table.optional_table("levels"))),
        levels_version=_levels_version(table),
    )


def _path(table: Table) -> str | None:
    """Return the directory of an output, None for one with ``publish = false`` in its place."""
    if "publish" not in table:
        return table.text("path")
    if "path" in table or table.flag("publish"):
        table.fail("publish", "can only be `false`, in place of `path`")
    return None


def _expert(table: Table) -> LockedExpert:
    return LockedExpert(
        source=table.text("source"),
        params=table.params(skip=("source", "layers")),
        layers=_optional_text(table, "layers"),
    )


def _optional_text(table: Table, key: str) -> str | None:
    return table.text(key) if key in table else None


def _slice(table: Table) -> LockedSlice:
    table.allow("layers", "operator", "operator_version", "base", "base_layers", "experts", "params", "rules")
    return LockedSlice(
        layers=table.text("layers"),
        operator=_optional_text(table, "operator"),
        operator_version=table.integer("operator_version") if "operator_version" in table else None,
        base=_optional_text(table, "base"),
        base_layers=_optional_text(table, "base_layers"),
        experts=tuple(map(_expert, table.array("experts"))),
        params=table.optional_table("params").params(),
        rules=tuple(map(_rule, table.optional_array("rules"))),
    )


def _rule(table: Table) -> LockedRule:
    table.allow("match", "layers", "params", "experts")
    return LockedRule(
        match=table.texts("match"),
        layers=_optional_text(table, "layers"),
        params=table.optional_table("params").params(),
        experts={name: expert.params() for name, expert in table.optional_table("experts").tables()},
    )


def _bound(table: Table) -> dict[str, str | float]:
    table.allow("kind", "absolute", "relative_to_update")
    bound: dict[str, str | float] = {"kind": table.text("kind")} if "kind" in table else {}
    bound.update((key, table.real(key)) for key in ("absolute", "relative_to_update") if key in table)
    return bound


def _shard(table: Table) -> LockedShard:
    table.allow("name", "digest", "bytes")
    return LockedShard(name=table.text("name"), digest=table.digest("digest"), bytes=table.integer("bytes"))


def _side_file(table: Table) -> LockedSideFile:
    table.allow("name", "digest")
    return LockedSideFile(name=table.text("name"), digest=table.digest("digest"))


def _levels_version(table: Table) -> int | None:
    if "levels_version" in table:
        return table.integer("levels_version")
    if "levels" in table:
        table.fail("levels", "stands there without `levels_version`")
    return None


def _levels(table: Table) -> dict[str, LockedLevels]:
    found = {}
    for name in table:
        match = _LEVELS.fullmatch(table.text(name))
        blocks = dict(map(_level_count, match[2].split(", ")[1:])) if match else {}
        if not match or list(blocks) != sorted(blocks) or len(blocks) != match[2].count(","):
            table.fail(name, 'is not `"BYTES B, N omitted, N at level LEVEL, N exact"`', table.text(name))
        found[name] = LockedLevels(bytes=int(match[1]), blocks=blocks)
    return found


def _level_count(text: str) -> tuple[int, int]:
    count, _, level = text.partition(" ")
    return _LEVEL_WORDS[level] if level in _LEVEL_WORDS else int(level.removeprefix("at level ")), int(count)


def _tensors(table: Table, levels: Mapping[str, LockedLevels]) -> tuple[LockedTensor, ...]:
    tensors = []
    for name in table:
        match = _BLOCKS.fullmatch(table.text(name))
        if not match:
            table.fail(name, 'is not `"DIGEST READ/TOTAL"`', table.text(name))
        digest = table.as_digest(name, match[1])
        read, total = int(match[2]), int(match[3])
        tensors.append(LockedTensor(name=name, digest=digest, read=read, total=total, levels=levels.get(name)))
    for name in levels:
        if name not in table:
            table.fail(name, "has levels and no digest")
    return tuple(tensors)
