"""What the harness makes of exit codes and messages."""

from __future__ import annotations

import pytest
from support.cases.errors import CaseError
from support.cases.outcome import check_expected, mentions, result_problems
from support.cli import Result


@pytest.fixture
def root(tmp_path):
    """Return a project's folder whose name says things."""
    return tmp_path / "truncated-lfs"


def problems(root, expected, code, stderr="", stdout=""):
    return list(result_problems(expected, Result(stdout=stdout, stderr=stderr, code=code), root))


@pytest.mark.parametrize(
    ("text", "entry", "found"),
    [
        ("`lm_head.weight` is tied", "lm_head.weight", True),
        ("an error", ["LFS", "lfs"], False),
        ("a git lfs pointer", ["LFS", "lfs"], True),
        ("warning: overflow", "w", False),
        ("warning: `w` overflows", "w", True),
        ("got 16, expected 18", "18", True),
        ("got 118", "18", False),
        ("the sum is 0.0", "0", True),
        ("layers -1..2", "-1", True),
        ("model of 4 layers", ["4", "5"], True),
    ],
)
def test_mentions(text, entry, found):
    assert mentions(text, entry) is found


def test_a_success_must_succeed_and_an_error_must_fail(root):
    assert not problems(root, {"outcome": "success"}, 0)
    assert problems(root, {"outcome": "success"}, 1, "error: x") == ["the build failed with exit code 1"]
    assert problems(root, {"outcome": "error"}, 0) == ["the build succeeded, expected an error"]
    assert not problems(root, {"outcome": "error"}, 2, "error: x")
    assert not problems(root, {"outcome": "either"}, 0)
    assert not problems(root, {"outcome": "either"}, 3, "warning: y\nerror: x")


@pytest.mark.parametrize("code", [-9, -11, 4, 127, 130])
def test_crashes_and_other_exit_codes_are_no_errors(root, code):
    assert problems(root, {"outcome": "error"}, code, "error: x")


def test_a_given_exit_code_must_be_that(root):
    assert problems(root, {"outcome": "error", "exit_code": 3}, 2, "error: x")
    assert not problems(root, {"outcome": "error", "exit_code": 3}, 3, "error: x")


@pytest.mark.parametrize("stderr", ["", "Usage: build", "an error: x", "errors"])
def test_an_error_says_so_on_a_line_of_its_own(root, stderr):
    assert problems(root, {"outcome": "error"}, 1, stderr) == ["there is no line `error: ...` on stderr"]


def test_errors_in_json_count_as_errors(root):
    assert not problems(root, {"outcome": "error"}, 1, '{"error": {"kind": "x"}}')


def test_a_traceback_is_never_fine(root):
    text = "Traceback (most recent call last):\n  ...\nerror: x"
    assert problems(root, {"outcome": "error"}, 1, text) == ["there is a traceback"]
    assert problems(root, {"outcome": "success"}, 0, text) == ["there is a traceback"]


def test_every_entry_must_be_mentioned_on_stderr(root):
    expected = {"outcome": "either", "error_should_mention": ["expert_a", ["LFS", "lfs"], "16"]}
    assert not problems(root, expected, 2, "error: expert_a is an LFS pointer of 16 bytes")
    assert len(problems(root, expected, 2, "error: something", stdout="expert_a LFS 16")) == 3


def test_the_projects_own_path_mentions_nothing(root):
    expected = {"outcome": "error", "error_should_mention": ["truncated", "expert/model"]}
    (problem,) = problems(root, expected, 2, f"error: {root}/expert/model.safetensors")
    assert "truncated" in problem


def test_messages_and_warnings_are_wanted_only_of_a_success_and_on_either_stream(root):
    expected = {
        "outcome": "either",
        "message_should_mention": [["extra", "3 tensors"]],
        "warning_should_mention": ["w"],
    }
    assert not problems(root, expected, 0, stderr="warning: `w`", stdout="3 tensors dropped")
    assert len(problems(root, expected, 0)) == 2
    assert not problems(root, expected, 1, "error: x")


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"outcome": "crash"},
        {"outcome": "success", "tensor": "x"},
        {"outcome": "success", "tensors": "x", "tolerance": {"ulp": 1}},
        {"outcome": "success", "tolerance": "exact"},
        {"outcome": "error", "exit_code": "zero"},
        {"outcome": "success", "bit_exact_names": ["w"]},
        "success",
    ],
)
def test_unknown_expectations_are_refused(expected):
    with pytest.raises(CaseError):
        check_expected(expected, "expected")


def test_documentation_is_allowed():
    check_expected({"outcome": "error", "forbidden": "x", "if_union_policy_is_offered": {}, "notes": "y"}, "expected")
