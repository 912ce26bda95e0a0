"""Random masks: the generator is Philox 4x64-10 as published, addressed by place, and its bits never change."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.operators.masks import last_kept, mask_key, random_words

MASK = 2**64 - 1
GOLDEN_KEY = ["581cfdb79823ab0d", "11def7049b3e822c"]
GOLDEN_START = [
    1974419475,
    794432382,
    3152242872,
    3165953146,
    3838132349,
    369579261,
    2127385049,
    971630180,
    3787268457,
    3894050240,
]
GOLDEN_LATER = [1756793759, 3081262756, 3830175041, 2460101164, 3635910691]


def philox(counter, key):
    """Return the four words of one count: Salmon et al. 2011, section 3.4, ten rounds."""
    words, (k0, k1) = [counter >> (64 * i) & MASK for i in range(4)], key
    for _ in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [second >> 64 ^ words[1] ^ k0, second & MASK, first >> 64 ^ words[3] ^ k1, first & MASK]
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & MASK, k1 + 0xBB67AE8584CAA73B & MASK
    return words


def number(key, index):
    """Return the 32-bit number of one element."""
    word = philox(index // 8 + 1, key)[index // 2 % 4]  # numpy counts before it draws
    return word >> 32 * (index % 2) & 0xFFFFFFFF


@given(st.integers(0, 2**64), st.integers(1, 40), st.tuples(st.integers(0, MASK), st.integers(0, MASK)))
def test_every_element_has_its_own_number(start, count, key):
    got = random_words(key, start, count)
    assert got.tolist() == [number(key, start + index) for index in range(count)]


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_stream_does_not_depend_on_where_it_is_cut(start, first, second):
    key = mask_key(0, "w", "e")
    whole = random_words(key, start, first + second)
    parts = random_words(key, start, first), random_words(key, start + first, second)
    assert np.array_equal(whole, np.concatenate(parts))


def test_the_numbers_are_those_of_numpy_from_the_start_of_its_stream():
    key = mask_key(3, "w", "e")
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(50)
    assert np.array_equal(random_words(key, 0, 100), words.astype("<u8").view("<u4"))


def test_the_bits_never_change():
    key = mask_key(7, "layers.0.w", "expert")
    assert [f"{word:016x}" for word in key] == GOLDEN_KEY
    assert random_words(key, 0, 10).tolist() == GOLDEN_START
    assert random_words(key, (1 << 40) + 3, 5).tolist() == GOLDEN_LATER


def test_the_key_depends_on_seed_tensor_and_source_and_nothing_runs_into_anything_else():
    keys = {
        mask_key(*fields)
        for fields in [(0, "a", "b"), (1, "a", "b"), (0, "b", "a"), (0, "ab", ""), (0, "", "ab"), (-1, "a", "b")]
    }
    assert len(keys) == 6


@given(st.floats(2.0**-40, 1, exclude_max=True))
def test_the_last_number_that_is_kept_is_the_largest_below_the_probability(probability):
    last = last_kept(probability)
    assert last == 2**32 - 1 or Fraction(last + 1, 2**32) >= Fraction(probability)
    assert Fraction(last, 2**32) < Fraction(probability)


@pytest.mark.parametrize("probability", [0.01, 0.25, 0.5, 0.9])
def test_shares_and_neighbours_are_those_of_independent_draws(probability):
    count = 200_000
    kept = random_words(mask_key(1, "w", "e"), 0, count) <= last_kept(probability)
    deviation = math.sqrt(probability * (1 - probability) / count)
    assert abs(kept.mean() - probability) < 4 * deviation
    for distance in (1, 2, 7, 8, 64):
        both = (kept[distance:] & kept[:-distance]).mean()
        assert abs(both - probability**2) < 6 * deviation


def test_streams_of_other_tensors_sources_and_seeds_are_independent():
    masks = [
        random_words(mask_key(*fields), 0, 100_000) < 2**31
        for fields in [(0, "a", "e"), (0, "b", "e"), (0, "a", "f"), (1, "a", "e")]
    ]
    for index, first in enumerate(masks):
        for second in masks[:index]:
            assert abs((first == second).mean() - 0.5) < 0.01


def test_numbers_are_uniform():
    words = random_words(mask_key(5, "w", "e"), 0, 1 << 18)
    counts = np.bincount(words >> np.uint32(24), minlength=256)
    expected = (1 << 18) / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 150 < chi_squared < 370  # 255 degrees of freedom: 255 +- 5 deviations
