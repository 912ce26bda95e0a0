"""What a budget came to is kept: what `plan` showed is not planned again to be built, and nothing depends on it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
import zlib

import msgspec
import pytest
from laws.test_budgets import budgeted
from support.budgets import percent, with_budget

import mergepipe.graph.survey
from mergepipe.cache.budgets import keep_budget, kept_budget
from mergepipe.cache.catalog import Catalog
from mergepipe.cache.database import seal
from mergepipe.cache.layout import CacheLayout
from mergepipe.progressive.levels import LEVELS

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


# --- rows with a right seal ---------------------------------------------------------------------------------------


def row_of(project):
    """Return key and data of the only row."""
    with contextlib.closing(sqlite3.connect(project.cache / "catalog.db")) as db:
        ((key, data),) = db.execute("SELECT key, data FROM budgets").fetchall()
    return key, data


def forge(project, data):
    """Put other data into the only row, under a seal of its own."""
    key, _ = row_of(project)
    with contextlib.closing(sqlite3.connect(project.cache / "catalog.db")) as db, db:
        db.execute("UPDATE budgets SET data = ?, seal = ?", (data, seal(key, data)))


def packed(found):
    return zlib.compress(msgspec.msgpack.encode(found))


def told(change):
    """Return a forgery of what a row says, from a function that changes that."""

    def forged(data):
        found = msgspec.msgpack.decode(zlib.decompress(data))
        change(found)
        return packed(found)

    return forged


def first(found):
    """Return the levels of the first tensor of which anything is left out, and their name."""
    return next(iter(found["levels"].items()))


def levels_of_the_first(change):
    def changed(found):
        name, levels = first(found)
        found["levels"][name] = change(levels)

    return told(changed)


def one_level(level):
    """Return a forgery in which one block that is left out has another level."""

    def changed(levels):
        for expert, row in enumerate(levels):
            at = -1 if row is None else row.find(bytes([0]))
            if at >= 0:
                return [*levels[:expert], row[:at] + bytes([level]) + row[at + 1 :], *levels[expert + 1 :]]
        raise AssertionError("nothing is left out")

    return levels_of_the_first(changed)


FORGERIES = {
    "nothing": lambda data: b"",
    "no zlib": lambda data: b"0" * 40,
    "cut off": lambda data: data[:-9],
    "text": lambda data: "text",
    "a number": lambda data: 7,
    "no msgpack": lambda data: zlib.compress(b"\xc1"),
    "msgpack cut off": lambda data: zlib.compress(zlib.decompress(data)[:-3]),
    "deeply nested": lambda data: zlib.compress(b"\x81\xa1z" + b"\x91" * 100_000),
    "names that are no text": lambda data: zlib.compress(zlib.decompress(data).replace(b"model", b"\xff\xfe\xfd12")),
    "a list": lambda data: packed([1, 2, 3]),
    "a form of an earlier version": told(lambda found: found.pop("bound")),
    "another type": told(lambda found: found.update(levels={"model.v": "text"})),
    "another key": told(lambda found: found.update(key=bytes(32))),
    "an unknown tensor": told(lambda found: found["levels"].update({"model.w": [b"\0", None, None]})),
    "an expert less": levels_of_the_first(lambda levels: levels[:-1]),
    "an expert more": levels_of_the_first(lambda levels: [*levels, None]),
    "a block less": levels_of_the_first(lambda levels: [row and row[:-1] for row in levels]),
    "a block more": levels_of_the_first(lambda levels: [row and row + b"\0" for row in levels]),
    "no block": levels_of_the_first(lambda levels: [row and b"" for row in levels]),
    "all exact in so many words": levels_of_the_first(lambda levels: [row and b"\xff" * len(row) for row in levels]),
    "a level that there is not": one_level(LEVELS + 1),
    "a level that is far off": one_level(254),
    "negative bytes": told(lambda found: found.update(block_bytes=-1)),
    "another expert": told(lambda found: found["experts"].update(e9=5)),
    "an expert without bytes": told(lambda found: found["experts"].popitem()),
    "a bound of no kind": told(lambda found: found["bound"].update(kind="sure")),
    "a negative bound": told(lambda found: found["bound"].update(absolute=-1.0)),
    "a negative error": told(lambda found: found.update(expected=-1.0)),
    "a loss of no tensor": told(lambda found: found["losses"].append(("model.w", found["losses"][0][1]))),
    "a loss far off": told(lambda found: found["losses"][0][1].update(tensor=1 << 40)),
}  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a function that gives a copy of a project that was planned, its row, and lock and output of its build."""
    root = tmp_path_factory.mktemp("planned")
    project = budgeted(root / "planned", "task_arithmetic", BUDGETS["levels"])
    project.open().plan()
    built = project.clone(root / "built")
    built.build()

    def copied(to):
        shutil.copytree(project.root, to)
        copy = dataclasses.replace(project, root=to)
        copy.open().plan()  # its sources are known from here on
        return copy, row_of(copy), (built.lock.read_bytes(), built.raw("m"))

    return copied


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_row_with_a_right_seal_and_of_another_form_is_planned_anew(tmp_path, planned, surveys, kind):
    project, row, expected = planned(tmp_path / "copy")
    forge(project, FORGERIES[kind](row[1]))
    assert row_of(project) != row
    del surveys[:]
    project.build()
    assert surveys
    assert (project.lock.read_bytes(), project.raw("m")) == expected
    assert row_of(project) == row


def test_a_row_that_cannot_be_unpacked_is_told_and_removed(tmp_path, planned):
    project, _, _ = planned(tmp_path / "copy")
    forge(project, b"0" * 40)
    (problem,) = project.open().cache_verify().problems
    assert "budgets" in problem.message
    assert not project.open().cache_verify().problems


def test_a_recorded_budget_that_does_not_fit_is_planned_anew(tmp_path, surveys):
    project = budgeted(tmp_path, "task_arithmetic", percent(30))
    project.build()
    before = project.lock.read_bytes(), project.raw("m")
    with contextlib.closing(sqlite3.connect(project.cache / "catalog.db")) as db, db:
        db.execute("DELETE FROM budgets")
        ((path, key, files, record),) = db.execute("SELECT path, key, files, record FROM published").fetchall()
        found = msgspec.msgpack.decode(record)
        name, levels = first(found["budget"])
        found["budget"]["levels"][name] = levels[:-1]
        row = (path, key, files, msgspec.msgpack.encode(found))
        db.execute("UPDATE published SET record = ?, seal = ?", (row[3], seal(*row)))
    del surveys[:]
    project.build()
    assert surveys
    assert (project.lock.read_bytes(), project.raw("m")) == before


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
