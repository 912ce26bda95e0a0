"""A checkpoint's place on disk, and opening its files with errors that say which one and why."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.sniff import sniff
from mergepipe.checkpoints.wording import quote
from mergepipe.digest import content_digest
from mergepipe.errors import SourceError
from mergepipe.values import dataclass

GET_AGAIN = "get the progressive checkpoint again from where it came"
_TEXT_LIMIT = 100_000_000
FOLLOW_VARIABLE = "MERGEPIPE_FOLLOW_LINKS"
"""The environment variable that lets links lead out of a checkpoint's folder; ``1`` for yes, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint lies, and what messages call it.

    Attributes
    ----------
    label
        Name of the source.
    root
        Absolute path of the folder.
    shown
        The folder as the user wrote it.
    is_named
        Whether the user named the file in it that is read, so that it may be a link to anywhere.
    sealed
        Of a progressive checkpoint: the digests of its small files, by name, as its record has them. Such a file that
        is read must be there and have its digest; another one beside them is refused. None for any other folder.
    """

    label: str
    root: Path
    shown: str
    is_named: bool = False
    sealed: Mapping[str, bytes] | None = None

    def show(self, name: str) -> str:
        """Return what messages call a file of the folder."""
        return os.path.join(self.shown, name)

    def error(
        self, what: str, *lines: str, name: str | None = None, hint: str | None = None, **facts: Any
    ) -> SourceError:
        """Return an error about a file of the folder, or about the folder: ``what`` follows its name."""
        path = self.shown if name is None else self.show(name)
        first = f"source {quote(self.label)}: {quote(path)} {what}"
        return SourceError("\n".join((first, *lines)), hint=hint, source=self.label, path=path, **facts)


@contextlib.contextmanager
def opened(place: Place, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file of the folder for reading; yield its descriptor and its status.

    Raises
    ------
    SourceError
        If it is missing, a broken link, no regular file, or may not be read; if a link leads out of the folder; also
        for an I/O error while it is open.
    """
    try:
        _confine(place, name)
        # Without O_NONBLOCK a named pipe would be waited for.
        fd = os.open(place.root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(place, name, error) from error
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise place.error("is a folder, not a file", name=name)
        if not stat.S_ISREG(status.st_mode):
            raise place.error("is not a regular file", name=name)
        yield fd, status
    except OSError as error:
        raise _unreadable(place, name, error) from error
    finally:
        os.close(fd)


def _confine(place: Place, name: str) -> None:
    """Refuse a file that is elsewhere: a checkpoint comes from anybody, and links in it could point to any file here.

    A hub's cache is an exception: its folders `snapshots/REVISION` hold links to the files in `blobs` beside them.
    """
    if place.is_named or os.environ.get(FOLLOW_VARIABLE) == "1":
        return
    real = os.path.realpath(place.root / name)
    root = os.path.realpath(place.root)
    if any(real.startswith(os.path.join(folder, "")) for folder in (root, *_blobs(root))) or not os.path.lexists(real):
        return
    raise place.error(
        f"is a link that leads out of the folder, to {quote(real)}",
        name=name,
        hint="put the file itself (or a hard link) there; a source may also be the path of one `.safetensors` file;"
        f" if all links in your checkpoints are your own, {FOLLOW_VARIABLE}=1 follows them",
        target=real,
    )


def _blobs(root: str) -> tuple[str, ...]:
    """Return where links of a snapshot in a hub's cache lead, nothing for any other folder."""
    repository, found, _ = root.rpartition(f"{os.sep}snapshots{os.sep}")
    return (os.path.join(repository, "blobs"),) if found else ()


def _unreadable(place: Place, name: str, error: OSError) -> SourceError:
    """Return the error for a file that the operating system did not open or read."""
    path = place.root / name
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        target = str(path.readlink())
        return place.error(
            f"is a link to {quote(target)}, which does not exist",
            name=name,
            hint="its content was deleted or not downloaded: download the model again",
        )
    if isinstance(error, FileNotFoundError):
        return place.error("does not exist", name=name)
    hint = "check the permissions of the file" if isinstance(error, PermissionError) else None
    return place.error(f"cannot be read: {error.strerror or error}", name=name, hint=hint)


def read_small(place: Place, name: str) -> bytes:
    """Return the content of a side file.

    Raises
    ------
    SourceError
        If it cannot be read, is larger than any side file, or is not the one that was sealed.
    """
    if place.sealed is not None and name in place.sealed and not os.path.lexists(place.root / name):
        raise place.error("is gone: the record of the progressive checkpoint has it", name=name, hint=GET_AGAIN)
    with opened(place, name) as (fd, status):
        if status.st_size > _TEXT_LIMIT:
            raise place.error(f"is too large: {status.st_size:,} bytes", name=name)
        with open(fd, "rb", closefd=False) as file:
            data = file.read()
    if place.sealed is not None:
        _check_sealed(place, name, place.sealed.get(name), data)
    return data


def _check_sealed(place: Place, name: str, digest: bytes | None, data: bytes) -> None:
    if digest is None:
        what, hint = "is not in the record of the progressive checkpoint", f"remove it, or {GET_AGAIN}"
        raise place.error(what, name=name, hint=hint)
    if content_digest(data) != digest:
        raise place.error("is not what was packed: it is damaged, or was changed", name=name, hint=GET_AGAIN)


def read_object(place: Place, name: str) -> dict[str, Any]:
    """Return the JSON object in a config; NaN and infinities are allowed there, as transformers writes them.

    Raises
    ------
    SourceError
        If it cannot be read, or holds something else.
    """
    data = read_small(place, name)
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        what, hint = what_instead(data) or (f"invalid JSON: {_json_words(error)}", None)
        raise place.error(f"is {what}", name=name, hint=hint) from None
    if not isinstance(value, dict):
        raise place.error("does not hold a JSON object", name=name)
    return value


def _json_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deeply, or a number too long"


def what_instead(data: bytes) -> tuple[str, str] | None:
    """Return what a file is that should have been JSON, and a hint, where that is plain: a pointer, a page, zeros."""
    finding = sniff(data[:4096])
    if finding is None or finding.kind in ("json", "text"):
        return None
    return finding.what, finding.hint
