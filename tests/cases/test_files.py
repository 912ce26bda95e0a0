"""The steps that change files."""

from __future__ import annotations

import tomllib

import pytest
from support.cases.errors import CaseError
from support.cases.files import (
    with_conflict_markers,
    with_newer_version,
    with_other_key_order,
)
from support.cases.project import Project
from support.cases.samples import RECIPE, write_case
from support.cases.steps import OPS, Progress

LOCK = """\
version = 1

[sources.base]
path = "base"
files = [
    "a = 1",
    "b",
]
digest = "b3:00"

# a remark
[[outputs.out.shards]]
name = "x"
size = 3
"""


@pytest.fixture
def project(tmp_path):
    """Return a fresh copy of a sample case."""
    return Project(write_case(tmp_path / "case"), tmp_path, RECIPE)


def do(project, op, **keys):
    OPS[op].do(Progress(project=project, expected={}), {"op": op, **keys})


def test_a_copy_is_fresh_writable_and_leaves_the_case_alone(tmp_path):
    case = write_case(tmp_path / "case")
    weights = case / "expert" / "model.safetensors"
    weights.chmod(0o444)
    old = weights.read_bytes()
    first, second = (Project(case, tmp_path, RECIPE) for _ in range(2))
    do(first, "overwrite_bytes", path="expert/model.safetensors", count=3)
    assert weights.read_bytes() == old
    assert (second.root / "expert/model.safetensors").read_bytes() == old
    assert (first.root / "expert/model.safetensors").read_bytes() != old


@pytest.mark.parametrize("how", ["rename", "in_place"])
@pytest.mark.parametrize("keep", [True, False])
def test_replace(project, how, keep):
    target = project.root / "expert/model.safetensors"
    old = target.stat()
    do(
        project,
        "replace",
        path="expert/model.safetensors",
        how=how,
        keep_mtime_ns=keep,
        **{"with": "expected.safetensors"},
    )
    new = target.stat()
    assert target.read_bytes() == (project.root / "expected.safetensors").read_bytes()
    assert (new.st_ino == old.st_ino) is (how == "in_place")
    assert (new.st_mtime_ns == old.st_mtime_ns) is keep
    assert [path.name for path in target.parent.iterdir()].count("config.json") == 1
    assert len(list(target.parent.iterdir())) == 2


def test_write_makes_folders_and_the_output_has_a_name_of_its_own(project):
    do(project, "write", path="<out>/sub/notes.txt", text="mine\n")
    assert (project.root / "out/sub/notes.txt").read_bytes() == b"mine\n"
    do(project, "check_file", path="out/sub/notes.txt", text="mine\n")


def test_touch_changes_the_time_alone(project):
    target = project.root / "expert/model.safetensors"
    old, data = target.stat(), target.read_bytes()
    do(project, "touch", path="expert/model.safetensors")
    assert target.stat().st_mtime_ns > old.st_mtime_ns
    assert target.read_bytes() == data


def test_delete_removes_files_and_folders_that_are_there(project):
    do(project, "delete", path="expert/config.json")
    do(project, "delete", path="base")
    assert not (project.root / "base").exists()
    assert not (project.root / "expert/config.json").exists()
    with pytest.raises(CaseError, match="there is no `base`"):
        do(project, "delete", path="base")


@pytest.mark.parametrize(("at", "first"), [("start", 0), ("middle", 48), ("end", 96), (7, 7), (-10, 90)])
@pytest.mark.parametrize("in_place", [True, False])
def test_overwrite_bytes_changes_these_bytes_only(project, at, first, in_place):
    path = project.root / "x.bin"
    path.write_bytes(bytes(100))
    inode = path.stat().st_ino
    do(project, "overwrite_bytes", path="x.bin", at=at, count=4, in_place=in_place)
    assert path.read_bytes() == bytes(first) + b"\xff" * 4 + bytes(96 - first)
    assert (path.stat().st_ino == inode) is in_place


def test_damage_hits_the_largest_pack(project):
    packs = project.root / ".mergecache/packs/aa"
    packs.mkdir(parents=True)
    (packs / "small").write_bytes(bytes(10))
    (packs / "large").write_bytes(bytes(100))
    (project.root / ".mergecache/catalog").write_bytes(bytes(1000))
    do(project, "damage_one_cache_entry")
    assert (packs / "large").read_bytes() == bytes(75) + b"\xff" * 4 + bytes(21)
    assert (packs / "small").read_bytes() == bytes(10)


def test_damage_without_a_pack_is_refused(project):
    with pytest.raises(CaseError, match="no pack"):
        do(project, "damage_one_cache_entry")


def test_a_moved_project_works_on(project):
    old = project.root
    do(project, "move_project", to="elsewhere")
    assert not old.exists()
    assert project.out == old.parent / "elsewhere" / "out"
    do(project, "delete", path="base")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "."])
def test_paths_stay_inside_the_project(project, path):
    with pytest.raises(CaseError, match="inside the project"):
        do(project, "write", path=path, text="")


def test_other_key_order_says_the_same():
    changed = with_other_key_order(LOCK)
    assert tomllib.loads(changed) == tomllib.loads(LOCK)
    assert changed.index("digest") < changed.index("files") < changed.index("path")
    assert changed.index("size") < changed.index("name")


def test_newer_version_changes_the_version_alone():
    assert with_newer_version(LOCK) == LOCK.replace("version = 1\n", "version = 999\n")
    with pytest.raises(CaseError):
        with_newer_version("[x]\ny = 1\n")


def test_conflict_markers_break_the_lock():
    text = with_conflict_markers(LOCK)
    assert text.count("<<<<<<< ") == text.count(">>>>>>> ") == text.count("=======\n") == 1
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads(text)


@pytest.mark.parametrize("how", ["crlf", "key_order", "newer_version", "conflict_markers"])
def test_every_rewrite_changes_the_lock(project, how):
    path = project.root / "Mergefile.lock"
    path.write_bytes(LOCK.encode())
    do(project, "rewrite_lock", how=how)
    assert path.read_bytes() != LOCK.encode()


def test_crlf_changes_line_ends_alone(project):
    path = project.root / "Mergefile.lock"
    path.write_bytes(LOCK.encode())
    do(project, "rewrite_lock", how="crlf")
    assert path.read_bytes() == LOCK.encode().replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    ("op", "keys"),
    [("rewrite_lock", {"how": "sort"}), ("replace", {"path": "base/config.json", "with": "case.json", "how": "link"})],
)
def test_unknown_ways_are_refused(project, op, keys):
    (project.root / "Mergefile.lock").write_text(LOCK, encoding="utf-8")
    with pytest.raises(CaseError, match="does not know how"):
        do(project, op, **keys)
