"""Typed access to the tables of a parsed TOML document; what is wrong is recorded, and reading goes on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import closest, code, short_listing

# What users of other tools write, and what it is called here.
_OTHER_NAMES = {
    "merge_method": "operator",
    "method": "operator",
    "models": "experts",
    "sources": "experts",
    "base_model": "base",
    "parameters": "params",
    "tokenizer_source": "write.tokenizer",
    "tokenizer": "write.tokenizer",
    "dtype": "write.dtype",
    "out_dtype": "write.dtype",
    "shard_size": "write.shard_size",
    "expert_reads": "budget.expert_reads",
    "max_error": "budget.max_error",
}


class Table:
    """One table of the document.

    Parameters
    ----------
    data
        Its content.
    path
        Its key path.
    problems
        Where to record what is wrong.
    """

    def __init__(self, data: Mapping[str, Any], path: KeyPath, problems: Problems) -> None:
        self.data = data
        self.path = path
        self.problems = problems
        self.line = problems.line(path)
        self._mistyped: tuple[str, ...] = ()

    def __contains__(self, key: str) -> bool:
        """Return whether the key is given, whatever its value."""
        return key in self.data

    def at(self, *keys: str | int) -> KeyPath:
        """Return the key path of something inside."""
        return (*self.path, *keys)

    def wrong(self, key: str, expected: str, hint: str | None = None) -> None:
        """Record that the value of a key is not what was expected."""
        self.problems.add(self.at(key), "invalid value", expected=expected, got=self.data[key], hint=hint)

    def missing(self, key: str, what: str, hint: str | None = None) -> None:
        """Record that a key is not given, unless it is there mistyped; ``what`` says what it is for."""
        if key not in self._mistyped:
            self.problems.add(self.at(key), f"missing: {what}", hint=hint)

    def string(self, key: str, expected: str = "a string", hint: str | None = None) -> str | None:
        """Return the value of a key that holds a string with something in it; None if it is not given or wrong."""
        value = self.data.get(key)
        if isinstance(value, str) and value.strip() and "\0" not in value:
            return value
        if key in self.data:
            self.wrong(key, expected, hint)
        return None

    def location(self, key: str, expected: str) -> str | None:
        """Return the value of a key that holds a path; a URL is none, and could hold a password."""
        value = self.string(key, expected)
        if value is not None and "://" in value:
            hint = "download it, and give the path of its folder; a Mergefile is no place for passwords and tokens"
            self.problems.add(self.at(key), "a URL, not a path", hint=hint)
            return None
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the value of a key that holds true or false."""
        value = self.data.get(key, default)
        if isinstance(value, bool):
            return value
        self.wrong(key, "true or false")
        return default

    def choice(self, key: str, choices: Collection[str]) -> str | None:
        """Return the value of a key that holds one of some strings; None if it is not given or wrong."""
        value = self.data.get(key)
        if isinstance(value, str) and value in choices:
            return value
        if key in self.data:
            names = ", ".join(f'"{choice}"' for choice in choices)
            near = closest(value, choices) if isinstance(value, str) else None
            self.wrong(key, f"one of {names}", None if near is None else f'did you mean "{near}"?')
        return None

    def table(self, key: str, hint: str | None = None) -> Table | None:
        """Return the table at a key; None if it is not given or something else."""
        value = self.data.get(key)
        if isinstance(value, Mapping):
            return Table(value, self.at(key), self.problems)
        if key in self.data:
            self.wrong(key, "a table", hint)
        return None

    def tables(self, hint: str | None = None) -> Iterable[tuple[str, Table]]:
        """Yield the name and content of each table in this one, recording what is not a table."""
        for name in self.data:
            inner = self.table(name, hint)
            if inner is not None:
                yield name, inner

    def items(self, key: str, expected: str, hint: str | None = None) -> list[Any]:
        """Return the list at a key; an empty one if it is not given or something else."""
        value = self.data.get(key)
        if isinstance(value, list):
            return value
        if key in self.data:
            self.wrong(key, expected, hint)
        return []

    def check_keys(self, known: Collection[str], hints: Mapping[str, str] | None = None) -> None:
        """Record every key that is not among the known ones.

        ``hints`` says what is better than the nearest known name, for keys whose mistake is understood.
        """
        for key in self.data:
            if key not in known:
                meant = _meant(key, known)
                hint = None if meant is None else f"did you mean {code(meant)}?"
                hint = (hints or {}).get(key, hint)
                self.problems.add(self.at(key), "unknown key", expected=short_listing(known), hint=hint)
                self._mistyped += () if meant is None else (meant,)


def _meant(key: str, known: Collection[str]) -> str | None:
    name = _OTHER_NAMES.get(key.lower(), "")
    return name if name.split(".")[0] in known else closest(key, known)


def finite_number(value: Any) -> float | None:
    """Return a TOML value as a float, None if it is not a finite number (true and false are not numbers).

    There is one zero, without a sign, so that equal numbers are the same value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number + 0.0 if math.isfinite(number) else None
