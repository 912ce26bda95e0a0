"""`mergepipe diff`: two records of a project, compared; the same from Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe.lockfile.diff import diff_sides
from mergepipe.lockfile.diff_values import LockDiff
from mergepipe.operators.registry import signatures
from mergepipe.project.diff_sides import Sides
from mergepipe.reporting import Reporter, SilentReporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.project.diff_weights import TensorNumbers

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What differs, and with ``--tensors`` the numbers from the weights, by output in the order of its changes.

    ``numbers`` is None where they were not asked for.
    """

    diff: LockDiff
    numbers: dict[str, TensorNumbers] | None = None

    def as_json(self) -> Json:
        """Return the JSON form."""
        found = self.diff.as_json()
        for output in found["outputs"]:
            numbers = None if self.numbers is None else self.numbers.get(output["name"])
            output["numbers"] = None if numbers is None else numbers.as_json()
        return found


def diff(
    old: str | None = None,
    new: str | None = None,
    *,
    mergefile: Path | Callable[[], Path] = Path("Mergefile.toml"),
    revisions: bool = False,
    tensors: bool = False,
    cache_dir: Path | None = None,
    reporter: Reporter | None = None,
) -> DiffReport:
    """Return what differs between two records of a project.

    Parameters
    ----------
    old, new
        Lockfiles, manifests, output directories or git revisions, see `mergepipe.project.diff_sides`. By default the
        lock that HEAD has, and the one on the disk.
    mergefile
        The Mergefile whose lock is meant; or what finds it, asked only where that is needed. It is not read.
    revisions
        Whether names are always git revisions.
    tensors
        Also compare the weights of tensors that differ, where both sides have them.
    cache_dir
        The cache, which may hold the weights of former outputs; ``.mergecache`` beside the Mergefile by default.
    reporter
        Receives progress and messages.

    Raises
    ------
    MergepipeError
        If one of them is not there, or cannot be read.
    """

    def lock_path() -> Path:
        found = mergefile() if callable(mergefile) else mergefile
        return Path(os.path.abspath(found)).with_suffix(".lock")  # noqa: PTH100 - resolve() would follow a linked one

    sides = Sides(lock_path, revisions=revisions)
    if old is not None and new is None:
        old, new = sides.ends(old) or (old, new)
    before, old_place = (sides.committed(), None) if old is None else sides.named(old)
    after, new_place = (sides.on_disk(), None) if new is None else sides.named(new)
    found = diff_sides(before, after, signatures())
    if not tensors:
        return DiffReport(diff=found)
    from mergepipe.project.diff_weights import Weights, compare_weights

    weights = [Weights.of(place, lock_path, cache_dir) for place in (old_place, new_place)]
    numbers = compare_weights(found, weights[0], weights[1], reporter or SilentReporter())
    return DiffReport(diff=found, numbers=numbers)
