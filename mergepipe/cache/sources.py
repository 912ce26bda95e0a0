"""What is known of the sources' content during one run: from the catalog, and from what this run has read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.given import GivenCodes
from mergepipe.cache.progressive import CodeStore
from mergepipe.cache.records import SourceFile, TensorDigests, TensorSamples
from mergepipe.checkpoints.checkpoint import Checkpoint, CheckpointFile
from mergepipe.checkpoints.geometry import Geometry
from mergepipe.checkpoints.place import GET_AGAIN
from mergepipe.checkpoints.safetensors import TensorInfo
from mergepipe.digest import (
    DIGEST_SIZE,
    digest_at,
    partial_tensor_digest,
    sampled_tensor_digest,
    source_digest,
    tensor_digest,
)
from mergepipe.errors import MergepipeError, PackError, SourceChangedError
from mergepipe.fsio.identity import FileIdentity, settle
from mergepipe.values import dataclass

_UNREAD = bytes(DIGEST_SIZE)
_LEVEL_RUNS = re.compile(rb"\0+|[^\0]+")


def _has_unread(packed: bytes) -> bool:
    """Return whether any of these digests stands for a block that was not read."""
    at = packed.find(_UNREAD)
    while at >= 0 and at % DIGEST_SIZE:
        at = packed.find(_UNREAD, at + 1)
    return at >= 0


@dataclass(slots=True)
class _FileState:
    """One file of a source: its digests so far, and those that are not in the catalog yet.

    ``is_output`` marks a file of an output in the cache, or of a progressive checkpoint: it is known without a read.
    """

    source: str
    file: CheckpointFile
    known: dict[str, bytes]
    blocks: dict[str, bytes] = field(default_factory=dict)
    recorded: dict[str, bytes] | None = None  # what the catalog has, not checked; looked up as samples are
    pending: list[TensorDigests] = field(default_factory=list)
    samples: dict[str, TensorSamples] | None = None  # looked up when they are first asked for
    pending_samples: set[str] = field(default_factory=set)
    read_at_ns: int = 0
    is_output: bool = False

    @property
    def key(self) -> SourceFile:
        return SourceFile(path=self.file.path, identity=self.file.identity, header=self.file.header_digest)


class SourceIndex:
    """The digests of source tensors and blocks, filled up as the run reads.

    Parameters
    ----------
    checkpoints
        By source name. Two sources may be the same files; they are known and read once.

    Attributes
    ----------
    given
        The codes of progressive checkpoints.
    """

    def __init__(self, catalog: Catalog, checkpoints: Mapping[str, Checkpoint], geometry: Geometry) -> None:
        self._catalog = catalog
        self._checkpoints = dict(checkpoints)
        self.geometry = geometry
        self._files: dict[Path, _FileState] = {}
        self._states: dict[str, list[_FileState]] = {}  # of a source, in the order of its files
        self._digests: dict[str, bytes | None] = {}  # emptied whenever more becomes known
        self._fingerprints: dict[str, bytes | None] = {}
        self.codes = CodeStore(catalog)
        """The progressive codes in the same cache."""
        for source, checkpoint in checkpoints.items():
            for file in checkpoint.files:
                if file.path not in self._files:
                    state = _FileState(source, file, {})
                    state.known = {} if checkpoint.standalone else dict(catalog.tensor_digests(state.key))
                    self._files[file.path] = state
            if checkpoint.standalone is not None:
                told = checkpoint.standalone.tensors.values()
                digests, blocks = {one.name: one.digest for one in told}, {one.name: one.blocks for one in told}
                self.add_known(source, checkpoint, digests, blocks)
        self.given = GivenCodes(self._checkpoints, geometry)

    def add_known(
        self, source: str, checkpoint: Checkpoint, digests: Mapping[str, bytes], blocks: Mapping[str, bytes]
    ) -> None:
        """Take an output of the project, or a progressive checkpoint, as a source: its content is known without a read.

        Its files are not looked at, and may be gone: whoever reads a block of it checks the block's digest, as of any
        source. Called again, it replaces what was known of the source.

        Parameters
        ----------
        digests, blocks
            By tensor name its digest, and packed those of its blocks; tensors that are in neither stay unknown.
        """
        self._checkpoints[source] = checkpoint
        members: list[list[str]] = [[] for _ in checkpoint.files]
        for info in checkpoint.tensors.values():
            members[info.file].append(info.name)
        for file, names in zip(checkpoint.files, members, strict=True):
            self._files[file.path] = _FileState(
                source,
                file,
                known={name: digests[name] for name in names if name in digests},
                blocks={name: blocks[name] for name in names if name in blocks},
                read_at_ns=time.time_ns(),
                is_output=True,
            )
        self._states.clear()
        self._digests.clear()

    def _state(self, source: str, info: TensorInfo) -> _FileState:
        states = self._states.get(source)
        if states is None:
            states = [self._files[file.path] for file in self._checkpoints[source].files]
            self._states[source] = states
        return states[info.file]

    def file(self, source: str, info: TensorInfo) -> CheckpointFile:
        """Return the file that holds a tensor of a source."""
        return self._checkpoints[source].files[info.file]

    def tensor(self, source: str, info: TensorInfo) -> bytes | None:
        """Return a tensor's digest, or None while it is cold."""
        return self._state(source, info).known.get(info.name)

    def blocks(self, source: str, info: TensorInfo) -> bytes | None:
        """Return a tensor's packed block digests, or None while it is cold."""
        state = self._state(source, info)
        if info.name not in state.known:
            return None
        blocks = state.blocks.get(info.name)
        if blocks is not None:
            return blocks
        if state.recorded is None:  # one question for all tensors: there are hundreds
            state.recorded = dict(self._catalog.block_digests(state.key))
        found = state.recorded.pop(info.name, None)
        if found is None or tensor_digest(info.dtype, info.shape, found) != state.known[info.name]:
            # The row vanished meanwhile, or is damaged: the tensor is cold again.
            del state.known[info.name]
            self._digests.clear()
            return None
        state.blocks[info.name] = found
        return found

    def settle(self, sources: Iterable[str]) -> None:
        """Wait until reading the cold files of these sources cannot be racy; call it before their first read."""
        for source in sources:
            for file in self._checkpoints[source].files:
                state = self._files[file.path]
                if not state.read_at_ns:
                    state.read_at_ns = settle(file.identity)

    def add(self, source: str, info: TensorInfo, blocks: bytes) -> bytes:
        """Take the block digests of a tensor that was read whole; return the tensor's digest."""
        state = self._state(source, info)
        digest = tensor_digest(info.dtype, info.shape, blocks)
        state.known[info.name] = digest
        self._digests.clear()
        state.blocks[info.name] = blocks
        state.pending.append(TensorDigests(name=info.name, digest=digest, blocks=blocks))
        return digest

    # --- tensors that are not read whole --------------------------------------------------------------------------

    def samples(self, source: str, info: TensorInfo) -> bytes | None:
        """Return the packed digests of the samples of a tensor's blocks, or None while they were not taken."""
        found = self._sampled(self._state(source, info), info).samples
        return found or (None if info.nbytes else b"")  # a tensor without elements has no blocks

    def add_samples(self, source: str, info: TensorInfo, samples: bytes) -> None:
        """Take the digests of the samples of all blocks of a tensor."""
        self._enter(source, info, lambda known: replace(known, samples=samples))

    def read_blocks(self, source: str, info: TensorInfo) -> bytes:
        """Return the packed digests of those blocks of a tensor that were ever read, zeros for the others."""
        whole = self.blocks(source, info)
        return whole or self._sampled(self._state(source, info), info).blocks

    def add_blocks(self, source: str, info: TensorInfo, blocks: bytes) -> None:
        """Take the digests of some blocks of a tensor, zeros for those that were not read: they stay as they are."""

        def merged(known: TensorSamples) -> TensorSamples:
            if not known.blocks:
                return replace(known, blocks=blocks)
            pairs = [(digest_at(blocks, at), digest_at(known.blocks, at)) for at in range(len(blocks) // DIGEST_SIZE)]
            found = [(before or _UNREAD) if now == _UNREAD else (now or _UNREAD) for now, before in pairs]
            return replace(known, blocks=b"".join(found))

        self._enter(source, info, merged)

    def pins(self, source: str, info: TensorInfo, levels: bytes) -> bytes | None:
        """Return, packed, a digest for each block of a tensor: its own where it is read, else that of its sample.

        None while one of them is not known.

        Parameters
        ----------
        levels
            A byte for each block, 0 where it is not read.
        """
        samples, blocks = self.samples(source, info), self.read_blocks(source, info)
        if samples is None or len(samples) != len(levels) * DIGEST_SIZE:
            return None
        found = []
        for run in _LEVEL_RUNS.finditer(levels):  # adjacent blocks that are read, or that are not
            first, stop = run.span()
            found.append((blocks if levels[first] else samples)[first * DIGEST_SIZE : stop * DIGEST_SIZE])
        pins = b"".join(found)
        return None if len(pins) < len(samples) or _has_unread(pins) else pins

    def partial(self, source: str, info: TensorInfo, levels: bytes) -> bytes | None:
        """Return the digest of what is known of a tensor of which some blocks are read, None while it is cold."""
        pins = self.pins(source, info, levels)
        return None if pins is None else partial_tensor_digest(info.dtype, info.shape, levels, pins)

    def unsampled(self, source: str) -> tuple[TensorInfo, ...]:
        """Return the tensors of a source of whose blocks no samples were taken."""
        return tuple(i for i in self._checkpoints[source].stored.values() if self.samples(source, i) is None)

    def fingerprint(self, source: str) -> bytes | None:
        """Return the digest of the samples of all blocks of a source, or None while any are missing."""
        if source not in self._fingerprints:
            checkpoint = self._checkpoints[source]
            found = [(info, self.samples(source, info)) for info in checkpoint.stored.values()]
            known = [
                (info.name, sampled_tensor_digest(info.dtype, info.shape, samples))
                for info, samples in found
                if samples is not None
            ]
            complete = len(known) == len(found)
            self._fingerprints[source] = source_digest([*known, *checkpoint.facts]) if complete else None
        return self._fingerprints[source]

    def _sampled(self, state: _FileState, info: TensorInfo) -> TensorSamples:
        if state.samples is None:
            state.samples = {} if state.is_output else dict(self._catalog.tensor_samples(state.key))
        return state.samples.get(info.name, TensorSamples(name=info.name, samples=b"", blocks=b""))

    def _enter(self, source: str, info: TensorInfo, change: Callable[[TensorSamples], TensorSamples]) -> None:
        state = self._state(source, info)
        known = self._sampled(state, info)
        assert state.samples is not None, "they were looked up"
        state.samples[info.name] = change(known)
        state.pending_samples.add(info.name)
        self._fingerprints.clear()

    # --- all of a source ------------------------------------------------------------------------------------------

    def cold(self, source: str) -> tuple[TensorInfo, ...]:
        """Return the tensors of a source whose content is not known."""
        return tuple(info for info in self._checkpoints[source].stored.values() if self.tensor(source, info) is None)

    def digest(self, source: str) -> bytes | None:
        """Return the source's content digest, or None while any of its tensors is cold."""
        if source not in self._digests:
            checkpoint = self._checkpoints[source]
            pairs = [(name, self.tensor(source, info)) for name, info in checkpoint.stored.items()]
            known = [(name, digest) for name, digest in pairs if digest is not None]
            complete = len(known) == len(pairs)
            self._digests[source] = source_digest([*known, *checkpoint.facts]) if complete else None
        return self._digests[source]

    def flush(self) -> None:
        """Record what was read since the last call, after checking that its files are still the same.

        Raises
        ------
        SourceChangedError
            If a file is not the one whose header was read; nothing of it is recorded, and what was is dropped.
        """
        pending = [state for state in self._files.values() if state.pending or state.pending_samples]
        for state in pending:
            self._check(state)
        with self._catalog.transaction():
            for state in pending:
                samples = [(state.samples or {})[name] for name in sorted(state.pending_samples)]
                self._catalog.record_tensors(state.key, state.read_at_ns or time.time_ns(), state.pending, samples)
        for state in pending:  # only now: a transaction that failed has recorded nothing
            state.pending, state.pending_samples = [], set()

    def check_unchanged(self) -> None:
        """Check every file of every source against the identity that it had when its header was read.

        The files of outputs are left out: links to them are made and removed, and every read of them is checked.

        Raises
        ------
        SourceChangedError
            For the first file that differs; what the catalog holds of it is dropped.
        StorageError
            If the file system does not say of one whether it does.
        """
        for state in self._files.values():
            if not state.is_output:
                self._check(state)

    def _check(self, state: _FileState) -> None:
        if FileIdentity.found(state.file.path) != state.file.identity:
            self._catalog.forget_file(state.file.path)
            raise source_changed(state.source, state.file)

    def forget(self, path: Path) -> None:
        """Drop everything known of a file: its bytes are not what they should be, whatever its identity says."""
        self._catalog.forget_file(path)
        for state in self._files.values():
            if state.file.path == path:
                state.known, state.blocks, state.recorded, state.pending = {}, {}, None, []
                state.samples, state.pending_samples = {}, set()
        self._digests.clear()
        self._fingerprints.clear()


def other_content(source: str, info: TensorInfo, file: CheckpointFile) -> MergepipeError:
    """Return the error for a tensor whose bytes are not what is known of it, in a file that seems to be the same."""
    if not file.is_sealed:
        return source_changed(source, file)
    return PackError(
        f"`{file.path}` of source `{source}` is damaged: tensor `{info.name}` is not what was packed",
        hint=GET_AGAIN,
        source=source,
        tensor=info.name,
        path=str(file.path),
    )


def source_changed(source: str, file: CheckpointFile) -> SourceChangedError:
    """Return the error for a file that is not what it was when the build began."""
    shown = os.path.join(source, file.name)
    return SourceChangedError(
        f"`{file.path}` of source `{source}` changed while it was being read",
        hint="run the build again when nothing writes to it any more; nothing was published",
        source=source,
        file=shown,
        path=str(file.path),
    )
