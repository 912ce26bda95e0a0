"""What git calls to show how a lock differs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.lockfile.diff import diff_sides
from mergepipe.operators.registry import signatures
from mergepipe.project.diff import DiffReport
from mergepipe.project.diff_sides import Sides
from mergepipe.project.git import GitError, Repository


def compare_files(arguments: Sequence[str], *, is_terminal: bool) -> tuple[DiffReport, bool]:
    """Return the difference of the two files of git's arguments, and whether git would show it in colour.

    Parameters
    ----------
    arguments
        As git gives them to a diff driver: path, old file, hex, mode, new file, hex, mode. A side that is not there is
        `/dev/null`.

    Raises
    ------
    MergepipeError
        If a file is no lock that can be read.
    """
    name, old_file, new_file = arguments[0], arguments[1], arguments[4]
    sides = Sides(Path.cwd)  # every file is named, so that nothing is looked for
    (old, _), (new, _) = (sides.named(file) for file in (old_file, new_file))
    old = old if old_file == os.devnull else replace(old, name=f"a/{name}")
    new = new if new_file == os.devnull else replace(new, name=f"b/{name}")
    return DiffReport(diff=diff_sides(old, new, signatures())), _has_colour(is_terminal=is_terminal)


def _has_colour(*, is_terminal: bool) -> bool:
    try:
        return Repository.at(Path.cwd()).has_colour(is_terminal=is_terminal)
    except GitError:
        return False
