"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.units import budget_words, exact_size, parse_size


@given(st.integers(0, 1 << 50))
def test_an_exact_size_is_read_back_as_the_same_number(count):
    assert parse_size(exact_size(count)) == count


@pytest.mark.parametrize(
    "text",
    ["0 B", "999 B", "1 KB", "500 KB", "1.5 GB", "1.25 MB", "1 KiB", "512 MiB", "1.5 GiB", "2 TB", "1234567 B"],
)
def test_a_size_is_written_as_it_was_typed(text):
    assert exact_size(parse_size(text)) == text


def test_a_budget_in_bytes_is_shown_as_it_was_written():
    texts = ["2000000 B", "1048576 B by samples", "25%", "full", "max_error 0.001"]
    assert list(map(budget_words, texts)) == ["2 MB", "1 MiB by samples", "25%", "full", "max_error 0.001"]
