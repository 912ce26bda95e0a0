"""Re-hashing packs: what a pack's bytes are, against the name that it has.

A pack is cut into runs of blocks, so that many workers hash one large pack together; nothing is written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from mergepipe.cache.layout import PACK_FILE, CacheLayout
from mergepipe.checkpoints.geometry import Geometry, grid
from mergepipe.checkpoints.safetensors import Header, TensorInfo, read_header
from mergepipe.digest import content_digest, record_digest, tensor_digest
from mergepipe.errors import FormatError, SourceChangedError, fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.fsio.reading import pread_into
from mergepipe.values import dataclass

_RUN_BYTES = 4 << 20  # read at once by a worker

Content = tuple[str, tuple[int, ...], bytes]
"""What lies at a place of a pack: dtype, shape and digest of a tensor."""


@dataclass(slots=True, kw_only=True)
class PackCheck:
    """A pack while it is checked, and what was found.

    Attributes
    ----------
    name, path
        Its name, and where it lies.
    geometry
        The block geometry in which its digest is stated.
    identity
        What the file looked like when it was opened; None if it could not be.
    is_linked
        Whether another name holds the same bytes.
    fault
        What is wrong with it, in words; None while nothing is known to be.
    contents
        What lies at each place, by the first byte's position in the file; of one that is right, once it is finished.
    """

    name: str
    path: Path
    geometry: Geometry
    header: Header | None = None
    identity: FileIdentity | None = None
    is_linked: bool = False
    fault: str | None = None
    contents: Mapping[int, set[Content]] = field(default_factory=dict)
    is_finished: bool = False
    _digests: list[bytearray] = field(default_factory=list)  # of blocks, packed, by tensor in the order of their bytes

    @property
    def nbytes(self) -> int:
        """Its size as a file; 0 if it could not be opened."""
        return self.identity.size if self.identity else 0

    def _infos(self) -> list[TensorInfo]:
        assert self.header is not None, "the pack was opened"
        return sorted(self.header.tensors, key=lambda info: info.offset)

    def open(self) -> None:
        """Look at the file and read its header."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            is_symlink = self.path.is_symlink()
            self.fault = "it is a symbolic link" if is_symlink else f"it cannot be read: {error.strerror}"
            return
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                self.fault = "it is not a file"
                return
            self.identity, self.is_linked = FileIdentity.of(found), found.st_nlink > 1
            self.header = read_header(fd, self.path, found.st_size, label="pack")
            self._digests = [bytearray() for _ in self.header.tensors]
        except OSError as error:
            self.fault = f"it cannot be read: {error.strerror}"
        except FormatError:
            self.fault = "its header is damaged"
        finally:
            os.close(fd)

    def runs(self) -> Iterator[PackRun]:
        """Yield its blocks in the order of their bytes, in runs that are read at once; none of one known to be bad."""
        if self.fault is not None:
            return
        for number, info in enumerate(self._infos()):
            layout = grid(info.dtype, info.shape, self.geometry)
            step = max(1, _RUN_BYTES // max(1, layout.block_rows * layout.row_bytes))
            for start in range(0, layout.count, step):
                yield PackRun(self, number, info, start, min(start + step, layout.count))

    def take(self, run: PackRun, digests: bytes | str) -> None:
        """Enter what hashing a run has come to: digests, or why it could not be read. Runs come in their order."""
        if isinstance(digests, str):
            self.fault = self.fault or f"it cannot be read: {digests}"
        else:
            self._digests[run.tensor] += digests

    def finish(self) -> None:
        """Compare all that was hashed with the name, once every run was entered; keep only what was found."""
        if self.is_finished:
            return
        self.is_finished = True
        if self.fault is None:
            assert self.header is not None, "the pack was opened"
            pairs = zip(self._infos(), map(bytes, self._digests), strict=True)
            found = [(info, tensor_digest(info.dtype, info.shape, blocks)) for info, blocks in pairs]
            if record_digest("shard", self.header.digest, [digest for _, digest in found]).hex() != self.name:
                self.fault = "its content is not what its name says"
            else:
                contents: dict[int, set[Content]] = {}
                for info, digest in found:
                    contents.setdefault(info.offset, set()).add((info.dtype, info.shape, digest))
                self.contents = contents
        self.header, self._digests = None, []


@dataclass(frozen=True, slots=True)
class PackRun:
    """Adjacent blocks of one tensor of a pack; ``tensor`` counts tensors in the order of their bytes."""

    pack: PackCheck
    tensor: int
    info: TensorInfo
    start: int
    stop: int

    def _range(self) -> tuple[int, int]:
        layout = grid(self.info.dtype, self.info.shape, self.pack.geometry)
        return layout.byte_range(self.start)[0], layout.byte_range(self.stop - 1)[1]

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        first, stop = self._range()
        return stop - first

    def hash(self, buffer: memoryview) -> bytes | str:
        """Return the packed digests of its blocks, or why they cannot be read; ``buffer`` has `nbytes` bytes."""
        first, _ = self._range()
        layout = grid(self.info.dtype, self.info.shape, self.pack.geometry)
        try:
            fd = os.open(self.pack.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                pread_into(fd, buffer, self.info.offset + first, path=self.pack.path)
            finally:
                os.close(fd)
        except OSError as error:
            return error.strerror or type(error).__name__
        except SourceChangedError:
            return "it became shorter meanwhile"
        ranges = map(layout.byte_range, range(self.start, self.stop))
        return b"".join(content_digest(buffer[start - first : stop - first]) for start, stop in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFolder:
    """What lies in the folder of packs: the names of packs, and the number of files that have no such name."""

    names: tuple[str, ...]
    strays: int


def pack_folder(layout: CacheLayout) -> PackFolder:
    """Return what lies in the folder of packs; nothing where there is none.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    try:
        files = sorted(os.listdir(layout.packs))
    except FileNotFoundError:
        files = []
    except OSError as error:
        fail_storage(error, layout.packs, "look into")
    names = tuple(match[1] for match in map(PACK_FILE.fullmatch, files) if match)
    return PackFolder(names=names, strays=len(files) - len(names))
