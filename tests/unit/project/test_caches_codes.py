"""The progressive packs of a cache on their own: checked, taken out of use, pruned, and made again by a build."""

import json
import shutil
import sqlite3

import ml_dtypes
import numpy as np
import pytest
from support.cli import run_mergepipe
from support.projects import Messages, SmallProject, skip_flushing

from mergepipe.cache.database import seal
from mergepipe.checkpoints.geometry import GEOMETRY_1
from mergepipe.project.caches import open_cache

SHAPES = {"a.weight": (160, 128), "b.weight": (200, 96), "c": (70,)}


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_flushing(monkeypatch)
        yield


@pytest.fixture
def project(tmp_path):
    """Return a built project with four progressive packs."""
    project = SmallProject(tmp_path / "project", GEOMETRY_1)
    rng = np.random.default_rng(0)
    base = {name: rng.normal(0, 0.02, shape) for name, shape in SHAPES.items()}
    for number, name in enumerate(("base", "e1", "e2")):
        moved = {key: array + (rng.normal(0, 0.004, array.shape) if number else 0) for key, array in base.items()}
        project.add_source(name, {key: array.astype(ml_dtypes.bfloat16) for key, array in moved.items()})
    recipe = {"operator": "task_arithmetic", "base": "base", "experts": ["e1", "e2"]}
    project.set_output("m", recipe | {"budget": {"expert_reads": "25%", "precision": "levels"}})
    project.build()
    return project


def cache_of(project, **options):
    return open_cache(project.cache, lock_path=project.lock, geometry=GEOMETRY_1, workers=2, **options)


def codes(project):
    return sorted((project.cache / "progressive").iterdir())


def flip(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def build_again(project):
    """Build all of it anew; return the bytes of the outputs, and what was warned of."""
    reporter = Messages()
    with project.open()._writing() as (catalog, _):
        for name, _ in catalog.pack_names():
            catalog.drop_pack(name)
    shutil.rmtree(project.folder("m"))
    project.build(reporter=reporter)
    return project.raw("m"), reporter.warnings


def test_a_sound_cache_is_left_as_it_is(project):
    reporter = Messages()
    check = cache_of(project, reporter=reporter).verify()
    size = sum(path.stat().st_size for path in codes(project))
    assert (check.ok, check.codes.checked, check.codes.bytes, check.rows["codes"]) == (True, 4, size, 4)
    assert [phase[0] for phase in reporter.phases] == ["checking packs", "checking codes"]
    assert reporter.phases[1][1] == reporter.phases[1][2] == size


def test_a_damaged_pack_is_quarantined_and_made_again(project):
    want = project.raw("m")
    first = codes(project)[0]
    intact = first.read_bytes()
    flip(first)
    told = cache_of(project).verify(dry_run=True)
    assert first.exists(), "a dry run leaves everything"
    check = cache_of(project).verify()
    assert check.problems == told.problems
    (problem,) = check.problems
    assert (problem.kind, problem.where, check.codes.damaged) == ("code", f"progressive/{first.name}", 1)
    assert not first.exists()
    assert (project.cache / "quarantine" / first.name).exists()
    assert cache_of(project).verify().ok
    raw, warnings = build_again(project)
    assert (raw, warnings, first.read_bytes()) == (want, [], intact)
    assert cache_of(project).prune().leftover_bytes == len(intact)


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE codes SET residuals = zeroblob(length(residuals)) WHERE rowid = 1", "checksum"),
        ("UPDATE codes SET header = zeroblob(32) WHERE rowid = 1", "checksum"),
        (None, "what its pack says"),
    ],
)
def test_a_damaged_row_is_found_and_known_again_from_the_pack(project, statement, why):
    want = project.raw("m")
    with sqlite3.connect(project.cache / "catalog.db") as db:
        if statement is None:  # sealed, and about another pack
            key, sizes, residuals, _ = db.execute("SELECT key, sizes, residuals, header FROM codes").fetchone()
            row = (key, sizes, residuals, bytes(32))
            db.execute("INSERT OR REPLACE INTO codes VALUES (?, ?, ?, ?, ?)", (*row, seal(*row)))
        else:
            db.execute(statement)
    db.close()
    check = cache_of(project).verify()
    (problem,) = check.problems
    assert (problem.facts["table"], problem.facts["count"]) == ("codes", 1)
    assert why in problem.what
    assert cache_of(project).verify().ok
    assert build_again(project)[0] == want
    assert cache_of(project).verify().rows["codes"] == 4


def test_codes_of_an_expert_that_is_another_one_now_go(project):
    tensors = {name: array.astype(np.float32) for name, array in project.expected("m").items()}
    before = codes(project)
    project.add_source("e2", {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()})
    project.build()
    assert len(codes(project)) == 6
    assert cache_of(project).prune(unreferenced=True, dry_run=True).codes
    report = cache_of(project).prune(unreferenced=True)
    assert {(name, reason) for name, _, reason in report.codes} == {
        (path.name, "unreferenced") for path in set(before) - set(codes(project))
    }
    assert len(codes(project)) == 4
    assert cache_of(project).verify().rows["codes"] == 4


def test_what_was_pruned_is_made_again_with_the_same_bytes(project):
    want, before = project.raw("m"), {path.name: path.read_bytes() for path in codes(project)}
    report = cache_of(project).prune(max_bytes=0)
    assert (len(report.codes), codes(project)) == (4, [])
    assert project.build_one("m").state == "unchanged"
    assert build_again(project)[0] == want
    assert {path.name: path.read_bytes() for path in codes(project)} == before


def test_the_commands_count_codes(project):
    def run(*args):
        result = run_mergepipe(["cache", *args], project.root)
        assert result.code in (0, 1), result.text
        return result.stdout

    assert json.loads(run("info", "--json"))["codes"] == 4
    assert "4 deltas" in run("info")
    (project.cache / "progressive/mine.txt").write_text("mine")
    flip(codes(project)[0])
    (line,) = [line for line in run("verify", "--dry-run").splitlines() if line.startswith("  codes ")]
    assert "4 checked" in line
    assert "1 damaged" in line
    assert "1 not of mergepipe" in line
    assert json.loads(run("verify", "--json"))["codes"] | {"bytes": 0} == {
        "checked": 4, "bytes": 0, "damaged": 1, "foreign": 1,
    }  # fmt: skip
    told = json.loads(run("prune", "--max-size", "0", "--json"))
    assert [code["reason"] for code in told["codes"]] == ["size"] * 3
    assert (project.cache / "progressive/mine.txt").exists()
