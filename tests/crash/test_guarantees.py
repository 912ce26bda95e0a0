"""The page of guarantees names tests: each of them is there, and is slow where the page says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "guarantees.md"
NAMED = re.compile(r"(?P<slow>slow: )?`(?P<file>tests/[\w/]+\.py)::(?P<test>\w+)`")


def named_tests():
    return [(match["file"], match["test"], bool(match["slow"])) for match in NAMED.finditer(PAGE.read_text("utf-8"))]


def defined_in(file):
    """Return the tests of a file, each with whether all of it is slow."""
    functions = [node for node in ast.parse((ROOT / file).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {node.name: "pytest.mark.slow" in map(ast.unparse, node.decorator_list) for node in functions}


@pytest.mark.parametrize(("file", "test", "slow"), named_tests())
def test_a_test_that_is_named_is_there(file, test, slow):
    assert (ROOT / file).exists(), f"{file} is not there"
    found = defined_in(file)
    assert test in found, f"{file} has no `{test}`"
    assert found[test] == slow, "the page says otherwise whether it is slow"


def test_every_line_of_the_tables_names_a_test():
    promises, _, _ = PAGE.read_text("utf-8").partition("## Measured")
    rows = [line for line in promises.splitlines() if line.startswith("| ") and "proven by" not in line]
    rows = [line for line in rows if not line.startswith("| ---")]
    assert len(rows) > 25
    assert [row for row in rows if not NAMED.search(row)] == []


def test_the_page_is_in_the_table_of_contents():
    assert "concepts/guarantees.md" in (ROOT / "mkdocs.yml").read_text("utf-8")
