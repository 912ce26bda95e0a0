"""Typed access to the tables of a lock; every failure says which key path, on which line, of which file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from mergepipe.digest import DIGEST_SIZE, SAMPLED_PREFIX, parse_digest, sampled_pin
from mergepipe.errors import LockError
from mergepipe.mergefile.locate import KeyPath, locate
from mergepipe.mergefile.problems import describe, key_path
from mergepipe.signatures import ParamValue

_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    dict: "a table",
    list: "an array",
}
_ABSENT = object()
_MAX_BITS = 256  # far more than any count; Python refuses to print integers of thousands of digits


class Document:
    """A lock being read: its text, its path for messages, and whether keys that are not ours are let pass."""

    __slots__ = ("hint", "lenient", "path", "text")

    def __init__(self, *, text: str, path: Path, hint: str) -> None:
        self.text = text
        self.path = path
        self.hint = hint
        self.lenient = False

    def fail(self, path: KeyPath, problem: str, got: Any = _ABSENT) -> NoReturn:
        """Raise the `LockError` for what is wrong at a key path."""
        line = locate(self.text).line(path)
        key = key_path(path)
        message = f"{self.path}:{line}: {key}: {problem}"
        if got is not _ABSENT:
            message += f"\n  got {describe(got)}"
        raise LockError(message, hint=self.hint, file=str(self.path), line=line, key_path=key)


class Table:
    """One table of the document. All methods raise `LockError` for a missing key or a value of another type."""

    __slots__ = ("_data", "_document", "_path")

    def __init__(self, document: Document, path: KeyPath, data: dict[str, Any]) -> None:
        self._document = document
        self._path = path
        self._data = data

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def fail(self, key: str, problem: str, got: Any = _ABSENT) -> NoReturn:
        """Raise the `LockError` for what is wrong with ``key`` in this table."""
        self._document.fail((*self._path, key), problem, got)

    def allow(self, *keys: str) -> None:
        """Refuse every other key, unless the lock has a higher revision than ours."""
        if self._document.lenient:
            return
        for key in self._data:
            if key not in keys:
                self.fail(key, "is not a key that mergepipe writes")

    def _get(self, key: str, kind: type) -> Any:
        if key not in self._data:
            self.fail(key, "is missing")
        value = self._data[key]
        if type(value) is not kind:  # a bool is an int to isinstance, and not to TOML
            self._wrong_type(key, _TYPE_NAMES[kind], value)
        self._check_size((key,), value)
        return value

    def _check_size(self, path: KeyPath, value: object) -> None:
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            self._document.fail((*self._path, *path), "is out of range")

    def _wrong_type(self, key: str, expected: str, value: object) -> NoReturn:
        self.fail(key, f"must be {expected}, not {_TYPE_NAMES.get(type(value), 'a date or time')}")

    def text(self, key: str) -> str:
        """Return a string."""
        text: str = self._get(key, str)
        return text

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value: bool = self._get(key, bool)
        return value

    def integer(self, key: str) -> int:
        """Return a non-negative integer: all integers of a lock, parameters aside, are counts and sizes."""
        value: int = self._get(key, int)
        if value < 0:
            self.fail(key, "must not be negative", value)
        return value

    def optional_integer(self, key: str, default: int) -> int:
        """Return a non-negative integer, or the default where there is none."""
        return self.integer(key) if key in self._data else default

    def real(self, key: str) -> float:
        """Return a number as a float."""
        value = self._data[key]
        if type(value) not in (int, float):
            self._wrong_type(key, "a number", value)
        try:
            return float(value)
        except OverflowError:
            self.fail(key, "is out of range")

    def digest(self, key: str) -> bytes:
        """Return a digest as raw bytes."""
        return self.as_digest(key, self.text(key))

    def as_digest(self, key: str, text: str) -> bytes:
        """Return ``text``, which belongs to ``key``, as a raw digest."""
        try:
            digest = parse_digest(text)
        except LockError:
            digest = b""
        if len(digest) != DIGEST_SIZE:
            self.fail(key, "is not a digest (`b3:` and 64 hexadecimal digits)", text)
        return digest

    def pin(self, key: str) -> bytes:
        """Return what pins a source: a digest, or a fingerprint (`mergepipe.digest.sampled_pin`)."""
        text = self.text(key)
        fingerprint = text.removeprefix(SAMPLED_PREFIX)
        digest = self.as_digest(key, fingerprint)
        return digest if fingerprint == text else sampled_pin(digest)

    def pins(self) -> dict[str, bytes]:
        """Return the whole table as pins by name."""
        return {key: self.pin(key) for key in self._data}

    def digests(self) -> dict[str, bytes]:
        """Return the whole table as digests by name."""
        return {key: self.digest(key) for key in self._data}

    def texts(self, key: str) -> tuple[str, ...]:
        """Return an array of strings."""
        values: list[Any] = self._get(key, list)
        for index, value in enumerate(values):
            if type(value) is not str:
                self._document.fail((*self._path, key, index), "must be a string", value)
        return tuple(values)

    def table(self, key: str) -> Table:
        """Return a table."""
        return Table(self._document, (*self._path, key), self._get(key, dict))

    def optional_table(self, key: str) -> Table:
        """Return a table, an empty one where there is none."""
        return self.table(key) if key in self._data else Table(self._document, (*self._path, key), {})

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Yield the tables in this table, by name."""
        return ((key, self.table(key)) for key in self._data)

    def array(self, key: str) -> Iterator[Table]:
        """Yield the tables of an array."""
        for index, value in enumerate(self._get(key, list)):
            path = (*self._path, key, index)
            if type(value) is not dict:
                self._document.fail(path, "must be a table", value)
            yield Table(self._document, path, value)

    def optional_array(self, key: str) -> Iterator[Table]:
        """Yield the tables of an array, none where there is no array."""
        return self.array(key) if key in self._data else iter(())

    def params(self, skip: tuple[str, ...] = ()) -> dict[str, ParamValue]:
        """Return the whole table as parameter values by name, without the keys ``skip``."""
        return {key: self._param(key) for key in self._data if key not in skip}

    def _param(self, key: str) -> ParamValue:
        value = self._data[key]
        if type(value) is list:
            for index, anchor in enumerate(value):
                if type(anchor) not in (int, float):
                    self._document.fail((*self._path, key, index), "must be a number", anchor)
                self._check_size((key, index), anchor)
            return tuple(value)
        if not isinstance(value, (bool, int, float, str)):
            self._wrong_type(key, "a scalar or an array of numbers", value)
        self._check_size((key,), value)
        return value

    def texts_and_integers(self) -> dict[str, str | int]:
        """Return the whole table as strings and integers by name."""
        for key, value in self._data.items():
            if type(value) not in (str, int):
                self._wrong_type(key, "a string or an integer", value)
            self._check_size((key,), value)
        return dict(self._data)
