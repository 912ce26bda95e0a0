"""`mergepipe git setup`: a diff driver and a merge driver for the lock, in a repository's own configuration.

Git runs what is registered through a shell. It tries `mergepipe` on the PATH, then the Python that registered it (a
virtual environment that is not activated); where neither works, a diff is git's own, and a merge is git's own by lines
that counts as a conflict: two locks that were merged by lines alone must not pass for one that was built.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergepipe.errors import fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import replace_file
from mergepipe.project.git import Repository
from mergepipe.values import dataclass

Json = dict[str, Any]
DRIVER = "mergepipe"
ATTRIBUTES = ".gitattributes"
LOCK_PATTERN = "Mergefile.lock"

_ATTRIBUTES_OF_LOCK = "diff=mergepipe merge=mergepipe"
_OURS = re.compile(rb"\s" + _ATTRIBUTES_OF_LOCK.encode() + rb"\s*$")

# `m` runs mergepipe and returns 127 where it is nowhere; PYTHON is a shell word.
_RUN = (
    'm() { s=127; command -v mergepipe >/dev/null 2>&1 && { mergepipe "$@"; s=$?; }; '
    '[ $s -eq 127 ] && [ -x PYTHON ] && { PYTHON -m mergepipe "$@"; s=$?; }; return $s; }; '
)
_DIFF = (
    _RUN + 'f() { m git diff-driver "$@" && return 0; '
    'if [ -n "$5" ]; then git --no-pager diff --no-index --no-ext-diff -- "$2" "$5"; fi; return 0; }; f'
)
_MERGE = (
    _RUN + 'f() { m git merge-driver "$@"; s=$?; [ $s -eq 0 ] && return 0; '
    '[ $s -eq 1 ] && grep -q "^<<<<<<<" "$2" && return 1; '
    'echo "mergepipe cannot merge $4, lines are merged as text: build it anew before you git add it" >&2; '
    'git merge-file -L ours -L base -L theirs "$2" "$1" "$3"; return 1; }; f %O %A %B %P'
)
_TEMPLATES: Mapping[str, str] = {
    "diff.mergepipe.command": _DIFF,
    # For what git shows without the command, such as `git log -p`: which table a change is in.
    "diff.mergepipe.xfuncname": r"^\[.*\]$",
    "merge.mergepipe.name": "mergepipe: merge two locks entry by entry",
    "merge.mergepipe.driver": _MERGE,
    "merge.mergepipe.recursive": "binary",
}


def settings(python: str) -> dict[str, str]:
    """Return what is registered, by key of git's configuration; ``python`` is the path of an interpreter."""
    word = shlex.quote(python or "/nonexistent")
    # In a merge driver git itself reads the percent signs.
    return {
        key: template.replace("PYTHON", word.replace("%", "%%") if template is _MERGE else word)
        for key, template in _TEMPLATES.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupReport:
    """How a repository is set up, and what was changed.

    Attributes
    ----------
    root
        The top of the repository.
    state
        ``complete``, ``partial`` or ``absent``: what there is now.
    changed, missing
        Keys of the configuration, and lines of `.gitattributes`, that were changed, or that are not as they should be.
    """

    root: Path
    state: str
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def as_json(self) -> Json:
        """Return the JSON form."""
        return {
            "root": str(self.root),
            "state": self.state,
            "changed": list(self.changed),
            "missing": list(self.missing),
        }


def set_up(directory: Path, lock_name: str = LOCK_PATTERN) -> SetupReport:
    """Register the drivers in the repository of a directory, and write the line of `.gitattributes`.

    Whatever else is in there stays. Doing it again changes nothing.

    Parameters
    ----------
    lock_name
        The file name of the lock, where it is another than usual.

    Raises
    ------
    GitError
        If the directory is in no repository, or git cannot write.
    """
    repository = Repository.at(directory)
    changed = []
    for key, value in settings(sys.executable).items():
        if repository.setting(key) != value:
            repository.configure(key, value)
            crash_point("git.configured")
            changed.append(key)
    for name in dict.fromkeys((LOCK_PATTERN, lock_name)):
        if not repository.has_attributes(name, {"diff": DRIVER, "merge": DRIVER}):
            line = f"{_pattern(name)} {_ATTRIBUTES_OF_LOCK}"
            _append(repository.root / ATTRIBUTES, line.encode())
            changed.append(line)
    found = check_setup(directory, lock_name)
    return SetupReport(root=found.root, state=found.state, changed=tuple(changed), missing=found.missing)


def check_setup(directory: Path, lock_name: str = LOCK_PATTERN) -> SetupReport:
    """Return whether the drivers are registered and in force; which Python would run them does not matter.

    Raises
    ------
    GitError
        If the directory is in no repository.
    """
    repository = Repository.at(directory)
    missing = [key for key, template in _TEMPLATES.items() if not _is_set(repository.setting(key), template)]
    wanted = {"diff": DRIVER, "merge": DRIVER}
    missing += [
        f"{_pattern(name)} {_ATTRIBUTES_OF_LOCK}"
        for name in dict.fromkeys((LOCK_PATTERN, lock_name))
        if not repository.has_attributes(name, wanted)
    ]
    traces = any(repository.has_setting(key) for key in _TEMPLATES) or bool(_own_lines(repository.root / ATTRIBUTES))
    state = "complete" if not missing else "partial" if traces else "absent"
    return SetupReport(root=repository.root, state=state, missing=tuple(missing))


def remove_setup(directory: Path) -> SetupReport:
    """Take the drivers out of the configuration, and our lines out of `.gitattributes`.

    Raises
    ------
    GitError
        If the directory is in no repository, or git cannot write.
    """
    repository = Repository.at(directory)
    changed = []
    for key in _TEMPLATES:
        if repository.has_setting(key):
            repository.configure(key, None)
            crash_point("git.removed")
            changed.append(key)
    changed += _remove_lines(repository.root / ATTRIBUTES)
    return SetupReport(root=repository.root, state="absent", changed=tuple(changed))


def _is_set(value: str | None, template: str) -> bool:
    parts = [re.escape(part) for part in template.split("PYTHON")]
    return value is not None and re.fullmatch(".+?".join(parts), value) is not None


# --- .gitattributes ----------------------------------------------------------------------------------------------


def _pattern(name: str) -> str:
    """Return a file name as a pattern of `.gitattributes` that matches it alone, in any folder."""
    escaped = re.sub(r"([\\*?\[])", r"\\\1", name)
    if re.search(r'[\s"#!]', escaped):
        return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return escaped


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        fail_storage(error, path, "read")


def _append(path: Path, line: bytes) -> None:
    data = _read(path)
    end = b"\r\n" if b"\r\n" in data else b"\n"
    data += end if data and not data.endswith(b"\n") else b""
    replace_file(path, data + line + end)


def _own_lines(path: Path) -> list[bytes]:
    return [line for line in _read(path).splitlines(keepends=True) if _OURS.search(line)]


def _remove_lines(path: Path) -> list[str]:
    """Take our lines out of the file, and the file away if nothing else is in it; return them."""
    ours = _own_lines(path)
    if not ours:
        return []
    rest = b"".join(line for line in _read(path).splitlines(keepends=True) if line not in ours)
    if rest:
        replace_file(path, rest)
    else:
        path.unlink()
        crash_point("git.unlinked")
    return [line.decode("utf-8", "replace").strip() for line in ours]
