"""Coding the delta of one block, with certified residual norms of every level.

All floating-point operations are elementwise and correctly rounded, and every sum has a fixed order: so the bytes and
the norms are the same on every machine, whatever was coded before and by however many threads.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mergepipe.progressive.levels import LEVEL_BITS, LEVELS, STAGE_BITS
from mergepipe.progressive.quantise import KEYS, fit_cells, keys_of
from mergepipe.progressive.units import HIGHEST_CODE, HIGHEST_SCALE, LOWEST_SCALE, Units, decoded_points, scale_of
from mergepipe.values import dataclass

Array = npt.NDArray[Any]

_BITS = LEVEL_BITS[-1]
_CELLS = 1 << _BITS
_TILE = 1 << 16
_SAMPLE = 1 << 15
_SLAB = 64
_EPS = 2.0**-52  # twice the largest relative error of one float64 operation
_FOLDS = 1024.0  # more than the operations, one after the other, of any sum but those of a cell's elements
_UNDERFLOWS = 2.0**-900  # squares below it may have lost digits
_STOPS = tuple(itertools.accumulate(1 << bits for bits in LEVEL_BITS))
_SPANS = tuple(zip((0, *_STOPS), _STOPS, strict=False))  # of each level's cells among those of all levels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBlock:
    """A block's delta, coded.

    Attributes
    ----------
    chunks
        What each stage adds; all empty for a delta of zeros, and for one that cannot be coded.
    residuals
        (LEVELS,) float64: of each level, an upper bound of the Frobenius norm of what it lacks. Infinite where the
        block cannot be coded.
    """

    chunks: tuple[bytes, ...]
    residuals: Array

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each chunk."""
        return tuple(map(len, self.chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What the residuals of a block follow from: of each (scale, finest cell), how many elements and their sum."""

    counts: Array
    sums: Array
    additions: int


class _Workspace(threading.local):
    """Buffers of one tile, kept by each thread: fresh memory costs more than the arithmetic."""

    def __init__(self) -> None:
        size = _TILE
        self.normal = np.empty(size, np.float32)
        self.wide = np.empty(size, np.float64)
        self.keys = np.empty(size, np.uint32)
        self.index = np.empty(size, np.intp)
        self.cells = np.empty(size, np.uint8)
        self.bit = np.empty(size, np.uint8)
        self.bins = np.empty(size, np.uint16)


_workspace = _Workspace()


def encode_block(delta: Array, row_elements: int) -> EncodedBlock:
    """Code the delta of a block.

    Parameters
    ----------
    delta
        1-D, float32 or float64, whole rows. It is coded in float32; residuals are against what was given.
    row_elements
        Elements of a row of the tensor.

    Returns
    -------
    EncodedBlock
        It depends on the values and ``row_elements`` alone.
    """
    if delta.size == 0:
        return _uncoded(0.0)
    units = Units.of(delta.size, row_elements)
    with np.errstate(all="ignore"):
        exact = _in_units(np.ascontiguousarray(delta), units)
        values = exact.astype(np.float32, copy=False)
        peaks, squares = _measured(values, exact)
        if not np.isfinite(peaks).all():
            return _uncoded(np.inf)
        energy = _folded(squares)
        steps = _steps(peaks, squares, units)
        if steps.max() >= HIGHEST_SCALE:
            return _uncoded(np.inf)
        coded = np.flatnonzero(steps > max(int(steps.max()) - HIGHEST_CODE, LOWEST_SCALE))
        if len(coded) == 0:
            return _uncoded(_norm_above(exact, energy) if energy > 0 or exact.any() else 0.0)
        return _coded(exact, values, units, steps, coded, energy)


def encode_zero() -> EncodedBlock:
    """Return the code of a delta that is known to be zero: nothing, and nothing is missing."""
    return _uncoded(0.0)


def _uncoded(residual: float) -> EncodedBlock:
    return EncodedBlock(chunks=(b"",) * LEVELS, residuals=np.full(LEVELS, residual))


def _in_units(delta: Array, units: Units) -> Array:
    """Return a delta as (units, padded); a copy where units have padding, or the last one is short."""
    if units.padded == units.size and units.last == units.size:
        return delta.reshape(units.count, units.size)
    padded = np.zeros((units.count, units.padded), delta.dtype)
    whole = units.elements - units.last if units.last != units.size else units.elements
    rows = whole // units.size
    padded[:rows, : units.size] = delta[:whole].reshape(rows, units.size)
    if rows < units.count:
        padded[-1, : units.last] = delta[whole:]
    return padded


def _tiles(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _TILE // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _measured(values: Array, exact: Array) -> tuple[Array, Array]:
    """Return the largest magnitude (float32) and the sum of squares (float64) of every unit."""
    rows, width = values.shape
    peaks, squares = np.empty(rows, np.float32), np.empty(rows)
    for tile in _tiles(rows, width):
        part = values[tile]
        magnitude = np.abs(part, out=_workspace.normal[: part.size].reshape(part.shape))
        magnitude.max(axis=1, out=peaks[tile])
        wide = _workspace.wide[: part.size].reshape(part.shape)
        np.copyto(wide, exact[tile])
        np.multiply(wide, wide, out=wide)
        squares[tile] = _row_sums(wide)
    return peaks, squares


def _row_sums(wide: Array) -> Array:
    """Return the sum of each row in an order that is the same everywhere; overwrites ``wide``.

    Where rows are made of slabs of 64, these are added one after the other (numpy does so along an axis that is not the
    last; a test watches it); the rest goes by halves.
    """
    rows, width = wide.shape
    if width > _SLAB and width % _SLAB == 0:
        wide = np.add.reduce(wide.reshape(rows, width // _SLAB, _SLAB), axis=1)
    columns: Array = np.ascontiguousarray(wide.T) if rows >= _SLAB or wide.shape[1] <= _SLAB else wide.T
    width = len(columns)
    while width > 1:
        half = (width + 1) // 2
        np.add(columns[: width - half], columns[half:width], out=columns[: width - half])
        width = half
    sums: Array = columns[0]
    return sums


def _folded(terms: Array) -> float:
    """Return the sum of a 1-D array by halves, which rounds about log2(length) times."""
    terms = terms.copy()
    length = len(terms)
    while length > 1:
        half = (length + 1) // 2
        terms[: length - half] += terms[half:length]
        length = half
    return float(terms[0]) if length else 0.0


def _steps(peaks: Array, squares: Array, units: Units) -> Array:
    """Return the scale of each unit in quarters of an octave; units of zeros have a step below every other.

    The scale is 2**(steps/4), the geometric mean of the unit's peak and its root mean square, rounded down to a step.
    """
    means = squares / units.size
    means[-1] = squares[-1] / units.last
    wide = peaks.astype(np.float64)
    _, exponents = np.frexp(wide * wide * means)
    return np.where((peaks > 0) & (means > 0), exponents - 1, -(1 << 20))


def _coded(exact: Array, values: Array, units: Units, steps: Array, coded: Array, energy: float) -> EncodedBlock:
    """Code the units that are listed in ``coded``."""
    if len(coded) < units.count:
        exact = exact[coded]
        values = exact.astype(np.float32, copy=False)
    used, scale_of_unit = np.unique(steps[coded], return_inverse=True)
    scales = scale_of(used)
    inverse = (np.float32(1) / scales)[scale_of_unit][:, None]
    cells = fit_cells(_sampled_keys(values, inverse))
    planes, sums = _planes(exact, values, inverse, scale_of_unit.astype(np.uint16), len(used), cells)
    last_is_coded = int(coded[-1]) == units.count - 1
    _forget_padding(sums, scale_of_unit, units, last_is_coded, int(cells[0]))
    cut = units.cut(last_is_coded)
    base = int(used[-1]) - HIGHEST_CODE
    codes = np.zeros(units.count, np.uint8)
    codes[coded] = steps[coded] - base
    points, residuals = _all_points(sums, scales, energy)
    chunks, head = [], struct.pack("<h", base) + codes.tobytes()
    for stage, bits in enumerate(LEVEL_BITS):
        added = planes[bits - STAGE_BITS[stage] : bits]
        chunks.append(b"".join((head, points[stage].astype("<f2").tobytes(), *(x[: len(x) - cut] for x in added))))
        head = b""
    residuals = np.maximum.accumulate(residuals[::-1])[::-1]
    return EncodedBlock(chunks=tuple(chunks), residuals=residuals)


def _sampled_keys(values: Array, inverse: Array) -> Array:
    """Return the keys of the magnitudes of some units, evenly spread."""
    rows, width = values.shape
    step = max(1, rows * width // _SAMPLE)
    normal = values[::step] * inverse[::step]
    return keys_of(normal, np.empty(normal.shape, np.uint32)).reshape(-1) & (KEYS - 1)


def _planes(
    exact: Array, values: Array, inverse: Array, scale_of_unit: Array, scales: int, cells: Array
) -> tuple[list[bytes], _Sums]:
    """Return the bits of each plane, from the sign down, and what the residuals follow from."""
    rows, width = values.shape
    space = _workspace
    pieces: list[list[bytes]] = [[] for _ in range(_BITS)]
    counts, sums = np.zeros(scales * _CELLS, np.int64), np.zeros(scales * _CELLS)
    classes = (scale_of_unit << _BITS)[:, None]
    for tile in _tiles(rows, width):
        part = values[tile]
        size, shape = part.size, part.shape
        normal = np.multiply(part, inverse[tile], out=space.normal[:size].reshape(shape))
        keys = keys_of(normal, space.keys[:size].reshape(shape))
        index = space.index[:size]
        np.copyto(index.reshape(shape), keys)
        cell = np.take(cells, index, out=space.cells[:size], mode="clip")
        bins = np.add(cell.reshape(shape), classes[tile], out=space.bins[:size].reshape(shape)).reshape(-1)
        np.copyto(index, bins)
        wide = space.wide[:size]
        np.copyto(wide.reshape(shape), exact[tile])
        counts += np.bincount(index, minlength=len(counts))
        sums += np.bincount(index, wide, minlength=len(sums))
        for plane in range(_BITS):
            bit = np.bitwise_and(cell, 1 << (_BITS - 1 - plane), out=space.bit[:size])
            pieces[plane].append(np.packbits(bit).tobytes())
    joined = [b"".join(piece) for piece in pieces]
    shape = (scales, _CELLS)
    return joined, _Sums(counts=counts.reshape(shape), sums=sums.reshape(shape), additions=len(pieces[0]))


def _forget_padding(sums: _Sums, scale_of_unit: Array, units: Units, last_is_coded: bool, cell: int) -> None:
    """Take the padding of units out of the counts; it is zeros, which add nothing to the sums."""
    padding = np.bincount(scale_of_unit, minlength=len(sums.counts)) * (units.padded - units.size)
    if last_is_coded:
        padding[scale_of_unit[-1]] += units.size - units.last
    sums.counts[:, cell] -= padding


def _all_points(sums: _Sums, scales: Array, energy: float) -> tuple[list[Array], Array]:
    """Return the points of every level (float16, in units of a scale), and the residual norms, rounded up.

    The point of a cell is the weighted mean of what it holds, rounded towards zero, which keeps the norm of what is
    decoded below that of the delta.
    """
    counts, totals = _at_all_levels(sums.counts.astype(np.float64)), _at_all_levels(sums.sums)
    wide = scales.astype(np.float64)[:, None]
    moment, weight = _column_sums(wide * totals), _column_sums(wide * wide * counts)
    points = _towards_zero(moment / np.where(weight > 0, weight, 1.0))
    values = decoded_points(scales, points).astype(np.float64)
    cross, square = 2.0 * values * totals, values * values * counts
    removed = _column_sums(cross - square)
    slack = _column_sums(np.abs(cross) * (counts + (sums.additions + _FOLDS)) + square * _FOLDS)
    residuals = np.empty(LEVELS)
    for level, (start, stop) in enumerate(_SPANS):
        left = energy - float(np.cumsum(removed[start:stop])[-1])
        residuals[level] = _root_above(left, (float(np.cumsum(slack[start:stop])[-1]) + energy * _FOLDS) * _EPS)
    return [points[start:stop] for start, stop in _SPANS], residuals


def _at_all_levels(finest: Array) -> Array:
    """Return (scales, cells of level 1, then those of level 2, ...) from the finest cells, which lie side by side."""
    tables = [finest]
    for bits in range(_BITS - 1, 0, -1):
        finest = finest[:, 0::2] + finest[:, 1::2]
        if bits in LEVEL_BITS:
            tables.append(finest)
    return np.concatenate(tables[::-1], axis=1)


def _column_sums(table: Array) -> Array:
    total: Array = table[0].copy()
    for row in table[1:]:
        total += row
    return total


def _towards_zero(points: Array) -> Array:
    """Return numbers in float16, none larger in magnitude than it was."""
    half = points.astype(np.float16)
    above = np.abs(half.astype(np.float64)) > np.abs(points)
    rounded: Array = np.where(above, (half.view(np.uint16) - 1).view(np.float16), half)
    return rounded


def _norm_above(exact: Array, energy: float) -> float:
    """Return a number that is not below the norm of values whose squares, summed, gave ``energy``."""
    if energy > _UNDERFLOWS:
        return _root_above(energy, energy * _EPS * _FOLDS)
    _, exponent = np.frexp(np.abs(exact).max())  # the squares are too small for float64
    near_one = np.ldexp(exact.astype(np.float64), -exponent)  # exact
    energy = _folded(_row_sums(near_one * near_one))
    return float(np.nextafter(np.ldexp(_root_above(energy, energy * _EPS * _FOLDS), exponent), np.inf))


def _root_above(square: float, slack: float) -> float:
    """Return a number that is not below the root of a number that is at most ``square + slack``."""
    return float(np.nextafter(np.sqrt(max(square, 0.0) + slack) * (1.0 + 4 * _EPS), np.inf))
