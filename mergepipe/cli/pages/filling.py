"""Filling the templates of pages.

Names come from checkpoints and Mergefiles, which may be anybody's. They go into a page in two ways only: escaped, in
the parts that are written in Python; and as JSON without ``<``, ``>`` and ``&``, which a script puts in as text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from mergepipe.cli.tables import plain

_PLACE = re.compile(r"@(\w+)@")
# In JSON these may stand only inside of strings, where the escape means the same; so no text ends the script.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def part(name: str) -> str:
    """Return a file of this package as text."""
    return resources.files("mergepipe.cli.pages").joinpath(name).read_text(encoding="utf-8")


def filled(name: str, parts: Mapping[str, str]) -> str:
    """Return a template with its places (``@name@``) filled; what is filled in is not looked at again."""
    return _PLACE.sub(lambda match: parts[match[1]], part(name))


def script_json(value: Any) -> str:
    """Return plain data as JSON that may stand in a ``script`` element; its texts are shown, so they are `plain`."""
    data = _shown(value)
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list | tuple) else value


def text(value: str) -> str:
    """Return a text for the content of an element or for a quoted attribute.

    What does not print, such as marks that turn the direction of writing, is shown as an escape.
    """
    return html.escape(plain(value))
