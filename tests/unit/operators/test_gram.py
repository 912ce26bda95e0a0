"""What the spherical operators share: inner products of blocks, exact packing, sines that every machine agrees on."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, tensor_params

from mergepipe.operators.angles import arccosine, cosine, sine
from mergepipe.operators.gram import GramOfDeltas, GramOfValues, folded
from mergepipe.operators.registry import operator
from mergepipe.operators.vectors import CHUNK_ELEMENTS, periods, symmetric

# An operator of deltas; that of karcher, which does not use the base, is not needed: the tiles are the same.
STOCK = operator("model_stock")


def run(arrays, **options):
    base, *experts = arrays
    return Run(STOCK, base, experts, tensor_params(STOCK, [{} for _ in experts], {}), **options)


def arrays(count, size, seed=0):
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def exact(vectors):
    """Return the inner products of integer vectors, exactly."""
    return [[sum(Fraction(int(x)) * int(y) for x, y in zip(a, b, strict=True)) for b in vectors] for a in vectors]


def test_inner_products_of_integers_are_exact():
    integers = np.random.default_rng(0).integers(-1000, 1000, (4, 500)).astype(np.float32)
    driver = run(integers, block_elements=70, tile=33)
    statistic = GramOfValues(slots=(0, 1, 2, 3))
    assert folded(driver.values(statistic), 4).tolist() == exact(integers)
    deltas = GramOfDeltas(slots=(0, 1, 3))
    assert folded(driver.values(deltas), 2).tolist() == exact([integers[1] - integers[0], integers[3] - integers[0]])


@given(st.integers(1, 3 * CHUNK_ELEMENTS), st.integers(500, 3 * CHUNK_ELEMENTS), st.booleans())
def test_the_numbers_of_a_block_do_not_depend_on_its_tiles(size, tile, find_zeros):
    data = arrays(3, size)
    data[1] = data[0]
    for statistic in (GramOfValues(slots=(0, 1, 2)), GramOfDeltas(slots=(0, 1, 2))):
        want = run(data).values(statistic)
        assert run(data, tile=tile, find_zeros=find_zeros).values(statistic) == want


@pytest.mark.parametrize("size", [1, CHUNK_ELEMENTS - 1, 4 * CHUNK_ELEMENTS + 1, 5 * CHUNK_ELEMENTS + 777])
def test_the_sums_are_those_of_chunks_in_order_the_last_one_shorter(size):
    data = arrays(3, size)
    want = np.zeros(3)
    for start in range(0, size, CHUNK_ELEMENTS):
        base, expert = (row[start : start + CHUNK_ELEMENTS].astype(np.float64) for row in data[:2])
        want += [np.add.reduce(product) for product in (base * base, base * expert, expert * expert)]
    (block,) = run(data).values(GramOfValues(slots=(0, 1)))
    assert np.frombuffer(block, "<f8").tolist() == want.tolist()


def test_blocks_whose_deltas_are_all_zero_are_zeros():
    data = arrays(3, 100)
    data[1:, 50:] = data[0, 50:]
    statistic = GramOfDeltas(slots=(0, 1, 2))
    driver = run(data, block_elements=50)
    first, second = driver.values(statistic)
    assert np.frombuffer(first, "<f8").all()
    assert second == bytes(24)
    assert run(data, block_elements=50, find_zeros=False).values(statistic) == [first, second]


def test_an_expert_may_be_there_in_some_tiles_of_a_block_alone():
    tile = CHUNK_ELEMENTS // 2
    data = arrays(3, 4 * tile)
    data[1, 2 * tile : 3 * tile] = data[2, 2 * tile : 3 * tile] = data[0, 2 * tile : 3 * tile]
    data[2, 3 * tile :] = data[0, 3 * tile :]
    statistic = GramOfDeltas(slots=(0, 1, 2))
    tiles = list(run(data, tile=tile, find_zeros=False)._tiles(0, statistic.slots, rowwise=False))
    tiles[2] = dataclasses.replace(tiles[2], experts=(None, None))  # in the chunk of the next
    tiles[3] = dataclasses.replace(tiles[3], experts=(tiles[3].experts[0], None))
    assert statistic.measure(iter(tiles)) == run(data).values(statistic)[0]


def test_equal_slots_share_one_statistic_and_values_and_deltas_do_not():
    assert GramOfValues(slots=(0, 1)) == GramOfValues(slots=(0, 1))
    assert GramOfValues(slots=(0, 1)) != GramOfDeltas(slots=(0, 1))
    assert GramOfValues(slots=(0, 1)).digest() != GramOfDeltas(slots=(0, 1)).digest()


def test_numbers_are_small_beside_the_block():
    data = arrays(5, 1000)
    (numbers,) = run(data).values(GramOfDeltas(slots=(0, 1, 2, 3, 4)))
    assert len(numbers) == 4 * 5 // 2 * 8


def test_a_base_is_not_read_for_blocks_without_a_change():
    assert GramOfDeltas.deltas_only
    assert not GramOfValues.deltas_only


def test_no_blocks_are_zeros():
    assert not folded([], 3).any()


def test_blocks_are_added_in_order():
    parts = [1.0, 2.0**-53, 2.0**-53]
    total = folded([np.array([part], "<f8").tobytes() for part in parts], 1)
    assert total == 1.0
    assert folded([np.array([part], "<f8").tobytes() for part in reversed(parts)], 1) == 1.0 + 2.0**-52


def test_packed_products_are_the_upper_triangle():
    assert symmetric(np.arange(6.0), 3).tolist() == [[0, 1, 2], [1, 3, 4], [2, 4, 5]]


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 12))
def test_periods_cover_a_range_once_and_know_their_columns(start, length, columns):
    seen = []
    for begin, stop, column in periods(start, length, columns):
        assert stop - begin <= columns - column or (column == 0 and (stop - begin) % columns == 0)
        assert (start + begin) % columns == column
        seen += range(begin, stop)
    assert seen == list(range(length))


# --- sines and angles ---------------------------------------------------------------------------------------------

UNIT = 2.0**-53


@given(st.floats(-math.pi, math.pi))
def test_sines_are_those_of_the_library(x):
    assert abs(float(sine(np.array(x))) - math.sin(x)) <= 4 * UNIT * max(abs(math.sin(x)), 1e-3)
    assert abs(float(cosine(np.array(x))) - math.cos(x)) <= 12 * UNIT


@given(st.floats(-1000, 1000))
def test_sines_of_large_angles_lose_what_the_angle_does(x):
    assert abs(float(sine(np.array(x))) - math.sin(x)) <= 4 * UNIT + abs(x) * UNIT


@given(st.one_of(st.floats(-1, 1), st.floats(0, 1e-9).map(lambda x: 1 - x), st.floats(0, 1e-9).map(lambda x: x - 1)))
def test_angles_are_those_of_the_library(c):
    assert abs(float(arccosine(np.array(c))) - math.acos(c)) <= 8 * UNIT * math.acos(c)


def test_the_bits_of_an_array_are_those_of_its_elements():
    x = np.linspace(-1, 1, 1001)
    for function in (sine, cosine, arccosine):
        assert function(x).tolist() == [float(function(np.array(value))) for value in x]


@pytest.mark.parametrize(
    ("function", "x", "bits"),
    [
        (sine, 0.5, "0x1.eaee8744b05f0p-2"),
        (sine, 3.0, "0x1.210386db6d55bp-3"),
        (cosine, 1.0, "0x1.14a280fb5068cp-1"),
        (arccosine, 0.3, "0x1.441f5ecbeef59p+0"),
        (arccosine, -0.9, "0x1.586476251e745p+1"),
    ],
)
def test_the_bits_are_these_on_every_machine(function, x, bits):
    assert float(function(np.array(x))).hex() == bits


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_the_numbers_of_a_block_do_not_depend_on_how_many_chunks_are_worked_on_together(at_once, monkeypatch):
    data = arrays(3, 5 * CHUNK_ELEMENTS + 77)
    want = run(data).values(GramOfValues(slots=(0, 1, 2)))
    monkeypatch.setattr("mergepipe.operators.gram._CHUNKS_AT_ONCE", at_once)
    assert run(data).values(GramOfValues(slots=(0, 1, 2))) == want
