"""JSON read strictly: what a lenient reader would let pass becomes a `Flaw`, where the caller meets it and can name it.

Python's reader lets the last of two equal keys win, accepts NaN and lone surrogates, reads ``-0`` as an integer and
fails in its own ways on very long numbers. Here

- an object with a repeated key becomes a flaw,
- NaN, infinities, ``-0``, integers beyond 64 bits and numbers that overflow a double become flaws,
- text that is not UTF-8, not JSON, or nested beyond the limit raises `JsonError`.

Lone surrogates stay in the strings; `flaw_in` finds them, and everything else at any depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from mergepipe.values import dataclass

MAX_NESTING = 127
"""Objects and arrays inside one another; the safetensors library stops there as well."""

_LONGEST_NUMBER = 400
_INTEGER_LIMIT = 2**64


@dataclass(frozen=True, slots=True)
class Flaw:
    """Stands where a value was that strict JSON does not allow.

    Attributes
    ----------
    rule
        ``duplicate-name``, ``number``, ``surrogate`` or ``nesting``.
    what
        The words that describe it.
    subject
        The repeated key of ``duplicate-name``.
    """

    rule: str
    what: str
    subject: str = ""


class JsonError(Exception):
    """A text is not JSON: ``rule`` is ``header-utf8``, ``header-json`` or ``nesting``."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(what)
        self.rule = rule
        self.what = what


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Flaw:
    """Build an object unless it repeats a key."""
    built = dict(pairs)
    if len(built) == len(pairs):
        return built
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return Flaw("duplicate-name", "appears twice", key)
        seen.add(key)
    raise AssertionError("unreachable")


def _number_flaw(text: str) -> Flaw:
    shown = text if len(text) <= 30 else f"{text[:30]}..."
    return Flaw("number", f"the number `{shown}` is not allowed")


def _integer(text: str) -> int | Flaw:
    # A JSON integer without leading zeros: 20 characters hold all 64-bit ones.
    if len(text) > 20 or text == "-0":
        return _number_flaw(text)
    value = int(text)
    return value if -_INTEGER_LIMIT < value < _INTEGER_LIMIT else _number_flaw(text)


def _float(text: str) -> float | Flaw:
    if len(text) > _LONGEST_NUMBER:
        return _number_flaw(text)
    value = float(text)
    return value if math.isfinite(value) else _number_flaw(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_number_flaw
)


def decode(data: bytes) -> Any:
    """Return the value of a JSON text, with a `Flaw` in the place of whatever is not allowed.

    Raises
    ------
    JsonError
        If it is not UTF-8, not JSON, or nested so deeply that the reader gives up.
    """
    try:
        return _DECODER.decode(data.decode())
    except UnicodeDecodeError as error:
        raise JsonError("header-utf8", f"not UTF-8 at byte {error.start:,}") from None
    except json.JSONDecodeError as error:
        raise JsonError("header-json", f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise JsonError("nesting", f"nested more than {MAX_NESTING} deep") from None


def is_encodable(text: str) -> bool:
    """Return whether a string is free of lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def flaw_in(value: Any, *, depth: int) -> Flaw | None:
    """Return the first flaw inside a value, which lies within ``depth`` objects and arrays."""
    pending: list[Iterator[Any]] = [iter((value,))]
    while pending:
        item = next(pending[-1], pending)
        if item is pending:
            pending.pop()
        elif isinstance(item, Flaw):
            return item
        elif isinstance(item, str):
            if not is_encodable(item):
                return Flaw("surrogate", "a string holds a lone surrogate")
        elif isinstance(item, dict | list):
            if depth + len(pending) > MAX_NESTING:
                return Flaw("nesting", f"nested more than {MAX_NESTING} deep")
            pending.append(iter(item) if isinstance(item, list) else _keys_and_values(item))
    return None


def _keys_and_values(item: dict[str, Any]) -> Iterator[Any]:
    for key, value in item.items():
        yield key
        yield value
