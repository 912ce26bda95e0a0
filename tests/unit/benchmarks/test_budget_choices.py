"""The choices that the planner is measured against are what they are said to be, with numbers made as its own are."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from benchmarks.budgets.choices import at_random, by_hash, fill, hash_of, reordered
from mergepipe.operators.influence import Influence, additive
from mergepipe.plan.budget import BudgetTensor, reading_order

EXPERTS = 3
INFLUENCES = {
    "additive": additive([0.5, 0.25, 1.0]),
    "mean": Influence(factors=(0.3, 0.3, 0.4), kind="mean", spread=(1.5, 1.5, 1.5)),
    "sum": Influence(factors=(0.3, 0.3, 0.4), kind="sum", spread=(0.3, 0.3, 0.4)),
    "none": Influence(factors=(1.0, 1.0, 1.0), kind="none"),
}
NAMES = ("b.weight", "a.weight", "norm")


def order(*kinds, seed=0, same=False):
    rng = np.random.default_rng(seed)
    tensors = []
    for kind, blocks, cost in zip(kinds, (7, 5, 1), (512, 512, 16), strict=False):
        norms = rng.lognormal(0.0, 1.5, (EXPERTS, blocks))
        norms[0, 0] = 0.0
        costs = np.full((EXPERTS, blocks), cost)
        costs[:, -1] = cost // 2 + 3
        costs[0, 0] = 0
        copied = np.tile(np.arange(EXPERTS)[:, None], blocks) if same else None
        if copied is not None:
            copied[2, ::2] = 1
            norms[2, ::2] = norms[1, ::2]
        tensors.append(BudgetTensor(norms=norms, costs=costs, influence=INFLUENCES[kind], same=copied, update=2.0))
    return reading_order(tensors)


def place(order, item):
    """Return (tensor, block, expert) of a place in the row of all blocks."""
    for number, tensor in enumerate(order.tensors):
        if item < tensor.norms.size:
            return number, item // EXPERTS, item % EXPERTS
        item -= tensor.norms.size
    raise AssertionError


# --- orders -------------------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_papers_code():
    digest = hashlib.sha256(b"model.norm.weight:0").hexdigest()
    assert hash_of("model.norm.weight", 0) == int("".join(digest[i : i + 2] for i in (6, 4, 2, 0)), 16)
    assert len({hash_of("a", 1), hash_of("a", 11), hash_of("b", 1)}) == 3


def test_every_threshold_of_the_hash_is_a_prefix_and_takes_all_experts_of_a_block():
    found = order("additive", "additive", "additive")
    items = by_hash(found, NAMES)
    assert sorted(items) == sorted(found.items)
    places = [place(found, item) for item in items.tolist()]
    keys = [hash_of(NAMES[tensor], block) for tensor, block, _ in places]
    assert keys == sorted(keys)
    assert [(block, expert) for tensor, block, expert in places if tensor == 2] == [(0, 1), (0, 2)]


def test_the_hash_looks_at_no_weight():
    assert by_hash(order(*["additive"] * 3, seed=1), NAMES).tolist() == by_hash(order(*["mean"] * 3), NAMES).tolist()


def test_a_seed_gives_one_order_whatever_the_planner_thinks_of_the_blocks():
    one, other = order("additive", "additive", seed=1), order("additive", "additive", seed=2)
    assert one.items.tolist() != other.items.tolist()
    assert at_random(one, 5).tolist() == at_random(other, 5).tolist()
    assert at_random(one, 5).tolist() != at_random(one, 6).tolist()
    assert sorted(at_random(one, 5)) == sorted(one.items)


# --- what they come to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INFLUENCES)
@pytest.mark.parametrize("same", [False, True])
def test_the_planners_own_order_put_in_order_is_itself_bit_for_bit(kind, same):
    found = order(kind, "additive", kind, same=same)
    again = reordered(found, found.items)
    for name in ("items", "bytes", "blocks", "bounds", "expected", "masses", "steps", "gains", "squares"):
        assert np.array_equal(getattr(again, name), getattr(found, name)), name
    assert again.unbounded == found.unbounded


@given(st.integers(0, 1000), st.integers(0, 40), st.sampled_from(["additive", "mean", "sum"]))
@settings(max_examples=examples(25))
def test_the_bound_of_a_choice_is_the_formula_over_what_it_leaves_out(seed, count, kind):
    found = order(kind, "additive", kind)
    items = at_random(found, seed)
    count = min(count, len(items))
    square = 0.0
    left = {place(found, item) for item in items[count:].tolist()}
    for number, tensor in enumerate(found.tensors):
        for block in range(tensor.norms.shape[1]):
            out = [e for e in range(EXPERTS) if (number, block, e) in left and tensor.norms[e, block] > 0]
            if tensor.influence.kind == "additive":
                square += sum(tensor.influence.factors[e] * tensor.norms[e, block] for e in out) ** 2
            elif out:
                lengths = [s * tensor.norms[e, block] for e, s in enumerate(tensor.influence.spread)]
                square += sum(lengths) ** 2 if kind == "sum" else sum(x * x for x in lengths)
    selection = reordered(found, items).cut(count)
    assert selection.bound.absolute == pytest.approx(math.sqrt(square), rel=1e-8, abs=1e-12)
    assert selection.planned_bytes == sum(
        found.tensors[t].costs[e, b] for t, b, e in (place(found, i) for i in items[:count].tolist())
    )


def test_without_a_bound_for_one_tensor_there_is_none_until_all_of_it_is_read():
    found = order("none", "additive")
    items = at_random(found, 3)
    unknown = np.asarray([place(found, item)[0] == 0 for item in items.tolist()])
    again = reordered(found, np.concatenate([items[~unknown][:4], items[unknown], items[~unknown][4:]]))
    last = 4 + np.count_nonzero(unknown)
    assert [again.cut(count).bound.kind for count in (0, 4, last - 1, last)] == [*["none"] * 3, "certified"]


@given(st.integers(0, 1000), st.integers(0, 20_000))
@settings(max_examples=examples(25))
def test_what_is_filled_costs_no_more_than_the_limit_and_leaves_nothing_that_would_fit(seed, limit):
    found = order("additive", "mean", "additive")
    items = at_random(found, seed)
    selection = fill(found, items, limit)
    assert selection.planned_bytes <= limit
    read, left = selection.order.items[: selection.items], selection.order.items[selection.items :]
    rank = {item: n for n, item in enumerate(items.tolist())}
    assert [rank[i] for i in read.tolist()] == sorted(rank[i] for i in read.tolist())
    costs = np.diff(selection.order.bytes)
    room = limit - selection.planned_bytes
    assert not len(left) or costs[selection.items :].min() > room
    assert selection.planned_bytes == costs[: selection.items].sum()


def test_a_limit_of_everything_reads_everything():
    found = order("mean", "additive", "additive")
    selection = fill(found, by_hash(found, NAMES), int(found.bytes[-1]))
    assert (selection.items, selection.bound.kind) == (len(found.items), "exact")
