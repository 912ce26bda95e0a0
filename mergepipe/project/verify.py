"""Verifying outputs: every byte of them, of their packs and of the lock against what was written.

An output is verified against its manifest, which is in its directory, and where there is a project against the lock and
the cache too. Nothing is changed: what is damaged is named, and stays as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import field, replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry
from mergepipe.digest import format_digest
from mergepipe.errors import LockError, MergefileError, raise_collected
from mergepipe.lockfile.manifest import MANIFEST_NAME
from mergepipe.lockfile.manifest_records import Manifest
from mergepipe.lockfile.reader import read_lock
from mergepipe.project.gather import open_sources, select_outputs
from mergepipe.project.replay_plan import Places
from mergepipe.project.session import Project, processors
from mergepipe.project.stages import record_place
from mergepipe.project.verify_directory import DirectoryCheck, check_directory, replaced_meanwhile
from mergepipe.project.verify_lock import Voucher, check_lock, vouchers_of
from mergepipe.project.verify_packs import PackCheck, check_packs, packs_of, recorded_entry
from mergepipe.project.verify_rebuild import Sample, rebuild_sample, temporary_cache
from mergepipe.project.verify_report import Problem, VerifiedLock, VerifiedOutput, VerifiedSource, VerifyReport
from mergepipe.project.verify_shards import CheckedShard, check_shards
from mergepipe.project.verify_sources import check_sources
from mergepipe.publish.directory import SIGNATURE
from mergepipe.reporting import Reporter, SilentReporter
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What is looked at beyond the outputs themselves.

    Attributes
    ----------
    full
        Hash the sources too, and compare them with the lock.
    sample
        What share of the output's blocks is made again from the sources, in percent; None for none.
    seed
        Chooses these blocks; None takes one that follows from the output's digest.
    public_key
        Verify the signature of each directory with this key; None leaves signatures alone.
    sources
        By name where sources are that blocks are made from again, if not where the manifest or the Mergefile has them.
    allow_custom
        Whether the code of custom operators may run for that where there is no project.
    """

    full: bool = False
    sample: float | None = None
    seed: int | None = None
    public_key: Path | None = None
    sources: Mapping[str, Path] = field(default_factory=dict)
    allow_custom: bool = False

    @property
    def places(self) -> Places:
        """Where the sources of a directory alone are."""
        return Places(sources=self.sources, allow_custom=self.allow_custom)


@dataclass(slots=True, kw_only=True)
class _Target:
    """Something to verify: an output of a project, or a directory alone."""

    name: str | None
    shown: str | None
    directory: DirectoryCheck | None
    packs: PackCheck | None = None
    shards: list[CheckedShard] | None = None
    cached: list[CheckedShard] | None = None


def verify_directories(
    paths: Sequence[Path | str],
    options: VerifyOptions | None = None,
    *,
    reporter: Reporter | None = None,
    workers: int | None = None,
    geometry: Geometry = GEOMETRY_1,
) -> VerifyReport:
    """Verify output directories by their manifests alone; no project and no cache is asked.

    Parameters
    ----------
    paths
        Directories with a ``mergepipe.json``, or paths of such files.
    workers
        Threads; one per processor by default.

    Raises
    ------
    LockError
        For what is no such directory, all of them together.
    """
    started = time.monotonic()
    options, reporter, workers = options or VerifyOptions(), reporter or SilentReporter(), workers or processors()
    refuse_without_sources(options)
    targets = [_directory(Path(path)) for path in _checked(paths)]
    _hash(targets, geometry, workers, reporter)
    outputs = [_verified(target, options.public_key) for target in targets]
    if options.sample is not None:
        sample = Sample(percent=options.sample, seed=options.seed, workers=workers, memory=None, geometry=geometry)
        pairs = zip(targets, outputs, strict=True)
        outputs = [
            _sampled(target, output, options.places, sample, temporary_cache(geometry), reporter)
            for target, output in pairs
        ]
    return VerifyReport(outputs=tuple(outputs), lock=None, sources=(), seconds=time.monotonic() - started)


def refuse_without_sources(options: VerifyOptions) -> None:
    """Refuse what takes sources, where only directories are verified.

    Raises
    ------
    MergefileError
        If it is asked for.
    """
    if options.full:
        raise MergefileError(
            "`--full` compares sources with the lock, and a directory alone has none",
            hint="name an output of a project",
        )


def is_path(target: str) -> bool:
    """Return whether a target is a path whatever outputs there are: it has a slash in it, or is ``.`` or ``..``."""
    return os.sep in target or target in (os.curdir, os.pardir)


def _is_place(target: str) -> bool:
    return is_path(target) or os.path.lexists(target)


def _checked(paths: Sequence[Path | str]) -> list[Path]:
    """Return the directories that are named, or raise what is wrong with them."""
    found, errors = [], []
    for path in map(Path, paths):
        directory = path.parent if path.name == MANIFEST_NAME and path.is_file() else path
        if os.path.lexists(directory / MANIFEST_NAME):
            found.append(directory)
            continue
        what = f"it has no `{MANIFEST_NAME}`" if directory.is_dir() else "there is no such directory"
        errors.append(
            LockError(
                f"`{path}` is not an output of mergepipe: {what}",
                hint=f"name an output, or a directory with a `{MANIFEST_NAME}`",
                path=str(path),
            )
        )
    raise_collected(errors)
    return found


def _directory(path: Path) -> _Target:
    return _Target(name=None, shown=str(path), directory=check_directory(path, str(path), None))


def _hash(targets: Sequence[_Target], geometry: Geometry, workers: int, reporter: Reporter) -> None:
    """Hash the shards of all targets, and their packs, in one go."""
    from mergepipe.engine.pool import WorkerPool  # numpy is imported only to hash

    checks = [check for target in targets if target.directory for check in target.directory.shards]
    checks += [check for target in targets if target.packs for check in target.packs.shards]
    pool = WorkerPool(workers)
    try:
        found = iter(check_shards(checks, geometry, pool, reporter))
    finally:
        pool.close()
    for target in targets:
        if target.directory:
            target.shards = [next(found) for _ in target.directory.shards]
    for target in targets:
        if target.packs:
            target.cached = [next(found) for _ in target.packs.shards]


def _verified(target: _Target, public_key: Path | None) -> VerifiedOutput:
    """Return what was found of a target."""
    check, shards, cached = target.directory, target.shards or [], target.cached or []
    problems = [*(check.problems if check else ()), *(p for shard in shards for p in shard.problems)]
    if target.packs is not None:
        problems += check_packs(target.packs, cached, check.shards if check else (), shards)
    signature = "absent"
    if check is not None and check.manifest is not None:
        signature, found = _signature(check, public_key)
        problems += found
    if check is not None and problems and replaced_meanwhile(check):
        what = "another output took its place while it was verified"
        problems = [Problem(kind="output", where=check.shown, what=what, hint="verify it again")]
    manifest = check.manifest if check else None
    return VerifiedOutput(
        name=target.name or (manifest.output.name if manifest else None),
        path=target.shown,
        digest=format_digest(manifest.output.digest) if manifest else None,
        problems=tuple(problems),
        shards=len(shards),
        tensors=sum(len(one.tensors) for one in check.shards) if check else 0,
        blocks=sum(shard.blocks for shard in shards),
        files=check.files if check else 0,
        bytes=sum(shard.bytes for shard in (*shards, *cached)) + (check.bytes if check else 0),
        others=check.others if check else 0,
        packs=target.packs.counts if target.packs else None,
        signature=signature,
    )


def _sampled(
    target: _Target,
    output: VerifiedOutput,
    places: Places,
    sample: Sample,
    cache: AbstractContextManager[Catalog],
    reporter: Reporter,
) -> VerifiedOutput:
    """Make some blocks of an output again, if its manifest says what they should be."""
    check = target.directory
    if check is None or check.manifest is None:
        return output
    file = Path(os.path.abspath(check.path / MANIFEST_NAME))  # noqa: PTH100 - links stay as they are
    where = check.where(MANIFEST_NAME)
    found, problems = rebuild_sample(check.manifest, file, where, places, sample, cache, reporter)
    return replace(output, sample=found, problems=(*output.problems, *problems))


def _signature(check: DirectoryCheck, public_key: Path | None) -> tuple[str, list[Problem]]:
    signed = os.path.lexists(check.path / SIGNATURE)
    if public_key is None or check.manifest is None:
        return ("unchecked" if signed else "absent"), []
    from mergepipe.project.signing import signature_problem

    where = check.where(SIGNATURE)
    problem = signature_problem(check.path, check.manifest.files, public_key) if signed else "the output is not signed"
    if problem is None:
        return "valid", []
    hint = None if signed else "`mergepipe build --sign KEY` signs it"
    return ("invalid" if signed else "absent"), [Problem(kind="signature", where=where, what=problem, hint=hint)]


# --- projects ---------------------------------------------------------------------------------------------------------


class VerifiedProject(Project):
    """A project whose outputs are verified."""

    def __init__(self, project: Project) -> None:
        # The same project: opening it again would run custom operators' code again.
        self.__dict__.update(vars(project))

    def verified(self, wanted: Sequence[str], options: VerifyOptions) -> VerifyReport:
        """Verify outputs and the lock, and directories beside them; see `Project.verify`."""
        started = time.monotonic()
        names = [name for name in wanted if name in self.mergefile.outputs]
        others = [path for path in wanted if path not in names]
        select_outputs(self.mergefile, [path for path in others if not _is_place(path)])  # refuses them all
        paths = _checked(others)
        selected = select_outputs(self.mergefile, names) if names or not wanted else ()
        if not selected:
            refuse_without_sources(options)
        targets = [self._target(output.name) for output in selected]
        with self._reading() as catalog:
            recorded = {name: recorded_entry(catalog, self.mergefile, name) for name in self.mergefile.outputs}
        for target in targets:
            manifest = target.directory.manifest if target.directory else None
            assert target.name is not None, "an output has a name"
            target.packs = packs_of(
                self._layout, manifest, recorded[target.name], target.directory, self._shown(self._layout.root)
            )
        targets += [_directory(path) for path in paths]
        _hash(targets, self._geometry, self._workers, self._reporter)
        outputs = [_verified(target, options.public_key) for target in targets]
        vouchers = [v for target in targets for v in self._vouchers(target)]
        vouchers += [Voucher(output=known.output) for name, known in recorded.items() if known is not None]
        lock = self._lock([output.name for output in selected], vouchers) if selected else None
        sources = self._sources([output.name for output in selected], targets) if options.full else ()
        if options.sample is not None:
            pairs = zip(targets, outputs, strict=True)
            outputs = [self._rebuilt(target, output, options) for target, output in pairs]
        return VerifyReport(
            outputs=tuple(outputs), lock=lock, sources=tuple(sources), seconds=time.monotonic() - started
        )

    def _shown(self, path: Path) -> str:
        """Return a path as somebody in the current directory writes it."""
        absolute, relative = str(path), os.path.relpath(path)
        return min(relative, absolute, key=len)

    def _target(self, name: str) -> _Target:
        output = self.mergefile.outputs[name]
        if not output.publish:
            return _Target(name=name, shown=None, directory=None)
        path = record_place(self.mergefile, output)
        shown = self._shown(path)
        check = check_directory(path, shown, f"mergepipe build {name}")
        if check.manifest is not None and check.manifest.output.name != name:
            what = f"is the manifest of output `{check.manifest.output.name}`, not of `{name}`"
            where = check.where(MANIFEST_NAME)
            check.problems.append(Problem(kind="manifest", where=where, what=what, hint=check.unclaimed))
        return _Target(name=name, shown=shown, directory=check)

    def _vouchers(self, target: _Target) -> list[Voucher]:
        manifest = target.directory.manifest if target.name and target.directory else None
        return list(vouchers_of(manifest)) if manifest and manifest.output.name == target.name else []

    def _lock(self, names: Sequence[str], vouchers: Sequence[Voucher]) -> VerifiedLock:
        shown = self._shown(self.lock_path)
        problems = check_lock(self.lock_path, shown, vouchers, self.mergefile, self._geometry.id, names)
        return VerifiedLock(path=self.lock_path.name, problems=tuple(problems))

    def _sources(self, names: Sequence[str], targets: Sequence[_Target]) -> list[VerifiedSource]:
        """Hash the sources of these outputs, and compare them with the lock."""
        from mergepipe.engine.pool import WorkerPool

        selected = select_outputs(self.mergefile, names)
        checkpoints = open_sources(self.mergefile, selected)
        manifests = [target.directory.manifest for target in targets if target.name and target.directory]
        pool = WorkerPool(self._workers)
        try:
            return check_sources(
                checkpoints,
                self._pinned(manifest for manifest in manifests if manifest),
                [manifest for manifest in manifests if manifest],
                self._geometry,
                pool,
                self._reporter,
            )
        finally:
            pool.close()

    def _pinned(self, manifests: Iterable[Manifest]) -> dict[str, list[bytes]]:
        """Return by source the digest that the lock has of it; where the lock cannot be read, those of the outputs."""
        try:
            lock = read_lock(self.lock_path)
        except LockError:
            lock = None
        if lock is not None:
            return {source.name: [source.digest] for source in lock.sources}
        found: dict[str, list[bytes]] = {}
        for manifest in manifests:
            for source in manifest.sources:
                found.setdefault(source.name, []).append(source.digest)
        return found

    def _rebuilt(self, target: _Target, output: VerifiedOutput, options: VerifyOptions) -> VerifiedOutput:
        """Make some blocks of an output again from the sources where the Mergefile has them now."""
        assert options.sample is not None, "it was asked for"
        sample = Sample(
            percent=options.sample,
            seed=options.seed,
            workers=self._workers,
            memory=self._memory,
            geometry=self._geometry,
        )
        if target.name is None:
            return _sampled(target, output, options.places, sample, temporary_cache(self._geometry), self._reporter)
        manifest = target.directory.manifest if target.directory else None
        records = [manifest.sources, *(stage.sources for stage in manifest.stages)] if manifest else []
        used = {source.name for sources in records for source in sources}
        here = {name: self.mergefile.source_path(name) for name in sorted(used) if name in self.mergefile.sources}
        places = Places(
            base_dir=self.mergefile.root,
            sources={name: path for name, path in here.items() if path is not None} | dict(options.sources),
            allow_custom=self._allow_custom or options.allow_custom,
        )
        return _sampled(target, output, places, sample, self._cache(), self._reporter)

    @contextmanager
    def _cache(self) -> Iterator[Catalog]:
        """Open the project's cache, or where nothing can be written into it one that is removed again."""
        root = self._layout.root
        existing = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
        if os.access(existing, os.W_OK):
            with self._writing() as (catalog, _):
                yield catalog
            return
        self._reporter.note(f"nothing can be written to the cache `{self._shown(root)}`: a temporary one is used")
        with temporary_cache(self._geometry) as catalog:
            yield catalog
