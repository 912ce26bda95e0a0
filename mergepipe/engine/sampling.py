"""Measuring blocks by samples: a few runs of elements of each, read on their own, and nothing else of a source.

The samples say which content a source has, as far as that can be said without reading it (its fingerprint), and how
long the deltas are, about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.checkpoints.checkpoint import CheckpointFile
from mergepipe.checkpoints.geometry import BlockGrid
from mergepipe.checkpoints.samples import sample_elements, sample_starts
from mergepipe.digest import content_digest
from mergepipe.dtypes import numpy_dtype
from mergepipe.engine.files import Files
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.meter import Meter
from mergepipe.engine.pool import WorkerPool
from mergepipe.engine.work import InputKey
from mergepipe.errors import fail_storage
from mergepipe.fsio.reading import pread_into
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.samples import (
    Estimates,
    estimated_tensor,
    estimates_key,
    known_estimates,
    open_estimates,
    sampled_refs,
)
from mergepipe.graph.survey import is_surveyed
from mergepipe.operators.vectors import inner_products
from mergepipe.plan.budget import BudgetTensor
from mergepipe.plan.sampling import sampled_sources
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan
from mergepipe.reporting import Reporter
from mergepipe.values import dataclass

Array = np.ndarray[Any, Any]

# Elements that the samples of a few blocks of one tensor may have to be worked on together: they stay in the cache.
_TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """A stored tensor whose blocks' samples are read."""

    key: InputKey
    ref: InputRef
    file: CheckpointFile
    grid: BlockGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The samples of one tensor: of all that it is merged from, or (``recipe`` None) of one that is only looked at.

    ``plan`` is the output that the reading counts for.
    """

    plan: OutputPlan
    inputs: tuple[_Sampled, ...]
    recipe: TensorRecipe | None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(_sample_bytes(one.grid) for one in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the samples of a task came to: per input the packed digests, and where they are compared the estimates."""

    task: _Task
    samples: tuple[bytes, ...]
    estimates: Estimates | None


class Sampler:
    """Takes the samples that outputs need and the cache does not have.

    Parameters
    ----------
    index, store
        Filled with what is found.
    meters
        By output name, where the reading is counted, as index bytes.
    """

    def __init__(
        self,
        index: SourceIndex,
        store: StatisticStore,
        pool: WorkerPool,
        reporter: Reporter,
        meters: Mapping[str, Meter],
    ) -> None:
        self._index = index
        self._store = store
        self._pool = pool
        self._reporter = reporter
        self._meters = meters

    def sample(self, plans: Sequence[OutputPlan]) -> dict[tuple[str, str], BudgetTensor]:
        """Return by (output, tensor) what budgets are planned from, for the tensors that are measured by samples.

        Afterwards the fingerprints of all sources that the outputs do not read whole are known.

        Raises
        ------
        SourceChangedError
            If a file is not the one that was planned.
        StorageError
            If a read is refused.
        """
        tasks = list(self._tasks(plans))
        if tasks:
            self._reporter.begin("sampling", sum(task.nbytes for task in tasks))
            try:
                for found in self._pool.run(_take_samples, tasks):
                    self._enter(found)
            finally:
                self._reporter.end()
        return {
            (plan.output.name, tensor.name): self._budget_tensor(plan, tensor)
            for plan in plans
            for tensor in plan.tensors
            if tensor.sampled and is_surveyed(tensor)
        }

    def _tasks(self, plans: Sequence[OutputPlan]) -> Iterator[_Task]:
        """Yield what must be read: tensors whose estimates are not known, then what fingerprints need besides."""
        read: set[InputKey] = set()
        begun: set[tuple[tuple[str, InputKey], ...]] = set()
        for plan in plans:
            for tensor in plan.tensors:
                if not (tensor.sampled and is_surveyed(tensor)):
                    continue
                recipe = TensorRecipe.of(tensor, plan.geometry)
                inputs = tuple(self._input(ref) for ref in sampled_refs(recipe))
                named = tuple((one.ref.source, one.key) for one in inputs)
                if named in begun or known_estimates(recipe, self._index, self._store) is not None:
                    continue
                begun.add(named)
                read.update(one.key for one in inputs)
                yield _Task(plan=plan, inputs=inputs, recipe=recipe)
        for plan in plans:
            for source in sampled_sources(plan):
                for info in self._index.unsampled(source):
                    one = self._input(InputRef(source=source, info=info))
                    if one.key not in read:
                        read.add(one.key)
                        yield _Task(plan=plan, inputs=(one,), recipe=None)

    def _input(self, ref: InputRef) -> _Sampled:
        file = self._index.file(ref.source, ref.info)
        return _Sampled(key=(str(file.path), ref.info.name), ref=ref, file=file, grid=ref.grid(self._index.geometry))

    def _enter(self, found: _Found) -> None:
        task = found.task
        for one, samples in zip(task.inputs, found.samples, strict=True):
            self._index.add_samples(one.ref.source, one.ref.info, samples)
        self._meters[task.plan.output.name].index_bytes += task.nbytes
        self._reporter.advance(task.nbytes)
        if task.recipe is not None and found.estimates is not None:
            key, table = estimates_key(task.recipe, found.samples), open_estimates(self._store, task.recipe)
            table.enter(0, key, None if table.holds(key) else found.estimates.encode())

    def _budget_tensor(self, plan: OutputPlan, tensor: TensorPlan) -> BudgetTensor:
        recipe = TensorRecipe.of(tensor, plan.geometry)
        estimates = known_estimates(recipe, self._index, self._store)
        assert estimates is not None, "they were taken just now"
        return estimated_tensor(recipe, estimates)


def _sample_bytes(grid: BlockGrid) -> int:
    """Return how many bytes the samples of all blocks of a tensor have."""
    return sum((stop - first) * _sample_size(elements, grid) for first, stop, elements in _pieces(grid))


def _sample_size(elements: int, grid: BlockGrid) -> int:
    """Return how many bytes the sample of a block of so many elements has."""
    return sample_elements(elements, grid.row_elements) * _item_bytes(grid)


def _item_bytes(grid: BlockGrid) -> int:
    return grid.row_bytes // grid.row_elements


def _pieces(grid: BlockGrid) -> Iterator[tuple[int, int, int]]:
    """Yield runs of blocks of equal length, as far as they are worked on together: first, behind the last, elements."""
    whole = grid.rows // grid.block_rows
    elements = grid.block_rows * grid.row_elements
    together = max(1, _TOGETHER // max(1, sample_elements(elements, grid.row_elements)))
    for first in range(0, whole, together):
        yield first, min(first + together, whole), elements
    if whole < grid.count:
        first_row, stop_row = grid.rows_of(whole)
        yield whole, grid.count, (stop_row - first_row) * grid.row_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The samples of adjacent blocks of equal length.

    Attributes
    ----------
    first, blocks, elements
        The number of the first block, how many there are, and how many elements each has.
    starts, length
        Where the runs begin, counted in elements from the first block's first, and the length of each.
    """

    first: int
    blocks: int
    elements: int
    starts: list[int]
    length: int

    @property
    def runs(self) -> int:
        """How many runs each sample has."""
        return len(self.starts) // self.blocks


def _take_samples(task: _Task, scratch: Scratch) -> _Found:
    """Read the samples of a task, hash them, and compare them.

    Raises
    ------
    SourceChangedError
        If a file is not the one that was planned.
    StorageError
        If a read is refused.
    """
    samples: list[list[bytes]] = [[] for _ in task.inputs]
    found: list[Estimates] = []
    files, grid = Files(scattered=True), task.inputs[0].grid
    try:
        for first, stop, elements in _pieces(grid):
            starts, length = sample_starts(elements, first, stop, grid.row_elements)
            piece = _Piece(first=first, blocks=stop - first, elements=elements, starts=starts, length=length)
            views = []
            for number, one in enumerate(task.inputs):
                buffer = scratch.buffer(("sample", number), len(starts) * length * _item_bytes(one.grid))
                views.append(_read(one, piece, files, buffer))
            for digests, view in zip(samples, views, strict=True):
                size = len(view) // piece.blocks
                digests.extend(content_digest(view[at : at + size]) for at in range(0, len(view), size))
            if task.recipe is not None:
                found.append(_estimates(_deltas(task, views, scratch), piece, scratch))
    finally:
        files.close()
    estimates = None
    if task.recipe is not None:
        estimates = Estimates(
            products=np.concatenate([one.products for one in found]),
            squares=np.concatenate([one.squares for one in found]),
            errors=np.concatenate([one.errors for one in found]),
        )
    return _Found(task=task, samples=tuple(map(b"".join, samples)), estimates=estimates)


def _read(one: _Sampled, piece: _Piece, files: Files, buffer: memoryview) -> memoryview:
    """Fill the buffer with the samples of the blocks of a piece, one after the other."""
    descriptor, item = files.descriptor(one), _item_bytes(one.grid)
    origin = one.ref.info.offset + piece.first * one.grid.block_rows * one.grid.row_bytes
    count, at, preadv = piece.length * item, 0, os.preadv
    try:
        for start in piece.starts:
            target = buffer[at : at + count]
            place = origin + start * item
            # One call for each run, and nothing else: a large model has millions of them.
            done = preadv(descriptor, (target,), place)
            if done != count:
                pread_into(descriptor, target[done:], place + done, path=one.file.path)
            at += count
    except OSError as error:
        fail_storage(error, one.file.path, "read")
    return buffer


def _deltas(task: _Task, views: Sequence[memoryview], scratch: Scratch) -> Array:
    """Return the base and the deltas of samples, float64 ``(inputs, elements)``; valid until the next are asked for."""
    values = [
        np.frombuffer(view, numpy_dtype(one.ref.info.dtype)) for view, one in zip(views, task.inputs, strict=True)
    ]
    count, size = len(values), values[0].size
    rows = scratch.tile("sample deltas", "float64", count * size).reshape(count, size)
    with np.errstate(all="ignore"):  # infinities and NaN, where they are allowed, are read first
        np.copyto(rows[0], values[0], casting="unsafe")
        for row, found in zip(rows[1:], values[1:], strict=True):
            np.copyto(row, found, casting="unsafe")
            row -= rows[0]
    return rows


def _estimates(rows: Array, piece: _Piece, scratch: Scratch) -> Estimates:
    """Return what samples of base and deltas say of their blocks.

    Squares are those of the whole sample. Products of two vectors matter only in sums over many blocks: those of the
    first run of each are enough, and take an eighth of the time.

    Parameters
    ----------
    rows
        float64 ``(inputs, elements)``.
    """
    count, blocks, runs = len(rows), piece.blocks, piece.runs
    parts = rows.reshape(count, blocks, runs, piece.length)
    sampled = runs * piece.length
    room = scratch.tile("sample products", "float64", rows.size)
    firsts = scratch.tile("sample firsts", "float64", count * blocks * piece.length)
    firsts = firsts.reshape(count, blocks, piece.length)
    with np.errstate(all="ignore"):
        sums = np.add.reduce(np.multiply(parts, parts, out=room.reshape(parts.shape)), axis=-1)
        np.copyto(firsts, parts[:, :, 0])
        return Estimates(
            products=inner_products(firsts, room[: firsts.size].reshape(firsts.shape)).T,
            squares=(np.add.reduce(sums, axis=-1) * (piece.elements / sampled)).T,
            errors=_standard_errors(sums, piece.elements, sampled).T,
        )


def _standard_errors(sums: Array, elements: int, sampled: int) -> Array:
    """Return the standard errors of the estimated squares, float64 ``(experts, blocks)``.

    Parameters
    ----------
    sums
        The squares of each run, float64 ``(experts, blocks, runs)``.
    """
    runs = sums.shape[-1]
    if sampled == elements or runs < 2:
        return np.zeros(sums.shape[:2])
    middle = np.add.reduce(sums, axis=-1, keepdims=True) / runs
    variance = np.add.reduce((sums - middle) ** 2, axis=-1) / (runs - 1)
    return np.asarray(np.sqrt(runs * variance * (1.0 - sampled / elements)) * (elements / sampled))
