"""One file with every kind of mistake, and the whole text of what is said about it.

Set ``UPDATE_GOLDEN=1`` to write the expected text anew, and review the difference.
"""

import os
from pathlib import Path

import pytest
from unit.mergefile.signatures import SIGNATURES

from mergepipe.errors import CollectedErrors
from mergepipe.mergefile.parse import load_mergefile

GOLDEN = Path(__file__).parents[2] / "golden" / "mergefile"


def rendered(error):
    hints = [f"{member.message}\n" + (f"  hint: {member.hint}\n" if member.hint else "") for member in error.errors]
    return "".join(hints)


def test_every_mistake_of_a_file_is_reported_in_one_go():
    with pytest.raises(CollectedErrors) as caught:
        load_mergefile(GOLDEN / "mistakes.toml", SIGNATURES)
    expected = GOLDEN / "mistakes.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        expected.write_text(rendered(caught.value), encoding="utf-8")
    assert rendered(caught.value) == expected.read_text(encoding="utf-8")
    assert caught.value.exit_status == 2


def test_the_problems_come_in_the_order_of_the_file():
    with pytest.raises(CollectedErrors) as caught:
        load_mergefile(GOLDEN / "mistakes.toml", SIGNATURES)
    lines = [error.facts["line"] for error in caught.value.errors]
    assert lines == sorted(lines)
    assert len(lines) >= 60
