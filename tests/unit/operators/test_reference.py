"""The operators' reference: the page is what the operators say of themselves, and what they say is complete and so."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.operators import Run, tensor_params

from mergepipe.operators.reference import experts_text, operators_page, value_text
from mergepipe.operators.registry import operators
from mergepipe.signatures import COMMON_PARAMS, BasePolicy, OperatorReference, OperatorSignature, ParamKind, ParamSpec

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"
NAMES = pytest.mark.parametrize("name", operators())


def test_the_page_is_current():
    assert PAGE.read_bytes() == operators_page().encode(), "run `make reference`"


def test_the_page_is_made_of_plain_lines():
    text = operators_page()
    assert text.isascii()
    assert text.endswith("\n")
    assert not re.search(r"[ \t]$|\n\n\n", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_the_overview_links_to_a_section_of_every_operator():
    text = operators_page()
    assert re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", text, re.MULTILINE) == [(name, name) for name in operators()]
    sections = re.findall(r"^## `(\w+)`$", text, re.MULTILINE)
    assert sections == list(operators())


def test_every_row_has_as_many_cells_as_its_table():
    cells = [len(re.split(r"(?<!\\)\|", line)) for line in operators_page().splitlines() if line.startswith("|")]
    assert set(cells) == {2 + columns for columns in (4, 5, 6)}


def section(name):
    return operators_page().partition(f"## `{name}`\n")[2].partition("\n## ")[0]


@NAMES
def test_a_section_has_every_parameter_and_nothing_is_lost(name):
    operator, text = operators()[name], section(name)
    assert [spec.name for spec in operator.signature.params] == re.findall(
        r"^\| `(\w+)` \| (?:output|each expert) \|", text, re.MULTILINE
    )
    words = " ".join(text.split())
    reference = operator.reference
    for sentence in (*reference.formula, reference.locality, *reference.edge_cases, *reference.differences):
        assert " ".join(sentence.split()) in words


@NAMES
def test_a_reference_is_complete(name):
    operator = operators()[name]
    reference = operator.reference
    assert type(reference) is OperatorReference
    assert reference.formula
    assert all(line.strip() == line and line for line in reference.formula)
    assert reference.source
    assert reference.edge_cases
    for sentence in (reference.locality, *reference.edge_cases, *reference.differences):
        assert sentence.endswith("."), sentence
    assert not reference.statistics.endswith(".")
    assert (reference.statistics == "none") == (reference.passes == (1, 1))
    assert all(spec.doc for spec in (*operator.signature.params, *COMMON_PARAMS))


def test_values_are_written_as_in_a_mergefile():
    real = ParamSpec(name="p", kind=ParamKind.REAL, low=0.0, low_open=True, high=1.0, gradient=True)
    assert value_text(real) == "number > 0 and <= 1"
    assert value_text(ParamSpec(name="p", kind=ParamKind.INTEGER, low=0.0)) == "integer >= 0"
    assert value_text(ParamSpec(name="p", kind=ParamKind.FLAG)) == "`true` or `false`"
    assert value_text(ParamSpec(name="p", kind=ParamKind.CHOICE, choices=("l1", False))) == '`"l1"` or `false`'


@pytest.mark.parametrize(
    ("low", "high", "base", "text"),
    [
        (1, None, BasePolicy.REQUIRED, "1 or more"),
        (2, 2, BasePolicy.OPTIONAL, "2"),
        (1, 90, BasePolicy.REQUIRED, "1 to 90"),
        (1, 2, BasePolicy.REQUIRED, "1, or 2 with the base"),
        (1, 2, BasePolicy.OPTIONAL, "1 to 2"),
    ],
)
def test_numbers_of_experts_in_words(low, high, base, text):
    signature = OperatorSignature(name="m", summary="", base=base, params=(), min_experts=low, max_experts=high)
    assert experts_text(signature) == text


# --- what the references say of passes --------------------------------------------------------------------------------

DROPPING = [{"density": density, "rescale": rescale} for density in (1.0, 0.3) for rescale in ("l1", False)]
SETTINGS = {
    **dict.fromkeys(("ties", "breadcrumbs", "breadcrumbs_ties", "dare_linear", "dare_ties"), DROPPING),
    **dict.fromkeys(("della", "della_linear"), DROPPING),
    "slerp": [{"t": 0.0}, {"t": 0.5}],
    "nearswap": [{"t": 0.5}],
    "nuslerp": [{}, {"nuslerp_flatten": False}],
    "sce": [{"select_topk": 1.0}, {"select_topk": 0.4}],
    "model_stock": [{}, {"filter_wise": True}],
    "ramplus_tl": [{}, {"r": 0.0}],
}


def passes(operator, experts, params, shape, spread, block_elements, dtype="float32"):
    """Return how often a tensor's inputs are gone through: once to merge, and once for each round of statistics."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(shape).astype(dtype)
    arrays = [(base + spread * rng.standard_normal(shape)).astype(dtype) for _ in range(experts)]
    resolved = tensor_params(operator, [{} for _ in arrays], params)
    run = Run(operator, base, arrays, resolved, block_elements=block_elements)
    if not operator.reduces(run.prepared, run.facts):
        return 1
    steps = operator.reduce(run.prepared, run.facts, [run.base is not None] + [True] * experts)
    wanted, known, rounds = next(steps), {}, 0
    while True:
        new = [statistic for statistic in wanted if statistic not in known]
        rounds += bool(new)
        known |= {statistic: run.values(statistic) for statistic in new}
        try:
            wanted = steps.send({statistic: known[statistic] for statistic in wanted})
        except StopIteration:
            return 1 + rounds


@NAMES
def test_the_passes_of_the_reference_are_those_that_are_made(name):
    operator = operators()[name]
    most = operator.signature.max_experts or 3
    counts = {"passthrough": (1,), "nuslerp": (2,), "model_stock": (3,), "sce": (3,)}
    counts = counts.get(name, (1,) if most == 2 else (1, 3))
    found = {
        passes(operator, experts, params, shape, spread, block_elements)
        for experts in counts
        for params in SETTINGS.get(name, [{}])
        for shape, block_elements in (((64, 48), 512), ((64, 48), 1 << 14), ((700, 256), 1 << 14))
        for spread in (1e-3, 1.0)
    }
    assert (min(found), max(found)) == operator.reference.passes


def test_float64_takes_up_to_two_passes_more():
    for name in ("ties", "arcee_fusion", "sce"):
        params = SETTINGS.get(name, [{}])[-1]
        experts = 1 if name == "arcee_fusion" else 3
        found = {
            passes(operators()[name], experts, params, (700, 256), spread, 1 << 14, "float64") for spread in (1e-3, 1.0)
        }
        assert max(found) <= operators()[name].reference.passes[1] + 2
