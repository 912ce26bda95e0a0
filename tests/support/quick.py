"""Which parameters and how many examples are tried by default, and which in the slow suite only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

from support.every_operator import QUICK


def every(values: Iterable[Any], quick: Iterable[Any] = QUICK) -> list[Any]:
    """Return parameters for a test of a law: each value, those that are not ``quick`` for the slow suite only."""
    kept = frozenset(quick)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def examples(count: int) -> int:
    """Return how many examples a law that takes ``count`` in the slow suite gets in this run: its share, at least 1."""
    return max(1, round(count * settings().max_examples / settings.get_profile("thorough").max_examples))
