"""Odd inputs that people really meet, one folder each, through the command line.

The environment variable ``MERGEPIPE_CASES`` names the folder of cases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases.case import load_case
from support.cases.errors import CheckError
from support.cases.runner import find_cases, run_case
from support.cases.waiting import waits_for
from support.forked import ForkServer

_DEFAULT = Path(__file__).parents[2].parent / "shared" / "cases"
FOLDER = Path(os.environ.get("MERGEPIPE_CASES") or _DEFAULT).absolute()
NAMES = find_cases(FOLDER) if FOLDER.is_dir() else []

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no folder of cases at {FOLDER}; MERGEPIPE_CASES may name another"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Return the server of the builds that nothing interferes with."""
    with ForkServer() as started:
        yield started


def _parameters() -> list[object]:
    # Strict: a case that passes although it is listed as waiting is a failure.
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=f"waits for {feature}", raises=CheckError, strict=True))
        if (feature := waits_for(name))
        else name
        for name in NAMES
    ]


def test_the_folder_holds_cases():
    assert NAMES


@pytest.mark.parametrize("name", NAMES or [""])
def test_the_harness_knows_every_key_of_the_case(name):
    load_case(FOLDER / name)


@pytest.mark.parametrize("name", _parameters() or [""])
def test_case(name, tmp_path, server):
    skipped = run_case(load_case(FOLDER / name), tmp_path, server=server)
    if skipped:
        pytest.skip("all else passed, but " + "; ".join(skipped))
