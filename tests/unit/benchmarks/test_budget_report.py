"""The page of measured budgets says what the committed figures say: among it that the planner is nearest."""

import pytest

from benchmarks.budgets.family import BUDGETS, Choice, choices, limit_of
from benchmarks.budgets.planning import EXPERTS, blocks_of, tensors
from benchmarks.budgets.plot import draw
from benchmarks.budgets.report import PAGE, SECTIONS, distances, percent, put
from benchmarks.budgets.results import load

POINT = {"bytes": 10, "blocks": 1, "deviation": 0.5, "bound": 0.75, "expected": 0.25}
FAMILY = {
    "operators": {
        "ties": {
            "expert_bytes": 40,
            "budgets": {
                "100": {"gain": POINT | {"bytes": 40, "deviation": 0.0, "bound": 0.0, "expected": 0.0}},
                "25": {
                    "gain": POINT,
                    "hash": POINT | {"deviation": 0.75},
                    "random": [POINT | {"deviation": 0.6}, POINT | {"deviation": 1.0, "bound": 1.5}],
                },
            },
        }
    }
}


def test_a_row_compares_ours_with_the_mean_the_hash_and_the_nearest_of_all():
    rows = distances(FAMILY, "ties").splitlines()[2:]
    assert rows[0] == (
        "| 25% | 10 B (25%) | 1 | **50%** | 25% | 75% | 80% (60% to 100%) | 75% | 1.60 | 1.50 | 1.20 |"
    )
    assert rows[1] == "| 100% | 40 B (100%) | 1 | **0%** | 0% | 0% | the same | the same | - | - | - |"


def test_text_is_put_between_its_markers_and_nowhere_else():
    page = "a <!-- begin: x -->\nold\n<!-- end: x --> b <!-- begin: y -->\n<!-- end: y -->"
    assert put(page, "x", r"new \1") == page.replace("old", r"new \1")
    with pytest.raises(ValueError, match="no place for `z`"):
        put(page, "z", "new")


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_the_committed_figures(name):
    text = SECTIONS[name](load()[name.split()[0]])
    assert f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_in_the_committed_figures_no_other_choice_is_as_near_as_ours(operator):
    rows = load()["family"]["operators"][operator]["budgets"]
    assert sorted(map(int, rows)) == list(BUDGETS)
    for budget, row in rows.items():
        assert row["gain"]["bytes"] <= row["limit"]
        assert row["gain"]["deviation"] <= row["gain"]["bound"]
        if 0 < int(budget) < 100:
            assert len(row["random"]) == 10
            for other in (row["hash"], *row["random"]):
                assert other["deviation"] > row["gain"]["deviation"]
                assert row["gain"]["bytes"] <= row["limit"] >= other["bytes"]


def test_there_are_as_many_choices_as_are_said():
    found = choices(10)
    assert len(set(found)) == len(found) == 2 + 5 * 12
    assert [choice for choice in found if choice.percent == 100] == [Choice(kind="gain", percent=100)]
    assert (limit_of(5, 27_412_480), limit_of(100, 7)) == (1_370_624, 7)


def test_the_planned_family_has_two_million_blocks():
    assert EXPERTS * sum(map(blocks_of, tensors())) > 2_000_000


def test_shares_have_three_digits():
    assert [percent(value) for value in (None, 0, 0.0384, 1.0, 1.673, 0.00222)] == [
        "none", "0%", "3.84%", "100%", "167%", "0.222%",
    ]  # fmt: skip


def test_the_same_figures_make_the_same_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "other.svg"):
        draw(FAMILY, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()
    assert "hash order: bound" in (tmp_path / "one.svg").read_text(encoding="utf-8")
