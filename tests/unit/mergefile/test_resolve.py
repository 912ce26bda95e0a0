"""Resolving: one precedence, gradients over the layers, and where each value came from."""

import fnmatch
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.mergefile.helpers import output
from unit.mergefile.signatures import SIGNATURES

from mergepipe.mergefile.resolve import Resolver, interpolate, rule_matches, unmatched_rules
from mergepipe.mergefile.schema import ExpertRef, Output, Rule
from mergepipe.signatures import BasePolicy, OperatorSignature, ParamKind, ParamSpec, Scope

TENSOR = "model.layers.1.self_attn.q_proj.weight"
ARITHMETIC = '[outputs.m]\noperator = "task_arithmetic"\nbase = "base"\n'


def resolve(made, signature, tensor, layer, layer_count):
    return Resolver(made, signature, layer_count).resolve(tensor, layer)


def resolved(body, tensor=TENSOR, layer=1, layer_count=4):
    found = output(ARITHMETIC + body)
    return resolve(found, SIGNATURES[found.operator], tensor, layer, layer_count)


def test_defaults_come_from_the_signature():
    found = resolved('experts = ["math", "code"]\n')
    assert found.params["lambda"] == 1.0
    assert found.params["normalize"] is False
    assert found.params["missing"] == "error"
    assert found.experts == ({"weight": 1.0}, {"weight": 1.0})
    assert found.origins["weight[code]"] == found.origins["lambda"] == "default"


def test_params_of_the_output_are_for_all_experts():
    found = resolved('experts = ["math", "code"]\nparams = { weight = 0.5, lambda = 2 }\n')
    assert found.params["lambda"] == 2.0
    assert [expert["weight"] for expert in found.experts] == [0.5, 0.5]
    assert found.origins["weight[math]"] == "outputs.m.params.weight"
    assert found.origins["lambda"] == "outputs.m.params.lambda"


def test_beside_the_expert_wins_over_params():
    found = resolved('experts = ["math", { source = "code", weight = 0.2 }]\nparams.weight = 0.5\n')
    assert [expert["weight"] for expert in found.experts] == [0.5, 0.2]
    assert found.origins["weight[code]"] == "outputs.m.experts[1].weight"


RULES = """\
experts = ["math", { source = "code", weight = 0.2 }]
[[outputs.m.rules]]
match = "*.self_attn.*"
params = { weight = 0.7, lambda = 3 }
experts = { math = { weight = 0.8 } }
[[outputs.m.rules]]
match = "*.q_proj.*"
experts = { code = { weight = 0.9 } }
[[outputs.m.rules]]
match = "*.mlp.*"
params = { weight = 0.1 }
"""


def test_rules_win_over_what_is_beside_the_expert_and_later_rules_over_earlier_ones():
    found = resolved(RULES)
    assert [expert["weight"] for expert in found.experts] == [0.8, 0.9]
    assert found.params["lambda"] == 3.0
    assert found.origins["weight[math]"] == "outputs.m.rules[0].experts.math.weight"
    assert found.origins["weight[code]"] == "outputs.m.rules[1].experts.code.weight"
    assert found.origins["lambda"] == "outputs.m.rules[0].params.lambda"


def test_a_later_rule_for_all_experts_wins_over_an_earlier_one_for_one_of_them():
    body = RULES + '[[outputs.m.rules]]\nmatch = "*"\nparams.weight = 0\n'
    assert [expert["weight"] for expert in resolved(body).experts] == [0.0, 0.0]


def test_rules_do_not_touch_other_tensors():
    found = resolved(RULES, "model.norm.weight", None)
    assert [expert["weight"] for expert in found.experts] == [1.0, 0.2]


def test_globs_match_the_whole_name_and_its_case():
    rule = Rule(match=("*.q_proj.*", "lm_head.weight"))
    assert rule_matches(rule, TENSOR, 1)
    assert rule_matches(rule, "lm_head.weight", None)
    assert not rule_matches(rule, "lm_head.weight.scale", None)
    assert not rule_matches(rule, TENSOR.upper(), 1)
    assert rule_matches(Rule(match=("a[0-9]?",)), "a7x", None)


def test_layers_are_half_open_and_leave_out_what_is_outside_of_them():
    rule = Rule(layers=(1, 3))
    assert [rule_matches(rule, "x", layer) for layer in (0, 1, 2, 3, None)] == [False, True, True, False, False]


def test_a_rule_with_globs_and_layers_needs_both():
    rule = Rule(match=("*.q_proj.*",), layers=(2, 4))
    assert not rule_matches(rule, TENSOR, 1)
    assert rule_matches(rule, TENSOR, 2)
    assert not rule_matches(rule, "model.layers.2.mlp.weight", 2)


def test_gradients_are_spread_over_the_layers():
    body = 'experts = [{ source = "math", weight = [0, 1] }]\nparams.lambda = [1, 2, 4]\n'
    found = [resolved(body, TENSOR, layer, 5) for layer in (0, 1, 2, 3, 4, None)]
    assert [value.experts[0]["weight"] for value in found] == [0.0, 0.25, 0.5, 0.75, 1.0, 0.0]
    assert [value.params["lambda"] for value in found] == [1.0, 1.5, 2.0, 3.0, 4.0, 1.0]
    assert found[1].origins["weight[math]"] == "outputs.m.experts[0].weight"


def test_a_single_layer_takes_the_last_anchor():
    assert interpolate((0.2, 0.6), 0, 1) == 0.6
    assert interpolate((0.2, 0.6), None, 1) == 0.2


def test_one_anchor_is_a_constant():
    assert [interpolate((0.3,), layer, 4) for layer in (0, 1, 3, None)] == [0.3] * 4


@given(
    st.lists(st.floats(-3e38, 3e38), min_size=1, max_size=5).map(tuple),
    st.integers(1, 200).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count))),
)
def test_interpolation_stays_between_its_anchors_and_meets_them_at_the_ends(anchors, place):
    layer, count = place
    value = interpolate(anchors, layer, count)
    assert min(anchors) <= value <= max(anchors)
    if layer == count - 1:
        assert value == anchors[-1]
    elif layer == 0:
        assert value == anchors[0]


@given(st.floats(-1e6, 1e6), st.integers(2, 60).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_a_gradient_between_equal_anchors_is_that_value_exactly(anchor, place):
    assert interpolate((anchor, anchor, anchor), *place) == anchor


def test_rules_that_are_for_no_tensor_are_found():
    rules = (
        Rule(match=("*.mlp.*",)),
        Rule(match=("*.self_atn.*",)),
        Rule(layers=(0, 2)),
        Rule(layers=(7, 9)),
        Rule(match=("*.mlp.*",), layers=(5, 6)),
    )
    tensors = [("model.layers.0.mlp.w", 0), ("model.layers.5.self_attn.w", 5), ("model.norm.weight", None)]
    assert unmatched_rules(rules, iter(tensors)) == (rules[1], rules[3], rules[4])


def test_tensors_with_the_same_rules_share_their_result():
    resolver = Resolver(output(ARITHMETIC + RULES), SIGNATURES["task_arithmetic"], 4)
    assert resolver.resolve("a.mlp.b", 0) is resolver.resolve("c.mlp.d", 3)


def test_thousands_of_tensors_with_dozens_of_rules_are_quick():
    rules = "".join(f'[[outputs.m.rules]]\nmatch = "*.{n}.*"\nparams.weight = 0.{n + 1}\n' for n in range(40))
    found = output(ARITHMETIC + 'experts = ["math", { source = "code", weight = [0, 1] }]\n' + rules)
    resolver = Resolver(found, SIGNATURES["task_arithmetic"], 80)
    started = time.process_time()
    for number in range(5000):
        resolver.resolve(f"model.layers.{number % 80}.x.weight", number % 80)
    assert time.process_time() - started < 3.0


SPECS = (
    ParamSpec(name="lambda", kind=ParamKind.REAL, default=1.0, gradient=True),
    ParamSpec(name="seed", kind=ParamKind.INTEGER, default=0),
    ParamSpec(name="rescale", kind=ParamKind.CHOICE, choices=("l1", False), default="l1"),
    ParamSpec(name="t", kind=ParamKind.REAL, gradient=True),
    ParamSpec(name="weight", kind=ParamKind.REAL, scope=Scope.EXPERT, default=1.0, gradient=True),
    ParamSpec(name="flag", kind=ParamKind.FLAG, scope=Scope.EXPERT, default=True),
)
SIGNATURE = OperatorSignature(name="x", summary="", base=BasePolicy.OPTIONAL, params=SPECS)
EXPERTS = ("a", "b", "c.d")
TENSORS = [("m.0.attn.w", 0), ("m.1.attn.w", 1), ("m.1.mlp.w", 1), ("m.2.mlp.w", 2), ("norm.w", None), ("head", None)]
REALS = st.one_of(
    st.sampled_from([0.0, 0.5, -1.0, 0.1, 0.3]),
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 0.1]), min_size=1, max_size=4).map(tuple),
)
VALUES = {
    "lambda": REALS,
    "seed": st.integers(0, 3),
    "rescale": st.sampled_from(["l1", False]),
    "t": REALS,
    "weight": REALS,
    "flag": st.booleans(),
}


def some(names):
    return st.fixed_dictionaries({}, optional={name: VALUES[name] for name in names})


BESIDE = some(["weight", "flag"])
RULE = st.builds(
    Rule,
    match=st.lists(st.sampled_from(["*", "*.attn.*", "m.?.mlp.w", "[hn]*", "none", "m.1*"]), max_size=2).map(tuple),
    layers=st.sampled_from([None, None, (0, 1), (1, 3), (5, 6)]),
    params=some(list(VALUES)),
    experts=st.dictionaries(st.sampled_from(EXPERTS), BESIDE, max_size=3),
)
OUTPUTS = st.builds(
    Output,
    name=st.just("o"),
    operator=st.just("x"),
    path=st.just("build/o"),
    experts=st.lists(st.sampled_from(EXPERTS), unique=True, min_size=1, max_size=3).flatmap(
        lambda names: st.tuples(*(st.builds(ExpertRef, source=st.just(name), params=BESIDE) for name in names))
    ),
    params=some(list(VALUES)),
    rules=st.lists(RULE, max_size=4).map(tuple),
)


def obvious(made, name, expert, tensor, layer, layer_count):
    """Return a parameter's value and origin by writing down all candidates and taking the last."""
    spec = SIGNATURE.all_params()[name]
    candidates = [] if spec.default is None else [(spec.default, "default")]
    if name in made.params:
        candidates.append((made.params[name], f"outputs.o.params.{name}"))
    for index, ref in enumerate(made.experts):
        if ref.source == expert and name in ref.params:
            candidates.append((ref.params[name], f"outputs.o.experts[{index}].{name}"))
    for number, rule in enumerate(made.rules):
        by_name = not rule.match or any(fnmatch.fnmatchcase(tensor, glob) for glob in rule.match)
        by_layer = rule.layers is None or (layer is not None and layer in range(*rule.layers))
        if by_name and by_layer:
            if name in rule.params:
                candidates.append((rule.params[name], f"outputs.o.rules[{number}].params.{name}"))
            if expert is not None and name in rule.experts.get(expert, {}):
                shown = expert if expert.isidentifier() else f'"{expert}"'
                where = f"outputs.o.rules[{number}].experts.{shown}.{name}"
                candidates.append((rule.experts[expert][name], where))
    if not candidates:
        return None
    value, origin = candidates[-1]
    if isinstance(value, tuple):
        t = 0.0 if layer is None else 1.0 if layer_count == 1 else layer / (layer_count - 1)
        place = t * (len(value) - 1)
        anchors = [*value, value[-1]]
        left, right = anchors[int(place)], anchors[int(place) + 1]
        value = pytest.approx(left + (right - left) * (place - int(place)), rel=1e-15, abs=1e-16)
    return value, origin


@given(OUTPUTS, st.sampled_from(TENSORS), st.integers(3, 5))
def test_resolving_equals_taking_the_last_of_all_candidates(made, tensor, layer_count):
    found = resolve(made, SIGNATURE, *tensor, layer_count)
    everything = {}
    for name, spec in SIGNATURE.all_params().items():
        owners = [ref.source for ref in made.experts] if spec.scope is Scope.EXPERT else [None]
        for owner in owners:
            everything[name, owner] = obvious(made, name, owner, *tensor, layer_count)
    expected = {key: value for key, value in everything.items() if value is not None}
    values = {(name, None): value for name, value in found.params.items()}
    for ref, params in zip(made.experts, found.experts, strict=True):
        values |= {(name, ref.source): value for name, value in params.items()}
    assert values == {key: value for key, (value, _) in expected.items()}
    labels = {key: key[0] if key[1] is None else f"{key[0]}[{key[1]}]" for key in expected}
    assert found.origins == {labels[key]: origin for key, (_, origin) in expected.items()}
    for value in found.params.values():
        assert isinstance(value, bool | int | float | str)
