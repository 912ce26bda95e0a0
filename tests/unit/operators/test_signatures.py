"""The signatures of the operators: complete, in range, and with the inputs and defaults of the methods."""

import subprocess
import sys

import pytest
from unit.mergefile.helpers import SOURCES, parse

from mergepipe.operators.registry import signatures
from mergepipe.signatures import BasePolicy, ParamKind, Scope

BY_NAME = signatures()
EACH = pytest.mark.parametrize("signature", BY_NAME.values(), ids=BY_NAME)


def test_all_methods_of_the_family_are_there():
    assert sorted(BY_NAME) == sorted(
        [
            "linear",
            "task_arithmetic",
            "passthrough",
            "slerp",
            "nuslerp",
            "multislerp",
            "karcher",
            "ties",
            "dare_linear",
            "dare_ties",
            "della",
            "della_linear",
            "breadcrumbs",
            "breadcrumbs_ties",
            "sce",
            "model_stock",
            "nearswap",
            "arcee_fusion",
            "ram",
            "ramplus_tl",
        ]
    )


@EACH
def test_a_summary_is_one_line_in_the_style_of_the_others(signature):
    assert signature.summary
    assert "\n" not in signature.summary
    assert not signature.summary.endswith(".")
    assert not signature.summary[0].isupper()


@EACH
def test_every_parameter_is_documented_and_its_default_is_in_range(signature):
    names = [spec.name for spec in signature.params]
    assert len(set(names)) == len(names)
    for spec in signature.params:
        assert spec.doc.endswith(".")
        assert "|" not in spec.doc
        assert spec.gradient == (spec.kind is ParamKind.REAL)
        if spec.kind is ParamKind.REAL and spec.default is not None:
            assert type(spec.default) is float
            assert spec.low is None or spec.default >= spec.low
            assert spec.high is None or spec.default <= spec.high
        if spec.kind is ParamKind.CHOICE:
            assert spec.default in spec.choices


def defaults(name):
    return {spec.name: spec.default for spec in BY_NAME[name].params}


def test_defaults_are_those_of_the_methods():
    assert defaults("linear") == {"weight": 1.0, "normalize": True}
    assert defaults("task_arithmetic") == {"weight": 1.0, "normalize": False, "lambda": 1.0}
    assert defaults("passthrough") == {"scale": 1.0}
    assert defaults("ties") == {"normalize": True, "rescale": False, "lambda": 1.0, "weight": 1.0, "density": 1.0}
    for name in ("dare_linear", "dare_ties"):
        assert defaults(name)["rescale"] == "density"
        assert defaults(name)["normalize"] is False
        assert defaults(name)["seed"] == 0
    assert defaults("della")["normalize"] is True
    assert defaults("della_linear")["normalize"] is False
    assert defaults("della")["epsilon"] == 0.15
    assert defaults("breadcrumbs")["gamma"] == 0.01
    assert defaults("slerp") == defaults("nearswap") == {"t": None}
    assert defaults("karcher") == {"max_iter": 10, "tol": 1e-5}
    assert defaults("multislerp") == {"normalize_weights": True, "eps": 1e-8, "weight": 1.0}
    assert defaults("sce") == {"select_topk": 1.0}
    assert defaults("model_stock") == {"filter_wise": False}
    assert defaults("ramplus_tl") == {"r": 0.1, "alpha": 0.2, "epsilon": 1e-5}


def test_inputs_are_those_of_the_methods():
    optional = {name for name, signature in BY_NAME.items() if signature.base is BasePolicy.OPTIONAL}
    assert optional == {"linear", "passthrough", "nuslerp", "multislerp", "karcher"}
    counts = {
        name: (signature.min_experts, signature.max_experts)
        for name, signature in BY_NAME.items()
        if (signature.min_experts, signature.max_experts) != (1, None)
    }
    signs = {"ties", "dare_ties", "della", "breadcrumbs_ties"}
    assert {name: counts.pop(name) for name in signs} == dict.fromkeys(signs, (1, 90))
    assert counts == {
        "passthrough": (1, 1),
        "slerp": (1, 2),  # the base may be listed beside the other
        "nearswap": (1, 2),
        "arcee_fusion": (1, 2),
        "nuslerp": (2, 2),
        "model_stock": (2, None),
        "sce": (1, 64),
    }


def test_random_methods_have_a_seed_and_only_these():
    seeded = {name for name in BY_NAME if "seed" in defaults(name)}
    assert seeded == {"dare_linear", "dare_ties", "della", "della_linear"}


def test_per_expert_parameters_are_those_of_the_table():
    per_expert = {
        name: {spec.name for spec in signature.params if spec.scope is Scope.EXPERT}
        for name, signature in BY_NAME.items()
    }
    assert per_expert["ties"] == per_expert["dare_linear"] == {"weight", "density"}
    assert per_expert["della"] == {"weight", "density", "epsilon"}
    assert per_expert["breadcrumbs_ties"] == {"weight", "density", "gamma"}
    assert per_expert["nuslerp"] == per_expert["multislerp"] == {"weight"}
    assert all(not per_expert[name] for name in ("slerp", "karcher", "sce", "model_stock", "ram", "ramplus_tl"))


@EACH
def test_a_mergefile_with_all_parameters_of_one_is_right(signature):
    body = f'{SOURCES}[outputs.m]\noperator = "{signature.name}"\nbase = "base"\n'
    body += 'experts = ["math", "code"]\n' if signature.max_experts != 1 else 'experts = ["math"]\n'
    body += "[outputs.m.params]\n"
    given = {spec.name: 0.5 if spec.default is None else spec.default for spec in signature.params}
    for name, value in given.items():
        body += f"{name} = {str(value).lower() if not isinstance(value, str) else repr(value)}\n"
    assert parse(body).outputs["m"].params == given


def test_parsing_imports_no_array_library():
    script = (
        "import sys, pathlib\n"
        "from mergepipe.mergefile.parse import parse_mergefile\n"
        "from mergepipe.mergefile import resolve, template\n"
        "from mergepipe.operators.registry import operators\n"
        "operators()\n"
        "heavy = {'numpy', 'torch', 'networkx', 'rich', 'ml_dtypes', 'tomlkit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
