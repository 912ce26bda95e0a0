"""The text of a lock: canonical, reviewable, and readable back whatever the names are."""

import dataclasses
import math

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from unit.lockfile.samples import ASSISTANT, BASE, CODE, LOCK, MATH, SLICED, check_golden, locks, texts

from mergepipe.errors import InternalError, LockError
from mergepipe.lockfile.records import LockedExpert, LockedFile, Lockfile
from mergepipe.lockfile.writer import expert_text, key_text, quote, render_lock, value_text


def test_the_golden_lock_is_rendered_byte_for_byte():
    check_golden("Mergefile.lock", render_lock(LOCK).encode())


def test_the_golden_lock_with_slices_is_rendered_byte_for_byte():
    check_golden("slices.lock", render_lock(SLICED).encode())


def test_a_lock_ends_with_one_newline_and_has_no_carriage_returns_or_trailing_blanks():
    text = render_lock(LOCK)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\r" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_every_tensor_and_every_array_element_has_a_line_of_its_own():
    lines = render_lock(LOCK).splitlines()
    for tensor in ASSISTANT.tensors:
        assert f'"{tensor.name}" = "b3:{tensor.digest.hex()} {tensor.read}/{tensor.total}"' in lines
    assert '    "lm_head.*",' in lines
    assert '    { source = "math", weight = 1.0 },' in lines


def test_the_text_does_not_depend_on_the_order_of_mappings_sources_and_outputs():
    params = dict(reversed(ASSISTANT.params.items()))
    write = dict(reversed(ASSISTANT.write.items()))
    sources = dict(reversed(ASSISTANT.sources.items()))
    other = dataclasses.replace(ASSISTANT, params=params, write=write, sources=sources)
    blend = LOCK.output("blend")
    assert render_lock(Lockfile(geometry=1, sources=(CODE, BASE, MATH), outputs=(other, blend))) == render_lock(LOCK)


def test_the_order_of_experts_is_kept():
    swapped = dataclasses.replace(ASSISTANT, experts=tuple(reversed(ASSISTANT.experts)))
    text = render_lock(Lockfile(geometry=1, sources=(), outputs=(swapped,)))
    assert text.index('source = "code"') < text.index('source = "math"')


def test_an_empty_lock_has_only_its_head():
    text = render_lock(Lockfile(geometry=1, sources=(), outputs=()))
    assert tomli.loads(text) == {"version": 1, "revision": 0, "geometry": 1}


def test_a_source_without_files_says_nothing_of_files():
    bare = dataclasses.replace(BASE, files=())
    assert "files" not in render_lock(Lockfile(geometry=1, sources=(bare,), outputs=()))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.4, "0.4"), (1, "1"), (1.0, "1.0"), (True, "true"), (False, "false"), (1e-05, "1e-05"), ((0.2, 1), "[0.2, 1]")],
)
def test_values_have_their_shortest_text(value, text):
    assert value_text(value) == text


@given(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | texts)
def test_values_read_back_with_their_type(value):
    read = tomli.loads(f"k = {value_text(value)}")["k"]
    assert read == value
    assert type(read) is type(value)
    assert not isinstance(value, float) or math.copysign(1, read) == math.copysign(1, value)


@settings(max_examples=examples(500))
@given(texts)
def test_any_text_reads_back_as_key_and_as_value(text):
    assert tomli.loads(f"{key_text(text)} = {quote(text)}") == {text: text}


@pytest.mark.parametrize(
    "character", [*map(chr, range(32)), "\x7f", "\x85", "\xa0", *"\u200b\u200e\u2028\u2029\u202e\ufeff"]
)
def test_controls_separators_and_invisible_marks_are_escaped(character):
    assert character not in quote(f"a{character}b")
    assert quote(f"a{character}b").isascii()


def test_letters_of_every_script_stand_for_themselves():
    assert quote("modèle 模型 модель") == '"modèle 模型 модель"'


@settings(deadline=None)
@given(locks)
def test_rendered_text_has_one_line_per_line_for_every_reader(lock):
    text = render_lock(lock)
    assert text.splitlines() == text.split("\n")[:-1]


def test_a_name_that_is_not_unicode_is_refused_with_its_name():
    odd = dataclasses.replace(
        BASE, files=(LockedFile(name=b"mod\xffel.safetensors".decode("utf-8", "surrogateescape"), bytes=1),)
    )
    with pytest.raises(LockError, match=r"mod\\udcffel.safetensors.*not valid Unicode"):
        render_lock(Lockfile(geometry=1, sources=(odd,), outputs=()))


def test_what_the_format_has_no_place_for_is_a_bug():
    with pytest.raises(InternalError, match="url"):
        render_lock(Lockfile(geometry=1, sources=(dataclasses.replace(BASE, location={"url": "x"}),), outputs=()))
    with pytest.raises(InternalError, match="slack"):
        render_lock(Lockfile(geometry=1, sources=(), outputs=(dataclasses.replace(ASSISTANT, bound={"slack": 1.0}),)))
    with pytest.raises(InternalError, match="`source`"):
        expert_text(LockedExpert(source="math", params={"source": 1}))
