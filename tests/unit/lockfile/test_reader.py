"""Reading a lock: whatever layout it has, nothing that mergepipe did not write, and always a message with a place."""

import contextlib
import dataclasses
import time
from pathlib import Path

import pytest
import tomli
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from unit.lockfile.samples import ASSISTANT, BASE, LOCK, digest, locks

from mergepipe.errors import LockError
from mergepipe.lockfile.compare import compare_locks
from mergepipe.lockfile.reader import parse_lock, read_lock
from mergepipe.lockfile.records import LockedLevels, LockedTensor, Lockfile
from mergepipe.lockfile.writer import render_lock

PATH = Path("project/Mergefile.lock")
TEXT = render_lock(LOCK)


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def refused(text):
    """Return the error that parsing ends with; it must name the lock."""
    with pytest.raises(LockError) as caught:
        parse_lock(text, PATH)
    assert caught.value.exit_status == 2
    assert str(PATH) in caught.value.message
    assert caught.value.facts["file"] == str(PATH)
    assert caught.value.hint
    return caught.value


def altered(old, new, count=1):
    assert old in TEXT
    return TEXT.replace(old, new, count)


@settings(deadline=None, max_examples=examples(200))
@given(locks)
def test_a_lock_reads_back_as_it_was_and_renders_the_same(lock):
    text = render_lock(lock)
    assert parse_lock(text, PATH) == lock
    assert render_lock(parse_lock(text, PATH)) == text


def test_the_sample_reads_back():
    assert parse_lock(TEXT, PATH) == LOCK


def test_types_of_numbers_survive():
    params = parse_lock(TEXT, PATH).output("assistant").params
    assert [type(params[key]) for key in ("lambda", "normalize", "seed")] == [float, bool, int]


def test_windows_line_ends_and_a_byte_order_mark_are_accepted():
    crlf = TEXT.replace("\n", "\r\n")
    assert parse_lock(crlf, PATH) == LOCK
    assert parse_lock(b"\xef\xbb\xbf" + crlf.encode(), PATH) == LOCK


def reverse(value):
    """Return TOML data with every table's keys in reverse order."""
    if isinstance(value, dict):
        return {key: reverse(item) for key, item in reversed(value.items())}
    return [reverse(item) for item in value] if isinstance(value, list) else value


def test_another_key_order_and_comments_are_accepted():
    text = "# a comment\n" + tomlkit.dumps(reverse(tomli.loads(TEXT)))
    assert text.index("[outputs") < text.index("[sources")
    assert compare_locks(parse_lock(text, PATH), LOCK) == ()


def test_an_absent_lock_is_none(tmp_path):
    assert read_lock(tmp_path / "Mergefile.lock") is None


def test_a_lock_is_read_from_its_file(tmp_path):
    path = tmp_path / "Mergefile.lock"
    path.write_bytes(TEXT.encode())
    assert read_lock(path) == LOCK


def test_a_lock_that_cannot_be_read_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(LockError, match="Is a directory") as caught:
        read_lock(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_a_newer_version_is_refused_with_both_versions():
    error = refused("version = 2\n\n[[package]]\nname = 'whatever'\n")
    assert "version 2" in error.message
    assert "version 1" in error.message
    assert "upgrade mergepipe" in error.hint
    assert error.facts["got"] == 2


def test_an_older_version_is_refused_without_advice_to_upgrade():
    assert "upgrade" not in refused(altered("version = 1", "version = 0")).hint


def test_what_a_higher_revision_added_is_ignored():
    newer = altered("revision = 0", "revision = 3\nadded = 1")
    newer = newer.replace("[sources.base]", "[sources.base]\nadded = { x = 1 }")
    newer = newer.replace("[outputs.assistant]", "[outputs.assistant]\nadded = [1979-05-27]")
    newer = newer.replace("bytes = 2128 }", "bytes = 2128, added = true }")
    newer = newer.replace("[[outputs.assistant.rules]]", "[[outputs.assistant.rules]]\nadded = 1")
    assert newer.count("added") == 7
    assert parse_lock(newer, PATH) == LOCK


@pytest.mark.parametrize("revision", ["revision = 0\n", ""])
@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("geometry = 1", "owner"),
        ("[sources.base]", "sources.base.owner"),
        ("[outputs.assistant]", "outputs.assistant.owner"),
        ("[[outputs.assistant.rules]]", "outputs.assistant.rules[0].owner"),
    ],
)
def test_a_key_that_this_revision_does_not_have_is_refused(revision, place, key):
    text = altered("revision = 0\n", revision).replace(place, f"{place}\nowner = 'me'", 1)
    error = refused(text)
    assert key in error.message
    assert error.facts["line"] == line_of(text, "owner")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("marker", ["<<<<<<< HEAD", "||||||| merged common ancestors", "=======", ">>>>>>> topic"])
def test_conflict_markers_are_named_with_their_line(marker, newline):
    text = altered("[sources.math]", f"{marker}\n[sources.math]").replace("\n", newline)
    error = refused(text)
    assert f"Mergefile.lock:{line_of(text, marker)}: git conflict marker `{marker[:7]}`" in error.message
    assert "mergepipe build" in error.hint
    assert "Mergefile first" in error.hint


def test_a_string_that_looks_like_a_conflict_is_not_one():
    odd = dataclasses.replace(BASE, location={"path": "<<<<<<< HEAD\n=======\n"})
    lock = Lockfile(geometry=1, sources=(odd,), outputs=())
    assert parse_lock(render_lock(lock), PATH) == lock


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tensors = 4", "tensors = "),
        ("tensors = 4", "tensors = 4 4"),
        ("tensors = 4", "tensors = 4\ntensors = 4"),
        ('operator = "ties"', 'operator = "ties'),
        ("[outputs.blend]", "[outputs.blend"),
        ("[outputs.blend]", "[outputs.assistant]"),
    ],
)
def test_text_that_is_not_toml_is_refused_near_its_line(old, new):
    text = altered(old, new)
    error = refused(text)
    assert "not valid TOML" in error.message
    assert error.facts["line"] - line_of(TEXT, old) in (0, 1)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "a", "version = 0x" + "f" * 9000])
def test_absurd_text_is_refused(text):
    refused(text)


def test_bytes_that_are_not_utf_8_are_refused_with_their_line():
    error = refused(TEXT.encode().replace("è".encode(), b"\xe8"))
    assert f"Mergefile.lock:{line_of(TEXT, 'è')}: is not UTF-8" in error.message


DIGEST = f'"b3:{BASE.digest.hex()}"'


@pytest.mark.parametrize(
    ("old", "new", "key", "problem"),
    [
        ("version = 1\n", "", "version", "is missing"),
        ("version = 1", "version = true", "version", "must be an integer, not a boolean"),
        ("version = 1", "version = 1.0", "version", "must be an integer, not a float"),
        ("revision = 0", "revision = -1", "revision", "must not be negative"),
        ("geometry = 1\n", "", "geometry", "is missing"),
        ("geometry = 1", "geometry = 2020-01-01", "geometry", "must be an integer, not a date or time"),
        ("[sources.base]", "[sources]\nodd = 1", "sources.odd", "must be a table, not an integer"),
        (f"digest = {DIGEST}\n", "", "sources.base.digest", "is missing"),
        (f"digest = {DIGEST}", f"digest = {DIGEST.upper()}", "sources.base.digest", "is not a digest"),
        (f"digest = {DIGEST}", f'digest = {DIGEST[:-2]}"', "sources.base.digest", "is not a digest"),
        (f"digest = {DIGEST}", 'digest = "b3:' + "00 " * 21 + '0"', "sources.base.digest", "is not a digest"),
        (f"sources.base = {DIGEST}", "sources.base = 'x'", "outputs.assistant.sources.base", "is not a digest"),
        ("bytes = 1311944 }", "bytes = '1' }", "sources.base.files[1].bytes", "must be an integer, not a string"),
        (
            '    { name = "model.safetensors", bytes = 3409280 },',
            '    "model.safetensors",',
            "sources.code.files[0]",
            "must be a table",
        ),
        ('operator = "ties"', "operator = 1", "outputs.assistant.operator", "must be a string, not an integer"),
        ('    { source = "math", weight = 1.0 },', "    {},", "outputs.assistant.experts[0].source", "is missing"),
        ("weight = [0.2, 0.6]", "weight = [0.2, true]", "outputs.assistant.experts[1].weight[1]", "must be a number"),
        ("weight = [0.2, 0.6]", "weight = {}", "outputs.assistant.experts[1].weight", "must be a scalar"),
        ("params.seed = 7", "params.seed = 1979-05-27", "outputs.assistant.params.seed", "must be a scalar"),
        ("params.seed = 7", "params.seed = 0x" + "f" * 5000, "outputs.assistant.params.seed", "is out of range"),
        ('    "lm_head.*",', "    7,", "outputs.assistant.rules[1].match[0]", "must be a string"),
        ("layers = ", "match = ", "outputs.assistant.rules[2].match", ""),
        (
            'write.dtype = "BF16"',
            "write.dtype = 1.5",
            "outputs.assistant.write.dtype",
            "must be a string or an integer",
        ),
        ("bound.absolute = 0.0", "bound.absolute = '0'", "outputs.assistant.bound.absolute", "must be a number"),
        ("bound.absolute = 0.0", "bound.absolute = 1" + "0" * 400, "outputs.assistant.bound.absolute", "out of range"),
        ("bound.absolute = 0.0", "bound.other = 0.0", "outputs.assistant.bound.other", "is not a key"),
        ("[outputs.assistant.tensors]", "[outputs.assistant.tensor]", "outputs.assistant.tensor", "is not a key"),
        (' 7/8"', ' 7"', 'outputs.assistant.tensors."model.layers.0.mlp.up_proj.weight"', "READ/TOTAL"),
        (' 7/8"', ' 07/8"', 'outputs.assistant.tensors."model.layers.0.mlp.up_proj.weight"', "READ/TOTAL"),
        ('" = "b3:', '" = "b4:', 'outputs.assistant.tensors."lm_head.weight"', "is not a digest"),
    ],
)
def test_wrong_structure_is_refused_with_key_path_and_line(old, new, key, problem):
    text = altered(old, new)
    error = refused(text)
    if "match = " not in new:  # which is a key given twice
        assert f": {key}: " in error.message
        assert error.facts["key_path"] == key
        assert problem in error.message
    if new and "key_path" in error.facts and "version" not in key:
        # An element of an inline table, or a missing key, has the line of what holds it.
        assert error.facts["line"] == text[: text.index(new) + len(new)].count("\n") + 1


def test_a_missing_key_has_the_line_of_its_table():
    error = refused(altered(f"digest = {DIGEST}\n", ""))
    assert error.facts["line"] == line_of(TEXT, "[sources.base]")


@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_damage_never_ends_in_anything_but_a_lock_or_a_lock_error(data):
    raw = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "truncate"]))
        if action == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "cut":
            del raw[at : at + data.draw(st.integers(1, 200))]
        elif action == "insert":
            raw[at:at] = data.draw(st.binary(max_size=8) | st.sampled_from([b"[", b"]]", b"\n", b"{", b'"', b"= 1\n"]))
        else:
            del raw[max(at, 1) :]
        if not raw:
            break
    with contextlib.suppress(LockError):
        parse_lock(bytes(raw), PATH)


def test_a_lock_of_ten_outputs_with_800_tensors_each_is_read_in_a_moment():
    tensors = tuple(
        LockedTensor(name=f"model.layers.{i}.mlp.up_proj.weight", digest=digest(str(i)), read=60, total=61)
        for i in range(800)
    )
    outputs = tuple(dataclasses.replace(ASSISTANT, name=f"output-{i}", tensors=tensors) for i in range(10))
    text = render_lock(Lockfile(geometry=1, sources=LOCK.sources, outputs=outputs)).encode()
    times = []
    for _ in range(3):
        start = time.process_time()
        parse_lock(text, PATH)
        times.append(time.process_time() - start)
    assert min(times) < 0.3


LEVELS = Lockfile(
    geometry=1,
    sources=(),
    outputs=(
        dataclasses.replace(
            ASSISTANT,
            levels_version=1,
            tensors=tuple(
                dataclasses.replace(tensor, levels=LockedLevels(bytes=7, blocks={3: 2})) for tensor in ASSISTANT.tensors
            ),
        ),
    ),
)


@pytest.mark.parametrize(
    "text",
    [
        *("12", "12 B, 0 exact", "12 B, 3 at level 0", "12 B, 3 at 3", "x B", "-1 B"),
        *("12 B, 3 exact, 2 omitted", "12 B, 1 exact, 2 exact"),
    ],
)
def test_levels_in_another_form_are_refused(text):
    rendered = render_lock(LEVELS)
    assert parse_lock(rendered, PATH) == LEVELS
    assert "7 B, 2 at level 3" in rendered
    with pytest.raises(LockError, match='is not `"BYTES B'):
        parse_lock(rendered.replace("7 B, 2 at level 3", text, 1), PATH)


def test_levels_need_their_version_and_a_tensor():
    rendered = render_lock(LEVELS)
    with pytest.raises(LockError, match="stands there without `levels_version`"):
        parse_lock(rendered.replace("levels_version = 1\n", ""), PATH)
    with pytest.raises(LockError, match="has levels and no digest"):
        parse_lock(rendered + '"x" = "1 B, 1 exact"\n', PATH)
