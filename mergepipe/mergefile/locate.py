"""Where each key of a TOML document stands: a map from key paths to line numbers.

TOML parsers give values without positions, so this walks the text a second time. It takes the text to be valid (it
was parsed before) and only follows its structure: headers, arrays of tables, dotted keys, inline tables, arrays. What
it cannot follow costs line numbers, never an error: a path that was not found has the line of the table around it.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections.abc import Mapping

import tomli

KeyPath = tuple[str | int, ...]
"""Keys from the top of the document; integers are positions in arrays, from 0."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY_PART = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|[^\s.=\[\]"\'#,{}]+')
# Alternatives in order: the two multi-line strings (their closing quotes may follow up to two quotes of the text), the
# two single-line ones, and anything else up to a delimiter: numbers, dates, true and false.
_PLAIN_VALUE = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|[^,\]}\n#]+",
    re.DOTALL,
)


class LineMap:
    """Line numbers (from 1) by key path."""

    def __init__(self, lines: Mapping[KeyPath, int]) -> None:
        self._lines = lines

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the nearest table around it; 1 for the whole document."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


def locate(text: str) -> LineMap:
    """Return the lines of all keys of a valid TOML document."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with contextlib.suppress(_LostError, RecursionError):  # the lines found so far still help
        scanner.document()
    return LineMap(scanner.lines)


class _LostError(Exception):
    """The text is not what this scanner expects at its position."""


class _Scanner:
    """Follows a document from its start; ``lines`` fills as it goes."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._pos = 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._table: KeyPath = ()
        self._last_index: dict[KeyPath, int] = {}

    def document(self) -> None:
        """Follow all statements."""
        self._skip(_BLANK)
        while self._pos < len(self._text):
            if self._text.startswith("[[", self._pos):
                self._header("[[", "]]")
            elif self._text.startswith("[", self._pos):
                self._header("[", "]")
            else:
                self._pair(self._table)
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._pos)
        if match is None:
            raise _LostError
        self._pos = match.end()
        return match[0]

    def _expect(self, literal: str) -> None:
        if not self._text.startswith(literal, self._pos):
            raise _LostError
        self._pos += len(literal)

    def _accept(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._pos)
        self._pos += len(literal) if found else 0
        return found

    def _line(self) -> int:
        return bisect_right(self._starts, self._pos)

    def _key(self) -> tuple[str, ...]:
        parts = []
        while True:
            self._skip(_SPACE)
            parts.append(_unquote(self._skip(_KEY_PART)))
            self._skip(_SPACE)
            if not self._accept("."):
                return tuple(parts)

    def _header(self, opening: str, closing: str) -> None:
        line = self._line()
        self._expect(opening)
        parts = self._key()
        self._expect(closing)
        path: KeyPath = ()
        for part in parts[:-1]:
            path = self._enter((*path, part), line)
        path = (*path, parts[-1])
        if opening == "[[":
            self.lines.setdefault(path, line)
            self._last_index[path] = self._last_index.get(path, -1) + 1
            path = (*path, self._last_index[path])
        # A table may be mentioned before its own header, through a table inside it; the header is the better place.
        self.lines[path] = line
        self._table = path

    def _enter(self, path: KeyPath, line: int) -> KeyPath:
        """Return the table at ``path``: of an array of tables, its latest element."""
        self.lines.setdefault(path, line)
        return (*path, self._last_index[path]) if path in self._last_index else path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._expect("=")
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        if self._accept("["):
            self._items(path)
        elif self._accept("{"):
            self._inline_table(path)
        else:
            self._skip(_PLAIN_VALUE)

    def _items(self, path: KeyPath) -> None:
        index = 0
        self._skip(_BLANK)
        while not self._accept("]"):
            self.lines.setdefault((*path, index), self._line())
            self._value((*path, index))
            self._separator("]")
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._skip(_BLANK)
        while not self._accept("}"):
            self._pair(path)
            self._separator("}")

    def _separator(self, closing: str) -> None:
        self._skip(_BLANK)
        if not self._accept(",") and not self._text.startswith(closing, self._pos):
            raise _LostError
        self._skip(_BLANK)


def _unquote(part: str) -> str:
    """Return the key that a bare or quoted part of a dotted key stands for."""
    if part[0] == '"' and "\\" in part:
        return str(tomli.loads("k=" + part)["k"])
    return part[1:-1] if part[0] in "\"'" else part
