"""Every durable step of the package has a crash point beside it, at which a test kills, or a reason to have none."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import mergepipe
from mergepipe.fsio.crash import CRASH_POINTS, RARE_CRASH_POINTS

PACKAGE = Path(mergepipe.__file__).parent
CRASH_TESTS = Path(__file__).parent

# Calls that change what is on the disk: of the system, of pathlib, and of our own that do several of them.
SYSTEM = frozenset(
    {
        *("rename", "replace", "renames", "link", "symlink", "unlink", "remove", "rmdir", "removedirs", "truncate"),
        *("fsync", "fdatasync", "ftruncate", "mkdir", "makedirs", "mkfifo", "posix_fallocate", "pwrite", "pwritev"),
    }
)
METHODS = frozenset(
    {
        *("unlink", "rename", "rmdir", "mkdir", "symlink_to", "hardlink_to", "touch", "write_bytes", "write_text"),
    }
)
SHUTIL = frozenset({"rmtree", "move", "copy", "copy2", "copyfile", "copytree"})
OURS = frozenset({"fsync_path", "write_file", "place_file", "copy_file", "remove_tree", "drop_temporary", "mkdtemp"})

# Functions without a point of their own, and why a kill in them needs none.
REASONS = {
    # steps of which others are made: the points lie in their callers
    "fsio/durable.py:fsync_path": "primitive",
    "fsio/durable.py:write_file": "primitive",
    "fsio/durable.py:drop_temporary": "removes a file that no reader looks at; the next call does it again",
    "fsio/durable.py:_remove_folder": "primitive of `remove_tree`",
    "fsio/durable.py:remove_tree": "primitive",
    "fsio/links.py:place_file": "primitive",
    "fsio/links.py:_reflink": "primitive",
    "fsio/links.py:copy_file": "primitive",
    "fsio/durable.py:pwrite_all": "primitive",
    "fsio/durable.py:take_room": "primitive",
    "fsio/locks.py:hold_place": "a folder that is empty: the next run makes it, or finds it",
    "publish/directory.py:_fsync_folders": "primitive of `assemble`",
    # what is lost with the process, and made again
    "fsio/scratch.py:_remove_left": "what killed processes left; the next process goes on",
    "cache/code_files.py:drop_scraps": "what killed processes left; the next process goes on",
    "project/room.py:_drop_other_layouts": "the rows go first: the files that are left, the next build removes",
    "cache/reserve.py:reserve": "a file without content that the next build makes again, or removes",
    "cache/reserve.py:release": "a file without content that the next build makes again, or removes",
    "cache/database.py:_probe_writing": "a file without content that nobody reads",
    "engine/staging.py:_create": "an unfinished shard is no shard: its rows are recorded after its bytes",
    "publish/userfiles.py:_share": "its caller has the point `publish.kept`",
    "project/caches_used.py:remember_project": "a folder; `replace_file` has the points of the note in it",
    "project/evaluate.py:_remove": "in a temporary cache that the next sweep removes",
    "project/locking.py:write_lock": "a temporary file that nobody reads; of the lock, `replace_file` has the points",
    "progressive/writer.py:abandon": "removes a file that no reader looks at",
    "cache/progressive.py:make_folder": "a folder that is empty: the next run makes it, or finds it",
    "project/signing.py:__init__": "removes a file that no reader looks at",
    "project/signing.py:_is_signed": "in a temporary directory of the system's",
}


def calls_of(node):
    """Yield the durable calls in a function, those of functions within it left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call) and (name := durable(child)) is not None:
            yield name
        yield from calls_of(child)


def durable(call):
    """Return the name of a durable call, None of another one."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in SYSTEM:
            return f"os.{name}"
        case ast.Attribute(value=ast.Name(id="shutil"), attr=name) if name in SHUTIL:
            return f"shutil.{name}"
        case ast.Attribute(attr=name) if name in METHODS:
            return name
        case ast.Attribute(value=ast.Name(id="dataclasses" | "structs")):
            return None
        case ast.Attribute(attr="replace") if len(call.args) == 1 and not call.keywords:
            return "replace"  # of a path; that of a text has two arguments
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in OURS:
            return name
    return None


def passes_point(node):
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "crash_point"
        for call in ast.walk(node)
    )


@functools.cache
def bare_steps():
    """Return the durable calls of every function of the package that passes no crash point, by place."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (calls := set(calls_of(node))) and not passes_point(node):
                found[f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"] = sorted(calls)
    return found


def test_every_durable_step_has_a_crash_point_beside_it():
    bare = {place: calls for place, calls in bare_steps().items() if place not in REASONS}
    assert bare == {}, "add `crash_point(...)` beside these steps, or a reason to REASONS"


def test_every_reason_is_still_needed():
    assert sorted(set(REASONS) - set(bare_steps())) == []


@pytest.mark.parametrize("code", ["os.rename(a, b)", "path.replace(other)", "path.unlink()", "shutil.rmtree(x)"])
def test_the_search_finds_durable_calls(code):
    assert list(calls_of(ast.parse(f"def f():\n    with x:\n        {code}").body[0])) != []


@pytest.mark.parametrize("code", ["text.replace('a', 'b')", "replace(plan, x=1)", "dataclasses.replace(x)"])
def test_the_search_takes_no_other_call_for_one(code):
    assert list(calls_of(ast.parse(f"def f():\n    {code}").body[0])) == []


def test_a_test_kills_at_every_rare_point():
    """Those of every build are walked by name in test_points.py."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in CRASH_TESTS.glob("test_rare_points*.py"))
    assert [point for point in RARE_CRASH_POINTS if f'"{point}"' not in text] == []
    assert len(set(CRASH_POINTS) | set(RARE_CRASH_POINTS)) == len(CRASH_POINTS) + len(RARE_CRASH_POINTS)
