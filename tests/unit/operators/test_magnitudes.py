"""Order statistics: equal to those of sorting, and places among equal magnitudes by flat index."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.operators import Run, tensor_params

from mergepipe.operators import magnitudes as module
from mergepipe.operators.magnitudes import Magnitudes, above, below, patterns, population, select
from mergepipe.operators.ranks import Edge
from mergepipe.operators.registry import operators
from mergepipe.operators.sums import MagnitudeSum, total_of

OPERATOR = operators()["task_arithmetic"]


def run_of(deltas, *, block=1 << 14, tile=1 << 16, find_zeros=True):
    base = np.zeros_like(deltas[0])
    params = tensor_params(OPERATOR, [{} for _ in deltas], {})
    return Run(OPERATOR, base, deltas, params, block_elements=block, tile=tile, find_zeros=find_zeros)


def find(run, wanted):
    """Return what `select` returns, and how often it asked."""
    steps = select(wanted)
    asked, rounds = next(steps), 1
    try:
        while True:
            asked, rounds = steps.send({statistic: run.values(statistic) for statistic in asked}), rounds + 1
    except StopIteration as stop:
        return stop.value, rounds


def check(delta, rank, found, block):
    """Assert that a selection is right, by sorting."""
    magnitudes = np.abs(delta)
    value = np.sort(magnitudes)[delta.size - rank]
    assert found.value == value
    assert found.rank == rank
    assert found.above == (magnitudes > value).sum()
    starts = range(0, delta.size, block)
    equal = [int((magnitudes[start : start + block] == value).sum()) for start in starts]
    assert found.equal.tolist() == equal
    largest = set(np.lexsort((np.arange(delta.size), -magnitudes))[:rank].tolist())
    first = {index for index in largest if magnitudes[index] == value}
    taken = found.taken(rank - found.above).tolist()
    assert taken == [len(first & set(range(start, start + block))) for start in starts]
    edge = found.edge(rank - found.above)
    assert taken == [
        count if number < edge.block else edge.count if number == edge.block else 0
        for number, count in enumerate(equal)
    ]


def data(kind, size, dtype, *, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size)
    if kind == "few":
        values = np.round(values * 3) / 8
    elif kind == "half":
        values = values.astype(np.float16)
    elif kind == "wide":
        values *= 10.0 ** rng.integers(-40, 30, size)
    elif kind == "sparse":
        values[rng.random(size) < 0.8] = 0
    elif kind == "subnormal":
        values *= 1e-42 if dtype == "float32" else 1e-320
    return values.astype(dtype)


small = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1 + 2**-20, -3.0, np.inf]), min_size=1, max_size=40)


@given(small, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.data())
def test_any_rank_of_a_small_tensor(values, block, tile, find_zeros, drawn):
    delta = np.float32(values)
    ranks = drawn.draw(st.lists(st.integers(1, delta.size), min_size=1, max_size=3))
    run = run_of([delta], block=block, tile=tile, find_zeros=find_zeros)
    statistic = Magnitudes(slots=(0, 1))
    found, rounds = find(run, {statistic: ranks})
    assert rounds == 1
    for rank, selection in zip(ranks, found[statistic], strict=True):
        check(delta, rank, selection, block)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["few", "half", "wide", "normal", "sparse", "subnormal"])
@pytest.mark.parametrize("block", [1000, 1 << 14])
def test_any_rank_where_tables_are_coarse(kind, dtype, block):
    delta = data(kind, 50_000, dtype)
    run = run_of([delta], block=block, tile=777)
    statistic = Magnitudes(slots=(0, 1))
    ranks = [1, 2, 777, 25_000, 49_999, 50_000]
    found, _ = find(run, {statistic: ranks})
    for rank, selection in zip(ranks, found[statistic], strict=True):
        check(delta, rank, selection, block)


@pytest.mark.parametrize(
    ("kind", "dtype", "block", "rounds"),
    [
        ("few", "float32", 1 << 18, 1),
        ("few", "float64", 1 << 18, 1),
        ("normal", "float32", 1000, 1),
        ("normal", "float32", 1 << 18, 2),
        ("half", "float32", 1 << 18, 2),
        ("normal", "float64", 1 << 18, 3),
    ],
)
def test_complete_tables_answer_every_rank_and_coarse_ones_ask_for_further_digits(kind, dtype, block, rounds):
    run = run_of([data(kind, 1 << 18, dtype)], block=block)
    statistic = Magnitudes(slots=(0, 1))
    assert find(run, {statistic: [100_000]})[1] == rounds
    asked = list(dict.fromkeys(statistic.digits for statistic, _ in run.measured))
    assert [len(digits) for digits in asked] == list(range(rounds))


def test_several_statistics_and_ranks_are_found_in_the_same_rounds():
    deltas = [data("normal", 30_000, "float32", seed=seed) for seed in range(3)]
    run = run_of(deltas)
    wanted = {Magnitudes(slots=(0, number + 1)): (100 * number + 1, 20_000) for number in range(3)}
    found, rounds = find(run, wanted)
    assert rounds == 2
    for number, delta in enumerate(deltas):
        for rank, selection in zip(
            *(table[Magnitudes(slots=(0, number + 1))] for table in (wanted, found)), strict=True
        ):
            check(delta, rank, selection, 1 << 14)


def test_tables_need_not_be_kept_between_rounds(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_ENTRIES", 50)
    delta = data("normal", 30_000, "float32")
    statistic = Magnitudes(slots=(0, 1))
    found, _ = find(run_of([delta], block=5000), {statistic: [12_345]})
    check(delta, 12_345, found[statistic][0], 5000)


@pytest.mark.parametrize("kind", ["few", "normal", "sparse"])
def test_elements_and_zeros_are_counted_exactly(kind):
    delta = data(kind, 30_000, "float32")
    delta[:10_000] = 0
    for find_zeros in (True, False):
        run = run_of([delta], block=5000, find_zeros=find_zeros)
        found = population(run.values(Magnitudes(slots=(0, 1))))
        assert (found.elements, found.zeros) == (30_000, (delta == 0).sum())


def test_nan_counts_as_the_largest_magnitude():
    delta = np.float32([1, np.nan, np.inf, -2])
    found, _ = find(run_of([delta]), {Magnitudes(slots=(0, 1)): [1, 2, 3]})
    first, second, third = found[Magnitudes(slots=(0, 1))]
    assert np.isnan(first.value)
    assert (second.value, third.value) == (np.inf, 2)


def test_blocks_whose_delta_is_known_to_be_zero_are_not_looked_at():
    delta = np.zeros(3000, np.float32)
    delta[2500] = 1
    statistic = Magnitudes(slots=(0, 1))
    run = run_of([delta], block=1000)
    zero, found_zero, _ = run.values(statistic)
    assert zero == found_zero
    assert find(run, {statistic: [1, 2]})[0][statistic][1].value == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares(Magnitudes):
    """Another number per element."""

    name: ClassVar[str] = "squares"

    def magnitudes(self, inputs):
        return inputs.delta(0, 0) ** 2


def test_a_statistic_of_other_numbers_is_searched_alike():
    delta = data("normal", 30_000, "float32")
    statistic = Squares(slots=(0, 1))
    run = run_of([delta])
    found, rounds = find(run, {statistic: [777]})
    assert rounds == 2
    check(delta**2, 777, found[statistic][0], 1 << 14)
    assert {type(asked) for asked, _ in run.measured} == {Squares}
    assert statistic.digest() != Magnitudes(slots=(0, 1)).digest()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 3), st.integers(0, 5), st.integers(0, 9))
def test_masks_take_the_first_of_the_equal_elements_over_all_tiles(values, pattern, edge_block, count):
    block, tile = 10, 3
    bits = patterns(np.uint32(values).view(np.float32))
    edge = Edge(pattern=pattern, block=edge_block, count=count)
    run = run_of([bits.view(np.float32)], block=block, tile=tile, find_zeros=False)
    low, high = [], []
    for number in range(run.facts.blocks):
        for inputs in run._tiles(number, (0, 1), rowwise=False):
            mine = patterns(inputs.delta(0, 0))
            low.extend(above(mine, edge, inputs, "low").tolist())
            high.extend(below(mine, edge, inputs, "high").tolist())
    seen = dict.fromkeys(range(run.facts.blocks), 0)
    for index, value in enumerate(values):
        number = index // block
        limit = block if number < edge_block else count if number == edge_block else 0
        taken = value == pattern and seen[number] < limit
        seen[number] += value == pattern
        assert low[index] == (value > pattern or taken)
        assert high[index] == (value < pattern or taken)


def test_what_several_statistics_keep_is_within_one_limit(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_ENTRIES", 40_000)
    rooms = []
    monkeypatch.setattr(module, "_Room", lambda entries, make=module._Room: rooms.append(make(entries)) or rooms[-1])
    deltas = [data("normal", 30_000, "float32", seed=seed) for seed in range(4)]
    wanted = {Magnitudes(slots=(0, number + 1)): (100, 20_000) for number in range(4)}
    found, _ = find(run_of(deltas, block=5000), wanted)
    for number, delta in enumerate(deltas):
        check(delta, 20_000, found[Magnitudes(slots=(0, number + 1))][1], 5000)
    (room,) = rooms
    assert 0 <= room.entries < 40_000


# --- sums from tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["few", "half", "subnormal", "sparse"])
def test_sums_of_complete_tables_are_those_of_the_elements(kind):
    delta = data(kind, 30_000, "float32")
    delta[[5, 77, 20_000]] = np.inf, np.nan, -np.inf
    run = run_of([delta], block=1000)
    statistic, looked = Magnitudes(slots=(0, 1)), []
    steps = select({statistic: (10_000, 20_000)}, lambda *found: looked.append(found))
    next(steps)
    with pytest.raises(StopIteration):
        steps.send({statistic: run.values(statistic)})
    ((same, tables, (high, low)),) = looked
    assert same is statistic
    for bounds in ((-1, None), (low.pattern, high.pattern), (0, None), (-1, low.pattern), (high.pattern, None)):
        whole = MagnitudeSum(slots=(0, 1), above=bounds[0], below=bounds[1])
        assert tables.sum_between(*bounds) == total_of(run.values(whole))


def test_tables_that_are_coarse_are_not_looked_at():
    run = run_of([data("any", 30_000, "float32")])
    looked = []
    steps = select({Magnitudes(slots=(0, 1)): (9,)}, lambda *found: looked.append(found))
    asked = next(steps)
    steps.send({statistic: run.values(statistic) for statistic in asked})
    assert not looked
