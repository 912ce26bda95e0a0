"""Text from elsewhere in a model card: nothing in a name can end a table's cell, a code span or a YAML value."""

from __future__ import annotations

import json
import re

# Controls, line separators, invisible and direction marks: what is read must be what is there. Spelled out, because the
# Unicode tables differ between versions of Python.
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\uffff"
    r"\U000e0000-\U000e0fff]"
)
_PLAIN_YAML = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*")
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def visible(text: str) -> str:
    """Return the text with what cannot be seen, or breaks a line, as ``\\u202e``."""
    return _HIDDEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def code_span(text: str) -> str:
    """Return a Markdown code span that shows the text, also within a table's cell."""
    shown = visible(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{blank}{shown}{blank}{fence}".replace("|", "\\|")


def fenced(text: str, language: str) -> list[str]:
    """Return the lines of a fenced block that no line of the text can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.splitlines(), fence]


def yaml_scalar(text: str) -> str:
    """Return a YAML scalar that every reader takes for this string, whichever version of YAML it follows."""
    if _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _HIDDEN.sub(_escape, quoted)
