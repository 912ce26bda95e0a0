"""The rows of a LoRA delta: bits that depend on the factors alone, whatever library multiplies, and in which pieces."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.adapters import exact_delta
from support.checkpoints import as_dtype

from mergepipe.checkpoints import lowrank
from mergepipe.checkpoints.lowrank import lora_rows

DTYPES = ["F32", "F16", "BF16"]
# Large and small beside each other: sums cancel, and their last bits depend on the order of the terms.
WIDE = st.floats(width=32, min_value=-(2.0**40), max_value=2.0**40, allow_subnormal=True)
SCALINGS = st.sampled_from([2.0, 0.75, 8 / 2**0.5, -1.0, 0.0])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Cut even small products into several tiles."""
    monkeypatch.setattr(lowrank, "_TILE_ROWS", 2)
    monkeypatch.setattr(lowrank, "_TILE_COLUMNS", 3)


@st.composite
def factor_pairs(draw, elements=WIDE):
    rank, out, into = draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.integers(1, 7))
    return draw(arrays(np.float32, (rank, into), elements=elements)), draw(
        arrays(np.float32, (out, rank), elements=elements)
    )


def rows(a, b, scaling, transposed=False, start=0, stop=None, **more):
    count = a.shape[1] if transposed else b.shape[0]
    return lora_rows(a, b, scaling, transposed, start, count if stop is None else stop, **more)


def bits(array):
    return array.view(np.uint32).tolist()


@given(factor_pairs(), SCALINGS, st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_every_element_is_the_exact_sum_rounded(pair, scaling, first, second):
    with np.errstate(over="ignore"):
        a, b = pair[0].astype(as_dtype(first)), pair[1].astype(as_dtype(second))
    if not (np.isfinite(a.astype(np.float32)).all() and np.isfinite(b.astype(np.float32)).all()):
        return
    with np.errstate(over="ignore"):
        expected = exact_delta(a, b, scaling).astype(np.float32)
    got = rows(a, b, scaling)
    assert got.dtype == np.float32
    assert bits(got) == bits(expected + np.float32(0))


@given(factor_pairs(), SCALINGS, st.data())
def test_the_order_of_the_ranks_does_not_matter(pair, scaling, data):
    a, b = pair
    order = data.draw(st.permutations(range(a.shape[0])))
    assert bits(rows(a[order], b[:, order], scaling)) == bits(rows(a, b, scaling))


@given(factor_pairs(), SCALINGS, st.booleans(), st.data())
def test_a_range_of_rows_is_that_part_of_the_whole(pair, scaling, transposed, data):
    whole = rows(*pair, scaling, transposed)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert bits(rows(*pair, scaling, transposed, start, stop)) == bits(whole[start:stop])


@given(factor_pairs(), SCALINGS)
def test_transposed_is_the_transpose(pair, scaling):
    assert bits(rows(*pair, scaling, transposed=True).T.copy()) == bits(rows(*pair, scaling))


def test_a_sum_that_float64_cannot_hold_is_still_exact():
    a = np.array([[1.0], [1.0], [1.0]], np.float32)
    b = np.array([[2.0**60, 1.0, -(2.0**60)], [2.0**60, -(2.0**60), 1.0]], np.float32)
    assert rows(a, b, 1.0).tolist() == [[1.0], [1.0]]


def test_a_sum_near_a_tie_of_float32_is_rounded_as_the_float64_that_it_is():
    a = np.array([[1.0], [1.0], [2.0**-40]], np.float32)
    b = np.array([[1.0, 2.0**-24, 2.0**-12], [1.0, 2.0**-24, 2.0**-20]], np.float32)
    above, at = 1.0 + 2.0**-24 + 2.0**-52, 1.0 + 2.0**-24  # the second has a term that float64 cannot hold
    assert exact_delta(a, b, 1.0).tolist() == [[above], [at]]
    assert rows(a, b, 1.0).tolist() == [[1.0 + 2.0**-23], [1.0]]


@given(factor_pairs(), SCALINGS, st.data())
def test_what_is_not_finite_stays_in_its_rows_and_columns(pair, scaling, data):
    a, b = pair[0].copy(), pair[1].copy()
    bad = st.sampled_from([np.nan, np.inf, -np.inf])
    i, j = data.draw(st.integers(0, a.shape[0] - 1)), data.draw(st.integers(0, a.shape[1] - 1))
    clean = rows(a, b, scaling)
    a[i, j] = data.draw(bad)
    got = rows(a, b, scaling)
    others = [column for column in range(a.shape[1]) if column != j]
    assert bits(got[:, others].copy()) == bits(clean[:, others].copy())
    assert not np.isfinite(got[:, j]).any()


@given(factor_pairs(), SCALINGS, st.sampled_from(["float32", "float64"]))
def test_no_zero_is_negative(pair, scaling, work):
    got = rows(*pair, scaling, work=work)
    assert not np.signbit(got[got == 0]).any()


@given(factor_pairs(), SCALINGS, st.booleans())
def test_float64_adds_the_terms_in_order(pair, scaling, stored_wide):
    a, b = (array.astype(np.float64) for array in pair)
    total = np.zeros((b.shape[0], a.shape[1]))
    for k in range(a.shape[0]):
        total += b[:, k, None] * a[None, k]
    factors = (a, b) if stored_wide else pair
    got = rows(*factors, scaling, work="float64")
    assert got.dtype == np.float64
    assert got.tolist() == (total * scaling).tolist()
    if stored_wide:  # float64 factors are added in order for float32 too: their products are not exact
        with np.errstate(over="ignore"):
            assert rows(*factors, scaling).tolist() == (total * scaling).astype(np.float32).tolist()


def test_the_whole_product_is_never_in_memory():
    rank, width, height = 4, 4_000, 100_000
    a, b = np.ones((rank, width), np.float32), np.ones((height, rank), np.float32)
    tracemalloc.start()
    try:
        got = rows(a, b, 0.5, start=70, stop=90)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (got == 2.0).all()
    assert peak < 2_000_000, "20 rows take 320 kB, all of them 1.6 GB"
