"""Operators of the user's own: they merge as written, their code is part of every key, and nothing runs unasked."""

import sys
import textwrap
from typing import ClassVar

import numpy as np
import pytest
from support.checkpoints import random_tensors
from support.cli import run_mergepipe
from support.projects import SmallProject

from mergepipe.errors import CollectedErrors, MergefileError, OperatorError, PlanError
from mergepipe.project.plugins import VARIABLE
from mergepipe.project.verify import VerifyOptions

SHAPES = {"model.layers.0.w": (12, 16), "model.layers.1.w": (12, 16), "model.norm.weight": (40,)}
MIDPOINT = '''
    def midpoint(base, experts, *, pull: float = 0.5):
        """Between the base and the mean of the experts."""
        return base + pull * (sum(experts) / len(experts) - base)
'''


class CustomProject(SmallProject):
    """A project with `[operators]`, whose code may run."""

    declared: ClassVar = {"mid": "ops.py:midpoint"}
    allowed = True

    def save(self):
        super().save()
        text = "".join(f'[operators.{name}]\npython = "{where}"\n' for name, where in self.declared.items())
        self.mergefile.write_text(self.mergefile.read_text() + text)

    def open(self, **options):
        return super().open(**({"allow_custom": self.allowed} | options))

    def code(self, text, name="ops.py"):
        (self.root / name).write_text(textwrap.dedent(text))


@pytest.fixture
def project(tmp_path):
    project = CustomProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, SHAPES, np.dtype("float32")))
    project.code(MIDPOINT)
    project.set_output("m", {"operator": "mid", "base": "base", "experts": ["e1", "e2"]})
    return project


def midpoint(project, pull=0.5):
    tensors = {}
    for name in SHAPES:
        base, first, second = (random_tensors(seed, SHAPES, np.dtype("float32"))[name] for seed in range(3))
        tensors[name] = base + np.float32(pull) * ((0 + first + second) / np.float32(2) - base)
    return tensors


def check(project, want):
    for name, array in project.tensors("m").items():
        np.testing.assert_array_equal(array, want[name])


def test_a_function_of_a_file_merges(project):
    assert project.build_one("m").state == "built"
    check(project, midpoint(project))
    assert project.build_one("m").state == "unchanged"


def test_parameters_rules_and_gradients_reach_the_function(project):
    project.outputs["m"]["params"] = {"pull": [0.0, 1.0]}
    project.outputs["m"]["rules"] = [{"match": "*norm*", "params": {"pull": 0.25}}]
    project.save()
    project.build()
    want = {"model.layers.0.w": 0.0, "model.layers.1.w": 1.0, "model.norm.weight": 0.25}
    check(project, {name: midpoint(project, pull)[name] for name, pull in want.items()})


def test_code_runs_only_where_it_is_allowed(project, monkeypatch):
    project.code("raise RuntimeError('this ran')")
    project.allowed = False
    for command in ("build", "plan", "status"):
        with pytest.raises(MergefileError, match=r"the code of `ops\.py:midpoint` would run") as caught:
            getattr(project.open(), command)()
        assert "--allow-custom" in caught.value.hint
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(MergefileError, match="RuntimeError: this ran"):
        project.build()


def test_a_name_that_a_file_lacks_is_answered_with_those_that_it_defines(project):
    project.code("from math import *\nfrom typing import Any\ndef other(base, experts): ...\nclass Third: ...")
    with pytest.raises(MergefileError, match="defines no `midpoint`") as caught:
        project.open()
    assert caught.value.hint == "it defines `other`, `Third`"


@pytest.mark.parametrize("no", ["", "0", "false", "no", "off"])
def test_no_word_for_no_in_the_environment_allows_code(project, monkeypatch, no):
    project.code("raise RuntimeError('this ran')")
    project.allowed = False
    monkeypatch.setenv(VARIABLE, no)
    with pytest.raises(MergefileError, match="would run"):
        project.build()


def test_an_operator_that_no_output_uses_is_not_loaded(project):
    project.declared = {"mid": "ops.py:midpoint", "other": "missing.py:nothing"}
    project.save()
    assert project.build_one("m").state == "built"


def test_changed_code_makes_outputs_stale_and_is_named(project):
    project.build()
    lock = project.lock.read_text()
    project.code(MIDPOINT.replace("return base", "return 2 * base"))
    (status,) = project.open().status().outputs.values()
    (reason,) = status.reasons
    assert status.state == "stale"
    assert reason.startswith("the code of a custom operator changed: `mid` b3:")
    report = project.build_one("m")
    assert report.blocks["computed"] == report.blocks["total"]
    assert report.blocks["cached"] == 0
    assert project.lock.read_text() != lock
    project.code(MIDPOINT)
    project.build()
    assert project.lock.read_text() == lock


def test_a_changed_module_beside_the_file_counts_as_changed_code(project):
    project.code("FACTOR = 0.5", "helper.py")
    code = "import helper\ndef midpoint(base, experts):\n    return base * helper.FACTOR\n"
    project.code(code)
    project.build()
    np.testing.assert_array_equal(
        project.tensors("m")["model.norm.weight"],
        random_tensors(0, SHAPES, np.dtype("float32"))["model.norm.weight"] * np.float32(0.5),
    )
    project.code("FACTOR = 0.25", "helper.py")
    assert project.build_one("m").state == "built"
    assert "helper" not in sys.modules
    assert not (project.root / "__pycache__").exists()


def test_rows_come_whole_where_the_function_asks_for_them(project):
    project.code(
        """
        from mergepipe import merge_function

        @merge_function(base="none", rows=True, per_expert={"weight": 1.0})
        def midpoint(base, experts, *, weight):
            assert base is None
            total = sum(w * x for w, x in zip(weight, experts))
            return total - total.mean(axis=1, keepdims=True)
        """
    )
    project.outputs["m"]["experts"] = [{"source": "e1", "weight": 0.5}, "e2"]
    project.save()
    project.build()
    first, second = (random_tensors(seed, SHAPES, np.dtype("float32")) for seed in (1, 2))
    for name, array in project.tensors("m").items():
        total = np.float32(0.5) * first[name] + second[name]
        np.testing.assert_allclose(array, total - total.mean(-1, keepdims=True), atol=1e-6)


def test_a_class_of_the_contract_is_an_operator_too(project):
    project.code(
        """
        from mergepipe.operators.additive import Linear

        class Mine(Linear):
            def apply(self, inputs, prepared, reduction=None):
                return super().apply(inputs, prepared, reduction) * 2
        """
    )
    project.declared = {"mid": "ops.py:Mine"}
    project.set_output("m", {"operator": "mid", "experts": ["e1", "e2"]})
    project.build()
    first, second = (random_tensors(seed, SHAPES, np.dtype("float32")) for seed in (1, 2))
    check(project, {name: (first[name] + second[name]) / np.float32(2) * 2 for name in SHAPES})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def midpoint(base): ...", "must take the base and the experts"),
        ("def midpoint(base, experts, *rest): ...", "must take the base and the experts"),
        ("midpoint = 3", "is a int, not a function that merges"),
        ("def other(base, experts): ...", "defines no `midpoint`"),
        ("def midpoint(base, experts:", r"SyntaxError: .* closed \(ops\.py, line 1\)$"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(line 2\)$"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def midpoint(base, experts, *, how='a'): ...", "which no parameter can have"),
    ],
)
def test_what_is_no_operator_is_refused_in_words(project, code, message):
    project.code(code)
    with pytest.raises((MergefileError, CollectedErrors), match=message):
        project.open()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return experts[0][:1]", "returned float64 .1. where"),
        ("return experts[0] > 0", "returned bool"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("experts[0][:] = 0; return experts[0]", "read-only"),
    ],
)
def test_what_a_function_does_wrong_stops_the_build_before_weights_are_read(project, body, message):
    project.code(f"def midpoint(base, experts):\n    {body}\n")
    with pytest.raises((OperatorError, PlanError), match=message):
        project.open().plan()
    assert not project.folder("m").exists()


def test_unknown_parameters_are_refused_with_the_functions_own(project):
    project.outputs["m"]["params"] = {"pul": 0.3}
    project.save()
    with pytest.raises(MergefileError, match="unknown parameter of `mid`") as caught:
        project.open()
    assert caught.value.hint == "did you mean `pull`?"


# --- packages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package that offers the operator `half`."""
    site = tmp_path / "site"
    info = site / "halves-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[mergepipe.operators]\nhalf = halves:half\n")
    (site / "halves.py").write_text("def half(base, experts):\n    return experts[0] * 0.5\n")
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("halves", None)


def test_an_installed_package_offers_operators(project, package):
    project.declared = {}
    project.set_output("m", {"operator": "half", "experts": ["e1"]})
    project.build()
    first = random_tensors(1, SHAPES, np.dtype("float32"))
    check(project, {name: first[name] * np.float32(0.5) for name in SHAPES})
    project.allowed = False
    with pytest.raises(MergefileError, match=r"the package `halves 1\.2`"):
        project.open()


def test_an_operator_that_nobody_offers_is_unknown(project, package):
    project.declared = {}
    project.set_output("m", {"operator": "halve", "experts": ["e1"]})
    with pytest.raises(MergefileError, match="unknown operator `halve`"):
        project.open()


STATISTIC = """
    from dataclasses import dataclass
    from typing import ClassVar
    from mergepipe.digest import record_digest
    from mergepipe.operators.additive import Linear
    from mergepipe.operators.contract import Reduction, Statistic

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Count(Statistic):
        name: ClassVar = "count"
        version: ClassVar = 1
        slots: tuple[int, ...]

        def settings(self):
            return ()

        def measure(self, tiles):
            return bytes([sum(tile.shape[0] for tile in tiles) * FACTOR % 251])

    class Mine(Linear):
        def reduces(self, prepared, facts):
            return True

        def reduce(self, prepared, facts, slots):
            count = Count(slots=(1,))
            values = yield (count,)
            total = sum(value[0] for value in values[count])
            return Reduction(value=total, key=record_digest("count", total))

        def apply(self, inputs, prepared, reduction=None):
            return super().apply(inputs, prepared) * 0 + reduction.value
"""


def test_changed_code_of_a_statistic_takes_it_again(project):
    project.declared = {"mid": "ops.py:Mine"}
    project.code(STATISTIC.replace("FACTOR", "1"))
    project.set_output("m", {"operator": "mid", "experts": ["e1", "e2"]})
    project.build()
    project.code(STATISTIC.replace("FACTOR", "2"))
    project.build()
    assert {float(value) for value in np.unique(project.tensors("m")["model.norm.weight"])} == {80.0}


def test_another_function_of_the_same_file_is_another_operator(project):
    project.code("def a(base, experts):\n    return base * 2\n\ndef b(base, experts):\n    return base * 3\n")
    base = random_tensors(0, SHAPES, np.dtype("float32"))
    for function, factor in (("a", 2), ("b", 3), ("a", 2)):
        project.declared = {"mid": f"ops.py:{function}"}
        project.save()
        assert project.build_one("m").state == "built"
        check(project, {name: array * np.float32(factor) for name, array in base.items()})


def test_what_a_function_raises_during_a_build_names_tensor_and_output(project):
    project.code("def midpoint(base, experts):\n    return 1 / 0 if base.size > 3 else base\n")
    told = r"tensor `model\.layers\.0\.w` of output `m`: the custom operator `mid` raised ZeroDivisionError"
    with pytest.raises(OperatorError, match=told):
        project.build()


def test_verifying_takes_no_code_of_operators(project, monkeypatch):
    """It only hashes; making blocks again runs code, and needs to be allowed."""
    monkeypatch.delenv(VARIABLE, raising=False)
    project.build()
    project.code("raise RuntimeError('this ran')")
    unloaded = project.open(allow_custom=False, load_custom=False)
    assert unloaded.verify().ok
    assert unloaded.verify(["m"], VerifyOptions(full=True)).ok
    with pytest.raises(MergefileError, match="would run"):
        unloaded.verify(["m"], VerifyOptions(sample=50.0))
    with pytest.raises(MergefileError, match="opened without their code"):
        unloaded.status()


def test_the_command_line_verifies_without_code(project):
    assert run_mergepipe(["build", "--allow-custom"], project.root).code == 0
    project.code("raise RuntimeError('this ran')")
    result = run_mergepipe(["verify"], project.root)
    assert (result.code, result.stderr) == (0, "")
    refused = run_mergepipe(["verify", "--rebuild-sample", "5%"], project.root)
    assert (refused.code, "would run" in refused.stderr) == (2, True)


def test_verifying_takes_no_code_of_packages(project, package):
    project.set_output("m", project.outputs["m"] | {"operator": "half"})
    project.build()
    sys.modules.pop("halves")
    assert project.open(allow_custom=False, load_custom=False).verify().ok
    assert "halves" not in sys.modules
