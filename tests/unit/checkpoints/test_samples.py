"""Samples: a few percent of every block, the same elements whatever the file, spread over the block."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.samples import sample_elements, sample_runs


@given(st.integers(0, 1 << 20), st.integers(0, 10_000))
def test_runs_lie_in_the_block_in_order_and_have_one_length(elements, block):
    runs = sample_runs(elements, block)
    assert all(0 <= start < stop <= elements for start, stop in runs)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
    assert len({stop - start for start, stop in runs}) <= 1
    assert sum(stop - start for start, stop in runs) == sample_elements(elements)


def test_a_block_of_the_usual_size_gives_three_percent_in_eight_runs_of_2_kib_of_bf16():
    assert [stop - start for start, stop in sample_runs(1 << 18, 5)] == [1024] * 8
    assert sample_elements(1 << 18) / (1 << 18) == 1 / 32


def test_a_small_block_is_its_sample():
    assert sample_runs(128, 3) == ((0, 128),)
    assert sample_runs(0, 0) == ()
    assert sample_elements(129) == 128


@given(st.integers(1 << 12, 1 << 18))
def test_every_eighth_has_a_run(elements):
    runs = sample_runs(elements, 1)
    for number, (start, stop) in enumerate(runs):
        assert number * elements // 8 <= start
        assert stop <= (number + 1) * elements // 8


def test_runs_move_from_block_to_block():
    starts = [sample_runs(1 << 18, block)[0][0] for block in range(1000)]
    assert len(set(starts)) > 950
    room = (1 << 15) - 1024
    # They lie evenly: each tenth of the room has about a tenth of them.
    counts = [sum(start * 10 // (room + 1) == tenth for start in starts) for tenth in range(10)]
    assert min(counts) > 80
    assert max(counts) < 120
