"""Patterns and texts from a checkpoint's files take time that grows with their length, whatever they are."""

import re
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import factors, write_adapter
from support.checkpoints import random_tensors, write_checkpoint

from mergepipe.checkpoints.adapter import open_adapter
from mergepipe.checkpoints.checkpoint import open_checkpoint
from mergepipe.checkpoints.patterns import ModulePattern, PatternError, Work
from mergepipe.checkpoints.sniff import sniff
from mergepipe.errors import SourceError

PATTERNS = st.text(alphabet="ab.0|*+?()[]^$\\d-{1,2}wsZA", max_size=14)
NAMES = st.text(alphabet="ab.01-_ é", max_size=12)


@given(PATTERNS, NAMES)
def test_a_pattern_selects_what_pythons_matcher_does(text, name):
    try:
        pattern = ModulePattern(text, Work())
    except PatternError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pattern.match(name) == bool(re.match(rf"(.*\.)?({text})$", name))


@pytest.mark.parametrize(
    ("text", "name", "selected"),
    [
        ("q", "layers.0.q", True),
        ("layers.0.q", "model.layers.0.q", True),
        ("^layers.0.q", "model.layers.0.q", False),
        (r".*\.[0-3]\.(q|k)", "model.layers.2.k", True),
        (r"layers\.(?:1[0-9]|2)\..*", "layers.12.x.y", True),
        ("q", "layers.0.qq", False),
        ("[^q]", "layers.q", False),
        (r"\w{2,3}", "a.bcd", True),
    ],
)
def test_patterns_as_people_write_them(text, name, selected):
    assert ModulePattern(text, Work()).match(name) is selected


@pytest.mark.parametrize("text", ["(a*)*b", "((a|a)*)*b", "(a+)+b", "(.*)*(.*)*x", "(a?){200}a{200}b", ".*.*.*.*.*.*x"])
def test_no_pattern_takes_long(text):
    started = time.process_time()
    assert not ModulePattern(text, Work()).match("a" * 400)
    assert time.process_time() - started < 5  # Python's matcher would need years


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a" * 2001, "longer than"), ("a{100000}", "repeats too much"), ("((a{100}){100}){100}", "repeats too much"),
        ("(?i)a", "sets flags"), ("(?=a)a", "not supported"), (r"(a)\1", "not supported"), ("[", "unterminated"),
        ("(" * 900 + ")" * 900, "deep|repeats"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(text, why):
    with pytest.raises(PatternError, match=why):
        ModulePattern(text, Work()).match("a")


def test_all_patterns_of_a_config_share_their_time():
    work = Work(limit=2500)
    first, second = ModulePattern("(a|b)*c", work), ModulePattern("(a|b)*d", work)
    assert not first.match("ab" * 200)
    with pytest.raises(PatternError, match="too long"):
        second.match("ab" * 200)


def test_an_adapter_with_such_patterns_is_refused_in_words(tmp_path):
    shapes = {f"layers.{i}.q.weight": (4, 4) for i in range(3)}
    base = open_checkpoint(write_checkpoint(tmp_path / "base", random_tensors(0, shapes)), label="base")
    weights = {name: array for i in range(3) for name, array in factors(i, f"layers.{i}.q", 4, 4).items()}
    folder = write_adapter(tmp_path / "a", weights, rank_pattern={"(.*)*x": 4, r"(?=l)": 1})
    with pytest.raises(SourceError, match=r"`rank_pattern` '\(\?=l\)': expected regular expressions \(`assert` is not"):
        open_adapter(folder, label="a", on=base)
    folder = write_adapter(tmp_path / "a", weights, alpha_pattern={r".*\.1\.q": 6})
    pairs = open_adapter(folder, label="a", on=base).adapter.low_rank
    assert {name: pair.scaling for name, pair in pairs.items()} == {
        "layers.0.q.weight": 1.5, "layers.1.q.weight": 3.0, "layers.2.q.weight": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("text", [b"<!---->" * 500, b"<!-- -->\n" * 400, b"<!--" * 1000, b" " * 4096, b"<!---" * 800])
def test_the_beginning_of_a_page_is_known_at_once(text):
    started = time.process_time()
    sniff(text[:4096])
    assert time.process_time() - started < 1


def test_a_page_behind_comments_is_a_page():
    assert sniff(b"<!-- a --> <!-- <b> -->\n<!doctype html>").kind == "html"
    assert sniff(b"<!-- a <html>").kind != "html"
