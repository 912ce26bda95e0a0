"""Samples: a few percent of every block, the same elements whatever the file, spread over the block."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.samples import sample_elements, sample_runs, sample_starts

ROWS = st.sampled_from([1, 1024, 8191, 8192, 1 << 15])


@given(st.integers(0, 1 << 20), st.integers(0, 10_000), ROWS)
def test_runs_lie_in_the_block_in_order_and_have_one_length(elements, block, row):
    runs = sample_runs(elements, block, row)
    assert all(0 <= start < stop <= elements for start, stop in runs)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
    assert len({stop - start for start, stop in runs}) <= 1
    assert sum(stop - start for start, stop in runs) == sample_elements(elements, row)


def test_a_block_of_the_usual_size_gives_three_percent_in_eight_runs_of_2_kib_of_bf16():
    assert [stop - start for start, stop in sample_runs(1 << 18, 5, 1024)] == [1024] * 8
    assert sample_elements(1 << 18, 1024) / (1 << 18) == 1 / 32


def test_a_block_of_long_rows_gives_less_than_a_percent_in_four_runs_of_1_kib_of_bf16():
    assert [stop - start for start, stop in sample_runs(1 << 18, 5, 8192)] == [512] * 4
    assert sample_elements(1 << 18, 8192) / (1 << 18) == 1 / 128


@given(st.integers(0, 1 << 16), st.integers(0, 100), st.integers(1, 5), ROWS)
def test_the_runs_of_adjacent_blocks_are_those_of_each(elements, first, count, row):
    starts, length = sample_starts(elements, first, first + count, row)
    runs = [(start, start + length) for start in starts]
    assert runs == [
        (at * elements + start, at * elements + stop)
        for at in range(count)
        for start, stop in sample_runs(elements, first + at, row)
    ]


def test_a_small_block_is_its_sample():
    assert sample_runs(128, 3, 16) == ((0, 128),)
    assert sample_runs(0, 0, 1) == ()
    assert sample_elements(129, 16) == 128


@given(st.integers(1 << 12, 1 << 18), st.sampled_from([(1024, 8), (8192, 4)]))
def test_every_eighth_has_a_run_or_every_quarter_where_rows_are_long(elements, form):
    row, count = form
    runs = sample_runs(elements, 1, row)
    assert len(runs) == count
    for number, (start, stop) in enumerate(runs):
        assert number * elements // count <= start
        assert stop <= (number + 1) * elements // count


def test_runs_move_from_block_to_block():
    starts = [sample_runs(1 << 18, block, 1024)[0][0] for block in range(1000)]
    assert len(set(starts)) > 950
    room = (1 << 15) - 1024
    # They lie evenly: each tenth of the room has about a tenth of them.
    counts = [sum(start * 10 // (room + 1) == tenth for start in starts) for tenth in range(10)]
    assert min(counts) > 80
    assert max(counts) < 120
