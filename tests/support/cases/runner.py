"""A case from beginning to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.cases.case import Case, Run
from support.cases.checks import Tensors
from support.cases.errors import CaseError, CheckError
from support.cases.launch import can_mount
from support.cases.project import Project
from support.cases.recipe import Recipe, with_settings
from support.cases.steps import Progress, judge, needs_small_disk, run_steps
from support.cases.tensors import read_checkpoint
from support.cases.waiting import run_waits_for
from support.cli import COMMAND, Result
from support.forked import ForkServer

# A wrong recipe is told at once, before weights are read; the seconds include the start of the interpreter.
RECIPE_KIND = "recipe"
AT_ONCE = 2.0


def find_cases(folder: Path) -> list[str]:
    """Return the names of the cases below a folder, sorted."""
    return sorted(path.parent.name for path in folder.glob("*/case.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    """What runs on a case, and where."""

    workdir: Path
    command: Sequence[str]
    server: ForkServer | None

    def project(self, case: Path, recipe: Recipe) -> Project:
        """Return a fresh copy of a case."""
        return Project(case, self.workdir, recipe, self.command, self.server)


def run_case(
    case: Case, workdir: Path, command: Sequence[str] = COMMAND, server: ForkServer | None = None
) -> list[str]:
    """Run all that a case asks for.

    Parameters
    ----------
    case
        The case.
    workdir
        Where copies of it are made.
    command
        The tool, as the first words of a command line.
    server
        Forks the processes of plain builds, where the tool is mergepipe; None starts each anew.

    Returns
    -------
    What this machine could not run, in words.

    Raises
    ------
    CheckError
        At the first run or step that does not go as the case says.
    CaseError
        If the case asks for something that makes no sense.
    """
    # How long an error takes counts from the start of a process that is the user's.
    tool = _Tool(workdir=workdir, command=command, server=None if case.kind == RECIPE_KIND else server)
    outputs: dict[int, Tensors | None] = {}
    skipped = []
    for number, steps in enumerate(case.step_lists):
        if needs_small_disk(steps) and not can_mount():
            skipped.append(f"step list {number} needs a small disk, and nothing can be mounted here")
            continue
        project = tool.project(case.folder, case.recipe)
        try:
            project = run_steps(project, case.expected, steps)
        except CheckError as error:
            raise CheckError(f"step list {number}: {error}") from error
        outputs.setdefault(0, _output(project))
    for run in case.runs:
        outputs[run.number] = _run(case, run, tool, outputs)
    return skipped


def _run(case: Case, run: Run, tool: _Tool, outputs: dict[int, Tensors | None]) -> Tensors | None:
    """Make one merge and check it; one that waits for a feature must not pass."""
    feature = run_waits_for(case.name, run.number)
    try:
        tensors = _merge(case, run, tool, outputs)
    except CheckError:
        if feature is None:
            raise
        return None
    if feature is not None:
        raise CaseError(f"{run.label} passes, and the list of what waits for {feature} still names it")
    return tensors


def _merge(case: Case, run: Run, tool: _Tool, outputs: dict[int, Tensors | None]) -> Tensors | None:
    project = tool.project(case.folder, with_settings(run.recipe, {}))
    progress = Progress(project=project, expected=run.expected)
    earlier = [outputs.get(number) for number in range(run.number)]
    result = project.build()
    if case.kind == RECIPE_KIND and result.code:
        result = _told_at_once(project, result)
    judge(progress, run.expected, result, earlier=earlier, label=run.label)
    return _output(project)


def _told_at_once(project: Project, result: Result) -> Result:
    """Check that an error came at once; a busy machine gets two more tries."""
    tries = 1
    while result.seconds >= AT_ONCE and tries < 3:
        result = project.build()
        tries += 1
    if result.seconds >= AT_ONCE:
        raise CheckError(f"the error came after {result.seconds:.1f} s, expected less than {AT_ONCE} s")
    return result


def _output(project: Project) -> Tensors | None:
    """Return the output for comparisons between runs; None where there is none, or an odd one that was refused."""
    try:
        return read_checkpoint(project.out) if project.out.is_dir() else None
    except CheckError:
        return None
