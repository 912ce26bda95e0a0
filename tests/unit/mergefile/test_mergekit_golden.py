"""What configurations become, whole, for people to look at.

Set ``UPDATE_GOLDEN=1`` to write the files anew, and review the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from unit.mergefile.mergekit import imported, problems

from mergepipe.mergefile.mergekit.sources import Found

GOLDEN = Path(__file__).parents[2] / "golden" / "mergekit"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "from-mergekit.md"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yml") if path.stem != "mistakes")


def locate(place):
    return Found(path=place.path) if place.path.startswith("models/") else None


def assert_golden(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_becomes_this_mergefile(name):
    path = GOLDEN / f"{name}.yml"
    found = imported(path.read_bytes(), source=path, locate=locate)
    assert_golden(path.with_suffix(".toml"), found.text)


def test_the_guide_shows_what_is_written():
    text = GUIDE.read_text(encoding="utf-8")
    (configuration,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (mergefile,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert imported(configuration, locate=locate).text == mergefile


def test_mistakes_are_told_like_this():
    path = GOLDEN / "mistakes.yml"
    found = problems(path.read_bytes(), source=path, locate=locate)
    lines = [line for error in found for line in (error.message, f"hint: {error.hint}" if error.hint else "")]
    assert_golden(path.with_suffix(".txt"), "\n".join(line for line in lines if line) + "\n")
