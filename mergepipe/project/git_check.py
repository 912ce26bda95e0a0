"""`mergepipe git check`: whether a lock goes with its Mergefile, told from these two files alone."""

from __future__ import annotations

from pathlib import Path

from mergepipe.errors import LockDiffersError
from mergepipe.lockfile.compare import Difference
from mergepipe.lockfile.compare_text import render_differences
from mergepipe.lockfile.declared import mergefile_differences
from mergepipe.lockfile.merge import inconsistencies
from mergepipe.lockfile.reader import read_lock
from mergepipe.mergefile.parse import load_mergefile
from mergepipe.operators.registry import operators, signatures
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LockCheck:
    """What was found: differences between lock and Mergefile, and entries of the lock that do not fit together.

    ``exists`` tells whether there is a lock.
    """

    path: Path
    exists: bool
    differences: tuple[Difference, ...] = ()
    inconsistencies: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return self.exists and not self.differences and not self.inconsistencies


def check_lock(path: Path) -> LockCheck:
    """Return whether the lock beside a Mergefile says what the Mergefile says; no checkpoint is opened, and no cache.

    Code of custom operators does not run. Whether the sources still are what the lock says, only `build --locked` can
    tell.

    Raises
    ------
    MergefileError
        For what is wrong in the Mergefile.
    LockError
        If the lock cannot be read, as with conflict marks.
    """
    mergefile = load_mergefile(path, signatures())
    lock_path = path.with_suffix(".lock")
    lock = read_lock(lock_path)
    if lock is None:
        return LockCheck(path=lock_path, exists=False)
    versions = {name: operator.version for name, operator in operators().items()}
    return LockCheck(
        path=lock_path,
        exists=True,
        differences=mergefile_differences(lock, mergefile, versions),
        inconsistencies=tuple(inconsistencies(lock)),
    )


def refuse(found: LockCheck, shown: str) -> None:
    """Stop with what is wrong, if anything is.

    Raises
    ------
    LockDiffersError
        Naming what differs.
    """
    if found.is_right:
        return
    hint = "run `mergepipe build` and commit the lock with the Mergefile"
    if not found.exists:
        raise LockDiffersError(f"`{shown}` does not exist", hint=hint, path=shown)
    parts = [render_differences(found.differences, Path(shown))] if found.differences else []
    if found.inconsistencies:
        parts.append("\n".join((f"`{shown}` contradicts itself", *(f"  {line}" for line in found.inconsistencies))))
    raise LockDiffersError(
        "\n".join(parts),
        hint=hint,
        path=shown,
        differences=[difference.as_json() for difference in found.differences],
        inconsistencies=list(found.inconsistencies),
    )
