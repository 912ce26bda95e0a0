"""Regular expressions from a checkpoint's files, matched in time that grows with the name alone.

An adapter's config selects modules by regular expressions, and anybody may have written it. Python's matcher goes back
over what it tried: a pattern of a few characters keeps it busy for years. Here all ways to match are followed side by
side (Thompson, Regular expression search algorithm, Communications of the ACM 11(6), 1968), so the work is at most the
length of the pattern times that of the name. What this cannot express, such as references back, is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST = 2000
"""Characters of a pattern."""
_MOST_STATES = 2000
_MOST_STEPS = 5_000_000
_Test = Callable[[str], bool]
_CATEGORIES: dict[Any, _Test] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    ops.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    ops.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)
# What takes one character or none: where there is nothing else, Python's matcher has nothing to go back over.
_FLAT = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT)


class PatternError(Exception):
    """A pattern is no regular expression, or not one that is followed here; the message says why."""


class Work:
    """Counts what all patterns of one config took, in steps of about a microsecond."""

    def __init__(self, limit: int = _MOST_STEPS) -> None:
        self._left = limit

    def take(self, steps: int) -> None:
        """Count steps.

        Raises
        ------
        PatternError
            If that is more than any sane config takes.
        """
        self._left -= steps
        if self._left < 0:
            raise PatternError("all patterns together take too long")


class ModulePattern:
    """Decides which modules a pattern selects, as PEFT does: it matches the name, or what follows one of its dots.

    Parameters
    ----------
    text
        The pattern as the config has it; ``layers.0`` matches ``model.layers.0``.
    work
        Where the steps are counted.

    Raises
    ------
    PatternError
        If it is not valid, or needs references back, a look around, or more states than any sane pattern.
    """

    def __init__(self, text: str, work: Work) -> None:
        self._work = work
        self._flat: re.Pattern[str] | None = None
        if len(text) > LONGEST:
            raise PatternError(f"longer than {LONGEST:,} characters")
        # A state is a test and the states behind it, or no test (it is passed at once), or None at both: an end.
        self._tests: list[_Test | None] = []
        self._next: list[tuple[int, ...]] = []
        self._anchors: dict[int, bool] = {}  # states that are passed only at the beginning (True) or the end (False)
        self._accept = self._start = self._state(None, ())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what may mean something else in a later Python
                tree = _parsed(text)
                if all(code in _FLAT for code, _ in tree):
                    self._flat = re.compile(rf"(?:.*\.)?(?:{text})\Z", re.DOTALL)
                else:
                    self._start = self._sequence(tree, self._accept)
        except RecursionError:
            raise PatternError("nested too deeply") from None

    def match(self, name: str) -> bool:
        """Return whether the module of this name is selected.

        Raises
        ------
        PatternError
            If the patterns of the config have taken too long.
        """
        if self._flat is not None:
            self._work.take(1 + len(name) // 64)
            return self._flat.match(name) is not None
        current: set[int] = set()
        for at in range(len(name) + 1):
            if at == 0 or name[at - 1] == ".":  # what stands before may be anything that ends in a dot
                current |= self._reached((self._start,), at, len(name))
            if at == len(name):
                break
            char = name[at]
            passed = {after for state in current if (test := self._tests[state]) and test(char)
                      for after in self._next[state]}  # fmt: skip
            self._work.take(1 + len(current))
            current = self._reached(passed, at + 1, len(name))
        return self._accept in current

    def _reached(self, states: Iterable[int], at: int, length: int) -> set[int]:
        """Return the states and all behind them that are passed without a character."""
        found, pending = set[int](), list(states)
        while pending:
            state = pending.pop()
            anchor = self._anchors.get(state)
            if state in found or (anchor is not None and at != (0 if anchor else length)):
                continue
            found.add(state)
            if self._tests[state] is None:
                pending += self._next[state]
        return found

    def _state(self, test: _Test | None, after: tuple[int, ...]) -> int:
        if len(self._tests) >= _MOST_STATES:
            raise PatternError("it repeats too much")
        self._tests.append(test)
        self._next.append(after)
        return len(self._tests) - 1

    def _sequence(self, items: Any, after: int) -> int:
        """Return the state at which a parsed sequence begins that goes on at ``after``."""
        for code, argument in reversed(list(items)):
            after = self._item(code, argument, after)
        return after

    def _item(self, code: Any, argument: Any, after: int) -> int:
        if code is ops.AT and argument in (*_STARTS, *_ENDS):
            state = self._state(None, (after,))
            self._anchors[state] = argument in _STARTS
            return state
        if code is ops.BRANCH:
            return self._state(None, tuple(self._sequence(branch, after) for branch in argument[1]))
        if code is ops.SUBPATTERN and not argument[1] and not argument[2]:
            return self._sequence(argument[3], after)
        if code in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, body = argument
            return self._repeat(least, most, body, after)
        return self._state(_test(code, argument), (after,))

    def _repeat(self, least: int, most: Any, body: Any, after: int) -> int:
        if least > _MOST_STATES or (most is not ops.MAXREPEAT and most > _MOST_STATES):
            raise PatternError("it repeats too much")
        start = after
        if most is ops.MAXREPEAT:
            start = self._state(None, (after,))
            self._next[start] = (self._sequence(body, start), after)
        else:
            for _ in range(most - least):
                start = self._state(None, (self._sequence(body, start), after))
        for _ in range(least):
            start = self._sequence(body, start)
        return start


def _parsed(text: str) -> Any:
    try:
        tree = parser.parse(text)
    except (re.error, OverflowError, ValueError) as error:
        raise PatternError(str(error)) from None
    if tree.state.flags & ~re.UNICODE:
        raise PatternError("it sets flags")
    return tree


def _test(code: Any, argument: Any) -> _Test:
    """Return the test of a single character."""
    if code is ops.LITERAL:
        return lambda char: ord(char) == argument
    if code is ops.NOT_LITERAL:
        return lambda char: ord(char) != argument
    if code is ops.ANY:
        return lambda _: True
    if code is ops.RANGE:
        return lambda char: argument[0] <= ord(char) <= argument[1]
    if code is ops.CATEGORY:
        return _CATEGORIES[argument]
    if code is ops.IN:
        negated = argument[0][0] is ops.NEGATE
        tests = [_test(*part) for part in argument[negated:]]
        return lambda char: any(test(char) for test in tests) != negated
    raise PatternError(f"`{str(code).lower()}` is not supported")
