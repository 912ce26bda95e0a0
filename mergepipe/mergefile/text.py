"""From a file to TOML data, with messages for everything that is not a readable TOML document.

CRLF line ends and a UTF-8 byte order mark are accepted: editors on Windows write them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tomli

from mergepipe.errors import MergefileError, fail_storage
from mergepipe.fsio.reading import read_regular

_BOM = "\ufeff"
_LARGEST = 64 << 20  # bytes; what people write by hand is far below
_CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?$", re.MULTILINE)
_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_DECLARED_TWICE = re.compile(r"Cannot (?:declare|redefine namespace) \((.*)\)(?: twice)?$")
_TUPLE_ITEM = re.compile(r"[\"'](.*?)[\"'](?:,|$)")
_LONGEST_EXCERPT = 120
# What the TOML parser says, and what helps. The keys are looked for in its messages.
_ADVICE = (
    ("Cannot overwrite a value", "a key is given twice", None),
    ("Duplicate inline table key", "a key is given twice", None),
    ("Cannot mutate immutable namespace", "a table in braces cannot be added to", None),
    (
        "Unescaped '\\' in a string",
        "unescaped `\\` in a string",
        "write such a path in single quotes, 'C:\\models', or with forward slashes",
    ),
    (
        "Invalid value",
        "invalid value",
        'strings need quotes ("..."), and true and false are written in small letters',
    ),
    ("Invalid hex value", "invalid escape in a string", "write such a path in single quotes: 'C:\\users'"),
)


def read_text(path: Path) -> str:
    """Return the text of a Mergefile.

    Raises
    ------
    MergefileError
        If there is no file, it is a directory, or it is not UTF-8.
    StorageError
        If the operating system refuses to read it.
    """
    try:
        data = read_regular(path, _LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        hint = "`mergepipe init` writes one, `-C DIR` looks in another directory"
        raise MergefileError(f"there is no Mergefile at `{path}`", hint=hint, file=str(path)) from None
    except IsADirectoryError:
        inside = path / "Mergefile.toml"
        hint = f"did you mean `{inside}`?" if inside.is_file() else "give the path of the file itself"
        raise MergefileError(f"`{path}` is a directory, not a Mergefile", hint=hint, file=str(path)) from None
    except OSError as error:
        fail_storage(error, path, "read")
    return _decode(data, path)


def _decode(data: bytes, path: Path) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise MergefileError(
            f"{path.name}: is UTF-16 text, and a Mergefile is UTF-8",
            hint="save it as UTF-8 in your editor",
            file=str(path),
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise MergefileError(
            f"{path.name}:{line}: is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})",
            hint="save it as UTF-8 in your editor",
            file=str(path),
            line=line,
        ) from None


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Return the data of a TOML document.

    Raises
    ------
    MergefileError
        If it is not TOML; with the line, the column and the text there.
    """
    try:
        return tomli.loads(text.removeprefix(_BOM))
    except tomli.TOMLDecodeError as error:
        raise _syntax_error(error, text.removeprefix(_BOM), path) from None
    except RecursionError:
        raise MergefileError(f"{path.name}: lists or tables are nested too deeply", file=str(path)) from None
    except ValueError as error:  # an integer of thousands of digits
        raise MergefileError(f"{path.name}: not valid TOML: {error}", file=str(path)) from None


def _syntax_error(error: tomli.TOMLDecodeError, text: str, path: Path) -> MergefileError:
    lines = text.replace("\r\n", "\n").split("\n")
    marker = _CONFLICT.search(text.replace("\r\n", "\n"))
    if marker is not None:
        line = text.replace("\r\n", "\n").count("\n", 0, marker.start()) + 1
        return MergefileError(
            f"{path.name}:{line}: merge conflict marker `{marker[1]}`",
            hint="resolve the conflict, then run the command again",
            file=str(path),
            line=line,
        )
    what, line, column = _position(error, lines)
    what, hint = _advice(what)
    return MergefileError(
        f"{path.name}:{line}:{column}: not valid TOML: {what}{_excerpt(lines[line - 1], column)}",
        hint=hint,
        file=str(path),
        line=line,
        column=column,
    )


def _position(error: tomli.TOMLDecodeError, lines: list[str]) -> tuple[str, int, int]:
    """Return the parser's message without its position, the line and the column (from 1)."""
    message = str(error)
    match = _POSITION.search(message)
    what = message[: match.start()] if match else message
    if match and match[1]:
        return what, int(match[1]), int(match[2])
    # At the end of the document: newer versions of tomli say as attributes where that is.
    line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
    if line is not None and column is not None:
        return what, line, column
    last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=1)
    return what, last, len(lines[last - 1]) + 1


def _advice(what: str) -> tuple[str, str | None]:
    for phrase, better, hint in _ADVICE:
        if phrase in what:
            return better, hint
    twice = _DECLARED_TWICE.search(what)
    if twice is not None:
        return f"the table `{'.'.join(re.findall(_TUPLE_ITEM, twice[1]))}` is declared twice", None
    return what[:1].lower() + what[1:], None


def _excerpt(line: str, column: int) -> str:
    """Return the line and a mark below the column, or nothing where that would not be readable."""
    if not line.strip() or len(line) > _LONGEST_EXCERPT:
        return ""
    shown = "".join(c if c.isprintable() else " " for c in line)
    return f"\n  {shown}\n  {' ' * (column - 1)}^"
