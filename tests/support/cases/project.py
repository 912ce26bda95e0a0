"""A fresh copy of a case's folder, with a Mergefile in it, and the tool run on it."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.cases.checks import Context, Tensors
from support.cases.errors import CaseError
from support.cases.recipe import Recipe, mergefile_text, output_dir
from support.cases.state import CACHE, LOCK, Snapshot, take_snapshot
from support.cli import COMMAND, Result, run_process
from support.forked import ForkServer

TIMEOUT = 120.0


class Project:
    """One copy of a case, on which builds run and steps act.

    Parameters
    ----------
    case
        The case's own folder; only read.
    workdir
        Where the copy is made, in a new folder.
    recipe
        The merge that the Mergefile asks for.
    command
        The tool, as the first words of a command line.
    server
        Forks the processes of plain builds of mergepipe; None starts each anew, as those that are interfered with are.
    """

    def __init__(
        self,
        case: Path,
        workdir: Path,
        recipe: Recipe,
        command: Sequence[str] = COMMAND,
        server: ForkServer | None = None,
    ) -> None:
        self.case = case
        self.workdir = workdir
        self.recipe = recipe
        self.command = tuple(command)
        self.server = server
        self.root = Path(tempfile.mkdtemp(dir=workdir)) / "project"
        shutil.copytree(case, self.root, symlinks=True)
        for path in (self.root, *self.root.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IWUSR)
        self.write_mergefile(recipe)

    def fresh(self) -> Project:
        """Return another fresh copy of the same case and recipe."""
        return Project(self.case, self.workdir, self.recipe, self.command, self.server)

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.root / output_dir(self.recipe)

    def path(self, text: str, *, must_exist: bool = False) -> Path:
        """Return the path that a step names: relative to the project, or below ``<out>``, ``<cache>``, ``<lock>``.

        Raises
        ------
        CaseError
            If it leads out of the project, or must exist and does not.
        """
        first, _, rest = text.partition("/")
        places = {"<out>": self.out, "<cache>": self.root / CACHE, "<lock>": self.root / LOCK}
        path = places[first] / rest if first in places else self.root / text
        if self.root not in path.parents or ".." in path.parts:
            raise CaseError(f"`{text}` is not a path inside the project")
        if must_exist and not path.exists():
            raise CaseError(f"there is no `{text}` to work on")
        return path

    def write_mergefile(self, recipe: Recipe, comment: str | None = None) -> None:
        """Write the Mergefile for a recipe."""
        (self.root / "Mergefile.toml").write_text(mergefile_text(recipe, comment), encoding="utf-8")

    def build(self, *flags: str, wrapper: Sequence[str] = (), env: dict[str, str] | None = None) -> Result:
        """Run the tool's ``build`` to its end, started through ``wrapper`` if there is one."""
        if self.server is not None and not wrapper:
            return self.server.run(["build", *flags], self.root, env)
        return run_process((*wrapper, *self.build_command(*flags)), self.root, env, TIMEOUT)

    def build_command(self, *flags: str) -> tuple[str, ...]:
        """Return the command line of ``build``."""
        return (*self.command, "build", *flags)

    def snapshot(self) -> Snapshot:
        """Return what lies in the project now."""
        return take_snapshot(self.root, self.out)

    def context(self, earlier: Sequence[Tensors | None] = (), out: Path | None = None) -> Context:
        """Return the present state as something to judge."""
        base: Any = self.recipe.get("base")
        return Context(case=self.case, out=out or self.out, base=base and self.root / base, earlier=earlier)
