"""The steps that change files, as people, sync tools and bad disks do."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.cases.errors import CaseError
from support.cases.project import Project
from support.cases.state import CACHE

Step = Mapping[str, Any]


def replace(project: Project, step: Step) -> None:
    """Put another file in a file's place: by renaming it there, or by writing over the old bytes."""
    target, source = project.path(step["path"]), project.path(step["with"], must_exist=True)
    old = target.stat() if target.exists() else None
    how = step.get("how", "rename")
    if how == "in_place":
        _make_writable(target)
        with target.open("r+b") as file:
            file.write(source.read_bytes())
            file.truncate()
        written = target
    elif how == "rename":
        written = target.with_name(f".{target.name}.incoming")
        shutil.copyfile(source, written)
    else:
        raise CaseError(f"replace: the harness does not know how to {how!r}")
    if step.get("keep_mtime_ns"):
        if old is None:
            raise CaseError(f"replace: `{step['path']}` has no time to keep")
        os.utime(written, ns=(old.st_atime_ns, old.st_mtime_ns))
    written.replace(target)


def write(project: Project, step: Step) -> None:
    """Write a text file."""
    path = project.path(step["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _make_writable(path)
    path.write_bytes(step["text"].encode())


def touch(project: Project, step: Step) -> None:
    """Set a file's time of modification to now."""
    os.utime(project.path(step["path"], must_exist=True))


def delete(project: Project, step: Step) -> None:
    """Remove a file or a folder."""
    path = project.path(step["path"], must_exist=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def overwrite_bytes(project: Project, step: Step) -> None:
    """Invert some bytes of a file, in place or in a new file under the same name."""
    path = project.path(step["path"], must_exist=True)
    data = path.read_bytes()
    start = _start(step.get("at", "middle"), len(data), step["count"])
    changed = _inverted(data, start, step["count"])
    if step.get("in_place", True):
        _make_writable(path)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(changed[start : start + step["count"]])
    else:
        fresh = path.with_name(f".{path.name}.edited")
        fresh.write_bytes(changed)
        fresh.replace(path)


def _start(at: str | int, size: int, count: int) -> int:
    places = {"start": 0, "middle": max(0, (size - count) // 2), "end": max(0, size - count)}
    if isinstance(at, int):
        return at if at >= 0 else size + at
    if at not in places:
        raise CaseError(f"overwrite_bytes: the harness does not know the place {at!r}")
    return places[at]


def _inverted(data: bytes, start: int, count: int) -> bytes:
    stop = min(start + count, len(data))
    return data[:start] + bytes(byte ^ 0xFF for byte in data[start:stop]) + data[stop:]


def damage_one_cache_entry(project: Project, step: Step) -> None:
    """Invert a few bytes in the second half of the cache's largest pack, in place."""
    packs = [p for p in sorted((project.root / CACHE / "packs").rglob("*")) if p.is_file() and p.stat().st_size]
    if not packs:
        raise CaseError(f"there is no pack below `{CACHE}/packs` to damage")
    victim = max(packs, key=lambda path: path.stat().st_size)
    size = victim.stat().st_size
    count = min(step.get("count", 4), size)
    at = min(size * 3 // 4, size - count)
    path = str(victim.relative_to(project.root))
    overwrite_bytes(project, {"path": path, "at": at, "count": count, "in_place": True})


def move_project(project: Project, step: Step) -> None:
    """Rename the project's folder."""
    target = project.root.parent / step["to"]
    target.parent.mkdir(parents=True, exist_ok=True)
    project.root = project.root.rename(target)


def rewrite_lock(project: Project, step: Step) -> None:
    """Change the lockfile as other tools and people do."""
    path = project.path("<lock>", must_exist=True)
    rewrites: Mapping[str, Callable[[str], str]] = {
        "crlf": lambda text: text.replace("\n", "\r\n"),
        "key_order": with_other_key_order,
        "newer_version": with_newer_version,
        "conflict_markers": with_conflict_markers,
    }
    if step["how"] not in rewrites:
        raise CaseError(f"rewrite_lock: the harness does not know how to {step['how']!r}")
    old = path.read_bytes().decode()
    new = rewrites[step["how"]](old)
    if new == old:
        raise CaseError(f"rewrite_lock: {step['how']} changed nothing in the lock")
    path.write_bytes(new.encode())


def with_other_key_order(text: str) -> str:
    """Return TOML with the keys of every table in reverse order; it says the same.

    Raises
    ------
    CaseError
        If reordering changed what it says (a kind of line that this function does not understand).
    """
    result = "".join("".join(reversed(entries)) for entries in _toml_sections(text))
    if tomllib.loads(result) != tomllib.loads(text):
        raise CaseError("cannot reorder the keys of this lock without changing what it says")
    return result


def _toml_sections(text: str) -> Iterator[list[str]]:
    """Yield lists of entries (each one or more lines); headers, comments and blank lines as lists of their own."""
    entries: list[str] = []
    for line in text.splitlines(keepends=True):
        if re.match(r"""[A-Za-z0-9_."'-][^=]*=""", line):
            entries.append(line)
        elif not line.strip() or line.startswith(("[", "#")):
            yield entries
            yield [line]
            entries = []
        elif entries:
            entries[-1] += line
        else:
            raise CaseError(f"not a line of TOML: {line!r}")
    yield entries


def with_newer_version(text: str) -> str:
    """Return the lock with a version from the far future."""
    key = r"(?:version|format|format_version|lock_version)"
    new, count = re.subn(rf"^({key}\s*=\s*)\d+", r"\g<1>999", text, count=1, flags=re.MULTILINE)
    if not count:
        raise CaseError("found no version in the lock")
    return new


def with_conflict_markers(text: str) -> str:
    """Return the lock as git leaves it after a conflict in its middle line."""
    lines = text.splitlines(keepends=True)
    middle = len(lines) // 2
    ours = lines[middle]
    conflict = ["<<<<<<< HEAD\n", ours, "=======\n", ours, ">>>>>>> topic\n"]
    return "".join((*lines[:middle], *conflict, *lines[middle + 1 :]))


def _make_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWUSR)


def show(step: Step) -> str:
    """Return a step in one line, for messages."""
    return json.dumps({k: v for k, v in step.items() if k != "expected"}, ensure_ascii=False)
