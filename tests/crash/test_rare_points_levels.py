"""Budgets in levels when things go wrong: a code is whole or made again, and outputs are as after a clean build."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.cli import run_process
from support.crash import CleanBuilds, Site, check_refused, spread, states
from support.forked import ForkServer
from support.meanwhile import HOLD, let_go, tidy, wait_for_holder
from support.projects import Messages, SmallProject, snapshot
from support.quick import every

from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.errors import StorageError
from mergepipe.progressive.pack import check_pack
from mergepipe.progressive.writer import TEMPORARY_SUFFIX, PackWriter

BUDGETS = """\

[outputs.one.budget]
expert_reads = "30%"
precision = "levels"

[outputs.two.budget]
expert_reads = "20%"
precision = "levels"
"""
POINTS = ["planes.written", "planes.renamed"]
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"


class LevelsSite(Site):
    """A project whose two outputs read their experts at levels."""

    template = Site.template + BUDGETS

    def packs(self):
        """Return the progressive packs that are there."""
        folder = self.cache / "progressive"
        return sorted(folder.glob("*.planes")) if folder.is_dir() else []

    def without_packs(self):
        """Remove the progressive packs."""
        shutil.rmtree(self.cache / "progressive")

    def unfinished(self):
        """Return what killed writers left."""
        return list((self.cache / "progressive").glob(f".*{TEMPORARY_SUFFIX}"))


@pytest.fixture(scope="session")
def clean(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> CleanBuilds:
    """Return what clean builds make, by version."""
    return CleanBuilds(tmp_path_factory.mktemp("levels"), server, LevelsSite)


@pytest.fixture
def site(tmp_path, server: ForkServer) -> LevelsSite:
    """Return a project at version 1 that was not built yet."""
    return LevelsSite(tmp_path / "site", server)


def finish(site, reference):
    """Build to the end, and once more: as clean, every pack whole, and then nothing to do."""
    site.report()
    site.check_done(reference)
    assert site.litter() == []
    assert site.staged() == []
    for path in site.packs():
        check_pack(path)
    assert site.unfinished() == []
    assert states(site.report()) == ["unchanged"] * 2


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", every([1, 2, 4, 8], [1, 4]))
@pytest.mark.parametrize("point", POINTS)
def test_a_first_build_killed_while_codes_are_made_ends_clean_the_next_time(site, clean, point, count):
    site.kill_at(f"{point}:{count}")
    site.check_between(None, clean[1])
    finish(site, clean[1])


@pytest.mark.parametrize("point", POINTS)
def test_a_build_killed_while_packs_that_are_gone_are_made_again_ends_clean_the_next_time(site, clean, point):
    site.report()
    site.without_packs()
    site.turn_to(2)
    site.kill_at(f"{point}:3")
    site.check_between(clean[1], clean[2])
    finish(site, clean[2])


def test_a_build_killed_while_a_damaged_pack_is_taken_out_of_use_ends_clean_the_next_time(site, clean):
    site.report()
    site.turn_to(2)
    for path in site.packs():
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    site.kill_at("codes.quarantined")
    site.check_between(clean[1], clean[2])
    site.report()
    site.check_done(clean[2])
    assert list((site.cache / "quarantine").glob("*.planes"))
    assert site.run("cache", "verify").code == 1  # stages that nobody has read yet are damaged, too
    finish(site, clean[2])


def kill_at_moments(site, clean, count, seed):
    """Kill builds that make all codes, at moments spread over them."""
    generator = random.Random(seed)
    duration = site.run().seconds
    killed = 0
    for version, moment in enumerate(spread(count, duration, [generator.random() for _ in range(count)]), 2):
        shutil.rmtree(site.cache)
        site.turn_to(version)
        process = site.start()
        time.sleep(moment)
        process.kill()
        killed += process.wait().code == -9
        site.check_between(clean[version - 1], clean[version])
        site.report()
        site.check_done(clean[version])
    finish(site, clean[version])
    assert killed > 0, "every build had ended before it was killed"


def test_killed_at_moments_while_codes_are_made(site, clean):
    kill_at_moments(site, clean, 3, 1)


@pytest.mark.slow
def test_killed_at_many_moments_while_codes_are_made(site, clean):
    kill_at_moments(site, clean, 40, 2)


# --- calls that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "nth"),
    [
        ("write", errno.ENOSPC, 1),
        pytest.param(*("write", errno.ENOSPC, 30), marks=pytest.mark.slow),
        ("write", errno.EIO, 7),
        pytest.param(*("write", errno.EDQUOT, 60), marks=pytest.mark.slow),
        ("truncate", errno.ENOSPC, 2),
        ("rename", errno.EIO, 1),
        pytest.param(*("rename", errno.EACCES, 5), marks=pytest.mark.slow),
        ("mkdir", errno.ENOSPC, 1),
        ("open", errno.EMFILE, 3),
        ("close", errno.EIO, 4),
        pytest.param(*("chmod", errno.EPERM, 1), marks=pytest.mark.slow),
    ],
)
def test_a_call_that_fails_while_codes_are_made_stops_the_build_in_words(tmp_path, faulty, clean, call, error, nth):
    site = LevelsSite(tmp_path / "site", faulty)
    env = {"FAULT_CALL": call, "FAULT_PATH": "/progressive", "FAULT_NTH": str(nth), "FAULT_ERROR": str(error)}
    check_refused(site.run("build", "-j", "1", env=env), os.strerror(error), "progressive")
    site.check_between(None, clean[1])
    assert site.unfinished() == []
    finish(site, clean[1])


@pytest.mark.parametrize(("call", "error"), [("read", errno.EIO), ("open", errno.EACCES), ("read", 0)])
def test_a_pack_that_cannot_be_read_is_made_up_for_from_the_sources(tmp_path, faulty, clean, call, error):
    site = LevelsSite(tmp_path / "site", faulty)
    site.report()
    site.turn_to(2)
    assert site.run("plan").code == 0  # makes what is new, so that the build only reads
    nth = "3" if call == "read" and error else "0"  # some of what is opened is only asked for
    env = {"FAULT_CALL": call, "FAULT_PATH": "/progressive/", "FAULT_NTH": nth}
    result = site.run("build", "-j", "1", env=env | {"FAULT_ERROR": str(error)})
    assert result.code == 0, result.text
    finish(site, clean[2])


def test_without_descriptors_a_build_says_so_and_takes_no_pack_for_damaged(tmp_path, faulty, clean):
    site = LevelsSite(tmp_path / "site", faulty)
    site.report()
    site.turn_to(2)
    assert site.run("plan").code == 0
    before = site.packs()
    env = {"FAULT_CALL": "open", "FAULT_PATH": "/progressive/", "FAULT_NTH": "0", "FAULT_ERROR": str(errno.EMFILE)}
    check_refused(site.run("build", "-j", "1", env=env), "Too many open files", "progressive")
    assert site.packs() == before
    finish(site, clean[2])


def test_few_descriptors_are_enough_for_many_tensors_of_many_experts(tmp_path):
    project = SmallProject(tmp_path, GEOMETRY_1)
    rng = np.random.default_rng(0)
    base = {f"model.layers.{layer}.mlp.weight": rng.normal(0, 0.02, (128, 130)) for layer in range(16)}
    sources = {f"e{number}": number * 0.001 for number in range(8)} | {"base": 0.0}
    project.add_sources({
        name: {key: (array + rng.normal(0, scale or 1e-9, array.shape)).astype(ml_dtypes.bfloat16)
               for key, array in base.items()}
        for name, scale in sources.items()
    })  # fmt: skip
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": [f"e{number}" for number in range(8)]}
    code = LIMITED.format(64) + "; from mergepipe.cli.main import run; import sys; sys.exit(run(sys.argv[1:]))"
    for share in (25, 35):  # codes are made, then read
        project.set_output("m", recipe | {"budget": {"expert_reads": f"{share}%", "precision": "levels"}})
        result = run_process([sys.executable, "-c", code, "build", "-j", "4"], tmp_path, {}, timeout=120)
        assert result.code == 0, result.text
    assert len(list((project.cache / "progressive").iterdir())) == 8 * 16


# --- given up in the process ------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """Return a small project in levels that was not built yet."""
    project = SmallProject(tmp_path / "project", GEOMETRY_1)
    rng = np.random.default_rng(0)
    base = {f"w{number}": rng.normal(0, 0.02, (160, 128)) for number in range(4)}
    project.add_sources({
        name: {key: (array + rng.normal(0, 0.004, array.shape)).astype(ml_dtypes.bfloat16)
               for key, array in base.items()}
        for name in ("base", "e1", "e2")
    })  # fmt: skip
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1", "e2"]}
    project.set_output("m", recipe | {"budget": {"expert_reads": "25%", "precision": "levels"}})
    return project


def descriptors():
    return sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else []


class Impatient(Messages):
    """A reporter whose user presses Ctrl-C when a little was done."""

    def advance(self, count):
        super().advance(count)
        if count:
            raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_a_build_that_is_given_up_leaves_nothing_open_and_nothing_half_made(project, monkeypatch, how):
    other = project.clone(project.root.parent / "other")
    other.build()
    before = descriptors()
    with monkeypatch.context() as patch:
        if how == "error":
            seen = []

            def failing(writer, block, encoded, original=PackWriter.put):
                seen.append(block)
                if len(seen) == 3:
                    raise StorageError("no more")
                original(writer, block, encoded)

            patch.setattr(PackWriter, "put", failing)
            with pytest.raises(StorageError, match="no more"):
                project.build()
        else:
            with pytest.raises(KeyboardInterrupt):
                project.build(reporter=Impatient())
    assert descriptors() == before
    folder = project.cache / "progressive"
    assert all(path.suffix == ".planes" for path in folder.iterdir())
    project.build()
    assert project.raw("m") == other.raw("m")
    assert project.lock.read_text() == other.lock.read_text()


def test_a_plan_whose_prices_are_known_changes_nothing_in_the_cache(project):
    project.build()
    project.set_output("m", project.outputs["m"] | {"budget": {"expert_reads": "35%", "precision": "levels"}})
    shutil.rmtree(project.cache / "progressive")
    before = snapshot(project.cache)
    assert project.open().plan().outputs["m"].expert_bytes["planned"] > 0
    assert snapshot(project.cache) == before


# --- several at once ------------------------------------------------------------------------------------------------


def test_two_builds_at_once_make_each_pack_once(site, clean):
    running = [site.start(), site.start()]
    assert [process.wait().code for process in running] == [0, 0]
    site.check_done(clean[1])
    finish(site, clean[1])


def test_pruning_waits_for_a_build_that_reads_codes(site, clean):
    site.report()
    site.turn_to(2)
    building = site.start(prelude=HOLD)
    wait_for_holder(site)
    pruning = site.start("cache", "prune", "--max-size", "0", "--unreferenced")
    time.sleep(0.3)
    assert site.packs(), "the build may still read them"
    let_go(site)
    assert [process.wait().code for process in (building, pruning)] == [0, 0]
    tidy(site)
    site.check_done(clean[2])
    assert site.packs() == []
    site.turn_to(3)
    finish(site, clean[3])
