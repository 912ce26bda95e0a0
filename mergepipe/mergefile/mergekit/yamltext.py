"""From bytes to YAML documents with line numbers, with messages for everything that is not readable as one.

Only plain data is accepted: mappings with string keys, lists, strings, numbers, true and false, null. The scalars mean
what they mean to PyYAML's safe loader (YAML 1.1), which mergekit uses: `1e-5` is a string, `yes` is true. Unlike there,
a key that is given twice is an error. Aliases are followed, up to a limit of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from mergepipe.errors import MergefileError
from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.suggest import code
from mergepipe.units import format_bytes
from mergepipe.values import dataclass

if TYPE_CHECKING:
    import yaml

LARGEST_FILE = 1_000_000
"""Bytes; configurations that people write have some thousands."""
LARGEST_TREE = 50_000
"""Nodes of all documents together, those behind aliases counted each time."""

_LONGEST_EXCERPT = 120
_SCALARS = ("str", "int", "float", "bool", "null")
_TAG = "tag:yaml.org,2002:"
# What PyYAML says, and what helps. The keys are looked for in its messages.
_ADVICE = (
    ("found character '\\t'", "a tab where YAML wants spaces", "indent with spaces"),
    ("mapping values are not allowed here", "a `:` that starts no value", "quote a text that holds `: `"),
    ("could not find expected ':'", "a line without `:`", "each key is followed by `: ` and its value"),
    ("found undefined alias", "an alias (`*name`) without its anchor (`&name`)", "quote a text that starts with `*`"),
    (
        "while scanning an alias",
        "`*` begins an alias here",
        'quote a text that starts with `*`: `filter: "*"`',
    ),
    ("found character '%'", "a text cannot start with `%`", "put it in quotes"),
    ("found character '@'", "a text cannot start with `@`", "put it in quotes"),
    ("found character '`'", "a text cannot start with a backtick", "put it in quotes"),
    ("found duplicate anchor", "an anchor (`&name`) is defined twice", None),
    ("while scanning a quoted scalar", "a string without its closing quote, or with an escape that is none", None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One YAML document: its data, and the line (from 1) of each key by key path."""

    data: Any
    lines: dict[KeyPath, int]


def read_documents(content: bytes, file: str, location: str) -> tuple[Document, ...]:
    """Return the documents of a YAML file, without the empty ones.

    Parameters
    ----------
    content
        The file's bytes.
    file, location
        How messages call the file, and its path for the machine-readable facts.

    Raises
    ------
    MergefileError
        If it is too large, not UTF-8, not YAML, or not plain data; with the line and the column.
    """
    reader = _Reader(file, location)
    documents = reader.documents(reader.decode(content))
    if not documents:
        raise MergefileError(f"{file}: is empty: it holds no merge", file=location)
    return documents


class _Reader:
    def __init__(self, file: str, location: str) -> None:
        self._file = file
        self._location = location
        self._left = LARGEST_TREE
        self._lines: dict[KeyPath, int] = {}
        self._open: list[yaml.Node] = []

    def decode(self, content: bytes) -> str:
        if len(content) > LARGEST_FILE:
            limit = format_bytes(LARGEST_FILE)
            raise MergefileError(
                f"{self._file}: is larger than {limit}: that is no merge configuration", file=self._location
            )
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            what = f"{self._file}: is UTF-16 text, and mergekit reads UTF-8"
            raise MergefileError(what, hint="save it as UTF-8 in your editor", file=self._location)
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            what = f"is not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start})"
            self._fail(line, None, what, hint="save it as UTF-8 in your editor")

    def documents(self, text: str) -> tuple[Document, ...]:
        import yaml

        found = []
        try:
            loader = yaml.SafeLoader(text)
            while loader.check_node():
                self._lines = {}
                node = loader.get_node()
                data = None if node is None else self._value(loader, node, ())
                if data is not None:
                    found.append(Document(data=data, lines=self._lines))
        except yaml.reader.ReaderError as error:
            number = error.character if isinstance(error.character, int) else ord(error.character)
            what = f"a character that YAML does not allow (U+{number:04X})"
            self._fail(text.count("\n", 0, error.position) + 1, None, what)
        except yaml.MarkedYAMLError as error:
            self._syntax_error(error, text)
        except RecursionError:
            raise MergefileError(f"{self._file}: is nested too deeply", file=self._location) from None
        return tuple(found)

    def _syntax_error(self, error: yaml.MarkedYAMLError, text: str) -> NoReturn:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        said = f"{error.context or ''} {error.problem or ''}".strip()
        what, hint = next(((what, hint) for phrase, what, hint in _ADVICE if phrase in said), (said, None))
        lines = text.splitlines()
        shown = lines[line - 1] if line <= len(lines) else ""
        excerpt = ""
        if shown.strip() and len(shown) <= _LONGEST_EXCERPT:
            shown = "".join(c if c.isprintable() else " " for c in shown)
            excerpt = f"\n  {shown}\n  {' ' * (column - 1)}^"
        self._fail(line, column, f"not valid YAML: {what}{excerpt}", hint=hint)

    def _fail(self, line: int, column: int | None, what: str, hint: str | None = None) -> NoReturn:
        place = f"{self._file}:{line}" + (f":{column}" if column else "")
        raise MergefileError(f"{place}: {what}", hint=hint, file=self._location, line=line) from None

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath) -> Any:
        """Return the data of a node, noting the line of everything in it."""
        import yaml

        line = node.start_mark.line + 1
        self._lines.setdefault(path, line)
        self._left -= 1
        if self._left < 0:
            self._fail(line, None, f"more than {LARGEST_TREE} values, those behind aliases counted each time")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(loader, node)
        if any(node is outer for outer in self._open):
            self._fail(line, None, "holds an alias to itself", hint="write it out")
        if node.tag != _TAG + ("map" if isinstance(node, yaml.MappingNode) else "seq"):
            self._fail(line, None, f"the tag {code(node.tag.removeprefix(_TAG))} is not supported", hint="remove it")
        self._open.append(node)
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(loader, node, path)
        else:
            value = [self._value(loader, inner, (*path, index)) for index, inner in enumerate(node.value)]
        self._open.pop()
        return value

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        line, kind = node.start_mark.line + 1, node.tag.removeprefix(_TAG)
        if kind == "timestamp":
            self._fail(line, None, f"{code(node.value)} is a date", hint="put it in quotes if it is a name")
        if kind not in _SCALARS:
            what = "`=` alone has a meaning of its own in YAML" if kind == "value" else None
            self._fail(line, None, what or f"the tag {code(kind)} is not supported", hint="put it in quotes")
        if any("\ud800" <= c <= "\udfff" for c in node.value):
            self._fail(line, None, "half of a surrogate pair, which is no character")
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError):  # `!!int x`, `!!bool x`; an integer of thousands of digits
            self._fail(line, None, f"{code(node.value[:40])} is not a number that can be read")

    def _mapping(self, loader: yaml.SafeLoader, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merges = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                merges.append(value_node)
                continue
            key = self._key(loader, key_node)
            if key in data:
                first = self._lines[(*path, key)]
                self._fail(line, None, f"the key {code(key)} is given twice (first in line {first})")
            self._lines[(*path, key)] = line
            data[key] = self._value(loader, value_node, (*path, key))
        for merge in merges:
            for other in self._merged(loader, merge, path):
                data = other | data
        return data

    def _merged(self, loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath) -> Iterator[dict[str, Any]]:
        """Yield the mappings that `<<` merges into one, the first of them first; what is there already wins."""
        import yaml

        for inner in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            own, self._lines = self._lines, {}
            value = self._value(loader, inner, path)
            own, self._lines = self._lines, own
            for place, line in own.items():
                self._lines.setdefault(place, line)
            if not isinstance(value, dict):
                self._fail(inner.start_mark.line + 1, None, "`<<` takes a mapping, or a list of them")
            yield value

    def _key(self, loader: yaml.SafeLoader, node: yaml.Node) -> str:
        import yaml

        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            self._fail(line, None, "a key is a list or a mapping", hint="keys are plain words")
        key = self._scalar(loader, node)
        if not isinstance(key, str):
            hint = f'put it in quotes: `"{node.value}"`' if node.value else None
            self._fail(line, None, f"the key {code(node.value) if node.value else 'null'} is not a string", hint=hint)
        return key
