"""Files of a user in an output directory: they are taken along into the next version of it, whatever they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.links import copy_file


def keep_user_files(
    previous: Path, staged: Path, owned: Collection[str], taken: Collection[str], is_replaced: Callable[[str], bool]
) -> None:
    """Give the user's files of the previous directory a place in the next one.

    Parameters
    ----------
    owned
        The names of the files that mergepipe put into the previous directory.
    taken
        The names of those that it puts into the next one.
    is_replaced
        Tells of a name whether its file is left behind.
    """
    for name in user_files(previous, owned):
        target = staged / name
        if is_replaced(name) or name in taken or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _share(previous / name, target)
        crash_point("publish.kept")


def rescue_user_files(
    retired: Path, target: Path, owned: Collection[str], is_replaced: Callable[[str], bool]
) -> None:
    """Move user files that appeared in the previous directory while the next one was put together."""
    for name in user_files(retired, owned):
        if not os.path.lexists(target / name) and not is_replaced(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (retired / name).rename(target / name)
            crash_point("publish.rescued")


def user_files(directory: Path, owned: Collection[str]) -> Iterable[str]:
    """Yield the relative names of all files, links and empty folders that mergepipe did not put there."""
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in sorted([*files, *links]):
            relative = os.path.relpath(os.path.join(folder, name), directory)
            if relative not in owned:
                yield relative
        if not folders and not files and folder != str(directory):
            yield os.path.relpath(folder, directory)


def _share(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
        return
    try:
        target.hardlink_to(source)
    except OSError:
        copy_file(source, target, mode=source.stat().st_mode & 0o777)
