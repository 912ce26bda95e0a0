"""What is written may be read and written by whom the umask lets, and finished shards by nobody."""

import os
import stat

import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject

SHAPES = {"layers.0.w": (4, 4), "layers.1.w": (4, 4)}


@pytest.fixture(params=[0o022, 0o077, 0o002, 0o000, 0o027], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(root):
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in (root, *root.rglob("*"))}


def test_the_umask_holds_for_all_that_is_written(tmp_path, umask):
    project = SmallProject(tmp_path / "p")
    project.add_sources({name: random_tensors(i, SHAPES) for i, name in enumerate(("base", "a"))}, config={})
    project.set_output("m", {"operator": "linear", "base": "base", "experts": ["a"], "path": "out/m"})
    project.build()
    project.set_output("m", project.outputs["m"] | {"params": {"weight": 0.5}})
    project.build()
    for path, mode in (modes(project.cache) | modes(project.root / "out") | modes(project.lock)).items():
        assert mode & umask == 0, f"{path.relative_to(tmp_path)}: {mode:o}"
        assert mode & 0o400, path
        assert path.is_dir() or not mode & 0o111, f"{path.relative_to(tmp_path)} can be run: {mode:o}"
        assert path.is_dir() or path.name == "build.lock" or not mode & 0o022, f"{path.relative_to(tmp_path)}: {mode:o}"


def test_finished_shards_are_read_only(tmp_path):
    project = SmallProject(tmp_path / "p")
    project.add_source("a", random_tensors(0, SHAPES))
    project.set_output("m", {"operator": "linear", "experts": ["a"]})
    project.build()
    shards = [*project.cache.glob("packs/*"), *project.folder("m").glob("*.safetensors")]
    assert len(shards) == 2
    assert [stat.S_IMODE(path.stat().st_mode) & 0o222 for path in shards] == [0, 0]
