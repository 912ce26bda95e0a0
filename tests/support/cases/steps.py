"""The steps of a case: what may be written in them, and what each does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cases import files, launch
from support.cases.checks import Tensors
from support.cases.errors import CaseError, CheckError, known_keys, require
from support.cases.files import Step, show
from support.cases.outcome import (
    SUCCESS,
    check_expected,
    describe,
    effect_problems,
    output_problems,
    result_problems,
)
from support.cases.project import Project
from support.cases.recipe import spell_weight, with_output_dir, with_settings
from support.cases.state import Snapshot, kept_output, litter, partial_output
from support.cli import Result

DISK = "disk"


@dataclass(kw_only=True)
class Progress:
    """A list of steps under way.

    Attributes
    ----------
    project
        What the steps act on.
    expected
        The case's own ``expected``: what `check` looks at.
    moment, duration
        When the ``during`` of a run happens, and the seconds that a build takes.
    before
        The state before the last run.
    killed
        Whether the last run was killed: it had no chance to tidy up.
    """

    project: Project
    expected: Mapping[str, Any]
    moment: launch.Moment = launch.MOMENTS[0]
    duration: float = 0.0
    before: Snapshot = field(init=False)
    killed: bool = False

    def __post_init__(self) -> None:
        self.before = self.project.snapshot()


def judge(
    progress: Progress,
    expected: Mapping[str, Any],
    result: Result,
    *,
    label: str,
    folder: Path | None = None,
    earlier: Sequence[Tensors | None] = (),
) -> None:
    """Check how a run ended and what it left.

    Parameters
    ----------
    label
        What ran, for messages.
    folder
        Where the output lies, if not in its place.
    earlier
        The outputs of the runs before this one.

    Raises
    ------
    CheckError
        With all that is wrong, and what the process printed.
    """
    project = progress.project
    out = folder or project.out
    problems = list(result_problems(expected, result, project.root))
    problems += effect_problems(expected, result.code != 0, progress.before, project.snapshot())
    if result.code == 0:
        problems += output_problems(expected, project.context(earlier, out))
    elif folder or progress.before.output is None:
        problems += partial_output(out)
    require([*problems, *describe(result)] if problems else (), label)


def _run(progress: Progress, step: Step) -> None:
    project = progress.project
    recipe = with_settings(project.recipe, step.get("set", {}))
    if "spell_weight_as" in step:
        recipe = spell_weight(recipe, step["spell_weight_as"])
    project.write_mergefile(recipe, "nothing of importance" if step.get("add_comment") else None)
    progress.before, progress.killed = project.snapshot(), "kill_after" in step
    if progress.killed:
        _killed_runs(progress, step)
        return
    result, folder = _launch(progress, step)
    expected = {**step.get("expected", SUCCESS), **{k: v for k, v in step.items() if k == "lock_unchanged"}}
    judge(progress, expected, result, folder=folder, label=show(step))
    if step.get("expect_all_cached"):
        require(_recomputed(result), show(step))


def _launch(progress: Progress, step: Step) -> tuple[Result, Path | None]:
    project = progress.project
    flags = [*step.get("flags", ()), *(["--json"] if step.get("expect_all_cached") else [])]
    if "limit_file_size" in step:
        return launch.build_with_file_limit(project, step["limit_file_size"], *flags), None
    if "output_on_tmpfs_bytes" in step:
        return _on_small_disk(progress, step["output_on_tmpfs_bytes"], flags)
    if "during" in step:
        return _disturbed(progress, step["during"], flags), None
    return project.build(*flags), None


def _on_small_disk(progress: Progress, size: int, flags: Sequence[str]) -> tuple[Result, Path]:
    project = progress.project
    disk = project.root / DISK
    disk.mkdir(exist_ok=True)
    result, seen = launch.build_on_small_disk(project, size, disk, *flags)
    folder = seen / project.out.relative_to(disk)
    left = [str(path.relative_to(seen)) for path in seen.rglob("*") if path != folder and folder not in path.parents]
    require((f"the build left `{path}` on the small disk" for path in left), "a small disk")
    return result, folder


def _disturbed(progress: Progress, action: Step, flags: Sequence[str]) -> Result:
    project = progress.project
    return launch.build_meanwhile(
        project,
        progress.moment,
        progress.duration,
        project.root / action.get("path", "."),
        lambda: OPS[action["op"]].do(progress, action),
        *flags,
    )


def _killed_runs(progress: Progress, step: Step) -> None:
    for seconds in step["kill_after"]:
        progress.before = progress.project.snapshot()
        result = launch.build_and_kill(progress.project, seconds, *step.get("flags", ()))
        problems = list(_after_a_kill(progress))
        if result.code > 0:
            problems.append("the build failed before it was killed")
        require([*problems, *describe(result)] if problems else (), f"killed after {seconds} s")


def _after_a_kill(progress: Progress) -> Iterator[str]:
    """Yield what is wrong after a kill: the output must be the earlier one, or a whole one."""
    project = progress.project
    yield from partial_output(project.out)
    if progress.before.output is not None and not project.out.exists():
        yield "the earlier output is gone"


def _recomputed(result: Result) -> Iterator[str]:
    """Yield which outputs of a ``build --json`` had blocks to compute."""
    try:
        outputs = json.loads(result.stdout)["outputs"]
    except (ValueError, LookupError) as error:
        raise CheckError(f"stdout is not a report in JSON ({error!r}):\n{result.stdout}") from error
    if not outputs:
        yield "the report names no output"
    for name, output in outputs.items():
        if output["blocks"]["computed"] != 0:
            yield f"{name}: {output['blocks']} blocks, expected none to be computed"


def _lock(progress: Progress, step: Step) -> None:
    _run(progress, {"op": "run"} | {k: v for k, v in step.items() if k != "op"})


def _run_together(progress: Progress, step: Step) -> None:
    project = progress.project
    project.write_mergefile(with_settings(project.recipe, step.get("set", {})))
    progress.before, progress.killed = project.snapshot(), False
    results = launch.build_together(project, step.get("count", step.get("n", 2)), step.get("flags", ()))
    expected = step.get("expected", SUCCESS)
    for result in results:
        ending = {"outcome": "either", "error_should_mention": expected.get("error_should_mention", ())}
        require(result_problems(ending, result, project.root), f"{show(step)}: {result}")
    if all(result.code for result in results):
        raise CheckError(f"none of the builds succeeded: {results}")
    problems = [*litter(progress.before, project.snapshot()), *output_problems(expected, project.context())]
    require(problems, show(step))


def _check(progress: Progress, step: Step) -> None:
    require(output_problems(step.get("expected", progress.expected), progress.project.context()), show(step))


def _check_no_partial_output(progress: Progress, step: Step) -> None:
    project = progress.project
    if progress.killed:
        require(_after_a_kill(progress), show(step))
        return
    now = project.snapshot()
    problems = [*partial_output(project.out), *litter(progress.before, now), *kept_output(progress.before, now)]
    require(problems, show(step))


def _check_file(progress: Progress, step: Step) -> None:
    path = progress.project.path(step["path"])
    want = step["text"]
    got = path.read_bytes().decode(errors="replace") if path.is_file() else None
    require([] if got == want else [f"`{step['path']}` holds {got!r}, expected {want!r}"], show(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What a step does, and the keys that it must and may have."""

    do: Callable[[Progress, Step], None]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def _op(do: Callable[[Progress, Step], None], required: str = "", optional: str = "") -> Op:
    return Op(do=do, required=frozenset(required.split()), optional=frozenset(optional.split()))


def _on_files(do: Callable[[Project, Step], None], required: str = "", optional: str = "") -> Op:
    return _op(lambda progress, step: do(progress.project, step), required, optional)


_RUN_KEYS = (
    "set flags kill_after limit_file_size output_on_tmpfs_bytes during expect_all_cached spell_weight_as "
    "add_comment lock_unchanged expected"
)
OPS: Mapping[str, Op] = {
    "run": _op(_run, optional=_RUN_KEYS),
    "lock": _op(_lock, optional="set flags expected"),
    "run_together": _op(_run_together, optional="set flags count n expected"),
    "replace": _on_files(files.replace, "path with", "how keep_mtime_ns"),
    "write": _on_files(files.write, "path text"),
    "touch": _on_files(files.touch, "path"),
    "delete": _on_files(files.delete, "path"),
    "overwrite_bytes": _on_files(files.overwrite_bytes, "path count", "at in_place"),
    "damage_one_cache_entry": _on_files(files.damage_one_cache_entry, optional="count"),
    "move_project": _on_files(files.move_project, "to"),
    "rewrite_lock": _on_files(files.rewrite_lock, "how"),
    "check": _op(_check, optional="expected"),
    "check_no_partial_output": _op(_check_no_partial_output),
    "check_file": _op(_check_file, "path text"),
}
_BUILDS = ("run", "lock", "run_together")


def check_step(step: Any, where: str) -> None:
    """Check that the harness knows a step's operation and all its keys.

    Raises
    ------
    CaseError
        If not.
    """
    if not isinstance(step, Mapping) or step.get("op") not in OPS:
        raise CaseError(f"{where}: the harness does not know the step {step!r}")
    op = OPS[step["op"]]
    known_keys(step, {"op"} | op.required | op.optional, f"{where} ({step['op']})", op.required)
    if "expected" in step:
        check_expected(step["expected"], f"{where}.expected")
    if "during" in step:
        check_step(step["during"], f"{where}.during")


def needs_small_disk(steps: Sequence[Step]) -> bool:
    """Return whether a step list mounts a small disk."""
    return any("output_on_tmpfs_bytes" in step for step in steps)


def moments(steps: Sequence[Step]) -> Sequence[launch.Moment]:
    """Return the moments at which a step list must be tried: one, or several where something happens during a run."""
    return launch.MOMENTS if any("during" in step for step in steps) else launch.MOMENTS[:1]


def run_steps(project: Project, expected: Mapping[str, Any], steps: Sequence[Step]) -> Project:
    """Run a step list once for each of its moments, each time in a fresh copy; check the state after the last step.

    Returns
    -------
    The last copy.

    Raises
    ------
    CheckError
        At the first step that does not go as the case says.
    """
    if needs_small_disk(steps):
        project.recipe = with_output_dir(project.recipe, f"{DISK}/{project.out.name}")
    several = moments(steps)
    duration = project.fresh().build().seconds if len(several) > 1 else 0.0
    for moment in several:
        project = project.fresh()
        progress = Progress(project=project, expected=expected, moment=moment, duration=duration)
        try:
            for number, step in enumerate(steps):
                _do(progress, step, number)
            _check_end(progress, steps)
        except CheckError as error:
            raise CheckError(f"{moment}, {error}" if len(several) > 1 else str(error)) from error
    return project


def _do(progress: Progress, step: Step, number: int) -> None:
    try:
        OPS[step["op"]].do(progress, step)
    except CheckError as error:
        raise CheckError(f"step {number}: {error}") from error


def _check_end(progress: Progress, steps: Sequence[Step]) -> None:
    """Check the case's own ``expected``, with what the last run said for itself taking precedence.

    After a run that was to fail the state is what the run before it left; the steps have checked that.
    """
    last = next((step for step in reversed(steps) if step["op"] in _BUILDS), {})
    own = last.get("expected", SUCCESS)
    if own["outcome"] != "success" or progress.expected["outcome"] == "error":
        return
    require(output_problems({**progress.expected, **own}, progress.project.context()), "after the last step")
