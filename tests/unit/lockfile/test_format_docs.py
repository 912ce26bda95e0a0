"""The pages on both formats show what the golden files hold, and name every key."""

import re
from pathlib import Path

import msgspec
import pytest
from unit.lockfile.samples import GOLDEN

from mergepipe.lockfile import reader, wire

DOCS = Path(__file__).parents[3] / "docs" / "formats"


@pytest.mark.parametrize(("page", "golden"), [("lockfile.md", "Mergefile.lock"), ("manifest.md", "mergepipe.json")])
def test_examples_are_taken_from_the_golden_files(page, golden):
    examples = re.findall(r"```(?:toml|json)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    held = "".join((GOLDEN / name).read_text(encoding="utf-8") for name in (golden, "slices.lock"))
    assert examples
    for example in examples:
        for part in example.split("\n\n"):
            assert part.strip("\n") in held


def test_the_page_of_the_lock_names_every_key_of_an_output():
    text = (DOCS / "lockfile.md").read_text(encoding="utf-8")
    for key in reader._OUTPUT_KEYS:
        assert re.search(rf"`(\[+outputs\.NAME\.)?{key}[`.\]]", text), key


def test_the_page_of_the_manifest_names_every_key():
    text = (DOCS / "manifest.md").read_text(encoding="utf-8")
    for kind in (wire.Manifest, wire.Output, wire.Source, wire.Shard, wire.Run, wire.Tensor, wire.Input, wire.Slice):
        for field in msgspec.structs.fields(kind):
            assert f"`{field.name}`" in text, field.name
