"""The planner: one order of all blocks, nested prefixes, bounds of every prefix, against definitions written out."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from mergepipe.mergefile.schema import Budget
from mergepipe.operators.influence import Influence, additive
from mergepipe.plan.bounds import margin, update_norm
from mergepipe.plan.budget import BudgetTensor, reading_order

GROWN = 1e-6  # by how much a bound may be above its formula: far more than `margin` is for so few items


def tensor(norms, costs=None, influence=None, **more):
    norms = np.array(norms, np.float64)
    costs = np.ones(norms.shape, np.int64) if costs is None else np.array(costs, np.int64)
    return BudgetTensor(norms=norms, costs=costs, influence=influence or additive([1.0] * len(norms)), **more)


@st.composite
def problems(draw, kinds=("additive", "mean", "sum", "none")):
    """Return tensors with random, skewed and heavy-tailed norms, many of them equal or zero; some blocks are free."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        experts, blocks = draw(st.integers(1, 4)), draw(st.integers(0, 3))
        shape = (experts, blocks)
        law = draw(st.sampled_from(["few", "normal", "heavy", "skewed"]))
        norms = {
            "few": lambda s: rng.choice([0.0, 1.0, 2.0], s),
            "normal": lambda s: np.abs(rng.standard_normal(s)),
            "heavy": lambda s: np.abs(rng.standard_cauchy(s)),
            "skewed": lambda s: rng.lognormal(0.0, 3.0, s),
        }[law](shape)
        same = np.arange(experts)[:, None].repeat(blocks, axis=1)
        costs = rng.choice([0, 2, 4], (experts, 1), p=[0.1, 0.4, 0.5]).repeat(blocks, axis=1)
        for expert, block in itertools.product(range(1, experts), range(blocks)):
            first = int(rng.integers(0, expert))
            if rng.random() < 0.2 and same[first, block] == first:
                same[expert, block] = first
                norms[expert, block], costs[expert, block] = norms[first, block], costs[first, block]
        kind = draw(st.sampled_from(kinds))
        factors = tuple(rng.choice([0.5, 1.0, 1.0, 2.0], experts).tolist())
        spread = factors if kind in {"mean", "sum"} else ()
        tensors.append(
            BudgetTensor(
                norms=norms,
                costs=costs.astype(np.int64),
                influence=Influence(factors=factors, kind=kind, spread=spread),
                same=same,
                update=draw(st.sampled_from([None, 1.0, 5.0])),
                base=draw(st.sampled_from([None, 30.0])),
            )
        )
    return tensors


def groups(tensors):
    """Return {(tensor, block, first expert): (bytes, effect, experts)} of everything that costs something."""
    found = {}
    for number, part in enumerate(tensors):
        for block, expert in itertools.product(range(part.norms.shape[1]), range(len(part.norms))):
            first = expert if part.same is None else int(part.same[expert, block])
            if part.costs[first, block]:
                effect = part.influence.factors[expert] * part.norms[expert, block]
                cost, total, experts = found.get((number, block, first), (int(part.costs[first, block]), 0.0, ()))
                found[number, block, first] = cost, total + effect, (*experts, expert)
    return found


def omitted(selection):
    """Return what a selection leaves out: a set of (tensor, block, expert)."""
    return {
        (number, block, expert)
        for number, levels in enumerate(selection.access())
        for expert, level in enumerate(levels)
        if level is not None
        for block, value in enumerate(level)
        if value == 0
    }


def defined_bound(tensors, left_out):
    """Return the bound of leaving these out, None where there is none: the definition, block by block."""
    square = 0.0
    for number, part in enumerate(tensors):
        influence = part.influence
        for block in range(part.norms.shape[1]):
            norms = part.norms[:, block]
            gone = [e for e in range(len(norms)) if (number, block, e) in left_out and norms[e] > 0]
            if gone and influence.kind == "none":
                return None
            if influence.kind == "additive":
                square += sum(influence.factors[e] * norms[e] for e in gone) ** 2
            elif gone:
                lengths = np.array(influence.spread) * norms
                square += lengths.sum() ** 2 if influence.kind == "sum" else (lengths**2).sum()
    return math.sqrt(square)


@given(problems())
def test_prefixes_are_nested_and_cost_what_they_say(tensors):
    order, items = reading_order(tensors), groups(tensors)
    assert len(order.items) == len(items)
    before = None
    for count in range(len(order.items) + 1):
        selection = order.cut(count)
        left_out = omitted(selection)
        assert before is None or left_out < before
        before = left_out
        read = {key: item for key, item in items.items() if key not in left_out}
        assert selection.planned_bytes == sum(cost for cost, _, _ in read.values())
        assert selection.full_bytes == sum(cost for cost, _, _ in items.values())
        assert sum(int(part.sum()) for part in selection.slot_bytes()) == selection.planned_bytes
        # Blocks of equal content go together, and what is free is always read.
        assert left_out == {
            (t, b, e) for (t, b, first), (_, _, es) in items.items() if (t, b, first) in left_out for e in es
        }
        paid = sum(int((part.costs > 0).sum()) for part in tensors)
        assert selection.full_blocks == paid
        assert selection.blocks == paid - sum(int(tensors[t].costs[e, b] > 0) for t, b, e in left_out)
    assert before == set()


@given(problems())
def test_the_order_is_gain_per_byte_then_tensor_block_and_expert(tensors):
    order, items = reading_order(tensors), groups(tensors)
    wanted = sorted(items, key=lambda key: (-(items[key][1] ** 2 / items[key][0]), key))
    before = omitted(order.cut(0))
    for count, (number, block, first) in enumerate(wanted, start=1):
        after = omitted(order.cut(count))
        assert before - after == {(number, block, expert) for expert in items[number, block, first][2]}
        before = after


@given(problems(), st.integers(-1, 80), st.integers(0, 80))
def test_a_budget_buys_the_longest_prefix_that_fits(tensors, limit, more):
    order = reading_order(tensors)
    selection = order.cut(order.count(Budget(expert_reads=max(limit, 0))))
    assert selection.planned_bytes <= max(limit, 0)
    if selection.items < len(order.items):
        assert order.cut(selection.items + 1).planned_bytes > limit
    larger = order.cut(order.count(Budget(expert_reads=max(limit, 0) + more)))
    assert omitted(larger) <= omitted(selection)


@given(problems())
def test_the_bound_of_every_prefix_is_the_one_that_is_defined(tensors):
    order = reading_order(tensors)
    before = math.inf
    for count in range(len(order.items) + 1):
        bound = order.cut(count).bound
        wanted = defined_bound(tensors, omitted(order.cut(count)))
        if wanted is None:
            assert (bound.kind, bound.absolute, bound.relative_to_update) == ("none", None, None)
            continue
        assert bound.kind == ("exact" if count == len(order.items) else "certified")
        assert wanted <= bound.absolute * (1 + 1e-13) <= wanted * (1 + GROWN)
        assert bound.absolute <= before
        before = bound.absolute
        for relative, norms in ((bound.relative_to_update, "update"), (bound.relative_to_base, "base")):
            known = [getattr(part, norms) for part in tensors if getattr(part, norms) is not None]
            assert (relative is None) == (not known and bound.absolute > 0)
            if known:
                assert relative == pytest.approx(bound.absolute / math.hypot(*known), rel=GROWN)


@given(problems(kinds=("additive", "mean", "none")), st.sampled_from([0.0, 1e-9, 0.01, 0.1, 0.5, 1.0, 3.0]))
def test_max_error_is_kept_with_the_fewest_blocks_of_the_order(tensors, max_error):
    order = reading_order(tensors)
    count = order.count(Budget(max_error=max_error))
    within = [
        (relative := order.cut(k).bound.relative_to_update) is not None and relative <= max_error
        for k in range(len(order.items) + 1)
    ]
    within[-1] = True
    assert count == within.index(True)


@given(problems())
def test_estimates_are_what_is_left_out_taken_as_orthogonal(tensors):
    order, items = reading_order(tensors), groups(tensors)
    for count in range(len(order.items) + 1):
        selection = order.cut(count)
        left_out = omitted(selection)
        gains = [effect**2 for key, (_, effect, _) in items.items() if key in left_out]
        assert selection.expected == pytest.approx(math.sqrt(sum(gains)))
        mass = [part.norms**2 for part in tensors]
        gone = sum(mass[t][e, b] for t, b, e in left_out)
        whole = sum(part.sum() for part in mass)
        assert selection.omitted_mass == pytest.approx(math.sqrt(gone / whole) if gone else 0.0)


@given(problems())
def test_the_losses_of_tensors_add_up_to_that_of_the_output(tensors):
    order = reading_order(tensors)
    for count in range(len(order.items) + 1):
        selection = order.cut(count)
        losses = selection.losses()
        assert [loss.tensor for loss in losses] == [
            loss.tensor for loss in sorted(losses, key=lambda loss: (-loss.expected, loss.tensor))
        ]
        assert {loss.tensor for loss in losses} == {number for number, _, _ in omitted(selection)}
        assert sum(loss.omitted_bytes for loss in losses) == selection.full_bytes - selection.planned_bytes
        assert math.hypot(*(loss.expected for loss in losses)) == pytest.approx(selection.expected)
        if selection.bound.absolute is None:
            assert any(loss.bound is None for loss in losses)
        else:
            assert math.hypot(*(loss.bound for loss in losses)) == pytest.approx(selection.bound.absolute)
        for loss in losses:
            own = {(0, block, expert) for number, block, expert in omitted(selection) if number == loss.tensor}
            wanted = defined_bound([tensors[loss.tensor]], own)
            assert loss.bound == (wanted if wanted is None else pytest.approx(wanted))
        assert selection.losses(1) == losses[:1]


@given(problems())
@settings(max_examples=examples(50))
def test_the_same_input_gives_the_same_order_bit_for_bit(tensors):
    first, second = reading_order(tensors), reading_order(list(tensors))
    for name in ("items", "bytes", "bounds", "expected", "masses"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


# --- examples -----------------------------------------------------------------------------------------------------


def test_cheaper_experts_are_read_first_where_they_bring_as_much():
    order = reading_order([tensor([[2.0, 2.0], [2.0, 2.0]], [[4, 4], [2, 2]])])
    assert omitted(order.cut(2)) == {(0, 0, 0), (0, 1, 0)}


def test_equal_gains_come_in_the_order_of_tensors_blocks_and_experts():
    order = reading_order([tensor([[1.0, 1.0], [1.0, 1.0]]), tensor([[1.0]])])
    everything = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
    assert [omitted(order.cut(count)) for count in range(6)] == [set(everything[count:]) for count in range(6)]


def test_a_block_that_does_not_fit_ends_the_prefix_though_a_later_one_would_fit():
    order = reading_order([tensor([[100.0, 1.0]], [[8, 2]])])
    assert order.cut(order.fitting(4)).planned_bytes == 0


def test_equal_blocks_of_two_experts_are_bought_once_and_count_together():
    same = np.array([[0], [0], [2]])
    part = tensor([[1.0], [1.0], [1.5]], [[4], [4], [4]], additive([0.5, 0.5, 0.5]), same=same)
    order = reading_order([part])
    assert (order.cut(2).full_bytes, order.cut(2).full_blocks) == (8, 3)
    assert omitted(order.cut(1)) == {(0, 0, 2)}  # (0.5 + 0.5) 1.0 is more than 0.5 * 1.5
    assert order.cut(1).planned_bytes == 4
    assert order.cut(0).expected == pytest.approx(math.hypot(1.0, 0.75))


def test_what_is_free_is_read_whatever_the_budget():
    order = reading_order([tensor([[5.0, 5.0], [1.0, 1.0]], [[0, 0], [4, 4]])])
    selection = order.cut(order.count(Budget(share=0.0)))
    assert selection.access() == ((None, b"\0\0"),)
    assert selection.bound.absolute == pytest.approx(math.sqrt(2))


def test_a_share_is_taken_as_it_is_written():
    order = reading_order([tensor([[1.0] * 10])])
    assert [order.count(Budget(share=share)) for share in (0.0, 0.1, 0.3, 0.7, 0.99, 1.0)] == [0, 1, 3, 7, 9, 10]


def test_a_share_may_be_of_more_than_the_blocks_that_must_be_read():
    order = reading_order([tensor([[1.0] * 10], [[1] * 5 + [0] * 5])])
    assert order.count(Budget(share=0.3), expert_bytes=10) == 3
    assert order.count(Budget(share=0.9), expert_bytes=10) == 5


def test_a_budget_beyond_all_bytes_reads_everything():
    order = reading_order([tensor([[1.0, 2.0]])])
    assert order.count(Budget(expert_reads=10**20)) == 2
    assert order.cut(2).access() == ((None,),)


def test_blocks_without_effect_are_read_last_but_read_in_the_end():
    order = reading_order([tensor([[0.0, 1.0]])])
    assert order.cut(1).access() == ((b"\0\xff",),)
    bound = order.cut(1).bound
    assert (bound.kind, bound.absolute) == ("certified", 0.0)
    assert order.cut(2).bound.kind == "exact"


def test_where_the_norm_of_the_update_is_unknown_an_error_is_kept_by_reading_everything():
    order = reading_order([tensor([[1.0, 2.0]])])
    assert order.within(0.9) == 2


def test_an_output_without_expert_blocks_has_an_exact_plan_that_reads_nothing():
    for tensors in ([], [tensor(np.zeros((2, 0)))], [tensor(np.zeros((0, 3)), influence=additive([]))]):
        order = reading_order(tensors)
        selection = order.cut(order.count(Budget(max_error=0.0)))
        assert (selection.planned_bytes, selection.full_bytes, selection.bound.kind) == (0, 0, "exact")
        assert selection.losses() == ()


def test_estimated_norms_give_an_estimate():
    order = reading_order([tensor([[1.0, 2.0]], update=1.0)], sampled=True)
    assert [order.cut(count).bound.kind for count in range(3)] == ["estimated", "estimated", "exact"]


@pytest.mark.parametrize("norm", [np.inf, np.nan])
def test_norms_that_are_not_finite_are_read_first_and_have_no_bound_until_then(norm):
    order = reading_order([tensor([[1.0, norm, 3.0]], update=1.0)])
    assert order.cut(0).bound.kind == "none"
    assert omitted(order.cut(1)) == {(0, 0, 0), (0, 2, 0)}
    assert order.cut(1).bound.absolute == pytest.approx(math.sqrt(10))
    assert order.cut(0).losses()[0].bound is None


@pytest.mark.parametrize("norm", [np.inf, np.nan])
def test_once_infinite_deltas_are_read_the_others_have_a_share_of_their_own_length(norm):
    order = reading_order([tensor([[4.0, norm, 3.0]]), tensor([[12.0]])])
    assert (order.cut(0).omitted_mass, order.cut(0).losses()[0].omitted_mass) == (1.0, 1.0)
    cut = order.cut(3)  # the infinite one, and the largest two of the others
    assert cut.omitted_mass == pytest.approx(3 / 13)
    assert [loss.omitted_mass for loss in cut.losses()] == [pytest.approx(3 / 5)]
    assert order.cut(4).omitted_mass == 0.0


def test_a_bound_is_above_its_formula_by_the_margin_for_rounding():
    order = reading_order([tensor([[3.0, 4.0]])])
    assert order.cut(0).bound.absolute == 5.0 * (1.0 + margin(2))


def test_the_norm_of_an_update_that_cancels_is_not_overstated():
    gram = np.array([[1.0, 1.0], [1.0, 1.0]])
    assert update_norm((0.0, 1.0, -1.0), gram) == 0.0
    assert update_norm((0.0, 1.0, 1.0), gram) == pytest.approx(2.0)
    assert update_norm((0.0, 1.0, 1.0), gram) <= 2.0
    assert update_norm(None, gram) is None
    assert update_norm((0.1, 1.0, 1.0), gram) is None


def test_a_family_of_two_million_blocks_is_planned_as_a_small_one_is():
    """Eight experts of a 70B model: it would be seen if anything went through them one by one."""
    rng = np.random.default_rng(0)
    counts = [4008, 4008, 1, *(([256] * 2 + [32] * 2 + [896] * 3 + [1] * 2) * 80)]
    tensors = [
        tensor(rng.standard_t(2, (8, n)) ** 2, np.full((8, n), 1 << 19), additive([0.125] * 8), update=1.0)
        for n in counts
    ]
    order = reading_order(tensors)
    assert len(order.items) > 2_000_000
    selections = [order.cut(order.fitting(order.bytes[-1] * percent // 100)) for percent in range(0, 101, 5)]
    bounds = [selection.bound.absolute for selection in selections]
    assert bounds == sorted(bounds, reverse=True)
    assert order.cut(order.within(0.5)).bound.relative_to_update <= 0.5
