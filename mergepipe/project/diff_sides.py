"""What `OLD` and `NEW` of `mergepipe diff` mean: lockfiles, manifests, output directories, git revisions.

The rule, in this order:

1. ``rev:NAME`` (or any name with ``--rev``) is a git revision.
2. A path that exists is that file or directory: a manifest, a lock, an output directory, or a folder with a lock.
   ``/dev/null`` is a lock that says nothing.
3. Anything else is a git revision. ``REVISION`` is the project's lock there; ``REVISION:PATH`` a file or folder at the
   top of the repository, ``REVISION:./PATH`` one in the current folder, ``:PATH`` one in the index: git's own names.
   Alone, ``OLD..NEW`` are two revisions, and ``OLD...NEW`` are NEW and the commit where OLD and NEW parted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mergepipe.errors import LockError, MergepipeError, fail_storage
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.diff import EMPTY_LOCK, manifest_side
from mergepipe.lockfile.diff_values import Side
from mergepipe.lockfile.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.lockfile.reader import parse_lock
from mergepipe.project.git import UNSHALLOW, GitError, Repository

LOCK_NAME = "Mergefile.lock"
_REVISION = "rev:"
_RANGE = re.compile(r"([^:]*?)(\.{2,3})([^:.][^:]*)?")
_FORCE = "write `rev:{name}` if the git revision is meant"


class DiffError(MergepipeError):
    """What is to be compared is not there, or is no record of a merge."""

    exit_status = 2


class Sides:
    """Opens what is compared.

    Parameters
    ----------
    find_lock
        Returns the path of the project's lock, absolute; it is asked only where that is needed, and may raise.
    revisions
        Whether names are always git revisions.
    """

    def __init__(self, find_lock: Callable[[], Path], *, revisions: bool = False) -> None:
        self._find_lock = find_lock
        self._revisions = revisions

    def committed(self) -> Side:
        """Return the lock that HEAD has."""
        lock = self._find_lock()
        repository = Repository.at(lock.parent)
        if not repository.has_commits():
            raise DiffError(
                "there is no commit yet, so no lock to compare with",
                hint="commit the lock, or name what to compare with: `mergepipe diff OLD`",
            )
        return self._of_revision("HEAD", repository, lock)

    def on_disk(self) -> Side:
        """Return the project's lock as it is now."""
        lock = self._find_lock()
        if not os.path.lexists(lock):
            raise DiffError(f"there is no lock at `{_shown(lock)}`", hint="`mergepipe build` writes it", path=str(lock))
        return self._of_file(_shown(lock), Path(_shown(lock)))

    def named(self, text: str) -> tuple[Side, Path | None]:
        """Return the side that a word on the command line names, and where its weights may lie: its directory.

        Raises
        ------
        MergepipeError
            If it is none, or cannot be read.
        """
        if text.startswith(_REVISION) or self._revisions:
            return self._revision(text.removeprefix(_REVISION)), None
        path = Path(text)
        if text == os.devnull:
            return Side(name=text, kind="empty", lock=EMPTY_LOCK), None
        if text and os.path.lexists(path):
            return self._of_path(text, path)
        try:
            return self._revision(text, path=path), None
        except DiffError as error:
            built = self._built(text)
            if built is None:
                raise
            raise DiffError(error.message, hint=f"the output of this name is `{built}`", path=text) from None

    def ends(self, text: str) -> tuple[str, str] | None:
        """Return the two revisions of ``OLD..NEW``; of ``OLD...NEW`` the commit where the two parted, and NEW.

        As in git an end that is left out is HEAD. None for what is no such range: a path that exists, for example.
        """
        match = _RANGE.fullmatch(text.removeprefix(_REVISION))
        forced = self._revisions or text.startswith(_REVISION)
        if match is None or (os.path.lexists(text) and not forced):
            return None
        old, dots, new = match[1] or "HEAD", match[2], match[3] or "HEAD"
        if dots == "...":
            repository = Repository.at(self._find_lock().parent)
            for name in (old, new):
                if repository.commit(name) is None:
                    raise _unknown(name, None, repository)
            old = repository.merge_base(old, new)
        return f"{_REVISION}{old}", f"{_REVISION}{new}"

    def _built(self, name: str) -> str | None:
        """Return the directory of an output of this name, at the place that outputs have by default."""
        try:
            directory = self._find_lock().parent / "build" / name
        except MergepipeError:
            return None
        return _shown(directory) if (directory / MANIFEST_NAME).is_file() else None

    # --- paths -------------------------------------------------------------------------------------------------------

    def _of_path(self, text: str, path: Path) -> tuple[Side, Path | None]:
        if not path.is_dir():
            side = self._of_file(text, path)
            return side, path.parent if side.kind == "manifest" else None
        if (path / MANIFEST_NAME).exists():
            return self._of_file(text, path / MANIFEST_NAME), path
        if (path / LOCK_NAME).exists():
            return self._of_file(text, path / LOCK_NAME), None
        raise DiffError(
            f"`{text}` is a directory without `{MANIFEST_NAME}`, so no output, and without `{LOCK_NAME}`",
            hint=_FORCE.format(name=text),
            path=text,
        )

    def _of_file(self, name: str, path: Path) -> Side:
        try:
            data = path.read_bytes() if str(path).startswith(_DESCRIPTORS) else read_regular(path)
        except OSError as error:
            fail_storage(error, path, "read")
        return _parsed(name, data, path, "lock")

    # --- revisions ---------------------------------------------------------------------------------------------------

    def _revision(self, name: str, *, path: Path | None = None) -> Side:
        """Return what git has under a name; ``path`` is where a file of that name would be, for messages."""
        try:
            if ":" in name:
                return self._of_object(name, Repository.at(Path.cwd()), path)
            lock = self._find_lock()
            repository = Repository.at(lock.parent)
            return self._of_revision(name, repository, lock, path)
        except GitError as error:
            if path is None:
                raise
            raise DiffError(f"`{name}` does not exist, and {error.message}", hint=error.hint, path=name) from None

    def _of_revision(self, name: str, repository: Repository, lock: Path, path: Path | None = None) -> Side:
        if repository.commit(name) is None:
            raise _unknown(name, path, repository)
        inner = f"{name}:./{lock.name}"
        if repository.kind(inner) != "blob":
            place = _in_repository(lock, repository)
            raise DiffError(
                f"the revision `{name}` has no `{place}`",
                hint="commit the lock, or name a revision that has it; `/dev/null` stands for no lock",
                revision=name,
            )
        return _parsed(name, repository.blob(inner), Path(f"{name}:{_in_repository(lock, repository)}"), "revision")

    def _of_object(self, name: str, repository: Repository, path: Path | None) -> Side:
        kind = repository.kind(name)
        if kind in ("tree", "commit"):
            inner = [f"{name.rstrip('/')}/{file}" if not name.endswith(":") else f"{name}{file}" for file in _RECORDS]
            name = next((found for found in inner if repository.kind(found) == "blob"), name)
            kind = repository.kind(name)
        if kind != "blob":
            revision, _, inside = name.partition(":")
            if revision and repository.commit(revision) is None:
                raise _unknown(revision, path, repository)
            what = "is a folder without one" if kind else "is not there"
            where = f"in the revision `{revision}`" if revision else "in the index"
            raise DiffError(
                f"`{inside}` is no lock or manifest {where}: it {what}",
                hint="a path behind `:` starts at the top of the repository, one with `./` in the current folder",
                revision=revision,
            )
        return _parsed(name, repository.blob(name), Path(name), "revision")


_DESCRIPTORS = ("/dev/fd/", "/proc/self/fd/")  # what a shell makes of `<(...)`: a pipe
_RECORDS = (MANIFEST_NAME, LOCK_NAME)


def _unknown(name: str, path: Path | None, repository: Repository) -> DiffError:
    shallow = f"this clone is shallow, and may lack it: {UNSHALLOW}" if repository.is_shallow() else None
    if path is None:
        hint = shallow or "`git log --oneline` lists them"
        return DiffError(f"`{name}` is not a git revision", hint=hint, revision=name)
    hint = "name a lockfile, a manifest, an output directory, or a revision such as `HEAD~1` or `main`"
    return DiffError(
        f"`{name}` is neither a file or directory nor a git revision",
        hint=hint if shallow is None else f"{hint}; {shallow}",
        path=name,
    )


def _in_repository(lock: Path, repository: Repository) -> str:
    folder = os.path.relpath(os.path.realpath(lock.parent), os.path.realpath(repository.root))
    return (PurePosixPath(Path(folder).as_posix()) / lock.name).as_posix()


def _shown(path: Path) -> str:
    """Return a path as somebody in the current folder would write it."""
    return min(os.path.relpath(path), str(path), key=len)


def _parsed(name: str, data: bytes, path: Path, kind: str) -> Side:
    """Return a lock or a manifest from its bytes; which one it is, is seen by its first character."""
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return manifest_side(name, parse_manifest(data, path))
    if _is_mergefile(data, path):
        raise LockError(
            f"`{path}` is a Mergefile, and what it made is recorded in its lock",
            hint=f"name the lock: `{path.with_suffix('.lock')}`",
            file=str(path),
        )
    return Side(name=name, kind=kind, lock=parse_lock(data, path))


def _is_mergefile(data: bytes, path: Path) -> bool:
    return path.suffix == ".toml" and b"geometry" not in data
