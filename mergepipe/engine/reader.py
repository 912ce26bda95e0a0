"""The inputs of one job: which blocks are in memory, where, and their digests."""

from __future__ import annotations

from collections.abc import Iterator

from mergepipe.cache.sources import other_content
from mergepipe.digest import content_digest
from mergepipe.engine.ahead import advise
from mergepipe.engine.code_reader import CodeReader, adjacent
from mergepipe.engine.coding import CodeInput, CodeKey, Coding, code_block
from mergepipe.engine.kernel import Array, Scratch, add_delta, typed
from mergepipe.engine.work import UNREAD, Input, InputKey, Job, TensorWork
from mergepipe.errors import InternalError, PlanError
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import EncodedBlock


class Reader:
    """Reads what a job needs: into buffers of the worker, or into those that the group holds between its passes.

    A job may be gone through piece by piece: `pieces` yields them, and what was read of one is gone with the next.

    Parameters
    ----------
    turn
        Tells the job from others that the worker has begun; codes that are asked for lie in buffers of their own.

    Attributes
    ----------
    blocks
        The blocks of the piece; at first those of the whole job.
    """

    def __init__(self, job: Job, scratch: Scratch, turn: int = 0) -> None:
        self._job = job
        self._group = job.group
        self._scratch = scratch
        self._inputs = job.group.inputs
        self.blocks = range(job.start, job.stop)
        self._most = job.piece or len(self.blocks)
        self._buffers: dict[InputKey, memoryview] = {}
        self._views: dict[InputKey, dict[int, memoryview]] = {key: {} for key in self._inputs}
        self._cold = [source for source in self._inputs.values() if source.known is None]
        self._found: dict[InputKey, list[bytes]] = {source.key: [] for source in self._cold}
        self._codes = CodeReader(job.group.codes, scratch, turn)
        self._files = scratch.files
        self._files.next_job()

    def pieces(self) -> Iterator[range]:
        """Yield the blocks of each piece of the job, when it is its turn."""
        whole = self.blocks
        for start in range(whole.start, whole.stop, self._most):
            self.blocks = range(start, min(start + self._most, whole.stop))
            for views in self._views.values():
                views.clear()
            yield self.blocks

    # --- what was read --------------------------------------------------------------------------------------------

    def hashed(self) -> dict[InputKey, bytes]:
        """Return, per cold input, the packed digests of its blocks in the job's range."""
        return {key: b"".join(digests) for key, digests in self._found.items()}

    def index_bytes(self, claimed: set[tuple[InputKey, int]]) -> dict[InputKey, int]:
        """Return the bytes that were read of the piece for nothing but digests and statistics.

        Parameters
        ----------
        claimed
            The blocks that were counted as read to merge. What the group holds is counted when it is done.
        """
        counts: dict[InputKey, int] = {}
        for key, views in self._views.items():
            for block, view in views.items():
                if (key, block) not in claimed:
                    counts[key] = counts.get(key, 0) + len(view)
        return counts

    def block_bytes(self, key: InputKey, block: int) -> int:
        """Return the bytes of a block of a stored input that is in memory."""
        return len(self.data(key, block))

    # --- reading --------------------------------------------------------------------------------------------------

    @property
    def is_cold(self) -> bool:
        """Whether the content of an input is not known."""
        return bool(self._cold)

    def read_cold(self) -> None:
        """Read and hash what is wanted of the piece of every input whose content is not known."""
        first, last = self.blocks.start, self.blocks.stop
        for source in self._cold:
            key, found, count = source.key, self._found[source.key], source.grid.count
            blocks = self.blocks if last <= count else range(first, max(first, count))
            if source.levels is None and not source.earlier:
                if blocks:
                    self._read_run(source, blocks)
                views = self._views[key]
                for block in blocks:
                    view = views.get(block)
                    found.append(content_digest(self.data(key, block) if view is None else view))
                continue
            for run in adjacent([block for block in blocks if source.is_missing(block)]):
                self._read_run(source, run)
            found += [self._cold_digest(source, block) for block in blocks]

    def _cold_digest(self, source: Input, block: int) -> bytes:
        if not source.is_wanted(block):
            return UNREAD
        return source.known_earlier(block) or content_digest(self.data(source.key, block))

    def digest(self, key: InputKey, block: int) -> bytes | None:
        """Return the digest of a block of an input, None if it has no such block."""
        adapter = self._group.adapters.get(key)
        if adapter is not None:
            return adapter.digest(block, self.digest(adapter.on, block) if adapter.on else None)
        source = self._inputs[key]
        if source.known is not None:
            return source.digest(block)
        digests = self._found[key]
        at = block - self._job.start
        return digests[at] if at < len(digests) else None

    def ask(self, needed: dict[InputKey, list[int]]) -> None:
        """Ask the kernel for the blocks that are needed and not in memory: the disk works on all of them then."""
        for source, run in self._runs(needed):
            self._ask(source, run)

    def _runs(self, needed: dict[InputKey, list[int]]) -> list[tuple[Input, range]]:
        """Return the runs of adjacent blocks that are needed and not in memory."""
        runs = []
        for key, wanted in self._stored(needed).items():
            views, present = self._views[key], self._group.present
            missing = [block for block in wanted if block not in views and (key, block) not in present]
            if missing:
                runs += [(self._inputs[key], run) for run in adjacent(missing)]
        return runs

    def read(self, needed: dict[InputKey, list[int]], *, asked: bool = False) -> None:
        """Read the blocks that are needed and not in memory, adjacent ones in one go; compare their digests.

        Parameters
        ----------
        asked
            Whether the kernel was asked for them.
        """
        runs = self._runs(needed)
        for source, run in () if asked else runs[1:]:  # the disk works on all of them while the first is read
            self._ask(source, run)
        for source, run in runs:
            self._read_run(source, run)
            for block in run:
                if content_digest(self.data(source.key, block)) != self.digest(source.key, block):
                    raise other_content(source.ref.source, source.ref.info, source.file)

    def _stored(self, needed: dict[InputKey, list[int]]) -> dict[InputKey, list[int]]:
        """Return what must be read of stored tensors: for an adapter, what its deltas are added to."""
        if not self._group.adapters:
            return needed
        stored: dict[InputKey, set[int]] = {}
        for key, blocks in needed.items():
            adapter = self._group.adapters.get(key)
            if adapter is None:
                stored.setdefault(key, set()).update(blocks)
            elif adapter.on is not None:
                stored.setdefault(adapter.on, set()).update(blocks)
        return {key: sorted(blocks) for key, blocks in stored.items()}

    def _ask(self, source: Input, run: range) -> None:
        start, stop = source.grid.byte_range(run.start)[0], source.grid.byte_range(run.stop - 1)[1]
        advise(self._files.descriptor(source), source.ref.info.offset + start, stop - start)

    def _read_run(self, source: Input, run: range) -> None:
        if source.ref.coded_only:
            raise PlanError(
                f"`{source.ref.info.name}` of `{source.ref.source}` is needed exactly, and that is a progressive"
                " checkpoint, which has a code of it alone",
                hint="give the whole checkpoint",
                source=source.ref.source,
                tensor=source.ref.info.name,
            )
        group, key = self._group, source.key
        if group.held is not None and run.start < group.kept:
            self._read_kept(source, run, group.held[key])
            return
        size, end = source.grid.block_bytes, source.grid.nbytes
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._scratch.buffer(len(self._buffers), min(self._most * size, end))
        origin, start, stop = self.blocks.start * size, run.start * size, run.stop * size
        target = buffer[start - origin : min(end, stop) - origin]
        self._files.read(source, target, start)
        views = self._views[key]
        if len(run) == 1:
            views[run.start] = target
            return
        for at, block in enumerate(run):
            views[block] = target[at * size : (at + 1) * size]

    def _read_kept(self, source: Input, run: range, held: memoryview) -> None:
        """Read a run of which the first blocks are kept between the passes."""
        group, key, size = self._group, source.key, source.grid.block_bytes
        if run.stop > group.kept:
            self._read_run(source, range(group.kept, run.stop))
            run = range(run.start, group.kept)
        self._files.read(source, held[run.start * size : run.stop * size], run.start * size)
        group.present.update([(key, block) for block in run])

    # --- codes of deltas --------------------------------------------------------------------------------------------

    def ask_for_codes(self, needed: dict[CodeKey, dict[int, int]]) -> None:
        """Take what the page cache has of all that `read_codes` will read, and ask for the rest; never wait.

        Parameters
        ----------
        needed
            As of `read_codes`.
        """
        self._codes.ask(needed)

    def read_codes(self, needed: dict[CodeKey, dict[int, int]]) -> None:
        """Read the stages that are needed of codes; compare their digests.

        What a pack does not give any more is coded anew from the sources' blocks.

        Parameters
        ----------
        needed
            By code and block the level.
        """
        for key, blocks in self._codes.read(needed).items():
            code = self._group.codes[key]
            code.is_damaged = True
            self.read({code.base.key: sorted(blocks), code.expert.key: sorted(blocks)})
            for block in blocks:
                self._codes.put(key, block, self.encoded(code, block).chunks)

    def encoded(self, code: Coding | CodeInput, block: int, *, differs: bool = True) -> EncodedBlock:
        """Return the code of a block whose inputs are in memory; ``differs`` says whether they do."""
        data = (self.data(code.base.key, block), self.data(code.expert.key, block)) if differs else None
        return code_block(code, data, self._scratch)

    def code_bytes(self, key: CodeKey, block: int) -> list[int]:
        """Return the bytes of the stages of a block's code that were read."""
        return self._codes.sizes(key, block)

    def decoder(self, work: TensorWork, slot: int, block: int, level: int) -> BlockDecoder:
        """Return what decodes a slot's delta in a block."""
        grid = work.recipe.grid
        return self._codes.decoder(work.code(slot), block, level, work.recipe.elements(block), grid.row_elements)

    # --- what is in memory ----------------------------------------------------------------------------------------

    def has(self, key: InputKey, block: int) -> bool:
        """Return whether a block of a stored input is in memory."""
        return block in self._views[key] or (key, block) in self._group.present

    def data(self, key: InputKey, block: int) -> memoryview:
        """Return the bytes of a block of a stored input."""
        view = self._views[key].get(block)
        if view is not None:
            return view
        if self._group.held is None or (key, block) not in self._group.present:
            raise InternalError(f"block {block} of `{key[1]}` is used but was not read")
        start, stop = self._inputs[key].grid.byte_range(block)
        return self._group.held[key][start:stop]

    def values(self, work: TensorWork, slot: int, block: int) -> Array | None:
        """Return the values of a slot, 1-D in their stored dtype; an adapter's in the work dtype. None if not read."""
        key, ref = work.inputs[slot], work.recipe.tensor.slots[slot]
        if key is None or ref is None:
            return None
        adapter = self._group.adapters.get(key)
        if adapter is None:
            return typed(self.data(key, block), ref.info.dtype) if self.has(key, block) else None
        start, stop = adapter.grid.rows_of(block)
        delta = adapter.rows(start, stop, work.recipe.tensor.work)
        if adapter.on is None:
            return delta
        on = self._inputs[adapter.on]
        return add_delta(typed(self.data(adapter.on, block), on.ref.info.dtype), delta)
