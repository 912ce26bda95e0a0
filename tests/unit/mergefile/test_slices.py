"""Slices: what may be written, what is wrong with what is written, and whose parameters count."""

import pytest
from unit.mergefile.helpers import SOURCES, check, line_of, only_problem, output, parse
from unit.mergefile.signatures import LINEAR, PASSTHROUGH, SIGNATURES, TASK_ARITHMETIC

from mergepipe.mergefile.checks import references
from mergepipe.mergefile.resolve import Resolver
from mergepipe.mergefile.schema import ExpertRef, Rule, Slice

KEYS = "`source`, `experts`, `layers`, `operator`, `base`, `base_layers`, `params` or `rules`"
STACK = '[outputs.m]\noperator = "passthrough"\n'
SECOND = "[[outputs.m.slices]]\noperator"
FULL = """\
[outputs.m]
operator = "passthrough"
params = { scale = [0.5, 1.0], lambda = 3 }
[[outputs.m.slices]]
source = "math"
layers = "0..3"
[[outputs.m.slices]]
operator = "task_arithmetic"
base = "base"
base_layers = "2..6"
layers = " 8 .. 12 "
experts = ["math", { source = "code", layers = "4..8", weight = 0.25 }]
params = { lambda = 2, weight = [0, 1] }
rules = [{ match = "*.mlp.*", experts = { code = { weight = 9 } } }]
[[outputs.m.rules]]
layers = "3..5"
params = { weight = 5, scale = 4 }
experts = { code = { weight = 6 } }
"""


def test_everything_that_a_slice_may_say_is_read():
    found = output(FULL)
    assert found.experts == ()
    assert found.slices == (
        Slice(layers=(0, 3), experts=(ExpertRef(source="math"),)),
        Slice(
            layers=(8, 12),
            operator="task_arithmetic",
            base="base",
            base_layers=(2, 6),
            experts=(ExpertRef(source="math"), ExpertRef(source="code", layers=(4, 8), params={"weight": 0.25})),
            params={"lambda": 2.0, "weight": (0.0, 1.0)},
            rules=(Rule(match=("*.mlp.*",), experts={"code": {"weight": 9.0}}),),
        ),
    )
    text = SOURCES + FULL
    assert [part.line for part in found.slices] == [line_of(text, part) for part in ("[[outputs.m.slices", SECOND)]
    assert found.expert_sources == ("math", "code")


def test_every_reference_of_a_slice_is_known_with_its_place():
    assert list(references(output(FULL))) == [
        ("math", ("outputs", "m", "slices", 0)),
        ("base", ("outputs", "m", "slices", 1, "base")),
        ("math", ("outputs", "m", "slices", 1)),
        ("code", ("outputs", "m", "slices", 1)),
    ]


@pytest.mark.parametrize("layers", ["0..0", "3..1", "-1..2"])
def test_a_wrong_range_is_kept_until_the_model_is_known(layers):
    (part,) = output(f'{STACK}slices = [{{ source = "math", layers = "{layers}" }}]\n').slices
    assert "..".join(map(str, part.layers)) == layers


@pytest.mark.parametrize(
    ("body", "key", "what", "hint"),
    [
        ('{ layers = "0..2"@ }', ".source", "missing: where the slice comes from", 'write `source = "NAME"`'),
        ('{ source = "math"@ }', ".layers", "missing: which layers the slice takes", '`layers = "0..8"`'),
        (
            '{ source = "math", experts = ["code"@], layers = "0..2" }',
            ".experts",
            "a slice has a `source` or `experts`, not both",
            None,
        ),
        (
            '{ source = "mth"@, layers = "0..2" }',
            ".source",
            "unknown source `mth`; expected `base`, `math` or `code`",
            "math",
        ),
        (
            '{ source = "math", layers = 4@ }',
            ".layers",
            'invalid value; expected layers such as "8..16" (8 to 15: the end is not included), got 4',
            'layer 4 alone is "4..5"',
        ),
        (
            '{ source = "math", layers = "0..2", scale = 1@ }',
            ".scale",
            f"unknown key; expected {KEYS}",
            "parameters go in `params` of the slice",
        ),
        (
            '{ experts = ["math", "code"@], layers = "0..2" }',
            ".experts",
            "`passthrough` needs exactly 1 expert, and there are 2",
            None,
        ),
        (
            '{ experts = ["math", { source = "code", layers = "0..3"@ }], layers = "4..6", operator = "linear" }',
            ".experts[1].layers",
            "has 3 layers, and the slice 2",
            '"0..2"',
        ),
        (
            '{ source = "math", base = "base", base_layers = "0..3"@, layers = "4..6" }',
            ".base_layers",
            "has 3 layers, and the slice 2",
            '"0..2"',
        ),
        (
            '{ source = "math", base_layers = "0..2"@, layers = "4..6" }',
            ".base_layers",
            "there is no base that they could be of",
            "`base`",
        ),
        (
            '{ source = "math", layers = "0..2", operator = "task_arithmetic"@ }',
            ".base",
            "missing: `task_arithmetic` needs a base",
            'write `base = "NAME"` here, or in `[outputs.m]`',
        ),
        (
            '{ source = "math", layers = "0..2", operator = "lineer"@ }',
            ".operator",
            "unknown operator `lineer`",
            "did you mean `linear`?",
        ),
        (
            '{ source = "math", layers = "0..2", params = { weight = 1@ } }',
            ".params.weight",
            "unknown parameter of `passthrough`; expected `scale`",
            None,
        ),
        (
            '{ source = "math", layers = "0..2", rules = [{ match = "*", experts = { code = { scale = 1@ } } }] }',
            ".rules[0].experts.code",
            "`code` is not an expert of this output; expected `math`",
            None,
        ),
        ("3@", "", "invalid value; expected a table, got 3", "[[outputs.m.slices]]"),
    ],
)
def test_what_is_wrong_with_a_slice_is_said_with_its_place(body, key, what, hint):
    check(f"{STACK}slices = [{body}]\n", f"outputs.m.slices[0]{key}", what, hint)


def test_an_output_needs_a_slice_and_has_experts_or_slices():
    check(f"{STACK}slices = []@\n", "outputs.m.slices", "an output needs at least one slice; got an empty list")
    body = STACK + 'experts = ["math"]@\nslices = [{ source = "math", layers = "0..2" }]\n'
    check(body, "outputs.m.experts", "an output has `experts` or `slices`, not both", "name the experts in the slices")


def test_parameters_of_the_output_may_be_those_of_any_of_its_operators():
    found = output(FULL)
    assert found.params == {"scale": (0.5, 1.0), "lambda": 3.0}
    check(
        f'{STACK}params.lamda = 1@\nslices = [{{ source = "math", layers = "0..2" }}, {{ source = "math",'
        ' base = "base", layers = "0..2", operator = "task_arithmetic" }]\n',
        "outputs.m.params.lamda",
        "unknown parameter of `passthrough`; expected `scale`, `weight`, `normalize` or `lambda`",
        "did you mean `lambda`?",
    )


def test_an_output_is_in_a_cycle_through_a_slice():
    body = STACK + 'slices = [{ source = "m", layers = "0..2" }]\n'
    assert "`m` refers to itself" in only_problem(SOURCES + body).message


def resolver(number, signature, first=0, count=3):
    return Resolver(output(FULL), signature, count, slice_index=number, first_layer=first)


def test_beside_the_expert_wins_over_the_slice_which_wins_over_the_output():
    found = resolver(1, TASK_ARITHMETIC, 3, 4).resolve("model.layers.6.attn.w", 6)
    assert found.params["lambda"] == 2.0
    assert [expert["weight"] for expert in found.experts] == [1.0, 0.25]
    assert found.origins["lambda"] == "outputs.m.slices[1].params.lambda"
    assert found.origins["weight[math]"] == "outputs.m.slices[1].params.weight"
    assert found.origins["weight[code]"] == "outputs.m.slices[1].experts[1].weight"
    assert "scale" not in found.params


def test_rules_of_the_slice_win_over_those_of_the_output_which_count_its_layers():
    found = resolver(1, TASK_ARITHMETIC, 3, 4).resolve("model.layers.3.mlp.w", 3)
    assert [expert["weight"] for expert in found.experts] == [5.0, 9.0]
    assert found.origins["weight[code]"] == "outputs.m.slices[1].rules[0].experts.code.weight"
    assert found.origins["weight[math]"] == "outputs.m.rules[0].params.weight"
    outside = resolver(0, PASSTHROUGH).resolve("model.layers.2.mlp.w", 2)
    assert outside.experts[0]["scale"] == 1.0


def test_gradients_run_over_the_layers_of_the_slice_also_those_of_the_output():
    found = resolver(0, PASSTHROUGH)
    assert [found.resolve("w", layer).experts[0]["scale"] for layer in (0, 1, 2, None)] == [0.5, 0.75, 1.0, 0.5]
    found = resolver(1, TASK_ARITHMETIC, 10, 3)
    weights = [found.resolve("w", layer).experts[0]["weight"] for layer in (10, 11, 12, None)]
    assert weights == [0.0, 0.5, 1.0, 0.0]
    assert resolver(1, TASK_ARITHMETIC, 10, 1).resolve("w", 10).experts[0]["weight"] == 1.0


def test_a_slice_of_another_operator_has_that_operators_defaults():
    body = '{ experts = ["math", "code"], layers = "0..2", operator = "linear" }'
    found = parse(f"{SOURCES}{STACK}slices = [{body}]\n").outputs["m"]
    values = Resolver(found, SIGNATURES["linear"], 2, slice_index=0).resolve("w", 0)
    assert values.params["normalize"] is LINEAR.all_params()["normalize"].default is True
    assert values.origins["normalize"] == "default"
