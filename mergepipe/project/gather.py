"""Opening what a build needs, and refusing early what must not be: sources, output directories, overlaps."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.progressive import open_standalone
from mergepipe.checkpoints.standalone import RECORD
from mergepipe.errors import CacheError, MergefileError, MergepipeError, PublishError, SourceError, raise_collected
from mergepipe.fsio.identity import settle
from mergepipe.mergefile.checks import references
from mergepipe.mergefile.schema import Mergefile, Output, Source
from mergepipe.operators.contract import Operator
from mergepipe.plan.output import plan_output
from mergepipe.plan.values import OutputPlan
from mergepipe.progressive.levels import CODE_VERSION
from mergepipe.project.stages import Plans, Stage, make_stage, record_place
from mergepipe.publish.directory import ANOTHER_PATH, check_place


def select_outputs(mergefile: Mergefile, names: Sequence[str]) -> tuple[Output, ...]:
    """Return the outputs of these names (a string is one name) in the Mergefile's order; all of them for no names.

    Raises
    ------
    MergefileError
        For a name that is no output.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in names if name not in mergefile.outputs]
    errors = []
    for name in unknown:
        close = difflib.get_close_matches(name, mergefile.outputs, n=1)
        errors.append(
            MergefileError(
                f"`{name}` is not an output of `{mergefile.path.name}`",
                hint=f"did you mean `{close[0]}`?" if close else f"outputs are: {', '.join(mergefile.outputs)}",
                output=name,
            )
        )
    raise_collected(errors)
    return tuple(output for name, output in mergefile.outputs.items() if not names or name in names)


def with_stages(mergefile: Mergefile, outputs: Iterable[Output]) -> tuple[Output, ...]:
    """Return these outputs and all outputs that they refer to, each behind those; else in the Mergefile's order."""
    found: dict[str, Output] = {}
    waiting = [*outputs][::-1]
    while waiting:
        needed = [mergefile.outputs[name] for name in _stages_of(mergefile, waiting[-1]) if name not in found]
        if needed:
            waiting += needed[::-1]
            continue
        output = waiting.pop()
        found[output.name] = output
    return tuple(found.values())


def _stages_of(mergefile: Mergefile, output: Output) -> list[str]:
    """Return the outputs that an output refers to, in the Mergefile's order."""
    named = {name for name, _ in references(output)}
    return [name for name in mergefile.outputs if name in named]


def open_sources(mergefile: Mergefile, outputs: Iterable[Output]) -> dict[str, Checkpoint]:
    """Open every checkpoint that these outputs, and the outputs that they refer to, are made from.

    Headers are read, weights are not.

    Raises
    ------
    SourceError
        For sources that cannot be read; several are raised together.
    """
    named = dict.fromkeys(name for output in with_stages(mergefile, outputs) for name, _ in references(output))
    checkpoints: dict[str, Checkpoint] = {}
    errors: list[MergepipeError] = []
    for source in _with_bases(mergefile, named):
        if source.on is not None and source.on not in checkpoints:
            continue  # what it applies to cannot be read, which is reported
        try:
            path = mergefile.source_path(source.name)
            assert path is not None, "the parser refuses hub sources"
            checkpoints[source.name] = open_settled(path, source, checkpoints)
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    return checkpoints


def _with_bases(mergefile: Mergefile, names: Iterable[str]) -> tuple[Source, ...]:
    """Return the sources among these names in order, each adapter behind the source that it applies to."""
    found: dict[str, Source] = {}
    for source in (mergefile.sources[name] for name in names if name in mergefile.sources):
        if source.on is not None:
            found.setdefault(source.on, mergefile.sources[source.on])
        found.setdefault(source.name, source)
    return tuple(found.values())


def open_settled(path: Path, source: Source, checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    """Open a checkpoint at a path; if a file was written just now, open it again when another write would show.

    Parameters
    ----------
    checkpoints
        At least the one that an adapter applies to, by source name.

    Raises
    ------
    SourceError
        If it cannot be read.
    """
    began = time.time_ns()
    checkpoint = _open(path, source, checkpoints)
    racy = [file for file in checkpoint.files if file.identity.is_racy(began)]
    if not racy:
        return checkpoint
    for file in racy:
        settle(file.identity)
    return _open(path, source, checkpoints)


def _open(path: Path, source: Source, checkpoints: Mapping[str, Checkpoint]) -> Checkpoint:
    path = Path(os.path.normpath(path))
    if source.progressive is not None:
        found = open_standalone(path, label=source.name, shown=source.progressive)
        if found.standalone is not None and found.standalone.code != CODE_VERSION:
            raise SourceError(
                f"source `{source.name}`: the codes of `{source.progressive}` are of version {found.standalone.code},"
                f" and this mergepipe reads version {CODE_VERSION}",
                hint="get one that this version made, or use the version that made it",
                source=source.name,
                path=source.progressive,
            )
        return found
    if source.on is None:
        return open_checkpoint(path, label=source.name, shown=source.path)
    return open_adapter(path, label=source.name, on=checkpoints[source.on], shown=source.path)


def placed_source(source: Source, path: Path) -> Source:
    """Return a source that lies at another path, where it may be a progressive checkpoint, whichever it was."""
    if source.on is None and os.path.lexists(path / RECORD):
        return replace(source, path=None, progressive=str(path))
    return replace(source, path=str(path), progressive=None)


def make_plans(
    mergefile: Mergefile,
    outputs: Iterable[Output],
    operators: Mapping[str, Operator],
    checkpoints: Mapping[str, Checkpoint],
    geometry: Geometry,
) -> Plans:
    """Plan these outputs, and those that they are made from: all of them before a weight of any is read.

    Parameters
    ----------
    operators
        By name, custom ones among them.
    checkpoints
        The opened sources.

    Raises
    ------
    MergepipeError
        For everything that does not fit, of all outputs together; what is made from an output that cannot be planned
        is left out.
    """
    outputs = tuple(outputs)
    ordered = with_stages(mergefile, outputs)
    stages: dict[str, Stage] = {}
    plans: dict[str, OutputPlan] = {}
    errors: list[MergepipeError] = []
    used = {name for output in ordered for name in _stages_of(mergefile, output)}
    for output in ordered:
        if not plans.keys() >= {*_stages_of(mergefile, output)}:
            continue
        known = {**checkpoints, **{name: stage.checkpoint for name, stage in stages.items()}}
        try:
            plan = plan_output(output, lambda name: _operator(name, operators), known, geometry)
            if output.name in used:
                stages[output.name] = make_stage(plan, mergefile, checkpoints, stages)
            plans[output.name] = plan
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    return Plans(
        mergefile=mergefile,
        checkpoints=checkpoints,
        stages=stages,
        plans=_to_build(plans, {output.name for output in outputs}),
    )


def _operator(name: str, operators: Mapping[str, Operator]) -> Operator:
    if name not in operators:
        what = f"`{name}` is a custom operator, and the project was opened without their code"
        raise MergefileError(what, hint="open it with `load_custom=True`")
    return operators[name]


def _to_build(plans: dict[str, OutputPlan], wanted: set[str]) -> tuple[OutputPlan, ...]:
    """Return the plans of the outputs that were asked for and of those whose weights they are made from.

    One that gives no more than its tokenizer need not be built for that.
    """
    for name in reversed(plans):  # what an output is made from stands before it
        if name in wanted:
            wanted |= plans[name].sources.keys() & plans.keys()
    return tuple(plan for name, plan in plans.items() if name in wanted)


def check_targets(
    mergefile: Mergefile,
    outputs: Iterable[Output],
    checkpoints: Mapping[str, Checkpoint],
    cache: Path,
) -> None:
    """Check that every published output has a place of its own: no file, no part of a source, the project or the cache.

    Raises
    ------
    PublishError
        For each output that would.
    CacheError
        If the cache would be the folder of a source, or one above it.
    """
    _check_cache(cache, checkpoints)
    errors: list[MergepipeError] = []
    for output in outputs:
        if not output.publish:
            continue
        target = record_place(mergefile, output)
        try:
            check_overlap(target, output.name, mergefile.root, checkpoints, cache)
            check_place(target)
        except PublishError as error:
            errors.append(error)
    raise_collected(errors)


def _check_cache(cache: Path, checkpoints: Mapping[str, Checkpoint]) -> None:
    """Check that no source lies among the cache's files, in a folder that is marked as one to leave out of backups."""
    real = Path(os.path.realpath(cache))
    for source, checkpoint in checkpoints.items():
        folder = Path(os.path.realpath(checkpoint.root))
        if checkpoint.is_folder and folder.is_relative_to(real):
            raise CacheError(
                f"`{cache}` cannot be the cache: source `{source}` {'is' if folder == real else 'lies in'} that folder",
                hint="give it a folder of its own with `--cache-dir`, or none for `.mergecache` beside the Mergefile",
                source=source,
                path=str(cache),
            )


def _overlap(first: Path, second: Path) -> bool:
    return first.is_relative_to(second) or second.is_relative_to(first)


def _real_folders(files: Iterable[Path]) -> set[Path]:
    """Return the folders in which these files really lie; links are followed, those of a folder once."""
    folders: set[Path] = set()
    found: set[Path] = set()
    for file in files:
        if file.is_symlink():
            found.add(Path(os.path.realpath(file)).parent)
        else:
            folders.add(file.parent)
    return found.union(Path(os.path.realpath(folder)) for folder in folders)


def check_overlap(
    target: Path,
    name: str,
    root: Path,
    checkpoints: Mapping[str, Checkpoint],
    cache: Path,
    *,
    another: str = ANOTHER_PATH,
) -> None:
    """Check that an output directory is, holds and lies in no source, and does not hold the project or its cache.

    Parameters
    ----------
    another
        How another place is chosen, for hints.

    Raises
    ------
    PublishError
        If it does.
    """
    real = Path(os.path.realpath(target))
    for source, checkpoint in checkpoints.items():
        root_folder = Path(os.path.realpath(checkpoint.root))
        linked = _real_folders(file.path for file in checkpoint.files) - {root_folder}
        for folder in (root_folder, *sorted(linked)):
            # A source must not lie in the output, nor the output in the source; a file that the source only links to,
            # or that is the whole source, may lie anywhere above the output.
            inside = folder == root_folder and checkpoint.is_folder and real.is_relative_to(folder)
            if real == folder or folder.is_relative_to(real) or inside:
                raise PublishError(
                    f"output `{name}` would be written to `{target}`, which overlaps with source `{source}`"
                    f" (`{folder}`)",
                    hint=f"{another}; sources are never written to, even with `--force`",
                    output=name,
                    source=source,
                    path=str(target),
                )
    cache_folder = Path(os.path.realpath(cache))
    if Path(os.path.realpath(root)).is_relative_to(real) or _overlap(real, cache_folder):
        raise PublishError(
            f"output `{name}` would replace `{target}`, which holds the project or overlaps with its cache",
            hint="choose a directory of its own for the output, such as `build/" + name + "`",
            output=name,
            path=str(target),
        )
