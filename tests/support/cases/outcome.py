"""How a build ended, and whether that is what the case expects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cases.checks import CHECKS, SETTINGS, Context, Expected
from support.cases.errors import CaseError, CheckError, known_keys
from support.cases.state import Snapshot, kept_lock, kept_output, litter, partial_output
from support.cases.values import check_tolerance
from support.cli import Result

SUCCESS: Expected = {"outcome": "success"}
_OUTCOMES = ("success", "error", "either")
_ERROR_CODES = (1, 2, 3)
_HANDLED_HERE = frozenset(
    {
        "outcome",
        "exit_code",
        "error_should_mention",
        "message_should_mention",
        "warning_should_mention",
        "no_partial_output",
        "lock_unchanged",
        "for_each",
    }
)
# Said for people: what the other keys check is the same thing, or it needs an option that no recipe asks for.
_DOCUMENTATION = frozenset({"forbidden", "if_union_policy_is_offered"})
EXPECTED_KEYS = frozenset(CHECKS) | SETTINGS | _HANDLED_HERE | _DOCUMENTATION


def check_expected(expected: Any, where: str) -> None:
    """Check that the harness knows every key of an ``expected``.

    Raises
    ------
    CaseError
        If not.
    """
    known_keys(expected, EXPECTED_KEYS, where, required=("outcome",))
    if expected["outcome"] not in _OUTCOMES:
        raise CaseError(f"{where}: the harness does not know the outcome {expected['outcome']!r}")
    check_tolerance(expected.get("tolerance", "bit_exact"), f"{where}.tolerance")
    code = expected.get("exit_code", "nonzero")
    if code != "nonzero" and not isinstance(code, int):
        raise CaseError(f"{where}: the harness does not know the exit code {code!r}")
    if "bit_exact_names" in expected and "tensors" not in expected:
        raise CaseError(f"{where}: `bit_exact_names` needs `tensors`")


def mentions(text: str, entry: str | Sequence[str]) -> bool:
    """Return whether the text holds the entry; a list is met by any one of its strings.

    One or two letters or digits count only as a word of their own: a `w` is in every warning.
    """
    if not isinstance(entry, str):
        return any(mentions(text, one) for one in entry)
    if len(entry) <= 2 and entry.isalnum():
        return re.search(rf"(?<!\w){re.escape(entry)}(?!\w)", text) is not None
    return entry in text


def _without_root(text: str, root: Path) -> str:
    # The folder that the test runs in bears the case's name, which may hold the very words to look for.
    for path in dict.fromkeys((str(root.resolve()), str(root))):
        text = text.replace(path, ".")
    return text


def _missing_mentions(text: str, entries: Sequence[Any], what: str) -> Iterator[str]:
    yield from (f"the {what} does not mention {entry!r}" for entry in entries if not mentions(text, entry))


def result_problems(expected: Expected, result: Result, root: Path) -> Iterator[str]:
    """Yield what is wrong with the exit code and the messages."""
    stderr, text = _without_root(result.stderr, root), _without_root(result.text, root)
    if "Traceback (most recent call last)" in result.text:
        yield "there is a traceback"
    if result.code == 0:
        if expected["outcome"] == "error":
            yield "the build succeeded, expected an error"
        for key in ("message_should_mention", "warning_should_mention"):
            yield from _missing_mentions(text, expected.get(key, ()), "output")
        return
    if expected["outcome"] == "success":
        yield f"the build failed with exit code {result.code}"
    if result.code not in _ERROR_CODES:
        yield f"the exit code is {result.code}, an error's is one of {_ERROR_CODES}"
    if isinstance(wanted := expected.get("exit_code", "nonzero"), int) and result.code != wanted:
        yield f"the exit code is {result.code}, expected {wanted}"
    if not re.search(r'^(error\b|\{"error")', stderr, re.MULTILINE):
        yield "there is no line `error: ...` on stderr"
    yield from _missing_mentions(stderr, expected.get("error_should_mention", ()), "error")


def output_problems(expected: Expected, context: Context) -> Iterator[str]:
    """Yield how the output differs from what is expected of it."""
    if not context.out.is_dir():
        yield f"there is no output folder `{context.out.name}`"
        return
    broken = list(partial_output(context.out))
    yield from broken
    for key, check in CHECKS.items():
        if key in expected and not broken:
            try:
                yield from check(expected[key], context, expected)
            except CheckError as error:
                yield f"{key}: {error}"


def effect_problems(expected: Expected, failed: bool, before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what a build did beside making its output: litter, and a failed one's traces."""
    yield from litter(before, after)
    if failed:
        yield from kept_output(before, after)
    if failed or expected.get("lock_unchanged"):
        yield from kept_lock(before, after)


def describe(result: Result) -> Iterator[str]:
    """Yield what a process printed, for the report of a failure."""
    yield f"exit code {result.code} after {result.seconds:.2f} s"
    streams: Mapping[str, str] = {"stdout": result.stdout, "stderr": result.stderr}
    yield from (f"{name}:\n{stream.rstrip()}" for name, stream in streams.items() if stream.strip())
