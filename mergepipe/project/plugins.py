"""Operators from outside: files that a Mergefile names, and packages that are installed. Loading them runs their code.

So nothing is loaded unless it is allowed, and only what an output really uses. The digest of the code is part of every
action key: of a file with what it imports from the project's folder, of a package with its name and version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mergepipe.digest import content_digest, record_digest
from mergepipe.errors import MergefileError, MergepipeError, raise_collected
from mergepipe.mergefile.schema import CustomOperator
from mergepipe.operators.contract import Operator
from mergepipe.operators.custom import make_operator

GROUP = "mergepipe.operators"
"""The entry-point group under which packages offer operators."""
VARIABLE = "MERGEPIPE_ALLOW_CUSTOM"
"""The environment variable that allows them; ``1`` for yes, and nothing else: ``false`` is no word for it."""


def is_allowed(asked: bool) -> bool:
    """Return whether code from outside may run: it was asked for, or the environment says so."""
    return asked or os.environ.get(VARIABLE) == "1"


def load_operators(
    declared: Iterable[CustomOperator], unknown: Iterable[str], root: Path, file: str, *, allowed: bool
) -> dict[str, Operator]:
    """Load the operators of these files, and of installed packages for names that are neither built in nor declared.

    Parameters
    ----------
    declared
        Those of the Mergefile that some output uses.
    unknown
        Names of operators that only a package could offer; those that none offers are left out.
    root
        The folder of the Mergefile.
    file
        Its name, for messages.

    Raises
    ------
    MergefileError
        If code would run and is not allowed to, cannot be loaded, or is no operator; several are raised together.
    """
    found: dict[str, Operator] = {}
    errors: list[MergepipeError] = []
    for entry in declared:
        try:
            _refuse(allowed, f"{file}:{entry.line}: operators.{entry.name}", f"`{entry.file}:{entry.function}`")
            found[entry.name] = _from_file(entry, root, file)
        except MergefileError as error:
            errors.append(error)
    for name, point in _entry_points(unknown).items():
        try:
            where = f"the package `{_package(point)}`"
            _refuse(allowed, f"{file}: operator `{name}`", where)
            found[name] = _from_package(name, point)
        except MergefileError as error:
            errors.append(error)
    raise_collected(errors)
    return found


def _refuse(allowed: bool, what: str, where: str) -> None:
    if not allowed:
        raise MergefileError(
            f"{what} is a custom operator: the code of {where} would run",
            hint=f"look at the code, then pass `--allow-custom` (or set {VARIABLE}=1)",
        )


# --- files --------------------------------------------------------------------------------------------------------


def _from_file(entry: CustomOperator, root: Path, file: str) -> Operator:
    path = Path(os.path.normpath(root / entry.file))
    where = f"`{entry.file}:{entry.function}`"
    if not path.is_file():
        raise MergefileError(
            f"{file}:{entry.line}: operators.{entry.name}.python: there is no file `{entry.file}`",
            hint="the path is relative to the Mergefile",
            path=str(path),
        )
    module, code = _run(path, root, where)
    if not hasattr(module, entry.function):
        names = [name for name, value in vars(module).items() if _is_own(module, name, value)]
        raise MergefileError(
            f"{file}:{entry.line}: operators.{entry.name}.python: `{entry.file}` defines no `{entry.function}`",
            hint=f"it defines {', '.join(f'`{name}`' for name in names)}" if names else None,
        )
    code = record_digest("custom-function", entry.function, code)  # one file may hold several
    return make_operator(entry.name, getattr(module, entry.function), code, where)


def _is_own(module: ModuleType, name: str, value: object) -> bool:
    """Return whether a file defines this function or class itself, for others to use: it may import many."""
    return callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _run(path: Path, root: Path, where: str) -> tuple[ModuleType, bytes]:
    """Run a file as a module; return it with the digest of its code and of what it imports from the folder."""
    name = f"mergepipe_custom_{record_digest('module', os.fsencode(path)).hex()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    with _importing_from(path.parent) as local:
        sys.modules[name] = module  # pickling and dataclasses look it up there
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            line = _line_in(error, path)  # a SyntaxError names its file and line itself
            at = f" (line {line})" if line else ""
            raise MergefileError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}{at}",
                hint="run with `--debug` for the traceback",
            ) from error
    own = [path, *(found for found in local() if found.is_relative_to(root))]
    parts = [(found.name, content_digest(found.read_bytes())) for found in own]
    return module, record_digest("custom-operator", parts[0][1], sorted(parts[1:]))


def _line_in(error: BaseException, path: Path) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


@contextmanager
def _importing_from(folder: Path) -> Iterator[Any]:
    """Let a file import its neighbours, leave no compiled files behind, and find out what was imported.

    The modules found are taken out of `sys.modules` again, so that another project's neighbours of the same name, or a
    changed version of these, are not mistaken for them.
    """
    before = set(sys.modules)
    written = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    found: list[Path] = []
    try:
        yield lambda: found
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = written
        for name in sorted(set(sys.modules) - before):
            place = getattr(sys.modules[name], "__file__", None)
            if place and Path(place).is_relative_to(folder) and not name.startswith("mergepipe_custom_"):
                found.append(Path(place))
                del sys.modules[name]


# --- packages -----------------------------------------------------------------------------------------------------


def _entry_points(names: Iterable[str]) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return what installed packages offer under these names, the first package in name order."""
    wanted = set(names)
    if not wanted:
        return {}
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=_package)
    return {point.name: point for point in reversed(points) if point.name in wanted}


def offered(names: Iterable[str]) -> list[str]:
    """Return those of these names under which installed packages offer operators; none of their code runs."""
    return sorted(_entry_points(names))


def _package(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _from_package(name: str, point: importlib.metadata.EntryPoint) -> Operator:
    where = f"`{point.value}` of the package `{_package(point)}`"
    try:
        found = point.load()
    except Exception as error:
        raise MergefileError(
            f"operator `{name}`: {where} cannot be loaded: {type(error).__name__}: {error}",
            hint="run with `--debug` for the traceback",
        ) from error
    module = sys.modules.get(point.module)
    source = getattr(module, "__file__", None)
    code = content_digest(Path(source).read_bytes()) if source and Path(source).is_file() else b""
    return make_operator(name, found, record_digest("packaged-operator", _package(point), point.value, code), where)
