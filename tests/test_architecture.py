"""The shape of the code: which module may import which, and how large modules and functions may be.

Imports are read from the source, also those inside functions and under ``TYPE_CHECKING``: an import that only the type
checker sees is still knowledge of a higher level.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mergepipe"

# The levels of docs/architecture.md, lowest first. The parts of one level do not import one another.
LEVELS = (
    ("errors", "digest", "dtypes", "units", "reporting", "values", "_version"),
    ("signatures", "fsio"),
    ("mergefile", "checkpoints", "operators", "progressive"),
    ("cache",),
    ("plan",),
    ("graph",),
    ("engine",),
    ("publish", "lockfile"),
    ("project",),
    ("cli", "__init__", "__main__"),
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# Everything may raise errors, and `python -m mergepipe` is the command line.
SAME_LEVEL = {("digest", "errors"), ("dtypes", "values"), ("__main__", "cli")}

# Distribution -> what it is imported as, where the two differ.
IMPORT_NAMES = {"array-api-compat": "array_api_compat", "model-signing": "model_signing", "pyyaml": "yaml"}

MODULE_LINES = 400
LARGEST_MODULE = 600
FUNCTION_LINES = 60
# What is larger than that, and may be for now: an entry goes when its module or function is mended, and none comes.
LARGE_MODULES: frozenset[str] = frozenset()
LONG_FUNCTIONS: frozenset[str] = frozenset()

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a module's path relative to the package, as it is named in messages."""
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    """Return the part of the package that a module belongs to: a subpackage, or a module at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Yield (absolute dotted name, line) of every import in a module, wherever it stands.

    ``from a import b`` gives ``a.b``, which may be a name in ``a`` or a module.
    """
    package = module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((str(name), node.lineno) for name in names)


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def dotted(path: Path) -> str:
    """Return a module's dotted name; a package's own module has ``__init__`` at its end."""
    return ".".join(["mergepipe", *path.relative_to(PACKAGE).with_suffix("").parts])


def imported_part(name: str) -> str | None:
    """Return the part of mergepipe that an import reaches, None for another package."""
    parts = name.split(".")
    if parts[0] != "mergepipe":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL_OF else "__init__"


def broken_rules(path: Path) -> Iterator[str]:
    own = part_of(path)
    for name, line in imported(tree_of(path), dotted(path)):
        other = imported_part(name)
        allowed = other in (None, own) or (own, other) in SAME_LEVEL or LEVEL_OF[other] < LEVEL_OF[own]
        if not allowed:
            yield f"{name_of(path)}:{line} imports {name}: level {LEVEL_OF[own]} imports level {LEVEL_OF[other]}"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (qualified name, lines from ``def`` to the end) of every function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        inner = prefix + node.name + "." if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
        yield from functions(node, inner)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_every_part_of_the_package_has_a_level():
    assert {part_of(path) for path in MODULES} <= set(LEVEL_OF)


def test_dataclasses_are_the_quick_ones():
    """The standard's cost the start of every command half a millisecond each; see `mergepipe.values`."""
    text = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    standard = re.compile(r"@dataclasses\.dataclass|^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    assert [name for name, code in text.items() if standard.search(code)] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_lower_levels_or_its_own_package(path):
    assert list(broken_rules(path)) == []


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("plan/output.py", "from mergepipe.engine.run import Engine", ["mergepipe.engine.run.Engine"]),
        ("plan/output.py", "def f():\n    import mergepipe.engine.run", ["mergepipe.engine.run"]),
        ("plan/output.py", "if TYPE_CHECKING:\n    from mergepipe import engine", ["mergepipe.engine"]),
        ("plan/output.py", "from ..engine import run", ["mergepipe.engine.run"]),
        ("plan/output.py", "from . import values", ["mergepipe.plan.values"]),
        ("plan/__init__.py", "from .values import OutputPlan", ["mergepipe.plan.values.OutputPlan"]),
        ("plan/output.py", "importlib.import_module('mergepipe.engine')", ["mergepipe.engine"]),
    ],
)
def test_every_way_to_import_is_seen(module, text, expected):
    names = [name for name, _ in imported(ast.parse(text), dotted(PACKAGE / module))]
    assert names == expected


def foreign_imports(paths: Iterable[Path], ours: Collection[str]) -> dict[str, str]:
    """Return the packages of others that modules import, each with one place where."""
    found: dict[str, str] = {}
    for path in paths:
        for name, line in imported(tree_of(path), ".".join(path.relative_to(ROOT).with_suffix("").parts)):
            top = name.partition(".")[0]
            if top not in ours and top not in sys.stdlib_module_names:
                found.setdefault(top, f"{path.relative_to(ROOT)}:{line}")
    return found


def declared(*extras: str) -> set[str]:
    """Return what the dependencies, and those of some extras, are imported as."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    names = [re.match(r"[\w.-]+", line)[0].lower() for line in lines]
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_the_package_imports_what_it_depends_on_and_nothing_else():
    found = foreign_imports(MODULES, {"mergepipe"})
    assert {name: where for name, where in found.items() if name not in declared("plot", "sign", "torch")} == {}
    assert declared() - set(found) == set(), "these are declared and not used"


def test_the_tests_import_what_the_project_declares():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    ours = {"benchmarks", "mergepipe", *(path.stem for path in (ROOT / "tests").iterdir())}
    found = foreign_imports(tests, ours)
    assert {name: where for name, where in found.items() if name not in declared("plot", "sign", "torch", "dev")} == {}


def test_modules_are_small():
    sizes = {name_of(path): lines_of(path) for path in MODULES}
    large = {name: size for name, size in sizes.items() if size > MODULE_LINES}
    assert set(large) - LARGE_MODULES == set(), large
    assert LARGE_MODULES - set(large) == set(), "take these off the list"
    assert max(sizes.values()) <= LARGEST_MODULE


def test_functions_are_short():
    lengths = {f"{name_of(path)}:{name}": length for path in MODULES for name, length in functions(tree_of(path))}
    long = {name: length for name, length in lengths.items() if length > FUNCTION_LINES}
    assert set(long) - LONG_FUNCTIONS == set(), long
    assert LONG_FUNCTIONS - set(long) == set(), "take these off the list"
