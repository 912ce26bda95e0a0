"""An output that is not published has `publish = false` where others have their path."""

import dataclasses
from pathlib import Path

import pytest
from unit.lockfile.samples import ASSISTANT, BASE, MANIFEST

from mergepipe.errors import InternalError, LockError
from mergepipe.lockfile.compare import compare_locks
from mergepipe.lockfile.convert import to_wire
from mergepipe.lockfile.reader import parse_lock
from mergepipe.lockfile.records import Lockfile
from mergepipe.lockfile.writer import render_lock

PATH = Path("Mergefile.lock")
HIDDEN = dataclasses.replace(ASSISTANT, path=None)


def lock(output):
    return Lockfile(geometry=1, sources=(BASE,), outputs=(output,))


def test_it_is_read_as_it_was_written():
    text = render_lock(lock(HIDDEN))
    assert "[outputs.assistant]\npublish = false\noperator = " in text
    assert "build/assistant" not in text
    assert parse_lock(text, PATH) == lock(HIDDEN)
    assert render_lock(parse_lock(text, PATH)) == text


@pytest.mark.parametrize(
    "line", ["publish = true", 'publish = false\npath = "build/assistant"', 'publish = "no"', "publish = 0", ""]
)
def test_anything_else_in_its_place_is_refused(line):
    text = render_lock(lock(HIDDEN)).replace("publish = false", line)
    with pytest.raises(LockError, match=r"outputs\.assistant\.(publish|path)"):
        parse_lock(text, PATH)


def test_that_an_output_is_no_longer_published_is_a_difference():
    (gone, new) = sorted(compare_locks(lock(ASSISTANT), lock(HIDDEN)), key=lambda difference: difference.entry)
    assert (gone.entry, gone.old, gone.new) == ("outputs.assistant.path", '"build/assistant"', None)
    assert (new.entry, new.old, new.new) == ("outputs.assistant.publish", None, "false")
    assert compare_locks(lock(HIDDEN), lock(HIDDEN)) == ()


def test_it_has_no_manifest():
    with pytest.raises(InternalError, match="not published"):
        to_wire(dataclasses.replace(MANIFEST, output=HIDDEN))
