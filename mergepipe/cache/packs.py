"""Packs: finished shards, immutable, named by digest. The only code that writes or checks them.

A pack may share its inode with a published file (hard links), and people edit published files. So a pack is used
whole only while its identity is the recorded one, or after it was hashed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.records import Result
from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.digest import content_digest, record_digest, tensor_digest
from mergepipe.errors import FormatError, SourceChangedError, fail_storage
from mergepipe.fsio.crash import crash_point
from mergepipe.fsio.durable import fsync_path, remove_tree
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into

READ_ONLY = 0o444
_HEADER_LENGTH_BYTES = 8


class PackStore:
    """The packs of one cache directory.

    Parameters
    ----------
    geometry
        The block geometry in which the packs' digests are stated.
    """

    def __init__(self, catalog: Catalog, geometry: Geometry) -> None:
        self._catalog = catalog
        self._layout = catalog.layout
        self._geometry = geometry

    def path(self, name: str) -> Path:
        """Return where a pack of this name lies, or would."""
        return self._layout.packs / f"{name}.safetensors"

    def adopt(self, staged: Path, name: str, results: Iterable[Result]) -> None:
        """Make a finished staged shard a pack: fsync, rename, directory fsync, and only then record it.

        Raises
        ------
        StorageError
            If the file system refuses; nothing is recorded then.
        """
        target = self.path(name)
        try:
            fsync_path(staged)
            staged.chmod(staged.stat().st_mode & READ_ONLY)  # as the umask allowed
            crash_point("packs.fsynced")
            staged.replace(target)
            fsync_path(self._layout.packs)
            crash_point("packs.renamed")
            identity = FileIdentity.of(target.stat())
        except OSError as error:
            fail_storage(error, target, "store the finished shard as")
        self._catalog.record_pack(name, identity, results, staged.stem)
        crash_point("packs.recorded")

    def usable(self, name: str) -> bool:
        """Return whether a pack may be used whole: its identity holds, or its content was just hashed and is right.

        A pack that is damaged is quarantined.
        """
        path = self.path(name)
        identity = FileIdentity.at(path)
        recorded = self._catalog.pack_identity(name)
        if identity is None:
            if recorded is not None:
                self._catalog.drop_pack(name)
            return False
        if identity == recorded:
            return True
        if hash_shard(path, self._geometry) != bytes.fromhex(name):
            self.quarantine(name)
            return False
        if recorded is None:
            return False  # no results point to it; it is left to `cache prune`
        self._catalog.record_pack_identity(name, identity)
        return True

    def refresh(self, name: str) -> bool:
        """Record a pack's identity again after a link to it was made or removed: that changes its ctime.

        Returns
        -------
        bool
            False if more than that changed, or it is gone: somebody wrote to it, through a published file that shares
            its inode.

        Raises
        ------
        StorageError
            If it cannot be looked at: nothing is known of it then.
        """
        path, recorded = self.path(name), self._catalog.pack_identity(name)
        try:
            identity = FileIdentity.of(path.stat())
        except FileNotFoundError:
            return False
        except OSError as error:
            fail_storage(error, path, "look at")
        if recorded is None or not identity.same_content(recorded):
            return False
        self._catalog.record_pack_identity(name, identity)
        return True

    def intact(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of these packs whose identity holds."""
        recorded = ((name, self._catalog.pack_identity(name)) for name in names)
        return tuple(
            name for name, known in recorded if known is not None and FileIdentity.at(self.path(name)) == known
        )

    def unlinked(self, name: str) -> None:
        """Record the identity of a pack again that was `intact`, and to which a link was removed: it was not used."""
        identity, recorded = FileIdentity.at(self.path(name)), self._catalog.pack_identity(name)
        if identity is not None and recorded is not None and identity.same_content(recorded):
            self._catalog.correct_pack_identity(name, identity)

    def quarantine(self, name: str) -> None:
        """Take a damaged pack out of use; it is kept aside for a look, and its results are forgotten."""
        self._catalog.drop_pack(name)
        crash_point("packs.forgotten")
        try:
            self._layout.quarantine.mkdir(exist_ok=True)
            path = self.path(name)
            if os.path.lexists(path):
                target = self._layout.quarantine / path.name
                remove_tree(target)  # an earlier one, which may be a folder
                path.replace(target)
                crash_point("packs.quarantined")
        except OSError as error:
            fail_storage(error, self.path(name), "quarantine")


def hash_shard(path: Path, geometry: Geometry) -> bytes | None:
    """Return the digest of a safetensors file from all of its bytes, or None if it is no valid one or unreadable.

    The same Merkle digest as a shard's in the lock: header bytes, then tensors of blocks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        header = read_header(fd, path, size, label="pack")
        raw = bytearray(header.size)
        pread_into(fd, memoryview(raw), 0, path=path)
        digests = []
        for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
            layout = grid(tensor.dtype, tensor.shape, geometry)
            blocks = b"".join(
                content_digest(_read(fd, tensor.offset + start, stop - start, path))
                for start, stop in map(layout.byte_range, range(layout.count))
            )
            digests.append(tensor_digest(tensor.dtype, tensor.shape, blocks))
        return record_digest("shard", content_digest(bytes(raw)), tuple(digests))
    except (OSError, FormatError, SourceChangedError):
        return None
    finally:
        os.close(fd)


def _read(fd: int, offset: int, count: int, path: Path) -> bytearray:
    buffer = bytearray(count)
    pread_into(fd, memoryview(buffer), offset, path=path)
    return buffer
