"""Asking git: the few questions that we have, put to the `git` command, with its answers as values or errors.

A revision or a path is never read as an option, however it is spelled. Nothing here changes a repository, but for
`Repository.configure`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.errors import MergepipeError
from mergepipe.values import dataclass

_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
_CONFIG_ABSENT = (1, 5)
UNSHALLOW = "`git fetch --unshallow` gets the rest (in CI, such as `fetch-depth: 0` of actions/checkout)"
"""What to do where history is missing, for hints."""


class GitError(MergepipeError):
    """Git is not there, the folder is in no repository, or git does not know what it was asked for."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    out: bytes
    message: str


def _ask(directory: Path, *args: str) -> _Answer:
    return _run(directory, args, _environment(directory))


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment for git in a folder, also inside a hook.

    A hook hands down where its repository is, in paths that may be relative to the current folder, which is not git's
    then. In a linked working tree it hands down GIT_DIR alone, with which git takes every folder for the top.
    """
    environment = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    environment |= {name: os.path.abspath(environment[name]) for name in _PLACES if environment.get(name)}  # noqa: PTH100
    if environment.get("GIT_DIR") and not environment.get("GIT_WORK_TREE"):
        without = {name: value for name, value in environment.items() if name != "GIT_DIR"}
        found = _run(directory, ("rev-parse", "--absolute-git-dir"), without)
        given = os.path.realpath(environment["GIT_DIR"])
        if found.code == 0 and os.path.realpath(os.fsdecode(found.out.removesuffix(b"\n"))) == given:
            return without
    return environment


def _run(directory: Path, args: Sequence[str], environment: Mapping[str, str]) -> _Answer:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *args],
            capture_output=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise GitError(
            "the command `git` is not found",
            hint="install git, or name two lockfiles, manifests or output directories",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        raise GitError(f"cannot run `git`: {error}") from None
    return _Answer(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace").strip())


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository that a folder is in; its working tree may be a linked one.

    Attributes
    ----------
    directory
        The folder, from which relative paths start.
    root
        The top of the working tree.
    """

    directory: Path
    root: Path

    @classmethod
    def at(cls, directory: Path) -> Repository:
        """Return the repository of a folder.

        Raises
        ------
        GitError
            If it is in none, or git is not there.
        """
        answer = _ask(directory, "rev-parse", "--show-toplevel")
        if answer.code:
            raise _no_repository(directory, answer)
        return cls(directory, Path(os.fsdecode(answer.out.removesuffix(b"\n"))))

    def commit(self, revision: str) -> str | None:
        """Return the full name of the commit that a revision is, None if it is none."""
        return self._object(f"{revision}^{{commit}}")

    def is_shallow(self) -> bool:
        """Return whether it is a clone without all of its history."""
        return _ask(self.directory, "rev-parse", "--is-shallow-repository").out.strip() == b"true"

    def merge_base(self, one: str, other: str) -> str:
        """Return the short name of the commit where two revisions parted.

        Raises
        ------
        GitError
            If they have none in common, as in a clone without its history.
        """
        answer = _ask(self.directory, "merge-base", "--", one, other)
        if answer.code:
            raise GitError(
                f"`{one}` and `{other}` have no commit in common",
                hint=f"a shallow clone may lack it: {UNSHALLOW}",
            )
        commit = answer.out.decode("ascii", "replace").strip()
        short = _ask(self.directory, "rev-parse", "--short", commit)
        return short.out.decode("ascii", "replace").strip() or commit

    def _object(self, name: str) -> str | None:
        answer = _ask(self.directory, "rev-parse", "--quiet", "--verify", "--end-of-options", name)
        return answer.out.decode("ascii", "replace").strip() if answer.code == 0 else None

    def kind(self, name: str) -> str | None:
        """Return ``blob``, ``tree`` or ``commit`` for what git calls by this name, None for nothing.

        Names are git's own: ``main:sub/Mergefile.lock`` is relative to the top, ``main:./Mergefile.lock`` to the
        folder, and ``:Mergefile.lock`` is the file in the index.
        """
        found = self._object(name)
        if found is None:
            return None
        answer = _ask(self.directory, "cat-file", "-t", found)
        return answer.out.decode("ascii", "replace").strip() if answer.code == 0 else None

    def blob(self, name: str) -> bytes:
        """Return the bytes of a file by git's name for it.

        Raises
        ------
        GitError
            If git cannot give them, as in a clone that left them out.
        """
        found = self._object(name)
        answer = _ask(self.directory, "cat-file", "blob", found or name)
        if answer.code:
            raise GitError(f"git cannot read `{name}`: {_last(answer.message)}")
        return answer.out

    def has_commits(self) -> bool:
        """Return whether HEAD is a commit."""
        return self._object("HEAD") is not None

    def setting(self, key: str) -> str | None:
        """Return a value of the repository's own configuration, None if it is not set or set several times."""
        answer = _ask(self.directory, "config", "--local", "--get-all", "-z", key)
        values = answer.out.decode("utf-8", "surrogateescape").split("\0")[:-1]
        return values[0] if len(values) == 1 else None

    def has_setting(self, key: str) -> bool:
        """Return whether the repository's own configuration sets a key, however often."""
        return _ask(self.directory, "config", "--local", "--get-all", key).code == 0

    def configure(self, key: str, value: str | None) -> None:
        """Set a key of the repository's own configuration, once; None takes it out.

        Raises
        ------
        GitError
            If git cannot write its configuration.
        """
        change = ["--unset-all", key] if value is None else ["--replace-all", key, value]
        answer = _ask(self.directory, "config", "--local", *change)
        if answer.code and not (value is None and answer.code in _CONFIG_ABSENT):
            raise GitError(f"git cannot write its configuration: {_last(answer.message)}", key=key)

    def has_attributes(self, name: str, wanted: Mapping[str, str]) -> bool:
        """Return whether attributes of a file in the folder, which need not be there, have these values."""
        answer = _ask(self.directory, "check-attr", "-z", *wanted, "--", f"./{name}")
        fields = answer.out.decode("utf-8", "surrogateescape").split("\0")[:-1]
        return dict(zip(fields[1::3], fields[2::3], strict=False)) == dict(wanted)

    def has_colour(self, *, is_terminal: bool) -> bool:
        """Return whether git would show a difference in colour."""
        state = "true" if is_terminal else "false"
        return _ask(self.directory, "config", "--get-colorbool", "color.diff", state).out.strip() == b"true"


def _no_repository(directory: Path, answer: _Answer) -> GitError:
    if "dubious ownership" in answer.message:
        return GitError(
            f"git does not trust the repository of `{directory}`: it belongs to somebody else",
            hint=f"`git config --global --add safe.directory {directory}` tells git that it may",
            path=str(directory),
        )
    if "must be run in a work tree" in answer.message:
        return GitError(f"`{directory}` is in a bare repository, which has no files", path=str(directory))
    return GitError(
        f"`{directory}` is not in a git repository",
        hint="`git init` makes one; files and directories can be compared without one",
        path=str(directory),
    )


def _last(message: str) -> str:
    """Return the last line of what git said, without its label."""
    line = message.splitlines()[-1] if message else "no reason is given"
    return line.removeprefix("fatal: ").removeprefix("error: ")


def merge_texts(ours: Path, base: Path, theirs: Path, labels: Sequence[str]) -> int:
    """Merge three files line by line into the first, as git does it without a merge driver.

    Returns
    -------
    int
        The number of conflicts, at most 127; marks stand in the file then.
    """
    options = [part for label in labels for part in ("-L", label)]
    answer = _ask(Path.cwd(), "merge-file", *options, "--", *(str(path.absolute()) for path in (ours, base, theirs)))
    if answer.code > 127:
        raise GitError(f"git cannot merge: {_last(answer.message)}")
    return answer.code
