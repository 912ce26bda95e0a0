"""Which parameters of a test are tried by default, and which in the slow suite only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.every_operator import QUICK


def every(values: Iterable[Any], quick: Iterable[Any] = QUICK) -> list[Any]:
    """Return parameters for a test of a law: each value, those that are not ``quick`` for the slow suite only."""
    kept = frozenset(quick)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
