"""Tables of bit patterns: exact counts, the same however the patterns come in, and small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.operators.tables import Counter, Table

WIDTHS = st.sampled_from([32, 64])


def kinds(width):
    top = 2 ** (width - 1) - 1
    wide = st.integers(0, top)
    few = st.sampled_from([0, 1, 2, 0x3F800000, 0x3F800001, 0x7F800000, top])
    return st.lists(st.one_of(wide, few), max_size=300)


patterns = WIDTHS.flatmap(lambda width: st.tuples(st.just(width), kinds(width)))


def array(width, numbers):
    return np.array(numbers, np.uint32 if width == 32 else np.uint64)


def table_of(width, *pieces, digits=(), zeros=0):
    counter = Counter(width, digits)
    counter.add_zeros(zeros)
    for piece in pieces:
        counter.add(piece)
    return counter.table()


def counts(table):
    found = dict(zip(table.keys.tolist(), table.counts.tolist(), strict=True))
    return found | ({0: table.zeros} if table.zeros else {})


def random_bits(width, distinct, size, *, seed=0):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, 2 ** (width - 1), distinct, dtype=np.uint64)
    return array(width, np.concatenate([chosen, rng.choice(chosen, size - distinct)]))


def direct(bits):
    return dict(zip(*(found.tolist() for found in np.unique(bits, return_counts=True)), strict=True))


@given(patterns, st.integers(0, 5))
def test_a_complete_table_has_every_pattern_with_its_count(case, zeros):
    width, numbers = case
    table = table_of(width, array(width, numbers), zeros=zeros)
    want = {number: numbers.count(number) for number in numbers}
    if zeros:
        want[0] = want.get(0, 0) + zeros
    assert table.shift == 0
    assert counts(table) == want
    assert table.keys.tolist() == sorted(table.keys.tolist())


@given(patterns)
def test_what_is_encoded_is_decoded(case):
    width, numbers = case
    table = table_of(width, array(width, numbers), zeros=3)
    again = Table.decode(table.encode())
    assert (again.width, again.shift, again.zeros) == (table.width, table.shift, table.zeros)
    assert np.array_equal(again.keys, table.keys)
    assert np.array_equal(again.counts, table.counts)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("distinct", [50, 6000, 8191, 8192, 99_999])
@pytest.mark.parametrize("sort", [False, True])
def test_counting_does_not_depend_on_the_pieces(width, distinct, sort):
    bits = random_bits(width, distinct, 1 << 18)
    bits[-5::-7] = 0
    if sort:  # then most patterns are new in later pieces
        bits.sort()
    whole = table_of(width, bits)
    if distinct < 8192:
        assert counts(whole) == direct(bits)
    else:
        assert whole.shift == width - 16
    for cuts in ([1 << 17], [1 << 16, 1 << 17, 3 << 16], [100, 5000, 90000], range(3000, 1 << 18, 3000)):
        assert table_of(width, *np.split(bits, cuts)).encode() == whole.encode()


@pytest.mark.parametrize("width", [32, 64])
def test_a_coarse_table_counts_the_next_digit_and_exact_zeros(width):
    bits = random_bits(width, 50_000, 1 << 17)
    bits[::11] = 0
    bits[1::11] = 1  # the first digit is that of zero
    table = table_of(width, bits)
    assert table.shift == width - 16
    assert table.zeros == (bits == 0).sum()
    assert dict(zip(table.keys.tolist(), table.counts.tolist(), strict=True)) == direct(
        bits[bits != 0] >> bits.dtype.type(width - 16)
    )


@pytest.mark.parametrize("width", [32, 64])
def test_a_coarse_table_behind_known_digits_counts_the_one_after_them(width):
    low = np.arange(20_000, dtype=np.uint64) * (3 if width == 32 else 3 << 32)
    bits = array(width, (0x3F80 << (width - 16)) + low)
    table = table_of(width, bits, digits=(0x3F80,))
    assert table.shift == width - 32
    assert dict(zip(table.keys.tolist(), table.counts.tolist(), strict=True)) == direct(
        bits >> bits.dtype.type(table.shift)
    )


@pytest.mark.parametrize(("size", "most"), [(10, 10), (1024, 1024), (20_000, 1024), (1 << 16, 2048), (1 << 19, 8192)])
def test_a_table_is_complete_while_it_is_small_beside_the_block(size, most):
    for distinct in {min(most, size), min(most + 1, size)}:
        table = table_of(32, random_bits(32, distinct, size))
        assert (table.shift == 0) == (distinct <= most)


def test_patterns_that_share_a_place_are_told_apart():
    inverse = pow(0x9E3779B1, -1, 2**32)
    same_place = array(32, [(5 << 16 | low) * inverse % 2**32 for low in range(200)])
    zero_place = array(32, [low * inverse % 2**32 for low in range(200)])
    bits = np.tile(np.concatenate([same_place, zero_place]), 50)
    table = table_of(32, bits[:10_000], bits[10_000:])
    assert counts(table) == direct(bits)


@pytest.mark.parametrize("low_bits", [0, 4, 8])
def test_tables_of_sixteen_bit_weights_are_small(low_bits):
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(1 << 18) * 0.02).astype(np.float32)
    expert = base + (1e-3 * rng.standard_normal(base.size)).astype(np.float32)

    def short(values):  # bfloat16, or with some bits more
        return (values.view(np.uint32) >> np.uint32(16 - low_bits) << np.uint32(16 - low_bits)).view(np.float32)

    table = table_of(32, np.abs(short(expert) - short(base)).view(np.uint32))
    assert len(table.encode()) < 0.02 * 2 * base.size
    assert (table.shift == 0) == (low_bits == 0)


def test_the_entries_behind_digits_are_found_at_any_resolution():
    bits = np.uint32([0, 1, 0x10000, 0x1FFFF, 0x20000, 0x2FFFF, 0x30000])
    table = table_of(32, bits)
    assert table.keys[table.span((1,))].tolist() == [0x10000, 0x1FFFF]
    assert table.keys[table.span((2, 0xFFFF))].tolist() == [0x2FFFF]
    assert table.keys[table.span((7,))].size == 0
    assert table.keys[table.span(())].size == 6
    coarse = Table(width=32, shift=16, zeros=1, keys=np.uint64([0, 1, 3]), counts=np.int64([1, 2, 1]))
    assert coarse.keys[coarse.span((1,))].tolist() == [1]
    assert (coarse.resolves(1), coarse.resolves(2)) == (True, False)


@pytest.mark.parametrize("others", [0, 3, 300])
def test_patterns_that_do_not_end_in_zeros_are_counted_among_many_that_do(others):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1000, 1 << 16, dtype=np.uint32) << np.uint32(16)
    bits[rng.choice(bits.size, others, replace=False)] |= rng.integers(1, 5, others, dtype=np.uint32)
    mixed = random_bits(32, 500, 5000)  # none ends in zeros: counted in another way, and added to the same table
    table = table_of(32, bits[: 1 << 15], bits[1 << 15 :], mixed, bits[:6000], zeros=7)
    want = direct(np.concatenate([bits, mixed, bits[:6000]]))
    want[0] += 7
    assert counts(table) == want
    assert table.keys.tolist() == sorted(table.keys.tolist())


@pytest.mark.parametrize("others", [0, 3, 300, 20_000])
@pytest.mark.parametrize("size", [1 << 15, (1 << 15) + 1, (1 << 15) + 13, 100])
@pytest.mark.parametrize("width", [32, 64])
def test_floats_are_counted_by_their_magnitudes_and_overwritten(width, size, others):
    rng = np.random.default_rng(others)
    bits = array(width, rng.integers(0, 150, size)) << array(width, width - 16)
    bits[rng.integers(0, size, others)] |= array(width, rng.integers(1, 5, others))
    bits[::3] = 0
    bits[5], bits[-1] = array(width, 0x7F80 << (width - 16)), array(width, 0x7FC1 << (width - 16))
    want = table_of(width, bits)
    signs = array(width, rng.integers(0, 2, size)) << array(width, width - 1)
    counter = Counter(width, ())
    for part in (slice(0, size // 3), slice(size // 3, size)):  # the others alike, in one more piece
        counter.add_floats((bits | signs)[part].view(np.float32 if width == 32 else np.float64))
    assert counts(want) == direct(bits)
    assert counter.table().encode() == want.encode()


@pytest.mark.parametrize("zeros", [0.0, 0.4, 0.5, 0.6, 0.9, 1.0])
def test_floats_of_which_many_are_zero_are_counted_as_few(zeros):
    rng = np.random.default_rng(3)
    steps = rng.integers(-400, 400, 1 << 17).astype(np.float32) * np.float32(2.0**-12)
    odd = rng.choice(steps.size, 200, replace=False)
    steps[odd] *= np.float32(1 + 2.0**-20)
    steps[:8] = np.float32([np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, -0.0, 3e38])
    steps[8:][rng.random(steps.size - 8) < zeros] = rng.choice(np.float32([0.0, -0.0]))
    rng.shuffle(steps)
    want = direct(steps.view(np.uint32) & np.uint32((1 << 31) - 1))
    for cuts in ([], [1 << 16], [1000, 50_001]):
        counter = Counter(32, ())
        for piece in np.split(steps.copy(), cuts):
            counter.add_floats(piece)
        assert counts(counter.table()) == want
