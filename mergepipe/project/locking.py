"""The lock of a project: what it will say, whether that differs from what it says, and writing it last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mergepipe.cache.sources import SourceIndex
from mergepipe.digest import is_sampled_pin, sampled_pin
from mergepipe.errors import LockDiffersError
from mergepipe.fsio.durable import drop_temporary, replace_file
from mergepipe.lockfile.assemble import locked_source
from mergepipe.lockfile.compare import Difference, compare_locks, declared_differences
from mergepipe.lockfile.compare_text import render_differences
from mergepipe.lockfile.records import UNKNOWN_DIGEST, LockedOutput, Lockfile
from mergepipe.lockfile.writer import render_lock
from mergepipe.plan.sampling import whole_sources
from mergepipe.project.stages import Plans


def next_lock(
    old: Lockfile | None, outputs: Sequence[LockedOutput], plans: Plans, index: SourceIndex, geometry: int
) -> Lockfile:
    """Return the lock after a build: entries of outputs that were not built stay as they are.

    An output that another is made from has its own entry, and none among the sources.
    """
    mergefile, checkpoints = plans.mergefile, plans.checkpoints
    built = {output.name: output for output in outputs}
    kept = [o for o in (old.outputs if old else ()) if o.name in mergefile.outputs and o.name not in built]
    entries = [*built.values(), *kept]
    fresh = {name for output in built.values() for name in output.sources if name in mergefile.sources}
    whole = {name for plan in plans.plans if plan.output.name in built for name in whole_sources(plan)}
    sources = [
        locked_source(mergefile.sources[name], checkpoints[name], _pin(name, old, whole, kept, index))
        for name in sorted(fresh)
    ]
    used = {name for output in kept for name in output.sources} - fresh
    sources += [source for source in (old.sources if old else ()) if source.name in used]
    return Lockfile(geometry=geometry, sources=tuple(sources), outputs=tuple(entries))


def _pin(
    name: str, old: Lockfile | None, whole: Collection[str], kept: Iterable[LockedOutput], index: SourceIndex
) -> bytes:
    """Return the pin of a source: its digest where any output reads it whole, else its fingerprint.

    Parameters
    ----------
    whole
        The sources that outputs that were built read whole.
    kept
        Outputs that were not: what they go by stays as it is, as long as nothing of it changed.
    """
    if name in whole:
        return index.digest(name) or UNKNOWN_DIGEST
    found = index.fingerprint(name)
    before = old.source(name) if old else None
    pins = {output.sources[name] for output in kept if name in output.sources}
    if before is not None and not is_sampled_pin(before.digest) and before.digest in pins:
        digest = index.digest(name)
        return before.digest if digest is None else digest
    return UNKNOWN_DIGEST if found is None else sampled_pin(found)


def lock_state(old: Lockfile | None, new: Lockfile, *, verified: bool) -> str:
    """Return ``missing``, ``current``, ``outdated``, or ``unverified`` where only a build can tell.

    Parameters
    ----------
    verified
        Whether ``new`` holds results; otherwise only what is declared, and the sources that are known, can differ.
    """
    if old is None:
        return "missing"
    if compare_locks(old, new) if verified else declared_differences(old, new):
        return "outdated"
    return "current" if verified else "unverified"


def refuse_declared_changes(old: Lockfile | None, new: Lockfile, lock_path: Path, root: Path) -> None:
    """Stop a ``--locked`` build early if what is declared, or a source whose content is known, differs.

    Raises
    ------
    LockDiffersError
        Listing the differences, or saying that there is no lock.
    """
    _refuse(old, declared_differences(old, new) if old else (), lock_path, root)


def refuse_changes(old: Lockfile | None, new: Lockfile, lock_path: Path, root: Path) -> None:
    """Stop a ``--locked`` build before anything is published if the lock would change at all."""
    _refuse(old, compare_locks(old, new), lock_path, root)


def _refuse(old: Lockfile | None, differences: Sequence[Difference], lock_path: Path, root: Path) -> None:
    shown = lock_path.relative_to(root) if lock_path.is_relative_to(root) else lock_path
    if old is None:
        raise LockDiffersError(
            f"`{shown}` does not exist, and `--locked` keeps a build from writing it",
            hint="run `mergepipe build` and commit the lock",
            path=str(shown),
        )
    if differences:
        raise LockDiffersError(
            render_differences(differences, shown),
            hint="run `mergepipe build` without `--locked` to update the lock, and review the change",
            path=str(shown),
            differences=[difference.as_json() for difference in differences],
        )


def write_lock(path: Path, old: Lockfile | None, new: Lockfile) -> bool:
    """Write the lock if it says something else than the one that is there; return whether it did."""
    if old is not None and not compare_locks(old, new):
        drop_temporary(path)
        return False  # the text may differ (line ends, order of keys): it is not ours to change then
    replace_file(path, render_lock(new).encode(), point="lock")
    return True
