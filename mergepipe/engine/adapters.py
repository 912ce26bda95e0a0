"""Adapters in the engine: stored factors are read once per tensor, deltas computed block by block and never stored."""

from __future__ import annotations

import threading
from dataclasses import field
from typing import Any

import numpy as np

from mergepipe.cache.sources import source_changed
from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.checkpoints.lowrank import lora_rows
from mergepipe.digest import content_digest, tensor_digest
from mergepipe.dtypes import numpy_dtype
from mergepipe.engine.files import Files
from mergepipe.engine.work import Input, InputKey
from mergepipe.graph.inputs import factors_digest, lora_block
from mergepipe.plan.values import InputRef, LoraRef
from mergepipe.values import dataclass

Array = np.ndarray[Any, Any]


@dataclass(slots=True, kw_only=True)
class Factors:
    """The two stored factors of a delta, read whole by the first job that needs them.

    Attributes
    ----------
    counted
        Whether their bytes were counted as read to merge; set by the thread that runs the build.
    """

    a: Input
    b: Input
    counted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arrays: tuple[Array, Array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.grid.nbytes + self.b.grid.nbytes

    @property
    def was_read(self) -> bool:
        """Whether they were read."""
        return self._arrays is not None

    def digests(self) -> tuple[bytes, bytes]:
        """Return the tensor digests of both; reads them if their content is not known."""
        with self._lock:
            if self.a.known is None or self.b.known is None:
                self._load()
        return _tensor(self.a), _tensor(self.b)

    def arrays(self) -> tuple[Array, Array]:
        """Return both as 2-D arrays of their stored dtypes."""
        with self._lock:
            if self._arrays is None:
                self._load()
        assert self._arrays is not None
        return self._arrays

    def _load(self) -> None:
        """Read both factors, and compare their digests, or find them."""
        files = Files()
        try:
            self._arrays = (_read(self.a, files), _read(self.b, files))
        finally:
            files.close()


@dataclass(slots=True, kw_only=True)
class AdapterInput:
    """A tensor that is computed from an adapter's factors.

    Attributes
    ----------
    factors
        What it is computed from; other tensors of the group may share them.
    on
        The key of the input that the delta is added to, None where the delta itself is the input.
    """

    key: InputKey
    ref: InputRef
    lora: LoraRef
    grid: BlockGrid
    factors: Factors
    on: InputKey | None
    _digest: bytes | None = None

    def digest(self, block: int, on: bytes | None) -> bytes:
        """Return the digest of a block; ``on`` is that of the block that the delta is added to, if any.

        Reads the factors if their content is not known.
        """
        if self._digest is None:  # every thread would set the same
            self._digest = factors_digest(self.lora, *self.factors.digests())
        return lora_block(self._digest, block, on)

    def rows(self, start: int, stop: int, work: str) -> Array:
        """Return rows of the delta, flat, in float32 (float64 if that is the work dtype)."""
        a, b = self.factors.arrays()
        return lora_rows(a, b, self.lora.scaling, self.lora.transposed, start, stop, work=work).reshape(-1)


def _tensor(source: Input) -> bytes:
    assert source.known is not None, "the factor was read"
    return tensor_digest(source.ref.info.dtype, source.ref.info.shape, source.known)


def _read(source: Input, files: Files) -> Array:
    """Return a factor as a 2-D array of its stored dtype."""
    data = memoryview(bytearray(source.grid.nbytes))
    files.read(source, data, 0)
    pieces = [data[slice(*source.grid.byte_range(block))] for block in range(source.grid.count)]
    digests = b"".join(map(content_digest, pieces))
    if source.known is None:
        source.known = digests
    elif digests != source.known:
        raise source_changed(source.ref.source, source.file)
    return np.frombuffer(data, numpy_dtype(source.ref.info.dtype)).reshape(source.ref.info.shape)
