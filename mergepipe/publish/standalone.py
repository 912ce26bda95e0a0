"""The folder of a progressive checkpoint: put together beside its place, flushed, swapped in: whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergepipe.checkpoints.place import Place
from mergepipe.checkpoints.standalone import FOLDER, RECORD, read_record
from mergepipe.errors import MergepipeError, PublishError, StorageError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import fsync_path, remove_tree, write_file
from mergepipe.fsio.locks import hold_place
from mergepipe.fsio.swap import recover_swap, staging_path, swap_in
from mergepipe.publish.directory import SIGNATURE, check_place
from mergepipe.publish.owned import MANIFEST
from mergepipe.publish.userfiles import keep_user_files, rescue_user_files

_ANOTHER = "choose another directory with `--out`"


def own_files(target: Path) -> tuple[str, ...] | None:
    """Return the names of the files that `mergepipe pack` put into a folder; None if it is not one of its own."""
    try:
        return read_record(Place(label=target.name, root=target, shown=str(target))).own_files
    except MergepipeError:
        return None


def check_target(target: Path, *, force: bool) -> None:
    """Check that a progressive checkpoint may be written: its folder is absent, empty, or one of its own.

    Raises
    ------
    PublishError
        If it is no folder, or holds something else and ``force`` is false.
    """
    check_place(target, another=_ANOTHER)
    if force or not target.exists() or own_files(target) is not None or not any(target.iterdir()):
        return
    record = f"has a `{RECORD}` that is damaged" if (target / RECORD).exists() else f"has no `{RECORD}`"
    raise PublishError(
        f"the directory `{target}` is no progressive checkpoint: it {record}",
        hint=f"{_ANOTHER}, or use `--force` to replace the weights in it (other files stay)",
        path=str(target),
    )


class StandaloneDirectory:
    """The folder of a progressive checkpoint in the making.

    Use as a context: it holds a lock on the parent folder, and cleans up what a failure leaves.

    Attributes
    ----------
    staged
        Where it is put together; its files with weights go into `tensors`.
    """

    def __init__(self, target: Path, *, force: bool) -> None:
        self.target = target
        self.staged = staging_path(target)
        self.tensors = self.staged / FOLDER
        self._force = force
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StandaloneDirectory:
        hold_place(self._stack, self.target)
        try:
            self._recover()
            check_target(self.target, force=self._force)
            self.tensors.mkdir(parents=True)
            crash_point("pack.begun")
        except OSError as error:
            self._stack.close()
            fail_storage(error, self.staged, "create")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is not None:
                with contextlib.suppress(StorageError):
                    self._recover()
        finally:
            self._stack.close()

    def _recover(self) -> None:
        """Finish or remove what a killed run left beside the folder."""
        try:
            while (retired := recover_swap(self.target)) is not None:
                if os.path.lexists(self.target):
                    self._rescue(retired)
                remove_tree(retired)
                crash_point("pack.recovered")
        except OSError as error:
            fail_storage(error, self.target, "recover")

    def finish(self, files: Mapping[str, bytes], weights: Sequence[str]) -> None:
        """Add the small files, and put the folder into its place.

        Parameters
        ----------
        files
            By name.
        weights
            The names of the files in `tensors`.

        Raises
        ------
        StorageError
            If the file system refuses; what was in the place stays.
        """
        try:
            for name, data in files.items():
                (self.staged / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(self.staged / name, data)
            if self.target.is_dir():
                self._keep([*files, *(f"{FOLDER}/{name}" for name in weights)])
            for folder, _, _ in os.walk(self.staged):
                fsync_path(folder)
            if self.target.is_dir():
                shutil.copymode(self.target, self.staged)
            crash_point("pack.assembled")
            retired = swap_in(self.target)
            if retired is not None:
                self._rescue(retired)
                remove_tree(retired)
            crash_point("pack.cleaned")
        except OSError as error:
            fail_storage(error, self.target, "write")

    def _keep(self, names: Sequence[str]) -> None:
        """Take along what others put into the folder; weights that are not ours are what `--force` replaces."""
        owned = own_files(self.target)
        keep_user_files(
            self.target, self.staged, owned or (), names, (lambda name: False) if owned is not None else _is_replaced
        )

    def _rescue(self, retired: Path) -> None:
        owned = None if retired.is_symlink() or not retired.is_dir() else own_files(retired)
        if owned is not None:
            rescue_user_files(retired, self.target, owned, lambda name: False)


def _is_replaced(name: str) -> bool:
    if "/" in name:
        return name.startswith(f"{FOLDER}/")
    return name in (RECORD, MANIFEST, SIGNATURE) or name.endswith((".safetensors", ".safetensors.index.json"))
