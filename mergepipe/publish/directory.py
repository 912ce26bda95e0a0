"""Publishing an output directory: assembled beside its final place, fsynced, swapped in atomically.

A reader sees the old directory or the new one. Files in it that mergepipe did not put there are the user's, and stay.
A directory that mergepipe did not make is not touched without force.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from mergepipe.cache.packs import hash_shard
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.digest import content_digest
from mergepipe.errors import PublishError, StorageError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import fsync_path, remove_tree, write_file
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.links import place_file
from mergepipe.fsio.locks import hold_place
from mergepipe.fsio.reading import read_regular
from mergepipe.fsio.swap import has_leftovers, recover_swap, staging_path, swap_in
from mergepipe.publish.card import CARD, has_foreign_card
from mergepipe.publish.owned import MANIFEST, owned_files
from mergepipe.publish.userfiles import keep_user_files, rescue_user_files
from mergepipe.values import dataclass

INDEX = "model.safetensors.index.json"
SIGNATURE = "model.sig"  # signs the very files beside it, so it goes when they do


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What goes into an output directory.

    Attributes
    ----------
    links
        By file name, the pack whose bytes it holds.
    files
        By file name, the bytes of every other file; the manifest among them.
    """

    links: Mapping[str, Path]
    files: Mapping[str, bytes]

    @property
    def names(self) -> tuple[str, ...]:
        """All file names in order."""
        return tuple(sorted({*self.links, *self.files}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file of an output directory: its identity when it was published, and its digest (a shard's is its pack's)."""

    name: str
    identity: FileIdentity
    digest: bytes
    is_shard: bool


PublishedFiles = tuple[PublishedFile, ...]


ANOTHER_PATH = "choose another `path` for the output"


def check_place(target: Path, *, another: str = ANOTHER_PATH) -> None:
    """Check that an output path is free or a directory, below directories.

    Parameters
    ----------
    another
        How another place is chosen, for hints.

    Raises
    ------
    PublishError
        If it, or what it lies in, is a file; or if it is a symbolic link.
    """
    for path in (target, *target.parents):
        if not os.path.lexists(path):
            continue
        linked = path == target and path.is_symlink()
        if linked or not path.is_dir():
            what = f"{'a symbolic link' if linked else 'a file'}, not a directory"
            raise PublishError(
                f"the output path `{target}`{'' if path == target else f': `{path}`'} is {what}",
                hint=f"{another}, or remove it",
                path=str(path),
            )
        return


def check_target(target: Path, *, force: bool, another: str = ANOTHER_PATH) -> None:
    """Check that an output directory may be written: absent, empty, or made by mergepipe; `check_place` has the rest.

    Raises
    ------
    PublishError
        If it is no directory, or holds what mergepipe did not make and ``force`` is false.
    """
    check_place(target, another=another)
    if force or not target.exists() or owned_files(target) is not None or not any(target.iterdir()):
        return
    record = "has a `mergepipe.json` that cannot be read" if (target / MANIFEST).exists() else "has no `mergepipe.json`"
    raise PublishError(
        f"the directory `{target}` was not made by mergepipe: it {record}",
        hint=f"{another}, or use `--force` to replace the weights in it (other files stay)",
        path=str(target),
    )


def check_writable(target: Path) -> None:
    """Check that a directory can be put in an output's place: that what it lies in, or would, can be written.

    Raises
    ------
    StorageError
        If it cannot.
    """
    folder = next(path for path in target.parents if path.exists())
    if os.access(folder, os.W_OK | os.X_OK):
        return
    reason = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    fail_storage(OSError(reason, os.strerror(reason)), target, "write the output")


def check_collisions(target: Path, names: Iterable[str], *, force: bool) -> tuple[str, ...]:
    """Check that no file of the user's in an output directory has a name that the output, or its loaders, need.

    Returns
    -------
    tuple
        With ``force``, the files that the next publication replaces.

    Raises
    ------
    PublishError
        Naming the files, unless ``force``.
    """
    owned = owned_files(target)
    if owned is None:
        return ()
    strays = {name for name in os.listdir(target) if is_weight_name(name)}
    taken = [name for name in sorted({*names, *strays}) if name not in owned and os.path.lexists(target / name)]
    if taken and not force:
        raise PublishError(
            f"the output directory `{target}` holds files that mergepipe did not put there, under names that the output"
            f" needs or that loaders take for its weights: {', '.join(f'`{name}`' for name in taken)}",
            hint="move them, or use `--force` to replace them",
            path=str(target),
            files=taken,
        )
    return tuple(taken)


def is_weight_name(name: str) -> bool:
    """Return whether loaders of a model folder look for weights under this name."""
    return name in ("model.safetensors", INDEX) or fnmatch.fnmatchcase(name, "model-*-of-*.safetensors")


def claim(target: Path, files: PublishedFiles) -> None:
    """Write down again whose files are whose in a directory whose manifest was deleted or damaged.

    Only where the directory still holds a file as it was published there; the next publication writes the manifest.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    if not target.is_dir() or owned_files(target) is not None:
        return
    if any(FileIdentity.at(target / file.name) == file.identity for file in files):
        try:
            write_file(target / MANIFEST, msgspec.json.encode({"version": 0, "files": [file.name for file in files]}))
            crash_point("publish.claimed")
        except OSError as error:
            fail_storage(error, target / MANIFEST, "write")


class Publication:
    """One output directory being published.

    Use as a context: it holds a lock on the parent directory, and cleans up what a failure leaves.

    Attributes
    ----------
    copied
        After `assemble`, the shards that lie on the same disk as their packs and were copied all the same.
    """

    copied: tuple[str, ...] = ()

    def __init__(self, target: Path, *, force: bool) -> None:
        self.target = target
        self._force = force
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Publication:
        hold_place(self._stack, self.target)
        try:
            self.recover()
            check_target(self.target, force=self._force)  # again: somebody may have put something there meanwhile
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is not None:
                with contextlib.suppress(StorageError):
                    self.recover()  # what lies beside the target may be the old directory, with files of the user's
        finally:
            self._stack.close()

    def recover(self) -> None:
        """Finish what a killed run left beside the directory, so that nothing of a user is lost and no litter stays."""
        try:
            while (retired := recover_swap(self.target)) is not None:
                if os.path.lexists(self.target):
                    _rescue(retired, self.target, weights=True)
                remove_tree(retired)
                crash_point("publish.recovered")
        except OSError as error:
            fail_storage(error, self.target, "recover")

    def assemble(self, contents: Contents) -> PublishedFiles:
        """Put the new directory together beside the target and flush it; return its files' identities.

        Raises
        ------
        StorageError
            If the file system refuses, such as a full disk; the target is untouched.
        """
        staged = staging_path(self.target)
        own = {CARD} if not has_foreign_card(self.target) else set()
        check_collisions(self.target, set(contents.names) - own, force=self._force)
        try:
            staged.mkdir()
            self.copied = tuple(name for name, pack in contents.links.items() if _place(pack, staged / name))
            for name, data in contents.files.items():
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(staged / name, data)
            if self.target.is_dir():
                _keep(self.target, staged, contents, force=self._force)
            _fsync_folders(staged)
            published = tuple(_published(staged, name, contents) for name in contents.names)
            if self.target.is_dir():
                shutil.copymode(self.target, staged)  # last: it may be read-only
            crash_point("publish.assembled")
        except OSError as error:
            remove_tree(staged)
            fail_storage(error, self.target, "publish")
        return published

    def swap(self) -> None:
        """Put the assembled directory in the target's place, then remove the previous one.

        Raises
        ------
        StorageError
            If the file system refuses; the target is then what it was.
        """
        try:
            retired = swap_in(self.target)
            if retired is not None:
                _rescue(retired, self.target, weights=not self._force)
                remove_tree(retired)
            crash_point("publish.cleaned")
        except OSError as error:
            fail_storage(error, self.target, "publish")


def _place(pack: Path, target: Path) -> bool:
    """Give a pack's bytes their place; return whether they were copied though they lie on the same disk.

    A pack that is not there any more is a `StorageError` that names it: somebody removed the cache meanwhile.
    """
    crash_point("publish.assembling")
    try:
        return place_file(pack, target) == "copy" and pack.stat().st_dev == target.stat().st_dev
    except FileNotFoundError as error:
        if os.path.lexists(pack):
            raise
        fail_storage(error, pack, "link the cached shard")


def _keep(previous: Path, staged: Path, contents: Contents, *, force: bool) -> None:
    """Take the user's files along.

    Weights that mergepipe did not write are what `--force` replaces: beside the new ones loaders could take them for
    part of the model.
    """
    owned = owned_files(previous)

    def is_replaced(name: str) -> bool:
        loose = owned is None and "/" not in name and name.endswith(".safetensors")
        return force and (is_weight_name(name) or loose)

    keep_user_files(previous, staged, {*(owned or ()), MANIFEST, SIGNATURE}, contents.names, is_replaced)


def _rescue(retired: Path, target: Path, *, weights: bool) -> None:
    """Move user files that appeared in the previous directory; without ``weights``, not those that were replaced."""
    owned = None if retired.is_symlink() or not retired.is_dir() else owned_files(retired)
    if owned is not None:
        replaced = (lambda name: False) if weights else is_weight_name
        rescue_user_files(retired, target, {*owned, MANIFEST, SIGNATURE}, replaced)


def _fsync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        fsync_path(folder)


def _published(staged: Path, name: str, contents: Contents) -> PublishedFile:
    pack = contents.links.get(name)
    digest = content_digest(contents.files[name]) if pack is None else bytes.fromhex(pack.stem)
    identity = FileIdentity.of((staged / name).stat())
    return PublishedFile(name=name, identity=identity, digest=digest, is_shard=pack is not None)


def recover_output(target: Path) -> None:
    """Clean up what a killed run left beside an output directory.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    if has_leftovers(target):
        with Publication(target, force=True):
            pass


def settled_files(target: Path, files: PublishedFiles) -> PublishedFiles:
    """Return the files with the identities that they have after the swap.

    Removing the previous directory drops links of shards that stayed the same, and with that changes their ctime.
    """
    settled = []
    for file in files:
        identity = FileIdentity.at(target / file.name)
        moved = identity is not None and identity.same_content(file.identity)
        settled.append(replace(file, identity=identity) if moved and identity else file)
    return tuple(settled)


def touched_files(target: Path, files: PublishedFiles) -> tuple[str, ...]:
    """Return the published files that are gone, or do not have the identity that they were published with."""
    return tuple(file.name for file in files if FileIdentity.at(target / file.name) != file.identity)


def recheck(target: Path, files: PublishedFiles, geometry: Geometry) -> PublishedFiles | None:
    """Hash the files that were touched; return all with their present identities, or None if any has other content.

    Links and unlinks of a shared inode touch a file, as do a copy of the project or `touch`; none of them is a reason
    to build again.
    """
    checked = []
    for file in files:
        path = target / file.name
        identity = FileIdentity.at(path)
        if identity is None or path.is_symlink():
            return None
        if identity != file.identity and _digest(path, file, geometry) != file.digest:
            return None
        checked.append(replace(file, identity=identity))
    return tuple(checked)


def _digest(path: Path, file: PublishedFile, geometry: Geometry) -> bytes | None:
    try:
        return hash_shard(path, geometry) if file.is_shard else content_digest(read_regular(path))
    except OSError:
        return None
