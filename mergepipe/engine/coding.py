"""Progressive codes of deltas on the engine's side: made while statistics are taken, and read to merge."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.cache.given import GivenCode
from mergepipe.cache.progressive import CodePrices, CodeStore
from mergepipe.engine.work import Group, Input, InputKey
from mergepipe.errors import PackError, StorageError, fail_storage
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

if TYPE_CHECKING:
    from mergepipe.engine.kernel import Array, Scratch
    from mergepipe.progressive.encode import EncodedBlock
    from mergepipe.progressive.header import PackHeader
    from mergepipe.progressive.writer import PackWriter

_OUT_OF_HANDLES = (errno.EMFILE, errno.ENFILE)

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
        from mergepipe.progressive.writer import PackWriter  # numpy comes with it, as below

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
    def open(cls, path: Path, header: PackHeader | None = None) -> OpenPack:
        """Open a pack and read its header, if that is not known from earlier.

        Raises
        ------
        PackError, StorageError
            If it is damaged, or not there.
        """
        from mergepipe.progressive.pack import read_header

        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            fail_storage(error, path, "read")
        try:
            return cls(fd, header or read_header(path, fd))
        except BaseException:
            os.close(fd)
            raise

    def close(self, close: Callable[[int], None] = os.close) -> None:  # it may be late: modules may be gone
        """Close the file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class CodeInput:
    """The code of a delta that a group reads.

    Attributes
    ----------
    stored
        Its key in the cache.
    open
        Opens its pack; None if there is none that is fit.
    header
        The pack and how many bytes the header is that must be read of it first; None where it was read.
    is_damaged
        Set where a worker found the pack unfit: blocks are coded anew from the sources then.
    is_given
        Whether it is one of a progressive checkpoint, and not of the cache: it cannot be made again.
    was_read
        Set where a worker read from the pack.
    """

    base: Input
    expert: Input
    stored: bytes
    open: Callable[[], OpenPack | None]
    header: tuple[Path, int] | None = None
    is_damaged: bool = False
    is_given: bool = False
    was_read: bool = False
    _pack: OpenPack | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _readers: int = 0

    @property
    def key(self) -> CodeKey:
        """Its inputs' keys."""
        return self.base.key, self.expert.key

    @contextlib.contextmanager
    def reading(self) -> Iterator[OpenPack | None]:
        """Open the pack for as long as workers read from it, and longer while few packs are open.

        Where many packs are read, descriptors are few; where few are, the next job finds its packs open.
        """
        with self._lock:
            if self._pack is None:
                self._pack = self.open()
            pack = self._pack
            self._readers += 1
            self.was_read |= pack is not None
        try:
            yield pack
        finally:
            with self._lock:
                self._readers -= 1
            if pack is not None:
                _keep_open(self)

    def rest(self) -> None:
        """Close the pack, unless somebody reads from it."""
        with self._lock:
            if self._readers == 0 and self._pack is not None:
                self._pack.close()
                self._pack = None


_OPEN_PACKS = 16
_opened: OrderedDict[int, weakref.ref[CodeInput]] = OrderedDict()  # the ones that were read from last come last
_opened_lock = threading.Lock()


def _keep_open(code: CodeInput) -> None:
    """Leave the pack of a code open, and close the one that was not read from for longest if there are too many."""
    with _opened_lock:
        _opened[id(code)] = weakref.ref(code)
        _opened.move_to_end(id(code))
        old = _opened.popitem(last=False)[1]() if len(_opened) > _OPEN_PACKS else None
    if old is not None:
        old.rest()


def opener(codes: CodeStore, stored: bytes) -> Callable[[], OpenPack | None]:
    """Return what opens a pack in any thread: what the catalog knows of it is looked up here.

    Raises
    ------
    StorageError
        When it is called, if the process has no descriptors left: that says nothing about the pack.
    """
    path, known = codes.path(stored), codes.header(stored)
    header: PackHeader | None = None

    def open_it() -> OpenPack | None:
        nonlocal header
        try:
            pack = None if known is None else OpenPack.open(path, header)
        except PackError:
            return None
        except StorageError as error:
            if error.facts.get("errno") in _OUT_OF_HANDLES:
                raise
            return None
        if pack is None or pack.header is header or pack.header.seal == known:
            header = None if pack is None else pack.header
            return pack
        pack.close()
        return None

    return open_it


def let_go(group: Group, codes: CodeStore, reporter: Reporter) -> None:
    """Note which packs a group has read; those that were damaged are taken out of use, and that is said."""
    for code in group.codes.values():
        code.rest()
        if code.was_read and not code.is_damaged and not code.is_given:
            codes.note_use(code.stored)
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
    from mergepipe.progressive.encode import encode_block, encode_zero

    if data is None:
        return encode_zero()
    dtypes = (coding.base.ref.info.dtype, coding.expert.ref.info.dtype)
    return encode_block(delta_of(data, dtypes, scratch), coding.expert.grid.row_elements)


def delta_of(data: tuple[memoryview, memoryview], dtypes: tuple[str, str], scratch: Scratch) -> Array:
    """Return the difference of two blocks: in float64 where either is, else in float32."""
    import numpy as np

    from mergepipe.engine.kernel import typed

    work = "float64" if "F64" in dtypes else "float32"
    base, expert = (typed(part, dtype) for part, dtype in zip(data, dtypes, strict=True))
    delta = scratch.tile("delta", work, expert.size)
    wide = scratch.tile("delta base", work, base.size)
    with np.errstate(all="ignore"):
        np.copyto(delta, expert, casting="unsafe")
        np.copyto(wide, base, casting="unsafe")
        np.subtract(delta, wide, out=delta)
    return delta
