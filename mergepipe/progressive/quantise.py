"""Where the cells of a block's quantiser lie: fitted to a histogram of its magnitudes.

A magnitude, in units of its unit's scale, is looked up by the upper bits of its float32 form: 8 of the exponent and 7
of the significand. The cells are those of an embedded quantiser: each is two cells of the next level. The first three
levels are split where that leaves the least squared error, the others so that the density of cells is about the cube
root of that of the magnitudes, which is the best for many cells (Bennett, "Spectra of quantized signals", 1948).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SHIFT = 16
"""Bits of a float32 that are dropped to look it up."""
KEYS = 1 << (31 - SHIFT)
"""Keys of magnitudes; those of negative numbers follow."""
MAGNITUDE_BITS = 7
_LOWEST = (127 - 11) << 7  # 2**-11: smaller magnitudes are alike
_HIGHEST = (127 + 10) << 7  # more than a magnitude can be: (elements of a unit)**(1/4) and the step of a scale
_BINS = _HIGHEST - _LOWEST
_EDGES = (np.arange(_LOWEST, _HIGHEST + 1, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
_EDGES[0] = 0.0
_WIDTHS = np.diff(_EDGES)
_CENTRES = (_EDGES[1:] + _EDGES[:-1]) * 0.5
_SPLITS = 3
_PARTS = np.arange(1, 1 << (MAGNITUDE_BITS - _SPLITS)) / (1 << (MAGNITUDE_BITS - _SPLITS))


def keys_of(normalised: Array, out: Array) -> Array:
    """Write the keys of float32 numbers to ``out`` (uint32); those of negative ones lie `KEYS` higher."""
    return np.right_shift(normalised.view(np.uint32), SHIFT, out=out)


def fit_cells(magnitude_keys: Array) -> Array:
    """Return the cell of every key, sign included, from a sample of the keys.

    Parameters
    ----------
    magnitude_keys
        1-D, below `KEYS`.

    Returns
    -------
    numpy.ndarray
        (2 * KEYS,) uint8: bit 7 is the sign, the others the cell of the magnitude from the lowest up.
    """
    counted = np.bincount(magnitude_keys, minlength=KEYS)
    histogram = counted[_LOWEST:_HIGHEST]
    histogram[0] += counted[:_LOWEST].sum()  # of integers: the same in every order
    starts = _starts(histogram)
    cells = np.zeros(2 * KEYS, np.uint8)
    cells[_LOWEST:_HIGHEST] = np.cumsum(np.bincount(starts, minlength=_BINS + 1)[:_BINS])
    cells[_HIGHEST:KEYS] = (1 << MAGNITUDE_BITS) - 1
    np.bitwise_or(cells[:KEYS], 1 << MAGNITUDE_BITS, out=cells[KEYS:])
    return cells


def _starts(histogram: Array) -> Array:
    """Return the first bin of every cell but the lowest, ascending; cells may be empty."""
    used = np.flatnonzero(histogram)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)
    counts = histogram[low:high].astype(np.float64)
    number = np.zeros(high - low + 1)
    np.cumsum(counts, out=number[1:])
    moment = np.zeros(high - low + 1)
    np.cumsum(counts * _CENTRES[low:high], out=moment[1:])
    bounds = [0, high - low]
    for _ in range(_SPLITS):
        middles = [_best_split(number, moment, *pair) for pair in itertools.pairwise(bounds)]
        bounds = [0, *(at for pair in zip(middles, bounds[1:], strict=True) for at in pair)]
    density = np.zeros(high - low + 1)
    np.cumsum(_density(counts / _WIDTHS[low:high]) * _WIDTHS[low:high], out=density[1:])
    edges = np.array(bounds)
    first, stop = edges[:-1, None], edges[1:, None]
    inner = np.searchsorted(density, density[first] + (density[stop] - density[first]) * _PARTS)
    inner = np.minimum(np.maximum(inner, first), stop)
    return np.concatenate((inner, stop), axis=1).reshape(-1)[:-1] + low


def _density(histogram: Array) -> Array:
    """Return numbers to the power 5/16: nearly the cube root, from square roots, which every machine rounds alike."""
    fourth = np.sqrt(np.sqrt(histogram))
    return fourth * np.sqrt(np.sqrt(fourth))


def _best_split(number: Array, moment: Array, first: int, stop: int) -> int:
    """Return where to split the bins [first, stop) so that the squared error around the two means is smallest."""
    if stop - first < 2:
        return stop
    left, right = number[first + 1 : stop] - number[first], number[stop] - number[first + 1 : stop]
    low, high = moment[first + 1 : stop] - moment[first], moment[stop] - moment[first + 1 : stop]
    gain = low * low / np.maximum(left, 1.0) + high * high / np.maximum(right, 1.0)
    return first + 1 + int(np.argmax(gain))
