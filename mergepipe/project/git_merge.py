"""What git calls when both sides of a merge changed the lock."""

from __future__ import annotations

import re
from pathlib import Path

from mergepipe.errors import LockError, fail_storage
from mergepipe.fsio.durable import replace_file
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.merge import MergedLock, merge_locks
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import REVISION, Lockfile
from mergepipe.lockfile.writer import render_lock
from mergepipe.project.git import merge_texts

_MARKS = re.compile(rb"^<{7}", re.MULTILINE)
_REVISION = re.compile(rb"^revision\s*=\s*([0-9]{1,9})\s*$", re.MULTILINE)
_LABELS = ("ours", "base", "theirs")  # in the order in which `git merge-file` takes the files


def merge_lock_files(base: Path, ours: Path, theirs: Path, name: str) -> tuple[str, ...]:
    """Merge three versions of a lock into the file ``ours``.

    If they cannot be merged, the file has conflict marks afterwards, whatever its lines are like: every command of ours
    refuses it then, and git does not let it pass.

    Parameters
    ----------
    name
        The path of the lock, for messages.

    Returns
    -------
    tuple
        Why they cannot be merged; empty if they were.

    Raises
    ------
    StorageError
        If a file cannot be read or written.
    """
    texts = {"base": _read(base), "ours": _read(ours), "theirs": _read(theirs)}
    merged = _merged(texts, name)
    if merged.lock is not None:
        # A side that says it all already keeps its text, line ends and all.
        replace_file(ours, _kept(merged.lock, texts, name) or render_lock(merged.lock).encode())
        return ()
    merge_texts(ours, base, theirs, _LABELS)
    if not _MARKS.search(_read(ours)):
        replace_file(ours, _whole_conflict(texts["ours"], texts["theirs"]))
    return merged.problems


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        fail_storage(error, path, "read")


def _merged(texts: dict[str, bytes], name: str) -> MergedLock:
    locks: dict[str, Lockfile] = {}
    problems = []
    for label, text in texts.items():
        if label == "base" and not text.strip():
            continue  # both sides wrote the lock for the first time
        revision = _REVISION.search(text)
        if revision and int(revision[1]) > REVISION:
            problems.append(f"{label}: a newer mergepipe wrote it")
            continue
        try:
            locks[label] = parse_lock(text, Path(name))
        except LockError as error:
            problems.append(f"{label}: {error.message}")
    if problems:
        return MergedLock(lock=None, problems=tuple(problems))
    return merge_locks(locks.get("base"), locks["ours"], locks["theirs"])


def _kept(lock: Lockfile, texts: dict[str, bytes], name: str) -> bytes | None:
    return next((texts[side] for side in ("ours", "theirs") if parse_lock(texts[side], Path(name)) == lock), None)


def _whole_conflict(ours: bytes, theirs: bytes) -> bytes:
    """Return both texts as one conflict: lines that merge do not make a lock that is right."""
    ours, theirs = (text if not text or text.endswith(b"\n") else text + b"\n" for text in (ours, theirs))
    return b"<<<<<<< ours\n" + ours + b"=======\n" + theirs + b">>>>>>> theirs\n"
