"""Hundreds of kills at random moments, with other processes at work on the same project: nothing is ever lost."""

from __future__ import annotations

import pytest
from support.soak import soak

FEW, MANY = 4, 200
LONGEST = 900.0  # seconds; a slow machine does fewer


def test_some_kills_under_load_lose_nothing(tmp_path, server):
    done = soak(tmp_path, server, FEW, LONGEST, seed=1)
    assert done.kills.total() >= FEW


@pytest.mark.slow
@pytest.mark.long
def test_two_hundred_kills_under_load_lose_nothing(tmp_path, server, capsys):
    done = soak(tmp_path, server, MANY, LONGEST, seed=2)
    with capsys.disabled():
        print(f"\n{done}")
    assert done.kills.total() >= MANY or done.seconds >= LONGEST
    assert done.kills["build"] > MANY // 2
