"""Codes that came with a source: those of progressive checkpoints. They stay where they are, and are read there."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.checkpoints.checkpoint import Checkpoint, CheckpointFile
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.place import GET_AGAIN
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.checkpoints.standalone import Standalone
from mergepipe.errors import PackError, StorageError, fail_storage
from mergepipe.fsio.identity import FileIdentity
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.progressive.header import PackHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCode:
    """The code of a tensor in a progressive checkpoint.

    Attributes
    ----------
    squares
        The square of the norm of the delta of each block.
    """

    source: str
    file: CheckpointFile
    header: PackHeader
    squares: tuple[float, ...]

    def open(self) -> int:
        """Return a descriptor of its file.

        Raises
        ------
        PackError
            If it is not the file whose header was read.
        """
        return _opened(self.file)


class GivenCodes:
    """The codes of progressive checkpoints, each header read once, when it is first asked for.

    Parameters
    ----------
    checkpoints
        By source name; others than progressive ones have none.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], geometry: Geometry) -> None:
        self._checkpoints = checkpoints
        self._geometry = geometry
        self._found: dict[Path, GivenCode] = {}
        self._read: dict[str, int] = {}
        self._counted: set[str] = set()

    def standalone(self, source: str) -> Standalone | None:
        """Return what makes a source a progressive checkpoint; None for any other source."""
        checkpoint = self._checkpoints.get(source)
        return None if checkpoint is None else checkpoint.standalone

    def code(self, source: str, info: TensorInfo) -> GivenCode | None:
        """Return the code of a tensor; None where it lies there exactly, or the source is no progressive checkpoint.

        Raises
        ------
        PackError
            If the file is damaged, or is not the one that the checkpoint's record speaks of.
        """
        value = self.standalone(source)
        if value is None or not value.is_coded(info.name):
            return None
        file = self._checkpoints[source].files[info.file]
        if file.path not in self._found:
            header = self._header(file, value, info)
            self._read[source] = self._read.get(source, 0) + header.nbytes
            told = value.tensors[info.name]
            self._found[file.path] = GivenCode(source=source, file=file, header=header, squares=told.squares)
        return self._found[file.path]

    def headers_read(self) -> dict[str, int]:
        """Return by source the bytes of all headers that were read."""
        found: dict[str, int] = {}
        for code in self._found.values():
            found[code.source] = found.get(code.source, 0) + code.header.nbytes
        return found

    def is_counted(self, source: str) -> bool:
        """Return whether headers of a source were read for a run of the engine (`take_read`)."""
        return source in self._counted

    def take_read(self, sources: Container[str]) -> dict[str, int]:
        """Return by source the bytes of the headers of these that were read since the last call that asked for them."""
        found = {source: count for source, count in self._read.items() if source in sources}
        self._counted.update(found)
        self._read = {source: count for source, count in self._read.items() if source not in sources}
        return found

    def _header(self, file: CheckpointFile, value: Standalone, info: TensorInfo) -> PackHeader:
        from mergepipe.progressive.pack import read_header

        told, fd = value.tensors[info.name], _opened(file)
        try:
            header = read_header(file.path, fd)
        except (PackError, StorageError) as error:
            raise PackError(error.message, hint=GET_AGAIN, path=str(file.path)) from None
        finally:
            os.close(fd)
        same = (header.seal, header.expert_digest, header.shape, header.block_elements)
        if same != (told.seal, told.digest, told.shape, self._geometry.block_elements):
            what = f"`{file.path}` is not the file that the record of its progressive checkpoint speaks of"
            raise PackError(what, hint=GET_AGAIN, path=str(file.path))
        return header


def _opened(file: CheckpointFile) -> int:
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise PackError(f"`{file.path}` is gone", hint=GET_AGAIN, path=str(file.path)) from None
    except OSError as error:
        fail_storage(error, file.path, "read")
    if FileIdentity.of(os.fstat(fd)) != file.identity:
        os.close(fd)
        what = f"`{file.path}` changed while it was being read"
        raise PackError(what, hint="run the command again when nothing writes to it any more", path=str(file.path))
    return fd
