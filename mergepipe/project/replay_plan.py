"""The plan of an output from its manifest and the sources alone, compared with what the manifest says of it.

The way is that of a build: what the manifest declares becomes a Mergefile again (`replay_source`), that is planned over
the sources' headers, and the recorded access sets of budgets take the place of the planner. Each tensor must then come
from the same inputs with the same parameters. No weights are read.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.digest import format_digest
from mergepipe.errors import MergefileError, MergepipeError, PlanError, SourceError, raise_collected
from mergepipe.fsio.reading import read_regular
from mergepipe.lockfile.manifest import MANIFEST_NAME, parse_manifest
from mergepipe.lockfile.manifest_records import LEVEL_EXACT, LEVEL_OMITTED, Manifest, ManifestTensor
from mergepipe.lockfile.records import LockedOutput, LockedSource
from mergepipe.mergefile.schema import Mergefile
from mergepipe.plan.access import TensorAccess
from mergepipe.plan.bounds import ErrorBound
from mergepipe.plan.budgeted import with_outcome
from mergepipe.plan.codes import may_be_coded
from mergepipe.plan.values import BudgetOutcome, Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVELS
from mergepipe.project.gather import make_plans, open_settled, placed_source
from mergepipe.project.replay_compare import plan_errors
from mergepipe.project.replay_source import declared_mergefile, locations_of, needed_sources, records_of
from mergepipe.project.stages import Plans
from mergepipe.values import dataclass

_BOUNDS = ("exact", "certified", "estimated", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where what a manifest needs is found.

    Attributes
    ----------
    base_dir
        What relative locations start from; None for `base_directory`.
    sources
        By name, sources that are elsewhere.
    code
        The folder of custom operators' files; None for the base directory.
    allow_custom
        Whether the code of custom operators may run.
    """

    base_dir: Path | None = None
    sources: Mapping[str, Path] = field(default_factory=dict)
    code: Path | None = None
    allow_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """The plans that a manifest makes again.

    Attributes
    ----------
    manifest
        What they were compared with.
    plans
        Of the stages and, last, of the output, with their access sets; what is to be built, in order.
    base_dir
        What relative locations started from.
    records
        By output name what the manifest says of it.
    tensors
        By output name what it says of its tensors; those of a stage have no block digests of their own.
    """

    manifest: Manifest
    plans: Plans
    base_dir: Path
    records: Mapping[str, LockedOutput]
    tensors: Mapping[str, tuple[ManifestTensor, ...]]

    @property
    def plan(self) -> OutputPlan:
        """The plan of the output itself."""
        return self.plans.plans[-1]


def read_manifest(path: Path) -> tuple[Manifest, Path]:
    """Return the manifest at a path, or in the directory there, and its own path, absolute.

    Raises
    ------
    LockError
        If it is no manifest.
    MergefileError
        If there is none.
    """
    file = path / MANIFEST_NAME if path.is_dir() else path
    file = _absolute(file)
    try:
        return parse_manifest(read_regular(file), file), file
    except (FileNotFoundError, NotADirectoryError):
        raise MergefileError(
            f"there is no manifest at `{file}`",
            hint=f"give the directory of an output, or the path of its `{MANIFEST_NAME}`",
            path=str(file),
        ) from None
    except OSError as error:
        raise MergefileError(f"`{file}` cannot be read: {error.strerror}", path=str(file)) from error


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are


def base_directory(manifest: Manifest, path: Path) -> Path:
    """Return where the Mergefile was, as far as the manifest's own place tells: what relative locations start from.

    The manifest lies in the directory of the output, whose path from there it states. Where its directory does not end
    in that path, it was moved, and its directory is taken.

    Parameters
    ----------
    path
        Of the manifest, absolute.
    """
    folder, stated = path.parent, Path(os.path.normpath(manifest.output.path or "."))
    parts = stated.parts
    if stated.is_absolute() or ".." in parts or not parts or folder.parts[-len(parts) :] != parts:
        return folder
    return Path(*folder.parts[: -len(parts)])


def remake(manifest: Manifest, path: Path, places: Places, *, geometry: Geometry = GEOMETRY_1) -> Remade:
    """Return the plans of a manifest's output and of its stages; reads the headers of the sources.

    Parameters
    ----------
    path
        Of the manifest, absolute.
    geometry
        The block geometry; another one than the default is for tests.

    Raises
    ------
    MergepipeError
        For everything that keeps the same result from being expected, together: sources that are not found or are not
        what they were, another version of an operator, tensors that would be made in another way.
    """
    if manifest.geometry != geometry.id:
        raise PlanError(
            f"the manifest is of block geometry {manifest.geometry}, and this mergepipe knows geometry {geometry.id}",
            hint=f"use mergepipe {manifest.mergepipe}, which wrote it",
        )
    base_dir = _absolute(places.base_dir or base_directory(manifest, path))
    mergefile, operators = declared_mergefile(
        manifest,
        path,
        base_dir,
        code=None if places.code is None else _absolute(places.code),
        allow_custom=places.allow_custom,
    )
    checkpoints = _open(mergefile, manifest, needed_sources(mergefile, manifest, operators), places.sources)
    output = mergefile.outputs[manifest.output.name]
    plans = make_plans(mergefile, [output], operators, checkpoints, geometry)
    records = records_of(manifest)
    tensors = {stage.output.name: stage.tensors for stage in manifest.stages} | {output.name: manifest.tensors}
    found = tuple(_with_access(plan, records[plan.output.name], tensors[plan.output.name]) for plan in plans.plans)
    by_name = {plan.output.name: plan for plan in found}
    stages = {name: replace(s, plan=by_name.get(name, s.plan)) for name, s in plans.stages.items()}
    raise_collected(e for p in found for e in plan_errors(p, records[p.output.name], tensors[p.output.name]))
    return Remade(
        manifest=manifest,
        plans=replace(plans, plans=found, stages=stages),
        base_dir=base_dir,
        records=records,
        tensors=tensors,
    )


# --- sources ------------------------------------------------------------------------------------------------------


def _open(
    mergefile: Mergefile, manifest: Manifest, needed: Iterable[str], given: Mapping[str, Path]
) -> dict[str, Checkpoint]:
    """Open the sources, and compare what their headers tell with the manifest."""
    raise_collected(_unknown_names(given, locations_of(manifest)))
    listed = [source for stage in manifest.stages for source in stage.sources]
    records = {source.name: source for source in (*listed, *manifest.sources)}
    checkpoints: dict[str, Checkpoint] = {}
    errors: list[MergepipeError] = []
    for name, path in _source_paths(mergefile, needed, given).items():
        source = mergefile.sources[name]
        if source.on is not None and source.on not in checkpoints:
            continue  # what it applies to cannot be read, which is reported
        try:
            shown = placed_source(source, path) if name in given else source
            checkpoints[name] = open_settled(path, shown, checkpoints)
            errors += _size_errors(checkpoints[name], records.get(name))
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    return checkpoints


def _source_paths(mergefile: Mergefile, needed: Iterable[str], given: Mapping[str, Path]) -> dict[str, Path]:
    """Return where the sources are; those that are not there are reported together."""
    found: dict[str, Path] = {}
    errors: list[MergepipeError] = []
    for name in needed:
        try:
            found[name] = _source_path(mergefile, name, given)
        except MergepipeError as error:
            errors.append(error)
    raise_collected(errors)
    return found


def _unknown_names(given: Mapping[str, Path], known: Iterable[str]) -> Iterator[MergepipeError]:
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            yield MergefileError(
                f"`{name}` is not a source of this output",
                hint=f"did you mean `{close[0]}`?" if close else f"its sources are: {', '.join(known)}",
                source=name,
            )


def _source_path(mergefile: Mergefile, name: str, given: Mapping[str, Path]) -> Path:
    if name in given:
        path, hint = _absolute(given[name]), "the path was given with `--source`"
    elif (located := mergefile.source_path(name)) is not None:
        path, declared = located, mergefile.sources[name].place or ""
        hint = f"give it with `--source {name}=PATH`"
        if not os.path.isabs(os.path.expanduser(declared)):  # noqa: PTH111, PTH117 - as `Mergefile.absolute`
            hint += ", or the folder that relative paths start from, where the Mergefile was, with `--base-dir DIR`"
    else:
        raise SourceError(
            f"source `{name}` is the hub repository `{mergefile.sources[name].hub}`",
            hint=f"download it and give its path with `--source {name}=PATH`",
            source=name,
        )
    if not os.path.lexists(path):
        raise SourceError(f"source `{name}` is not at `{path}`", hint=hint, source=name, path=str(path))
    return path


def _size_errors(checkpoint: Checkpoint, record: LockedSource | None) -> Iterator[MergepipeError]:
    """Yield an error for a source whose header alone tells that it is another one."""
    value = checkpoint.standalone
    if record is not None and value is not None and value.expert != record.digest:
        yield SourceError(
            f"source `{record.name}` is not what the output was made from: `{checkpoint.root}` was packed from"
            f" {format_digest(value.expert)}, and the output was made from {format_digest(record.digest)}",
            hint=f"give it as it was with `--source {record.name}=PATH`",
            source=record.name,
        )
        return
    found = (len(checkpoint.stored), checkpoint.nbytes)
    if record is not None and found != (record.tensors, record.bytes):
        yield SourceError(
            f"source `{record.name}` is not what the output was made from: it has {found[0]:,} tensors of"
            f" {found[1]:,} bytes, and had {record.tensors:,} of {record.bytes:,}",
            hint=f"it was read from `{checkpoint.root}`; give it as it was with `--source {record.name}=PATH`",
            source=record.name,
            expected={"tensors": record.tensors, "bytes": record.bytes},
            got={"tensors": found[0], "bytes": found[1]},
        )


# --- access sets --------------------------------------------------------------------------------------------------


def _with_access(plan: OutputPlan, record: LockedOutput, tensors: Iterable[ManifestTensor]) -> OutputPlan:
    """Return a plan with the access set that is on record, where its budget left one to be chosen.

    Raises
    ------
    PlanError
        If the record has no access set that this output could have.
    """
    levels = {tensor.name: tensor.levels for tensor in tensors if tensor.levels is not None}
    if not plan.is_pending:
        if levels:
            raise PlanError(
                f"the manifest leaves blocks out of output `{record.name}`, whose budget (`{record.budget}`) reads all",
                output=record.name,
            )
        return plan
    named = {tensor.name: tensor for tensor in plan.tensors}
    accesses = {name: _access(plan, named[name], matrix) for name, matrix in levels.items() if name in named}
    return with_outcome(plan, accesses, _outcome(plan, record, accesses))


def _access(plan: OutputPlan, tensor: TensorPlan, matrix: bytes) -> TensorAccess | None:
    count = tensor.grid(plan.geometry).count
    fits = len(matrix) == count * len(tensor.experts)
    rows = [matrix[at * count : (at + 1) * count] for at in range(len(tensor.experts))]
    able = all(_may_have(plan, tensor, ref, row) for ref, row in zip(tensor.experts, rows, strict=True))
    if not fits or not able or tensor.decision is not Decision.MERGE or tensor.base is None:
        raise PlanError(
            f"the manifest states access levels of tensor `{tensor.name}` that it cannot have",
            output=plan.output.name,
            tensor=tensor.name,
        )
    access = TensorAccess(levels=tuple(None if row.count(LEVEL_EXACT) == count else row for row in rows))
    return None if access.is_full else access


def _may_have(plan: OutputPlan, tensor: TensorPlan, ref: InputRef | None, row: bytes) -> bool:
    """Return whether these can be the levels of an expert: approximations only of what can have a code."""
    between = set(row) - {LEVEL_OMITTED, LEVEL_EXACT}
    if not between:
        return True
    able = plan.buys_levels and ref is not None and may_be_coded(tensor, ref, plan.geometry)
    return able and max(between) <= LEVELS


def _outcome(plan: OutputPlan, record: LockedOutput, accesses: Mapping[str, TensorAccess | None]) -> BudgetOutcome:
    """Return what the budget came to, as far as the record tells; the merge does not depend on it."""
    bound: Mapping[str, Any] = record.bound
    kind = bound.get("kind")
    return BudgetOutcome(
        block_bytes=record.expert_bytes_planned - plan.adapter_bytes,
        omitted_blocks=_omitted(plan, accesses),
        bound=ErrorBound(
            kind=kind if kind in _BOUNDS else "none",
            absolute=bound.get("absolute"),
            relative_to_update=bound.get("relative_to_update"),
            relative_to_base=None,
        ),
        expected=0.0,
        omitted_mass=0.0,
        experts={},
        losses=(),
    )


def _omitted(plan: OutputPlan, accesses: Mapping[str, TensorAccess | None]) -> int:
    named = {tensor.name: tensor for tensor in plan.tensors}
    return sum(
        1
        for name, access in accesses.items()
        if access is not None
        for block in range(named[name].merged_blocks(plan.geometry))
        for expert in access.omitted(block)
        if named[name].experts[expert] is not None
    )
