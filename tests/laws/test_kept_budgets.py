"""What a budget came to is kept: what `plan` showed is not planned again to be built, and nothing depends on it."""

from __future__ import annotations

import sqlite3

import pytest
from laws.test_budgets import budgeted
from support.budgets import percent, with_budget

import mergepipe.graph.survey
from mergepipe.cache.budgets import keep_budget, kept_budget
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout

BUDGETS = {
    "blocks": percent(30),
    "levels": {"expert_reads": "30%", "precision": "levels"},
    "error": {"max_error": 0.02, "precision": "blocks"},
}


@pytest.fixture
def surveys(monkeypatch):
    """Return a list that gets an entry whenever a survey is asked for, whose last step is planning."""
    asked = []
    found = mergepipe.graph.survey.known_survey

    def noting(*args):
        asked.append(args)
        return found(*args)

    monkeypatch.setattr(mergepipe.graph.survey, "known_survey", noting)
    return asked


@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_what_was_planned_is_built_without_planning_again_and_comes_to_the_same(tmp_path, surveys, operator, kind):
    planned = budgeted(tmp_path / "planned", operator, BUDGETS[kind])
    at_once = budgeted(tmp_path / "at-once", operator, BUDGETS[kind])
    planned.open().plan()
    del surveys[:]
    planned.build()
    assert not surveys
    at_once.build()
    assert surveys
    assert planned.lock.read_bytes() == at_once.lock.read_bytes()
    assert planned.manifest("m").tensors == at_once.manifest("m").tensors
    assert planned.raw("m") == at_once.raw("m")


def test_another_budget_is_planned_anew_and_an_earlier_one_is_not(tmp_path, surveys):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.build()
    first = project.lock.read_bytes()
    del surveys[:]
    with_budget(project, percent(60)).build()
    assert surveys
    assert project.lock.read_bytes() != first
    del surveys[:]
    with_budget(project, percent(30)).build()
    assert not surveys
    assert project.lock.read_bytes() == first


def test_a_damaged_row_is_planned_anew(tmp_path, surveys):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.open().plan()
    with sqlite3.connect(project.cache / "catalog.db") as db:
        assert db.execute("UPDATE budgets SET data = data || x'00'").rowcount == 1
    db.close()
    (problem,) = project.open().cache_verify(dry_run=True).problems
    assert "budgets" in problem.message
    del surveys[:]
    project.build()
    assert surveys


def test_the_latest_are_kept(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    keys = [bytes([number]) * 32 for number in range(20)]
    for key in keys:
        keep_budget(catalog, key, key * 2)
    keep_budget(catalog, keys[4], b"again")
    assert [kept_budget(catalog, key) for key in keys[:6]] == [None, None, None, None, b"again", keys[5] * 2]
    assert catalog.count("budgets") == 16
    catalog.close()
