"""Progressive codes of deltas on the engine's side: made while statistics are taken, and read to merge."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mergepipe.cache.given import GivenCode
from mergepipe.cache.progressive import CodePrices, CodeStore
from mergepipe.engine.kernel import Array, Scratch, typed
from mergepipe.engine.work import Group, Input, InputKey
from mergepipe.errors import PackError, StorageError, fail_storage
from mergepipe.progressive.encode import EncodedBlock, encode_block
from mergepipe.progressive.header import PackHeader
from mergepipe.progressive.levels import LEVELS
from mergepipe.progressive.pack import PackWriter, read_header
from mergepipe.reporting import Reporter

CodeKey = tuple[InputKey, InputKey]
"""The code of a delta: the base's tensor and the expert's."""


@dataclass(slots=True, kw_only=True, eq=False)
class Coding:
    """A delta that is being coded.

    Attributes
    ----------
    base, expert
        The two tensors, of one shape.
    writer
        The pack in the making; blocks come from any worker.
    """

    base: Input
    expert: Input
    writer: PackWriter

    @property
    def key(self) -> CodeKey:
        """Its inputs' keys."""
        return self.base.key, self.expert.key

    @classmethod
    def begin(cls, codes: CodeStore, base: Input, expert: Input, block_elements: int) -> Coding:
        """Begin a pack.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        codes.make_folder()
        writer = PackWriter(codes.folder, shape=expert.ref.info.shape, block_elements=block_elements)
        return cls(base=base, expert=expert, writer=writer)

    def finish(self, codes: CodeStore, base: bytes, expert: bytes) -> CodePrices:
        """Put the pack into the cache; every block was coded. ``base`` and ``expert`` are tensor digests.

        Raises
        ------
        StorageError
            If the file system refuses.
        """
        return codes.record(codes.key(base, expert), self.writer.finish(base, expert))


@dataclass(slots=True, eq=False)
class OpenPack:
    """A pack that is read from."""

    fd: int
    header: PackHeader

    @classmethod
    def open(cls, path: Path) -> OpenPack:
        """Open a pack and read its header.

        Raises
        ------
        PackError, StorageError
            If it is damaged, or not there.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            fail_storage(error, path, "read")
        try:
            return cls(fd, read_header(path, fd))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


@dataclass(slots=True, kw_only=True, eq=False)
class CodeInput:
    """The code of a delta that a group reads.

    Attributes
    ----------
    stored
        Its key in the cache.
    open
        Opens its pack; None if there is none that is fit.
    is_damaged
        Set where a worker found the pack unfit: blocks are coded anew from the sources then.
    is_given
        Whether it is one of a progressive checkpoint, and not of the cache: it cannot be made again.
    """

    base: Input
    expert: Input
    stored: bytes
    open: Callable[[], OpenPack | None]
    is_damaged: bool = False
    is_given: bool = False
    _pack: OpenPack | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looked: bool = False

    @property
    def key(self) -> CodeKey:
        """Its inputs' keys."""
        return self.base.key, self.expert.key

    def pack(self) -> OpenPack | None:
        """Return the pack, opened when it is first asked for; any thread may."""
        with self._lock:
            if not self._looked:
                self._pack, self._looked = self.open(), True
            return self._pack

    def close(self) -> None:
        """Close the pack."""
        with self._lock:
            if self._pack is not None:
                self._pack.close()
            self._pack, self._looked = None, False


def opener(codes: CodeStore, stored: bytes) -> Callable[[], OpenPack | None]:
    """Return what opens a pack in any thread: what the catalog knows of it is looked up here."""
    path, known = codes.path(stored), codes.header(stored)

    def open_it() -> OpenPack | None:
        try:
            pack = None if known is None else OpenPack.open(path)
        except (PackError, StorageError):
            return None
        if pack is not None and pack.header.seal != known:
            pack.close()
            return None
        return pack

    return open_it


def let_go(group: Group, codes: CodeStore, reporter: Reporter) -> None:
    """Close the packs that a group has read; those that were damaged are taken out of use, and that is said."""
    for code in group.codes.values():
        code.close()
        if code.is_damaged:
            codes.quarantine(code.stored)
            reporter.warn(
                f"the progressive pack of `{code.expert.ref.info.name}` of source `{code.expert.ref.source}` was"
                " damaged: it was taken out of use, and what was needed of it was made again"
            )
            code.is_damaged = False


def given_opener(code: GivenCode) -> Callable[[], OpenPack]:
    """Return what opens a code of a progressive checkpoint in any thread.

    Raises
    ------
    PackError
        When it is called, if the file is not the one whose header was read.
    """
    return lambda: OpenPack(code.open(), code.header)


def code_block(
    coding: Coding | CodeInput, data: tuple[memoryview, memoryview] | None, scratch: Scratch
) -> EncodedBlock:
    """Return the code of a block.

    Parameters
    ----------
    data
        The bytes of the base's and of the expert's block; None where they are known to be equal.
    """
    if data is None:
        return EncodedBlock(chunks=(b"",) * LEVELS, residuals=np.zeros(LEVELS))
    dtypes = (coding.base.ref.info.dtype, coding.expert.ref.info.dtype)
    return encode_block(delta_of(data, dtypes, scratch), coding.expert.grid.row_elements)


def delta_of(data: tuple[memoryview, memoryview], dtypes: tuple[str, str], scratch: Scratch) -> Array:
    """Return the difference of two blocks: in float64 where either is, else in float32."""
    work = "float64" if "F64" in dtypes else "float32"
    base, expert = (typed(part, dtype) for part, dtype in zip(data, dtypes, strict=True))
    delta = scratch.tile("delta", work, expert.size)
    wide = scratch.tile("delta base", work, base.size)
    with np.errstate(all="ignore"):
        np.copyto(delta, expert, casting="unsafe")
        np.copyto(wide, base, casting="unsafe")
        np.subtract(delta, wide, out=delta)
    return delta
