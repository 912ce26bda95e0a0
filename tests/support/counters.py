"""Counting what a build does where it happens: files opened, bytes read, blocks measured, weights in memory."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import mergepipe.engine.job
import mergepipe.engine.pool
import mergepipe.engine.run
from mergepipe.engine.hold import HoldPool
from mergepipe.engine.kernel import Scratch
from support.projects import Reads

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_opened: list[str] | None = None
_hooked = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        path = arguments[0]
        _opened.append(os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path))


class Counters:
    """Counts from when it is made until the monkeypatch is undone; `clear` begins anew.

    Attributes
    ----------
    reads
        Every range that was read with `os.pread` or `os.preadv`.
    measured
        How many statistics of single blocks were taken.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        global _hooked
        if not _hooked:  # a hook cannot be taken away again: it listens while somebody counts
            sys.addaudithook(_hear)
            _hooked = True
        monkeypatch.setattr(sys.modules[__name__], "_opened", [])
        self.reads = Reads(monkeypatch)
        self.measured = 0
        self._scratches: list[Scratch] = []
        self._holds: list[_CountingHold] = []
        measure = mergepipe.engine.job.measure_block

        def counted(*arguments: Any, **options: Any) -> bytes:
            self.measured += 1
            return measure(*arguments, **options)

        monkeypatch.setattr(mergepipe.engine.job, "measure_block", counted)
        monkeypatch.setattr(mergepipe.engine.pool, "Scratch", lambda tile: _kept(self._scratches, Scratch(tile)))
        # What it takes is given back untouched: no memory of the process, though Python counts it for a moment.
        monkeypatch.setattr(mergepipe.engine.run, "keep_freed_memory", lambda: None)
        monkeypatch.setattr(mergepipe.engine.run, "HoldPool", lambda limit: _kept(self._holds, _CountingHold(limit)))

    def clear(self) -> None:
        """Forget what was counted."""
        assert _opened is not None
        _opened.clear()
        self.reads.clear()
        self.measured = 0
        self._scratches.clear()
        self._holds.clear()

    def opened(self, path: Path) -> int:
        """Return how often a file was opened."""
        return Counter(_opened)[str(path)]

    def data_bytes(self, path: Path) -> int:
        """Return the bytes of a safetensors file that were read behind its header."""
        return sum(stop - start for start, stop in self.reads.data_ranges(path))

    @property
    def weight_bytes(self) -> int:
        """The most bytes of stored and merged weights that were in memory at once.

        Buffers of workers are kept from job to job and only grow; what is held between passes comes and goes.
        """
        buffers = [array.nbytes for s in self._scratches for name, array in s._bytes.items() if _is_weights(name)]
        return sum(buffers) + sum(hold.peak for hold in self._holds)

    @property
    def buffer_bytes(self) -> int:
        """As `weight_bytes`, with what is computed in."""
        arrays = [array for s in self._scratches for array in (*s._bytes.values(), *s._wide.values())]
        return sum(array.nbytes for array in arrays) + sum(hold.peak for hold in self._holds)


def _is_weights(name: object) -> bool:
    """Return whether a buffer holds what was read (they are numbered) or what is made of it."""
    return isinstance(name, int) or name in ("out", "copy")


def _kept(found: list[Any], value: Any) -> Any:
    found.append(value)
    return value


class _CountingHold(HoldPool):
    """A pool that knows the most bytes that it ever had."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.peak = 0

    def lend(self, nbytes: int) -> memoryview:
        view = super().lend(nbytes)
        self.peak = max(self.peak, self._lent + sum(map(len, self._free)))
        return view
