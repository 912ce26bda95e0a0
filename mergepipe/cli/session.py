"""What a command works with: its options, its console, and the project that it opens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cli.console import Console
from mergepipe.cli.options import GlobalOptions
from mergepipe.errors import MergefileError
from mergepipe.reporting import Reporter

if TYPE_CHECKING:
    from mergepipe.project import Project
    from mergepipe.project.caches import ProjectCache

MERGEFILE = "Mergefile.toml"
CACHE_DIRECTORY = ".mergecache"  # as in `mergepipe.project.session`, which takes its time to import


class Session:
    """One run of the command line.

    Parameters
    ----------
    options
        The global options, filled in while the command line is parsed.
    """

    def __init__(self, options: GlobalOptions) -> None:
        self.options = options
        self.console = Console(options)

    def open_project(
        self, reporter: Reporter, *, workers: int | None = None, memory: int | None = None, load_custom: bool = True
    ) -> Project:
        """Open the project of the Mergefile that the options name, or the nearest one.

        Without ``load_custom`` no code of custom operators is needed, nor runs.

        Raises
        ------
        MergefileError
            If there is none, or for what is wrong in it.
        """
        path = Path(self.options.file) if self.options.file else find_mergefile(Path.cwd())
        cache = self.options.cache_directory()
        # The pipeline takes its time to import, which `--help` must not.
        from mergepipe.project import open_project

        return open_project(
            path,
            cache_dir=Path(cache) if cache is not None else None,
            reporter=reporter,
            workers=workers,
            memory=memory,
            allow_custom=self.options.allow_custom,
            load_custom=load_custom,
        )

    def open_cache(self, reporter: Reporter, *, workers: int | None = None) -> ProjectCache:
        """Open the cache directory that the options name, else that beside the Mergefile, which need not be right.

        Raises
        ------
        MergefileError
            If there is neither a Mergefile nor a cache.
        """
        named = self.options.cache_directory()
        try:
            folder, lock = self._cache_place()
        except MergefileError:
            if named is None:
                raise
            folder, lock = Path(), None
        from mergepipe.project.caches import open_cache

        return open_cache(named or folder / CACHE_DIRECTORY, lock_path=lock, reporter=reporter, workers=workers)

    def _cache_place(self) -> tuple[Path, Path | None]:
        """Return the folder that a cache may lie in, and the lock of the project there, if there is one."""
        if self.options.file:
            path = Path(self.options.file)
            if not path.is_file() and not (path.parent / CACHE_DIRECTORY).is_dir():
                raise MergefileError(
                    f"there is no Mergefile `{path}`, and no cache beside it",
                    hint="`--cache-dir` names a cache",
                    path=str(path),
                )
            return path.parent, path.with_suffix(".lock")
        here = Path.cwd()
        for number, folder in enumerate((here, *here.parents)):
            if (folder / MERGEFILE).is_file():
                break
            if (folder / CACHE_DIRECTORY).is_dir():  # of a project whose Mergefile has another name, or is gone
                return Path(*[".."] * number), None
        path = find_mergefile(here)
        return path.parent, path.with_suffix(".lock")


def find_mergefile(directory: Path) -> Path:
    """Return the path of the Mergefile in a directory, or in the nearest one above; relative to the directory.

    Raises
    ------
    MergefileError
        If there is none up to the root.
    """
    for number, folder in enumerate((directory, *directory.parents)):
        if (folder / MERGEFILE).is_file():
            return Path(*[".."] * number, MERGEFILE)
    misspelled = next((name for name in sorted(os.listdir(directory)) if name.lower() == MERGEFILE.lower()), None)
    raise MergefileError(
        f"there is no `{MERGEFILE}` in `{directory}` or above",
        hint=f"the file `{misspelled}` must be called `{MERGEFILE}`"
        if misspelled
        else "`mergepipe init` writes one, `--file` names another",
        path=str(directory),
    )


def shown_path(root: Path) -> Callable[[str], str]:
    """Return what shows a path of the Mergefile in ``root`` to somebody in the current directory."""
    here = os.getcwd()  # noqa: PTH109 - compared as text
    if os.path.realpath(root) == os.path.realpath(here):
        return str

    def shown(path: str) -> str:
        absolute = os.path.normpath(root / os.path.expanduser(path))  # noqa: PTH111 - as the Mergefile does it
        return min(os.path.relpath(absolute, here), absolute, key=len)

    return shown
