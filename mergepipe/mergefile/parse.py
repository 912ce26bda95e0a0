"""Reads a Mergefile: text in, a checked `Mergefile` out, or every problem of it in one go.

The steps: TOML (`text`), lines (`locate`), entry by entry against the schema and the operators' signatures
(`sources`, `outputs`, ...), the file as a whole (`checks`), and what this release cannot execute (`unsupported`). No
weight is read, and only `load_mergefile` looks at the file system, for the Mergefile alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergepipe.errors import MergefileError
from mergepipe.mergefile.checks import check_whole
from mergepipe.mergefile.locate import LineMap, locate
from mergepipe.mergefile.names import Names, check_names, named_tables
from mergepipe.mergefile.outputs import OUTPUT_KEYS, read_output
from mergepipe.mergefile.problems import Problems
from mergepipe.mergefile.progressive import check_progressive, with_coarse_budget
from mergepipe.mergefile.schema import CustomOperator, Mergefile
from mergepipe.mergefile.sources import SOURCE_KEYS, read_operator, read_source
from mergepipe.mergefile.table import Table
from mergepipe.mergefile.text import parse_toml, read_text
from mergepipe.mergefile.unsupported import report_unsupported
from mergepipe.signatures import OperatorSignature

VERSION = 1
_TOP_KEYS = ("version", "sources", "outputs", "operators")
_SOURCE_HINT = 'write `[sources.NAME]` with `path = "..."` below it'
_OUTPUT_HINT = "write `[outputs.NAME]` with `operator` and `experts` below it"
_UNSEEN = CustomOperator(name="", file="", function="", line=0)  # of a package; only that there is one counts
_OPERATOR_HINT = 'write `[operators.NAME]` with `python = "ops.py:my_merge"` below it'


LoadOperators = Callable[[Sequence[CustomOperator], Sequence[str]], Mapping[str, OperatorSignature | None]]
"""Given the custom operators that outputs use, and names of operators that are neither built in nor declared, returns
the signatures of those that it can load, and None for one that there is but that it does not load; it may raise
`MergefileError`."""


def _load_none(declared: Sequence[CustomOperator], unknown: Sequence[str]) -> Mapping[str, OperatorSignature]:
    """Load nothing: outputs of custom operators are then checked without a signature."""
    del declared, unknown
    return {}


def load_mergefile(
    path: Path, signatures: Mapping[str, OperatorSignature], load: LoadOperators = _load_none
) -> Mergefile:
    """Return the Mergefile at ``path``, checked against the operators' ``signatures``.

    Parameters
    ----------
    signatures
        Of the built-in operators.
    load
        Loads custom ones, which runs their code.

    Raises
    ------
    MergefileError
        If the file is missing, is not TOML, or has one problem.
    CollectedErrors
        If it has several problems: a `MergefileError` for each, in the order of the file.
    StorageError
        If the operating system refuses to read it.
    """
    mergefile, problems = _read(read_text(path), path, signatures, load)
    problems.raise_if_any()
    return mergefile


def parse_mergefile(text: str, path: Path, signatures: Mapping[str, OperatorSignature]) -> Mergefile:
    """Return the Mergefile in ``text``; ``path`` is where it is, or would be.

    Raises
    ------
    MergefileError, CollectedErrors
        As `load_mergefile`.
    """
    mergefile, problems = _read(text, path, signatures, _load_none)
    problems.raise_if_any()
    return mergefile


def check_declarations(
    data: Mapping[str, Any], path: Path, signatures: Mapping[str, OperatorSignature], load: LoadOperators = _load_none
) -> Mergefile:
    """Return what a record repeats of a Mergefile as a Mergefile, checked like one.

    Parameters
    ----------
    data
        As a TOML parser gives it.
    path
        The record; for messages, which have no line of it to name.

    Raises
    ------
    MergefileError, CollectedErrors
        As `load_mergefile`.
    """
    problems = Problems(path.name, str(path), LineMap({}))
    mergefile = _entries(Table(data, (), problems), path, signatures, load)
    check_whole(mergefile, problems)
    check_progressive(mergefile, problems)
    report_unsupported(mergefile, problems)
    problems.raise_if_any()
    return mergefile


def _read(
    text: str, path: Path, signatures: Mapping[str, OperatorSignature], load: LoadOperators
) -> tuple[Mergefile, Problems]:
    """Return what could be understood, and the problems found on the way."""
    data = parse_toml(text, path)
    if not data:
        hint = "`mergepipe init` writes a commented one"
        raise MergefileError(f"{path.name}: is empty: it declares no sources and no outputs", hint=hint, file=str(path))
    problems = Problems(path.name, str(path), locate(text))
    top = Table(data, (), problems)
    if not _check_version(top):
        problems.raise_if_any()
    top.check_keys(_TOP_KEYS)
    mergefile = _entries(top, path, signatures, load)
    check_whole(mergefile, problems)
    check_progressive(mergefile, problems)
    report_unsupported(mergefile, problems)
    return mergefile, problems


def _check_version(top: Table) -> bool:
    """Record a version that is not ours; return False for a newer one, whose rules we cannot know."""
    value = top.data.get("version")
    if "version" not in top:
        top.missing("version", "the version of the Mergefile's format", hint=f"write `version = {VERSION}` at the top")
    elif isinstance(value, bool) or not isinstance(value, int) or value < VERSION:
        top.wrong("version", str(VERSION))
    elif value > VERSION:
        what = "this Mergefile needs a newer mergepipe"
        top.problems.add(("version",), what, expected=str(VERSION), got=value, hint="upgrade mergepipe")
        return False
    return True


def _entries(top: Table, path: Path, signatures: Mapping[str, OperatorSignature], load: LoadOperators) -> Mergefile:
    sections = {key: top.table(key) for key in ("sources", "outputs", "operators")}
    if not top.data.get("sources", {}):
        top.missing("sources", "no checkpoints to merge are declared", hint=_SOURCE_HINT)
    if not top.data.get("outputs", {}):
        top.missing("outputs", "nothing to build is declared", hint=_OUTPUT_HINT)
    sources = named_tables(sections["sources"], SOURCE_KEYS, _SOURCE_HINT)
    outputs = named_tables(sections["outputs"], OUTPUT_KEYS, _OUTPUT_HINT)
    check_names(sections["sources"])
    check_names(sections["outputs"])
    names = Names(
        sources=_all_names(sections["sources"], sources),
        outputs=_all_names(sections["outputs"], outputs),
        adapters=frozenset(name for name, table in sources.items() if "on" in table),
    )
    custom = _custom_operators(sections["operators"], signatures)
    used = _operators_used(outputs)
    loaded = load(
        [operator for name, operator in custom.items() if name in used and operator.file],
        [name for name in used if name not in signatures and name not in custom],
    )
    signatures = {**signatures, **{name: signature for name, signature in loaded.items() if signature is not None}}
    known = {**dict.fromkeys(loaded, _UNSEEN), **custom}
    found = {name: read_source(name, table, names) for name, table in sources.items()}
    declared = {name: read_output(name, table, names, signatures, known) for name, table in outputs.items()}
    return Mergefile(
        path=Path(os.path.abspath(path)),  # noqa: PTH100 - symlinks stay as they are
        sources=found,
        outputs={name: with_coarse_budget(output, found) for name, output in declared.items()},
        operators=custom,
    )


def _all_names(section: Table | None, understood: Mapping[str, Table]) -> tuple[str, ...]:
    """Return the names of a section, those of entries that are not tables too."""
    data = {} if section is None else section.data
    return (*understood, *(name for name, value in data.items() if not isinstance(value, Mapping)))


def _operators_used(outputs: Mapping[str, Table]) -> list[str]:
    """Return the names of operators that outputs and their slices give, as far as they are names, in order."""
    found: list[object] = []
    for table in outputs.values():
        found.append(table.data.get("operator"))
        slices = table.data.get("slices")
        parts = slices if isinstance(slices, list) else []
        found += [part.get("operator") for part in parts if isinstance(part, Mapping)]
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def _custom_operators(section: Table | None, signatures: Mapping[str, OperatorSignature]) -> dict[str, CustomOperator]:
    """Return the user's own operators; one with problems is a name without a function, so that it can be used."""
    found = {}
    for name, table in section.tables(_OPERATOR_HINT) if section is not None else ():
        operator = read_operator(name, table, name in signatures)
        found[name] = operator or CustomOperator(name=name, file="", function="", line=table.line)
    return found
