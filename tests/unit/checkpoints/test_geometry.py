"""The block grid: blocks of whole rows that cut a tensor into pieces without gap or overlap."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.geometry import GEOMETRY_1, Geometry, grid
from mergepipe.dtypes import DTYPES

# A loaded machine may take any time for one example.
QUIET = settings(deadline=None)

SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)
GEOMETRIES = st.integers(1, 200).map(lambda n: Geometry(block_elements=n, id=2))


@QUIET
@given(dtype=st.sampled_from(sorted(DTYPES)), shape=SHAPES, geometry=GEOMETRIES)
@example(dtype="BF16", shape=(), geometry=GEOMETRY_1)
@example(dtype="F32", shape=(3, 2**18 + 1), geometry=GEOMETRY_1)
@example(dtype="F4", shape=(5, 7), geometry=Geometry(block_elements=4, id=2))
def test_blocks_partition_the_tensor(dtype, shape, geometry):
    blocks = grid(dtype, shape, geometry)
    at_row = at_byte = 0
    for i in range(blocks.count):
        first, stop = blocks.rows_of(i)
        begin, end = blocks.byte_range(i)
        assert (first, begin) == (at_row, at_byte)
        assert stop > first
        assert end - begin == (stop - first) * blocks.row_bytes
        at_row, at_byte = stop, end
    assert at_row == blocks.rows
    assert at_byte == blocks.nbytes == DTYPES[dtype].nbytes(math.prod(shape))


@QUIET
@given(shape=SHAPES.filter(lambda shape: math.prod(shape) > 0), geometry=GEOMETRIES)
def test_a_block_holds_as_many_whole_rows_as_fit_and_at_least_one(shape, geometry):
    blocks = grid("F32", shape, geometry)
    row = shape[-1] if len(shape) > 1 else 1
    assert blocks.row_elements == row
    assert blocks.rows * row == math.prod(shape)
    for i in range(blocks.count):
        first, stop = blocks.rows_of(i)
        elements = (stop - first) * row
        assert elements <= geometry.block_elements or stop - first == 1
        if i < blocks.count - 1:
            assert elements + row > geometry.block_elements


@QUIET
@given(shape=SHAPES.filter(lambda shape: len(shape) > 1), geometry=GEOMETRIES)
def test_the_same_rows_make_a_block_in_every_byte_sized_dtype(shape, geometry):
    narrow, wide = grid("BF16", shape, geometry), grid("F64", shape, geometry)
    assert [narrow.rows_of(i) for i in range(narrow.count)] == [wide.rows_of(i) for i in range(wide.count)]
    assert wide.row_bytes == 4 * narrow.row_bytes


@pytest.mark.parametrize(
    ("shape", "rows", "row_elements", "block_rows", "count"),
    [
        ((), 1, 1, 2**18, 1),
        ((5,), 5, 1, 2**18, 1),
        ((2**18 + 1,), 2**18 + 1, 1, 2**18, 2),
        ((151936, 896), 151936, 896, 292, 521),
        ((4, 2**18), 4, 2**18, 1, 4),
        ((4, 2**18 + 1), 4, 2**18 + 1, 1, 4),
        ((8, 3, 5), 24, 5, 52428, 1),
        ((7, 1), 7, 1, 2**18, 1),
    ],
)
def test_geometry_1_cuts_at_two_to_the_eighteenth_elements(shape, rows, row_elements, block_rows, count):
    blocks = grid("BF16", shape, GEOMETRY_1)
    assert (blocks.rows, blocks.row_elements, blocks.block_rows, blocks.count) == (
        rows,
        row_elements,
        block_rows,
        count,
    )
    assert blocks.row_bytes == 2 * row_elements


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2)])
def test_a_tensor_without_elements_has_no_blocks(shape):
    blocks = grid("F32", shape, GEOMETRY_1)
    assert (blocks.count, blocks.rows, blocks.nbytes) == (0, 0, 0)


def test_sub_byte_dtypes_are_blocked_over_their_bytes():
    blocks = grid("F4", (3, 6), Geometry(block_elements=4, id=2))
    assert (blocks.rows, blocks.row_bytes, blocks.count) == (9, 1, 3)
    assert blocks.byte_range(2) == (8, 9)


@pytest.mark.parametrize("block", [-1, 2])
def test_a_block_that_does_not_exist_is_an_index_error(block):
    blocks = grid("F32", (4, 2**17), GEOMETRY_1)
    assert blocks.count == 2
    with pytest.raises(IndexError):
        blocks.byte_range(block)


def test_a_geometry_needs_a_block_size():
    with pytest.raises(ValueError, match="at least one element"):
        Geometry(block_elements=0)
