"""A merge with deltas left out is never farther from the full read than its bound, whatever the deltas.

Arrays are really merged, by the operators, with the reduction of the full read. They are float64 (a bound is about the
formula; float32 steps round besides), in blocks of a few elements, so that every way to leave blocks out comes up.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.every_operator import RECIPES
from support.operators import Run, tensor_params
from support.quick import every, examples

from mergepipe.operators.registry import operator as operator_named
from mergepipe.plan.bounds import update_norm
from mergepipe.plan.budget import BudgetTensor, reading_order

BLOCK = 8
SHAPES = ((6, 5), (8, 4), (7, 8), (29,), (3, 2))
# Of float64 arithmetic on the magnitudes that are summed; next to cancelling weights or angles no digits are left.
ROUNDING = 1e-9


def numbers(recipe, **changes):
    """Return (operator, experts' parameters, output's parameters) of a recipe; gradients as their first number."""

    def first(value):
        return value[0] if isinstance(value, list) else value

    experts = [
        {} if isinstance(e, str) else {k: first(v) for k, v in e.items() if k != "source"} for e in recipe["experts"]
    ]
    params = {k: first(v) for k, v in (recipe.get("params", {}) | changes).items()}
    return operator_named(recipe["operator"]), experts, params


def weighted(recipe, *weights):
    return recipe | {"experts": [e | {"weight": w} for e, w in zip(recipe["experts"], weights, strict=True)]}


def alone(recipe):
    return recipe | {"experts": recipe["experts"][:1]}


POSITIVE = weighted(RECIPES["ties"], 0.5, 0.3, 0.2)
CASES = {name: numbers(recipe) for name, recipe in RECIPES.items()} | {
    "linear-sum": numbers(RECIPES["linear"], normalize=False),
    "task_arithmetic-mean": numbers(RECIPES["task_arithmetic"], normalize=True),
    "slerp-beyond": numbers(RECIPES["slerp"], t=1.7),
    "slerp-end": numbers(RECIPES["slerp"], t=1.0),
    "nuslerp-lone": numbers(weighted(RECIPES["nuslerp"], 0.0, 0.7)),
    "multislerp-lone": numbers(alone(RECIPES["multislerp"])),
    "karcher-lone": numbers(alone(RECIPES["karcher"])),
    "ties-mean": numbers(POSITIVE, normalize=True, rescale=False),
    "ties-mean-l1": numbers(POSITIVE, normalize=True, rescale="l1"),
    "ties-mean-density": numbers(POSITIVE, normalize=True, rescale="density", **{"lambda": -1.5}),
    "ties-negative": numbers(weighted(POSITIVE, -0.5, -0.3, -0.2), normalize=True),
    "ties-sum": numbers(RECIPES["ties"], normalize=False, rescale=False),
    "ties-mixed": numbers(RECIPES["ties"], normalize=True),
    "ties-lone": numbers(alone(RECIPES["ties"]), normalize=True),
    "dare_linear-l1": numbers(RECIPES["dare_linear"], rescale="l1", **{"lambda": -0.7}),
    "dare_linear-plain": numbers(RECIPES["dare_linear"], rescale=False, normalize=True),
    "dare_linear-mixed": numbers(weighted(RECIPES["dare_linear"], -0.5, 0.3, 0.4)),
    "dare_linear-whole": numbers(
        {**RECIPES["dare_linear"], "experts": [{"weight": w, "density": 1.0} for w in (1, 2)]}
    ),
    "dare_ties-sum": numbers(RECIPES["dare_ties"], rescale="density", normalize=False),
    "della-density": numbers(RECIPES["della"], rescale="density"),
    "della_linear-l1": numbers(RECIPES["della_linear"], rescale="l1"),
    "breadcrumbs-density": numbers(RECIPES["breadcrumbs"], rescale="density"),
    "breadcrumbs-l1": numbers(RECIPES["breadcrumbs"], rescale="l1"),
    "sce-all": numbers(RECIPES["sce"], select_topk=1.0),
    "sce-lone": numbers(alone(RECIPES["sce"]), select_topk=1.0),
    "ram-lone": numbers(alone(RECIPES["ram"])),
    "ramplus-strong": numbers(RECIPES["ramplus_tl"], r=3.0, alpha=2.0, epsilon=0.5),
    "nearswap-far": numbers(RECIPES["nearswap"], t=1e-8),
}
KINDS = {
    "additive": {
        *("linear", "linear-sum", "task_arithmetic", "task_arithmetic-mean", "passthrough", "slerp", "slerp-beyond"),
        *("slerp-end", "nuslerp", "nuslerp-columns", "nuslerp-lone", "multislerp", "multislerp-lone", "karcher"),
        *("karcher-lone", "model_stock", "dare_linear", "dare_linear-l1", "dare_linear-plain", "dare_linear-mixed"),
        *("dare_linear-whole", "della_linear", "della_linear-l1", "breadcrumbs", "breadcrumbs-density"),
        *("breadcrumbs-l1", "ties-lone", "sce-lone", "ram-lone", "nearswap", "nearswap-far", "arcee_fusion"),
    },
    "mean": {
        *("ties-mean", "ties-mean-l1", "ties-mean-density", "ties-negative", "dare_ties", "della", "della-density"),
        *("sce", "sce-all", "ram", "ramplus_tl", "ramplus-strong"),
    },
    "sum": {"ties", "ties-sum", "dare_ties-sum", "breadcrumbs_ties"},
    "none": {"ties-mixed", "nuslerp-base-rows", "model_stock-rows"},
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}
BOUNDED = sorted(set(KIND_OF) - KINDS["none"])
# Of each family and kind of bound one case; the slow suite has the others.
QUICK = {
    *("linear-sum", "task_arithmetic-mean", "passthrough", "slerp-beyond", "nuslerp-columns", "multislerp", "karcher"),
    *("dare_linear-l1", "breadcrumbs-density", "ties-lone", "nearswap", "arcee_fusion", "model_stock"),
    *("ties-mean-l1", "della-density", "sce", "ram", "ramplus-strong", "ties-sum", "breadcrumbs_ties"),
    *("ties-mixed", "nuslerp-base-rows", "model_stock-rows"),
}
# Where the result is a combination of base and deltas, so that its distance from the base follows from a Gram matrix.
COMBINED = {
    *("linear", "linear-sum", "task_arithmetic", "task_arithmetic-mean", "passthrough", "slerp", "slerp-beyond"),
    *(
        "slerp-end",
        "nuslerp",
        "nuslerp-lone",
        "multislerp",
        "multislerp-lone",
        "karcher",
        "karcher-lone",
        "model_stock",
    ),
    *("dare_linear-whole", "sce-lone"),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A base and experts: float64 arrays of one shape."""

    base: np.ndarray
    experts: list[np.ndarray]


@st.composite
def families(draw, count):
    """Return deltas that are random, skewed or heavy-tailed, some blocks of them zero or those of another expert."""
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = math.prod(shape)
    base = rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.1, 1.0]))
    experts = []
    for _ in range(count):
        noise = {
            "normal": rng.standard_normal,
            "heavy": lambda n: rng.standard_cauchy(n).clip(-1e4, 1e4),
            "skewed": lambda n: rng.lognormal(0.0, 2.0, n),
            "sparse": lambda n: rng.standard_normal(n) * (rng.random(n) < 0.2),
            "equal": lambda n: np.full(n, 0.5) * rng.choice([-1.0, 1.0], n),
        }[draw(st.sampled_from(["normal", "heavy", "skewed", "sparse", "equal"]))](size)
        experts.append(noise)
    row = shape[-1] if len(shape) > 1 else 1
    step = max(1, BLOCK // row) * row
    for start in range(0, size, step):
        for number in range(count):
            kind = draw(st.sampled_from(["as it is", "as it is", "zero", "tiny", "large", "copy", "opposite"]))
            part = slice(start, start + step)
            scale = {"zero": 0.0, "tiny": 1e-6, "large": 1e3}.get(kind, 1.0)
            if kind in {"copy", "opposite"} and number:
                experts[number][part] = experts[0][part] * (1.0 if kind == "copy" else -1.0)
            experts[number][part] *= scale
    return Family(base=base.reshape(shape), experts=[(base + noise).reshape(shape) for noise in experts])


class Merge:
    """One operator and one family, merged with whatever is left out."""

    def __init__(self, case, family):
        operator, experts, params = CASES[case]
        self.case, self.family = case, family
        resolved = tensor_params(operator, experts, params)
        self.run = Run(operator, family.base, family.experts, resolved, block_elements=BLOCK)
        self.reduction = self.run.full_reduction()
        self.influence = operator.influence(self.run.prepared, self.run.facts, self.reduction)
        self.anchor = None if operator.uses_base else family.base
        self.full = self.run.result(self.reduction)
        live = self.run.prepared.live
        self.deltas = [e - family.base if on else e * 0.0 for e, on in zip(family.experts, live, strict=True)]
        self.norms = np.array([[np.linalg.norm(part) for part in self.parts(delta)] for delta in self.deltas])

    def parts(self, array):
        flat = array.ravel()
        return [flat[start : start + self.run.block_size] for start in range(0, flat.size, self.run.block_size)]

    def without(self, omitted):
        return self.run.result(self.reduction, omitted=omitted, anchor=self.anchor)

    @property
    def rounding(self):
        """What float64 arithmetic may add: of the base and of all that the deltas can reach."""
        reach = self.influence.spread or self.influence.factors
        lengths = sum(factor * np.linalg.norm(delta) for factor, delta in zip(reach, self.deltas, strict=True))
        return ROUNDING * (np.linalg.norm(self.family.base) + lengths)

    def tensor(self, costs):
        same = np.arange(len(self.norms))[:, None].repeat(self.norms.shape[1], axis=1)
        for block in range(self.norms.shape[1]):
            values = [self.parts(expert)[block].tobytes() for expert in self.family.experts]
            same[:, block] = [values.index(value) for value in values]
        vectors = np.stack([self.family.base.ravel(), *(delta.ravel() for delta in self.deltas)])
        update = update_norm(self.influence.combination, vectors @ vectors.T)
        costs = np.where(self.norms == 0, 0, costs)
        base = float(np.linalg.norm(self.family.base))
        return BudgetTensor(
            norms=self.norms, costs=costs, influence=self.influence, same=same, update=update, base=base
        )


def omissions(selection, shape):
    """Return what a selection leaves out of its only tensor, ``(experts, blocks)``."""
    (levels,) = selection.access()
    blocks = shape[1]
    return np.array([np.frombuffer(level or b"\xff" * blocks, np.uint8) == 0 for level in levels])


def costs_of(draw, shape):
    """Return bytes per block: those of two dtypes, and of an adapter, whose blocks are free."""
    per_expert = draw(st.lists(st.sampled_from([0, 16, 32, 32]), min_size=shape[0], max_size=shape[0]))
    return np.array(per_expert)[:, None].repeat(shape[1], axis=1)


def check_every_cut(merge, order):
    shape = merge.norms.shape
    bounds = []
    for count in range(len(order.items) + 1):
        selection = order.cut(count)
        omitted = omissions(selection, shape)
        error = np.linalg.norm(merge.without(omitted) - merge.full)
        bound = selection.bound
        assert bound.absolute is not None
        assert error <= bound.absolute + merge.rounding, (count, error, bound)
        bounds.append(bound.absolute)
        if bound.relative_to_base is not None:
            assert error <= bound.relative_to_base * np.linalg.norm(merge.family.base) + merge.rounding
        if bound.relative_to_update is not None:
            update = np.linalg.norm(merge.full - merge.family.base)
            assert error <= bound.relative_to_update * update + 2 * merge.rounding
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == 0


def test_every_case_is_of_the_kind_that_is_proven():
    assert set(KIND_OF) == set(CASES)
    assert set(CASES) > QUICK
    family = Family(base=np.zeros((6, 5)), experts=list(np.random.default_rng(0).standard_normal((3, 6, 5))))
    found = {}
    for name, (_, experts, _) in CASES.items():
        merge = Merge(name, Family(base=family.base, experts=family.experts[: len(experts)]))
        found[name] = merge.influence
    assert {name: influence.kind for name, influence in found.items()} == KIND_OF
    assert {name for name, influence in found.items() if influence.combination is not None} == COMBINED


@pytest.mark.parametrize("case", every(BOUNDED, QUICK))
@settings(max_examples=examples(25))
@given(data=st.data())
def test_the_bound_holds_for_every_prefix(case, data):
    merge = Merge(case, data.draw(families(len(CASES[case][1]))))
    order = reading_order([merge.tensor(costs_of(data.draw, merge.norms.shape))])
    check_every_cut(merge, order)


@pytest.mark.parametrize("case", every(BOUNDED, QUICK))
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_block_moves_by_no_more_than_its_influence_allows_whatever_is_left_out(case, data):
    merge = Merge(case, data.draw(families(len(CASES[case][1]))))
    experts, blocks = merge.norms.shape
    flags = data.draw(st.lists(st.booleans(), min_size=experts * blocks, max_size=experts * blocks))
    omitted = np.array(flags).reshape(experts, blocks)
    moved = merge.parts(merge.without(omitted) - merge.full)
    influence = merge.influence
    for block in range(blocks):
        gone, norms = omitted[:, block], merge.norms[:, block]
        if influence.kind == "additive":
            limit = sum(f * n for f, n, out in zip(influence.factors, norms, gone, strict=True) if out)
        elif not (norms[gone] > 0).any():
            limit = 0.0
        else:
            lengths = np.array(influence.spread) * norms
            limit = lengths.sum() if influence.kind == "sum" else np.linalg.norm(lengths)
        assert np.linalg.norm(moved[block]) <= limit + merge.rounding


@pytest.mark.parametrize("case", every(sorted(CASES), QUICK))
@settings(max_examples=examples(10))
@given(data=st.data())
def test_everything_read_is_the_full_read_bit_for_bit(case, data):
    merge = Merge(case, data.draw(families(len(CASES[case][1]))))
    order = reading_order([merge.tensor(costs_of(data.draw, merge.norms.shape))])
    selection = order.cut(len(order.items))
    assert selection.bound.kind == "exact"
    assert selection.bound.absolute == 0
    assert merge.without(omissions(selection, merge.norms.shape)).tobytes() == merge.full.tobytes()


@pytest.mark.parametrize("case", every(sorted(COMBINED), QUICK))
@settings(max_examples=examples(25))
@given(data=st.data())
def test_the_norm_of_the_update_is_that_of_the_merge(case, data):
    merge = Merge(case, data.draw(families(len(CASES[case][1]))))
    known = merge.tensor(np.ones(merge.norms.shape, np.int64)).update
    measured = np.linalg.norm(merge.full - merge.family.base)
    assert known is not None
    assert known <= measured + merge.rounding
    # Next to total cancellation the lower bound is below what is left; elsewhere it is exact but for rounding.
    lengths = np.linalg.norm(np.abs(merge.influence.combination) @ np.ones((len(merge.norms) + 1, 1)))
    doubt = 1e-4 * lengths * sum(np.linalg.norm(d) for d in (merge.family.base, *merge.deltas))
    assert known >= measured - doubt - merge.rounding


@pytest.mark.parametrize("case", sorted(COMBINED - {"linear-sum", "passthrough", "slerp", "slerp-beyond", "karcher"}))
def test_the_products_with_the_base_are_needed_only_where_it_enters_twice(case):
    rng = np.random.default_rng(1)
    merge = Merge(
        case, Family(base=rng.standard_normal((6, 5)), experts=list(rng.standard_normal((len(CASES[case][1]), 6, 5))))
    )
    deltas = np.stack([delta.ravel() for delta in merge.deltas])
    known = update_norm(merge.influence.combination, deltas @ deltas.T)
    assert known == pytest.approx(np.linalg.norm(merge.full - merge.family.base))


@pytest.mark.parametrize("case", ["linear-sum", "passthrough", "karcher"])
def test_without_the_products_with_the_base_the_norm_of_such_an_update_is_unknown(case):
    rng = np.random.default_rng(1)
    merge = Merge(
        case, Family(base=rng.standard_normal((6, 5)), experts=list(rng.standard_normal((len(CASES[case][1]), 6, 5))))
    )
    deltas = np.stack([delta.ravel() for delta in merge.deltas])
    assert update_norm(merge.influence.combination, deltas @ deltas.T) is None


def test_an_election_can_turn_on_the_smallest_delta():
    """Why a bound by what is left out alone cannot be had for ties: here it would be a thousandth of the error."""
    base = np.zeros(4)
    experts = [np.ones(4), np.full(4, -0.999), np.full(4, -0.002)]
    case = numbers(POSITIVE | {"experts": [{"weight": 1.0, "density": 1.0}] * 3}, normalize=True, rescale=False)
    operator, own, params = case
    run = Run(operator, base, experts, tensor_params(operator, own, params), block_elements=BLOCK)
    omitted = np.array([[False], [False], [True]])
    error = np.linalg.norm(run.result(omitted=omitted) - run.result())
    assert error > 1.4 * np.linalg.norm(np.ones(4))
    assert error <= math.sqrt(2) * np.linalg.norm(experts)


def test_float32_merges_keep_within_the_bound_and_their_own_rounding():
    rng = np.random.default_rng(5)
    base = rng.standard_normal((64, 32)).astype(np.float32)
    experts = [(base + 0.02 * rng.standard_t(2, (64, 32))).astype(np.float32) for _ in range(3)]
    for case in BOUNDED:
        operator, own, params = CASES[case]
        run = Run(operator, base, experts[: len(own)], tensor_params(operator, own, params), block_elements=256)
        reduction = run.full_reduction()
        influence = operator.influence(run.prepared, run.facts, reduction)
        deltas = [
            (e.astype(np.float64) - base) * on for e, on in zip(experts[: len(own)], run.prepared.live, strict=True)
        ]
        norms = np.array([[np.linalg.norm(part) for part in d.reshape(8, -1)] for d in deltas])
        order = reading_order([BudgetTensor(norms=norms, costs=np.ones(norms.shape, np.int64), influence=influence)])
        full = run.result(reduction)
        for count in range(0, len(order.items) + 1, 3):
            selection = order.cut(count)
            anchor = None if operator.uses_base else base
            merged = run.result(reduction, omitted=omissions(selection, norms.shape), anchor=anchor)
            rounding = 8 * 2.0**-24 * (np.linalg.norm(full) + np.linalg.norm(base))
            assert np.linalg.norm(merged.astype(np.float64) - full) <= selection.bound.absolute + rounding
