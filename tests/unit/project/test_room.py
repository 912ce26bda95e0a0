"""Room on disks: what a build takes where, and when it is refused."""

from __future__ import annotations

import math

import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.engine.finish import ShardFinisher
from mergepipe.errors import CollectedErrors, StorageError
from mergepipe.project import room
from mergepipe.project.room import DiskSpace, check_room


@pytest.fixture
def project(tmp_path):
    project = SmallProject(tmp_path)
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (8, 16)}))
    for output, weight in (("m", 1.0), ("n", 0.5)):
        experts = ["e1", {"source": "e2", "weight": weight}]
        project.set_output(output, {"operator": "linear", "base": "base", "experts": experts})
    return project


@pytest.fixture
def disks(monkeypatch, project):
    """Let the cache and each output lie on a disk of its own, by the name of the last folder; return what is free."""
    free = {".mergecache": 10_000, "m": 10_000, "n": 10_000}
    numbers = {name: number for number, name in enumerate(free)}
    monkeypatch.setattr(room, "_device", lambda path: numbers[path.name])
    monkeypatch.setattr(room, "_free", lambda path: (free[path.name], free[path.name]))
    return free


def shard_bytes(project):
    return project.open().plan(["m"]).outputs["m"].output_bytes


def test_on_one_disk_outputs_share_the_bytes_of_the_cache(project):
    (disk,) = project.open().plan().disks
    assert (disk.path, disk.cache, disk.outputs) == (".mergecache", True, ("m", "n"))
    assert disk.needed == 2 * shard_bytes(project)
    assert disk.fits
    assert disk.free > disk.needed
    project.build("m")
    assert project.open().plan().disks[0].needed == shard_bytes(project)
    project.build()
    assert project.open().plan().disks[0].needed == 0


def test_outputs_on_other_disks_are_copied_there(project, disks):
    size = shard_bytes(project)
    found = {disk.path: disk for disk in project.open().plan().disks}
    assert {path: disk.needed for path, disk in found.items()} == {
        ".mergecache": 2 * size,
        "build/m": size,
        "build/n": size,
    }
    assert found["build/m"].outputs == ("m",)


def test_what_is_left_in_packs_needs_no_room_in_the_cache_but_where_it_is_copied(project, disks):
    project.build()
    size = shard_bytes(project)
    other = project.outputs["m"]["experts"]
    project.set_output("m", project.outputs["m"] | {"path": "elsewhere/n", "experts": other})
    found = {disk.path: disk.needed for disk in project.open().plan(["m"]).disks}
    assert found == {".mergecache": 0, "elsewhere/n": size}


def staged(project):
    return list((project.cache / "staging").iterdir())


def test_what_a_killed_build_left_of_another_layout_makes_room(project, monkeypatch):
    finish = ShardFinisher.finish

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardFinisher, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        project.build("m")
    monkeypatch.setattr(ShardFinisher, "finish", finish)
    project.set_output("m", project.outputs["m"] | {"write": {"dtype": "bfloat16"}})
    project.build("n")
    assert len(staged(project)) == 1, "what is left of outputs that are not built stays"

    def free(path):
        left = 4096 + 100 - sum(path.stat().st_blocks * 512 for path in staged(project))
        return left, left

    monkeypatch.setattr(room, "_free", free)
    (disk,) = project.open().plan(["m"]).disks
    assert disk.needed == 0, "the other shard gives more room than this takes"
    assert len(staged(project)) == 1, "a plan removes nothing"
    project.build("m")
    assert staged(project) == []


@pytest.mark.parametrize("short", [".mergecache", "n"])
def test_a_build_without_room_is_refused_with_numbers_and_reads_nothing(project, disks, short):
    disks[short] = 300
    report = project.open().plan()
    assert [disk.fits for disk in report.disks].count(False) == 1
    with pytest.raises(StorageError, match="No space left for this build") as refused:
        project.build()
    facts = refused.value.as_json()
    assert facts["free"] == 300
    assert facts["needed"] == (2 if short == ".mergecache" else 1) * shard_bytes(project)
    assert "300 B are free" in str(refused.value)
    assert not any((project.cache / "staging").iterdir())
    assert project.open().plan().outputs["m"].next_build.unindexed, "no source was read"
    disks[short] = 10_000
    project.build()


def test_a_copy_of_what_the_cache_has_is_refused_too_where_there_is_no_room_for_it(project, disks):
    project.build("m")
    project.set_output("m", project.outputs["m"] | {"path": "elsewhere/n"})
    disks["n"] = 300
    with pytest.raises(StorageError, match=r"No space left for this build at `.*elsewhere/n`") as refused:
        project.build("m")
    assert refused.value.as_json()["needed"] == shard_bytes(project)
    disks["n"] = 10_000
    project.build("m")


def test_sources_that_were_only_touched_are_no_reason_to_refuse(project, disks):
    project.build()
    for source in project.sources:
        path = project.source_file(source)
        path.write_bytes(path.read_bytes())
    disks[".mergecache"] = 0
    assert not project.open().plan().disks[0].fits, "it may need room, if the content is another one"
    assert {output.state for output in project.build().outputs.values()} == {"unchanged"}


@pytest.fixture
def coded(project):
    """One output whose budget takes codes: two experts, whose deltas are a tensor each."""
    elements = project.geometry.block_elements * 8
    for seed, name in enumerate(("base", "e1", "e2")):
        project.add_source(name, random_tensors(seed, {"w": (8, elements // 8)}))
    budget = {"expert_reads": "40%", "precision": "levels"}
    recipe = {"operator": "linear", "base": "base", "experts": ["e1", "e2"], "budget": budget}
    project.outputs.clear()
    project.set_output("m", recipe)
    return 2 * math.ceil(0.55 * 2 * elements)


def test_a_build_that_has_plenty_of_room_is_not_gone_through_before_it_begins(project, disks, monkeypatch):
    monkeypatch.setattr(room, "forecast", None)
    with pytest.raises(TypeError):
        project.build()
    disks |= dict.fromkeys(disks, 10**6)
    project.build()


@pytest.mark.parametrize("precision", ["levels", "blocks"])
@pytest.mark.parametrize("elements", [16, 1000])
def test_what_is_taken_to_be_plenty_is_no_less_than_a_build_may_need(
    project, disks, coded, monkeypatch, elements, precision
):
    for seed, name in enumerate(project.sources):
        project.add_source(name, random_tensors(seed, {"w": (8, elements), "v": (3,), "s": ()}, dtype="bfloat16"))
    project.set_output("n", {"operator": "ties", "base": "base", "experts": ["e1", "e2"]})
    budget = project.outputs["m"]["budget"] | {"precision": precision}
    project.set_output("m", project.outputs["m"] | {"budget": budget})
    most = []
    taken = room.most_room
    monkeypatch.setattr(room, "most_room", lambda plan: most.append(taken(plan)) or most[-1])
    disks |= {".mergecache": 0, "m": 10**9, "n": 10**9}
    with pytest.raises(StorageError) as refused:
        project.build()
    assert refused.value.as_json()["needed"] <= sum(most)


@pytest.mark.parametrize("command", ["build", "plan", "sweep"])
def test_codes_that_are_made_need_room_before_anything_is_read(project, disks, coded, command):
    """`plan` and `sweep` write the codes themselves, where they are not there."""
    size = 32 * project.geometry.block_elements  # the shard: 4 bytes an element
    disks |= {".mergecache": 10**9, "m": 10**9}
    calls = {
        "build": lambda: project.build("m"),
        "plan": lambda: project.open().plan(["m"]),
        "sweep": lambda: project.open().sweep("m", ["40"]),
    }
    disks[".mergecache"] = coded - 1
    with pytest.raises(StorageError, match=r"up to .* of codes of deltas there, and .* are free") as refused:
        calls[command]()
    facts = refused.value.as_json()
    assert (facts["codes"], facts["free"]) == (coded, coded - 1)
    assert facts["needed"] == coded or (command == "build" and facts["needed"] >= coded + size)
    assert not (project.cache / "progressive").exists(), "nothing was coded"
    assert project.open().status(["m"]).outputs["m"].state == "unbuilt"
    disks[".mergecache"] = coded + 2 * size
    calls[command]()
    assert len(list((project.cache / "progressive").iterdir())) == 2
    disks[".mergecache"] = 0
    project.open().plan(["m"])  # nothing is left to be made


def test_codes_that_are_there_already_are_no_reason_to_refuse(project, disks, coded):
    """Sources that were only touched, or that lie at other places now, may be those of the codes in the cache."""
    disks |= {".mergecache": 10**9, "m": 10**9}
    project.build("m")
    for source in project.sources:
        path = project.source_file(source)
        path.write_bytes(path.read_bytes())
    disks[".mergecache"] = 0
    assert project.build_one("m").state == "unchanged"


def test_every_disk_that_is_too_small_is_named(tmp_path):
    disk = DiskSpace(path=tmp_path, cache=True, outputs=(), needed=20, certain=10, free=5, limit=9)
    other = DiskSpace(path=tmp_path / "o", cache=False, outputs=("m",), needed=20, certain=20, free=5, limit=9)
    with pytest.raises(StorageError) as refused:
        check_room([disk])
    assert "--cache-dir" in refused.value.hint
    with pytest.raises(CollectedErrors) as both:
        check_room([disk, other])
    assert len(both.value.errors) == 2


@pytest.mark.parametrize(("certain", "limit"), [(10, 10), (0, 0), (10**18, None)])
def test_what_fits_and_what_is_not_known_to_fail_is_not_refused(tmp_path, certain, limit):
    check_room([DiskSpace(path=tmp_path, cache=True, outputs=(), needed=99, certain=certain, free=0, limit=limit)])
