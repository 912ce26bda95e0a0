"""What mergekit 0.1.5 makes of small inputs with `dtype: float32`, and how near mergepipe comes to it.

The fixtures are its own outputs; `python -m benchmarks.parity fixtures` writes them anew. Where both sides are
deterministic and sum over a few experts only, the bits are equal. Elsewhere the bound says why they cannot be. It is in
units in the last place (float32, or the output's dtype) at the magnitude of the largest input or the output, so that
an element that nearly cancels is held to what went into it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import read_checkpoint, read_safetensors
from support.projects import SmallProject, quicken

from mergepipe.operators.registry import operators

FIXTURES = Path(__file__).parent / "fixtures"
HEAD, *CASES = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))
FAMILIES = sorted({case["family"] for case in CASES})

TREES = "sums over a tensor are float32 trees in mergekit and float64 here: the coefficients differ by their last bits"
FUSED = "mergekit's linear fuses multiply and add: its products are not rounded"
RECIPROCAL = "mergekit divides by the distance through a rounded reciprocal"
PARTIAL = "torch sums the last elements of a tensor over five or more experts in another order"
# Methods with sums over a tensor, or with another order of roundings: the largest distance, and why there is one.
BOUNDS = {
    "linear": (2, FUSED),
    "nearswap": (2, RECIPROCAL),
    "slerp": (4, TREES),
    "nuslerp": (6, TREES),
    "multislerp": (8, TREES),
    "karcher": (6, TREES),
    "model_stock": (64, f"{TREES}; a small angle between deltas is a difference of large sums"),
    "sce": (4, TREES),
}


def bound_of(recipe: dict[str, Any]) -> tuple[int, str]:
    """Return how far an output may be from mergekit's, and why."""
    if recipe["operator"] in BOUNDS:
        return BOUNDS[recipe["operator"]]
    if recipe.get("params", {}).get("rescale"):
        return 8, f"{TREES}, and deltas may be larger than inputs after they are rescaled"
    if len(recipe["experts"]) > 4:
        return 1, PARTIAL
    return 0, "both do the same operations in the same order"


def id_of(case: dict[str, Any]) -> str:
    return str(case["id"])


def inputs_of(family: str) -> dict[str, dict[str, Any]]:
    """Return the tensors of every source of a family."""
    found: dict[str, dict[str, Any]] = {}
    for key, array in read_safetensors(FIXTURES / f"inputs-{family}.safetensors").items():
        source, _, tensor = key.partition("/")
        found.setdefault(source, {})[tensor] = array
    return found


class Outputs:
    """The outputs by case. Those of one family and operator are built together, the first time that one is asked for.

    Workers of a parallel run build only what they compare, so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._projects: dict[str, SmallProject] = {}
        self._made: dict[str, dict[str, Any]] = {}

    def __getitem__(self, case_id: str) -> dict[str, Any]:
        if case_id not in self._made:
            (case,) = (case for case in CASES if case["id"] == case_id)
            self._build(case["family"], case["recipe"]["operator"])
        return self._made[case_id]

    def _build(self, family: str, operator: str) -> None:
        if family not in self._projects:
            self._projects[family] = SmallProject(self._folder / family)
            self._projects[family].add_sources(inputs_of(family))
        project = self._projects[family]
        recipes = {case["id"]: case["recipe"] for case in CASES if case["family"] == family}
        project.outputs = {name: recipe for name, recipe in recipes.items() if recipe["operator"] == operator}
        project.save()
        project.build()
        self._made |= {name: read_checkpoint(project.folder(name)) for name in project.outputs}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the outputs of all cases."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        yield Outputs(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def inputs():
    """Return for each family every source's elements, flat."""
    return {family: {source: flat(tensors) for source, tensors in inputs_of(family).items()} for family in FAMILIES}


def flat(tensors) -> Any:
    """Return all elements, tensor by tensor in the order of the fixtures."""
    return np.concatenate([tensors[name].reshape(-1) for name in HEAD["tensors"]])


def unit(values, dtype) -> Any:
    """Return the unit in the last place at these magnitudes."""
    single = np.spacing(values.astype(np.float32)).astype(np.float64)
    return single * (1 if dtype.itemsize == 4 else 2**16)


def stored(case) -> tuple[Any, Any]:
    """Return mergekit's elements, and which are undecided: a tie at a threshold, a sign that hangs on rounding."""
    arrays = read_safetensors(FIXTURES / f"{case['recipe']['operator']}.safetensors")
    theirs, bits = arrays[case["id"]], arrays.get(f"{case['id']}?")
    undecided = np.zeros(theirs.shape, bool) if bits is None else np.unpackbits(bits)[: theirs.size].astype(bool)
    return theirs, undecided


def sources_of(recipe) -> list[str]:
    """Return the sources of a recipe, the base last."""
    experts = [expert if isinstance(expert, str) else expert["source"] for expert in recipe["experts"]]
    return [*experts, *([recipe["base"]] if "base" in recipe else [])]


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_an_output_is_what_mergekit_makes_of_it(built, inputs, case):
    (theirs, undecided), ours = stored(case), flat(built[case["id"]])
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    sizes = [np.abs(inputs[case["family"]][source].astype(np.float32)) for source in sources_of(case["recipe"])]
    scale = unit(np.max([*sizes, np.abs(theirs.astype(np.float32))], axis=0), theirs.dtype)
    apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)) / scale
    bound, reason = bound_of(case["recipe"])
    assert apart[~undecided].max(initial=0) <= bound, reason


def keeps_a_count(case) -> bool:
    """Return whether what differs from the base is what was kept, ties included."""
    recipe = case["recipe"]
    return recipe["operator"] in ("ties", "breadcrumbs", "breadcrumbs_ties") and len(recipe["experts"]) == 1


@pytest.mark.parametrize("case", [case for case in CASES if keeps_a_count(case)], ids=id_of)
def test_as_many_equal_magnitudes_are_kept_as_in_mergekit(built, inputs, case):
    (theirs, _), ours = stored(case), flat(built[case["id"]])
    base = inputs[case["family"]]["base"].astype(np.float32)
    ends = np.cumsum([built[case["id"]][name].size for name in HEAD["tensors"]])[:-1]
    counts = [[int(part.sum()) for part in np.split(output != base, ends)] for output in (ours, theirs)]
    if case["recipe"]["operator"] != "ties":  # of tiny tensors mergekit's breadcrumbs keep nothing, ours one element
        counts = [[max(count, 1) for count in kept] for kept in counts]
    assert counts[0] == counts[1]


def test_most_elements_are_compared():
    undecided = np.concatenate([stored(case)[1] for case in CASES])
    assert undecided.mean() < 0.15


def test_most_methods_are_compared_to_the_bit_somewhere():
    equal = {case["recipe"]["operator"] for case in CASES if bound_of(case["recipe"])[0] == 0}
    assert equal == {case["recipe"]["operator"] for case in CASES} - set(BOUNDS)


def test_every_operator_is_compared():
    assert {case["recipe"]["operator"] for case in CASES} == set(operators())
