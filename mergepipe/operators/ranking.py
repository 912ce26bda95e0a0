"""Ranks of magnitudes within rows, by stable sorting of their bit patterns."""

from __future__ import annotations

import numpy as np

from mergepipe.operators.contract import Array
from mergepipe.operators.tables import DIGIT, DIGITS

# Up to this share of patterns that do not end in zeros, those are put in order apart.
_FEW = 16


def ascending(bits: Array) -> Array:
    """Return the flat indices that sort each row of patterns (rows, size); equal ones stay in order.

    numpy sorts digits of 16 bits by radix, in linear time and stably. Where nearly all patterns of 32 bits end in
    zeros, as differences of bfloat16 numbers do, their first halves are sorted alone, and then the few runs of equal
    first halves that have other patterns among them. Elsewhere they are sorted digit by digit, the last first.
    """
    rows, size = bits.shape
    starts = np.arange(rows)[:, None] * size
    if bits.itemsize == 4:
        odd = np.flatnonzero(bits & bits.dtype.type(DIGITS - 1) != 0)
        if odd.size * _FEW <= bits.size:
            return _by_first_half(bits, starts, odd)
    order: Array | None = None
    for shift in range(0, 8 * bits.dtype.itemsize, DIGIT):
        digits = (bits >> bits.dtype.type(shift)).astype(np.uint16)
        if not digits.any():
            continue
        if order is not None:
            digits = digits.reshape(-1).take(order)
        places = np.argsort(digits, axis=1, kind="stable")
        places += starts
        order = places if order is None else order.reshape(-1).take(places)
    return starts + np.arange(size) if order is None else order


def _by_first_half(bits: Array, starts: Array, odd: Array) -> Array:
    """Return what `ascending` does; `odd` has the flat indices of the patterns that do not end in zeros."""
    rows, size = bits.shape
    halves = (bits >> bits.dtype.type(DIGIT)).astype(np.uint16)
    order = np.argsort(halves, axis=1, kind="stable")
    order += starts
    if odd.size:
        in_order = halves.reshape(-1).take(order).astype(np.int64)  # ascending, as a whole, with the row before it
        in_order += np.arange(rows)[:, None] << DIGIT
        runs = np.unique((odd // size << DIGIT) + halves.reshape(-1)[odd])
        firsts = np.searchsorted(in_order.reshape(-1), runs, side="left")
        lengths = np.searchsorted(in_order.reshape(-1), runs, side="right") - firsts
        before = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(firsts - before, lengths)
        flat = order.reshape(-1)
        elements = flat[places]
        lows = bits.reshape(-1)[elements] & bits.dtype.type(DIGITS - 1)
        flat[places] = elements[np.lexsort((lows, np.repeat(np.arange(runs.size), lengths)))]
    return order
