"""Laws that hold for examples of every kind are tried on more of them than the default suite takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.cli import run_process

TESTS = Path(__file__).parent
# What is costly to try, and not tried in the slow suite anyway.
PLACES = {
    "locks": ["unit/lockfile"],
    "files": ["unit/checkpoints", "unit/mergefile"],
    "blocks": ["unit/graph", "laws/test_numbers.py", "laws/test_slices.py"],
    "bounds": ["laws/test_bounds.py"],
}


@pytest.mark.slow
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_laws_hold_for_more_examples(tmp_path, places):
    paths = [str(TESTS / place) for place in places]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "thorough")]
    chosen = ["-m", "hypothesis and not slow", "--hypothesis-profile", "thorough"]
    environment = {name: "" for name in os.environ if name.startswith("PYTEST_")}
    result = run_process([sys.executable, "-m", "pytest", *options, *chosen, *paths], TESTS.parent, environment, 600)
    assert result.code == 0, result.text
    assert " passed" in result.stdout
