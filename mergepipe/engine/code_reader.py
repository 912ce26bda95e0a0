"""The codes that one job reads: which stages of which blocks are in memory, and how they come there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mergepipe.checkpoints.place import GET_AGAIN
from mergepipe.engine.ahead import ask_for, read_cached
from mergepipe.engine.coding import CodeInput, CodeKey, OpenPack
from mergepipe.engine.kernel import Scratch
from mergepipe.errors import PackError, StorageError
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.pack import checked_chunks, read_run
from mergepipe.values import dataclass

Levels = dict[int, int]
"""By block the level that is needed."""


@dataclass(slots=True)
class _Run:
    """Chunks of one stage of adjacent blocks, which are read in one go.

    Attributes
    ----------
    done
        How many bytes of them are in ``target``.
    """

    stage: int
    blocks: range
    start: int
    target: memoryview
    done: int = 0


class CodeReader:
    """Reads what a job needs of codes, into buffers of the worker.

    Parameters
    ----------
    turn
        Tells the job from others that the worker has begun, which have buffers of their own.
    """

    def __init__(self, codes: Mapping[CodeKey, CodeInput], scratch: Scratch, turn: int = 0) -> None:
        self._codes = codes
        self._scratch = scratch
        self._turn = turn
        self._chunks: dict[CodeKey, dict[int, list[memoryview]]] = {}
        self._left: dict[CodeKey, list[_Run]] = {}

    def ask(self, needed: Mapping[CodeKey, Levels]) -> None:
        """Take what the page cache has of all that `read` will read, and ask the kernel for the rest; never wait.

        Raises
        ------
        PackError
            If what was taken of the code of a progressive checkpoint is damaged.
        """
        for number, (key, levels) in enumerate(needed.items()):
            with self._codes[key].reading() as pack:
                if pack is not None:
                    self._begin(self._codes[key], pack, levels, number)

    def read(self, needed: Mapping[CodeKey, Levels]) -> dict[CodeKey, list[int]]:
        """Read the stages that are needed of codes, those of adjacent blocks in one go; compare their digests.

        Returns
        -------
        dict
            The blocks of which a pack did not give all.

        Raises
        ------
        PackError
            If the code of a progressive checkpoint is damaged.
        """
        lacking = {}
        for number, (key, levels) in enumerate(needed.items()):
            code, left = self._codes[key], self._left.pop(key, None)
            if left is None or left:
                with code.reading() as pack:
                    if pack is not None:
                        for run in left or self._runs(pack, levels, number):
                            self._finish(code, pack, run)
            found = self._chunks.get(key, {})
            if blocks := [block for block, level in levels.items() if len(found.get(block, ())) < level]:
                lacking[key] = blocks
        return lacking

    def put(self, key: CodeKey, block: int, chunks: Iterable[bytes]) -> None:
        """Take a block's chunks that came from elsewhere than the pack."""
        self._chunks.setdefault(key, {})[block] = [memoryview(chunk) for chunk in chunks]

    def sizes(self, key: CodeKey, block: int) -> list[int]:
        """Return the bytes of the stages of a block's code that were read."""
        return [len(chunk) for chunk in self._chunks[key][block]]

    def decoder(self, key: CodeKey, block: int, level: int, elements: int, row_elements: int) -> BlockDecoder:
        """Return what decodes a block of so many elements at a level.

        Raises
        ------
        PackError
            If the chunks are not what such a block has.
        """
        try:
            return BlockDecoder(self._chunks[key][block][:level], elements, row_elements)
        except PackError as error:
            with self._codes[key].reading() as pack:
                if pack is None:
                    raise
                raise unfit(pack, error, f"block {block} cannot be decoded: ") from None

    def _runs(self, pack: OpenPack, levels: Levels, number: int) -> list[_Run]:
        """Return what is to be read of a pack, stage after stage, each with a place in the stage's buffer."""
        runs = []
        blocks, header = sorted(levels), pack.header
        for stage in range(max(levels.values())):
            blocks = [block for block in blocks if levels[block] > stage]
            found = [(run, *header.run_range(stage, run)) for run in adjacent(blocks)]
            size, at = sum(stop - start for _, start, stop in found), 0
            buffer = self._scratch.buffer(("code", self._turn, number, stage), size)
            for run, start, stop in found:
                runs.append(_Run(stage, run, start, buffer[at : at + stop - start]))
                at += stop - start
        return runs

    def _begin(self, code: CodeInput, pack: OpenPack, levels: Levels, number: int) -> None:
        """Read a code as far as that needs no waiting. What follows the first that does is asked for, and left."""
        runs = self._runs(pack, levels, number)
        for at, run in enumerate(runs):
            run.done = read_cached(pack.fd, run.target, run.start)
            if run.done < len(run.target):
                for one in runs[at:]:
                    ask_for(pack.fd, one.start + one.done, len(one.target) - one.done)
                self._left[code.key] = runs[at:]
                return
            self._finish(code, pack, run)
        self._left[code.key] = []

    def _finish(self, code: CodeInput, pack: OpenPack, run: _Run) -> None:
        """Take a run as far as it is sound: a block has all of its earlier stages, or none of this."""
        try:
            if run.done < len(run.target):
                read_run(pack.fd, pack.header, run.target[run.done :], run.start + run.done)
            found = checked_chunks(pack.header, run.stage, run.blocks, run.target)
        except (PackError, StorageError) as error:
            if code.is_given:
                raise unfit(pack, error) from None
            return
        have = self._chunks.setdefault(code.key, {})
        for block, chunk in zip(run.blocks, found, strict=True):
            chunks = have.setdefault(block, [])
            if len(chunks) == run.stage:
                chunks.append(chunk)


def unfit(pack: OpenPack, error: PackError | StorageError, what: str = "") -> PackError:
    """Return the error for a code that cannot be made again: it came with a progressive checkpoint."""
    path = pack.header.path
    message = error.message if path in error.message else f"`{path}`: {what}{error.message}"
    return PackError(message, hint=GET_AGAIN, path=path)


def adjacent(blocks: Sequence[int]) -> Iterable[range]:
    """Yield the runs of adjacent blocks; ``blocks`` are in order."""
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield range(blocks[start], blocks[at - 1] + 1)
            start = at
