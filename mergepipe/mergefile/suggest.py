"""Did-you-mean, and literals in messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

_LISTED_CHARACTERS = 160


def code(text: str) -> str:
    """Return a literal for a message: in backticks, with what does not print escaped."""
    return f"`{text}`" if text.isprintable() else f"`{_escaped(text)}`"


def quoted(text: str) -> str:
    """Return a string as it stands in a Mergefile, in double quotes; what does not print is escaped."""
    plain = text.isprintable() and '"' not in text and "\\" not in text
    return f'"{text}"' if plain else f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in escaped)


def _escape(number: int) -> str:
    """Return a character as TOML writes it by its number."""
    return f"\\U{number:08x}" if number > 0xFFFF else f"\\u{number:04x}"


def listing(names: Iterable[str], conjunction: str = "or") -> str:
    """Return ``\\`a\\`, \\`b\\` or \\`c\\```."""
    literals = [code(name) for name in names]
    if len(literals) < 2:
        return "".join(literals)
    return f"{', '.join(literals[:-1])} {conjunction} {literals[-1]}"


def short_listing(names: Iterable[str], conjunction: str = "or") -> str | None:
    """Return `listing`, or None where it would be too long for a message (or empty)."""
    text = listing(names, conjunction)
    return text if 0 < len(text) <= _LISTED_CHARACTERS else None


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that ``word`` most likely stands for, None if nothing is near.

    Spelling aside (case, ``-`` for ``_``) an equal name always wins.
    """
    by_form: dict[str, str] = {}
    for name in names:
        by_form.setdefault(_form(name), name)
    matches = difflib.get_close_matches(_form(word), list(by_form), n=1, cutoff=0.6)
    return by_form[matches[0]] if matches else None


def respelled(word: str, names: Iterable[str]) -> str | None:
    """Return the name that equals ``word`` but for case and ``-`` or ``_``, None if there is none."""
    return next((name for name in names if _form(name) == _form(word)), None)


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    """Return the hint ``did you mean `name`?``, None if no name is near."""
    name = closest(word, names)
    return None if name is None else f"did you mean {code(name)}?"


def _form(name: str) -> str:
    return name.casefold().replace("-", "_")
