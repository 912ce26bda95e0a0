"""`mergepipe pack` killed at each of its points: the folder is the old one or the new one, whole."""

import os
import shutil

import numpy as np
import pytest
from support.checkpoints import write_checkpoint

POINTS = (
    "pack.begun",
    "planes.written",
    "planes.renamed",
    "pack.exact",
    "pack.assembled",
    "publish.swap-begun",
    "publish.swapped",
    "pack.cleaned",
)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def places(tmp_path_factory, server):
    """Return a folder with a base and two experts, and what packing these gives."""
    root, rng = tmp_path_factory.mktemp("pack"), np.random.default_rng(0)
    base = {"a.weight": rng.normal(size=(150, 128)).astype(np.float32), "b.bias": np.ones(3, np.float32)}
    write_checkpoint(root / "base", base)
    for name in ("one", "two"):
        noise = rng.normal(size=(150, 128)).astype(np.float32)
        write_checkpoint(root / name, {**base, "a.weight": base["a.weight"] + 0.01 * noise})
        assert run(server, root, name, f"clean-{name}").code == 0
    return root


def run(server, root, name, out, **env):
    return server.run(("pack", name, "--base", "base", "--out", out), root, env)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("before", [None, "one"])
def test_a_killed_pack_leaves_the_old_one_or_the_new_one(places, server, point, before):
    out = places / "out"
    shutil.rmtree(out, ignore_errors=True)
    if before is not None:
        shutil.copytree(places / f"clean-{before}", out)
        (out / "notes.txt").write_text("mine")
    killed = run(server, places, "two", "out", MERGEPIPE_CRASH_POINT=point)
    assert killed.code == -9, killed.text
    new = tree(places / "clean-two")
    if out.exists():
        found = tree(out)
        assert found.pop("notes.txt", b"mine") == b"mine"
        assert found in (new, tree(places / "clean-one"))
    else:
        assert before is None
    again = run(server, places, "two", "out")
    assert again.code == 0, again.text
    found = tree(out)
    assert found.pop("notes.txt", None) == (None if before is None else b"mine")
    assert found == new
    assert [name for name in os.listdir(places) if name.startswith(".out")] == []


def test_a_kill_while_it_recovers_is_recovered_from(places, server):
    out = places / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(places / "clean-one", out)
    assert run(server, places, "two", "out", MERGEPIPE_CRASH_POINT="publish.swapped").code == -9
    assert run(server, places, "two", "out", MERGEPIPE_CRASH_POINT="pack.recovered").code == -9
    assert run(server, places, "two", "out").code == 0
    assert tree(out) == tree(places / "clean-two")
    assert [name for name in os.listdir(places) if name.startswith(".out")] == []
