"""Names of sources and outputs: how they are written, and whether what is referred to exists."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from mergepipe.mergefile.locate import KeyPath
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.suggest import code, did_you_mean, quoted, short_listing
from mergepipe.mergefile.table import Table
from mergepipe.values import dataclass

_NAME = re.compile(r"\w[\w.-]*")


def is_name(text: str) -> bool:
    """Return whether a source or an output may have this name."""
    return _NAME.fullmatch(text) is not None


def clean_name(text: str) -> str:
    """Return a valid name made from any text, such as a folder's name; other characters become ``-``."""
    cleaned = re.sub(r"[^\w.]+", "-", unicodedata.normalize("NFC", text)).strip("-.")
    return cleaned or "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Every name that a base, an expert or a tokenizer can refer to, in the order of the file.

    ``adapters`` are the sources that apply to another one.
    """

    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    adapters: frozenset[str] = frozenset()

    def check(self, name: str, path: KeyPath, problems: Problems, *, below: bool = False) -> bool:
        """Return whether ``name`` exists, recording at ``path`` that it does not.

        ``below`` asks for what an adapter can apply to: no adapter and no output is offered then.
        """
        known = dict.fromkeys(self.sources + self.outputs)
        if name in known:
            return True
        if below:
            known = dict.fromkeys(source for source in self.sources if source not in self.adapters)
        known.pop(str(path[1]), None)  # the entry that refers to it cannot be what was meant
        hint = did_you_mean(name, known)
        if hint is None and ("/" in name or "\\" in name):
            hint = f"to merge a checkpoint, declare it first: `[sources.NAME]` with `path = {quoted(name)}`"
        problems.add(
            path,
            f"unknown source {code(name)}",
            expected=short_listing(known),
            hint=hint,
        )
        return False

    def reference(self, table: Table, key: str) -> str | None:
        """Return the name that a key of ``table`` refers to; None if it is not given, wrong or unknown."""
        name = table.string(key, "the name of a source")
        return name if name is not None and self.check(name, table.at(key), table.problems) else None


def check_names(table: Table | None) -> None:
    """Record the names in `[sources]` or `[outputs]` that cannot be used."""
    for name in table.data if table is not None else ():
        if table is not None and not is_name(name):
            table.problems.add(
                table.at(name),
                f"invalid name {code(name)}",
                expected="letters, digits, `_`, `-` and `.`, and no `-` or `.` first",
                hint=f"call it {code(clean_name(name))}",
            )


def named_tables(table: Table | None, known: tuple[str, ...], hint: str) -> dict[str, Table]:
    """Return the entries of `[sources]` or `[outputs]` by name.

    A name with a dot that was not quoted is a table in a table; it is recorded as that one mistake, and its entry is
    returned under the name that was meant.
    """
    found: dict[str, Table] = {}
    for name, entry in table.tables(hint) if table is not None else ():
        inner = _undotted(entry, known)
        for part in inner:
            meant = ".".join(str(key) for key in part.path[1:])
            hint = f"write `[{part.path[0]}.{quoted(meant)}]`"
            part.problems.add(part.path, "a name with a dot needs quotes", hint=hint)
            found[meant] = part
        if not inner:
            found[name] = entry
    return found


def _undotted(entry: Table, known: tuple[str, ...]) -> list[Table]:
    """Return the entries inside one that is only the first part of their dotted names; none if it is not."""
    parts, leaves = [entry], []
    while parts:
        part = parts.pop(0)
        if any(key in known for key in part.data):
            leaves.append(part)
        elif part.data and all(isinstance(value, Mapping) for value in part.data.values()):
            parts += [Table(value, part.at(key), part.problems) for key, value in part.data.items()]
        else:
            return []
    return [] if leaves == [entry] else leaves
