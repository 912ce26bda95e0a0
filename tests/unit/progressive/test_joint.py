"""Sums of decoded deltas: what decoding each by itself, weighting and adding gives, to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.progressive import normal

from mergepipe.progressive import joint
from mergepipe.progressive.decode import BlockDecoder
from mergepipe.progressive.encode import encode_block
from mergepipe.progressive.joint import JointDecoder
from mergepipe.progressive.levels import LEVEL_BITS, LEVELS

BITS = 8


def decoders(rows, row_elements, levels, zero_rows=0):
    found = []
    for number, level in enumerate(levels):
        delta = normal(number, rows, row_elements)
        delta.reshape(rows, row_elements)[number % 3 :: 3][:zero_rows] = 0
        chunks = encode_block(delta, row_elements).chunks[:level]
        found.append(BlockDecoder(chunks, delta.size, row_elements))
    return found


def one_by_one(found, weights, dtype, elements):
    """Sum up as the page on levels says: from left to right within a table, then the tables."""
    total = None
    for members in joint._tables(found):
        table = None
        for member in members:
            delta = np.empty(elements, np.float32)
            found[member].fill(0, delta)
            term = delta.astype(dtype) * dtype.type(weights[member])
            table = term if table is None else table + term
        total = table if total is None else total + table
    return np.zeros(elements, dtype) if total is None else total


@settings(max_examples=40, deadline=None)
@given(
    levels=st.lists(st.integers(1, LEVELS), min_size=1, max_size=9),
    row=st.sampled_from([1, 7, 96, 255, 256, 300, 1000, 4096, 9000]),
    dtype=st.sampled_from([np.float32, np.float64]),
    zero_rows=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 20_000), max_size=3),
)
def test_a_sum_is_that_of_the_deltas_one_by_one(levels, row, dtype, zero_rows, cuts):
    rows, dtype = -(-20_000 // row), np.dtype(dtype)
    found = decoders(rows, row, levels, zero_rows)
    weights = [float(dtype.type(0.3 * (number - 2))) for number in range(len(levels))]
    expected = one_by_one(found, weights, dtype, rows * row)
    got = np.full(rows * row, np.nan, dtype)
    decoder = JointDecoder(found, weights, dtype)
    for start, stop in pairwise(sorted({0, *cuts, rows * row})):
        decoder.fill(start, got[start:stop])
    assert np.array_equal(got, expected)  # a zero may have either sign


def test_what_nothing_is_coded_of_is_zero():
    delta = np.zeros(4096, np.float32)
    zero = BlockDecoder(encode_block(delta, 256).chunks[:2], 4096, 256)
    out = np.full(4096, np.nan, np.float32)
    JointDecoder([zero, zero], [1.0, 2.0], np.dtype(np.float32)).fill(0, out)
    assert not out.any()


@pytest.mark.parametrize("tile", [256, 1000, 1 << 20])
def test_tiles_change_nothing(monkeypatch, tile):
    found = decoders(40, 512, [1, 2, 3, 1, 6, 7])
    weights = [0.25, 1.0, -0.5, 0.75, 0.1, 2.0]
    expected = one_by_one(found, [float(np.float32(w)) for w in weights], np.dtype(np.float32), 40 * 512)
    monkeypatch.setattr(joint, "TILE", tile)
    got = np.empty(40 * 512, np.float32)
    JointDecoder(found, [float(np.float32(w)) for w in weights], np.dtype(np.float32)).fill(0, got)
    assert np.array_equal(got, expected)


@given(levels=st.lists(st.integers(1, LEVELS), max_size=12))
def test_tables_hold_every_decoder_once_and_are_as_few_as_first_fit_makes_them(levels):
    found = decoders(4, 256, levels)
    tables = joint._tables(found)
    assert sorted(member for table in tables for member in table) == list(range(len(levels)))
    sizes = [sum(LEVEL_BITS[levels[member] - 1] for member in table) for table in tables]
    assert all(size <= BITS for size in sizes)
    assert all(table == sorted(table) for table in tables)
    assert all(one + other > BITS for at, one in enumerate(sizes) for other in sizes[at + 1 :]) or len(tables) == -(
        -sum(sizes) // BITS
    )


def test_more_tables_than_two_bytes_count_are_summed_up_all_the_same():
    count, elements = 257, 2048
    found = decoders(8, 256, [LEVELS] * count)
    assert len(joint._tables(found)) == count
    got = np.full(elements, np.nan, np.float32)
    JointDecoder(found, [1.0] * count, np.dtype(np.float32)).fill(0, got)
    assert np.array_equal(got, one_by_one(found, [1.0] * count, np.dtype(np.float32), elements))
