"""Pruning: by reachability, age and size, least recently used first, and always what nothing knows of."""

import time

import pytest
from support.checkpoints import random_tensors
from support.projects import SmallProject

from mergepipe.cache.catalog import Catalog
from mergepipe.cache.layout import CacheLayout
from mergepipe.cache.maintenance import PruneLimits, cache_info, plan_prune, prune
from mergepipe.fsio.identity import FileIdentity

DAY = 86_400 * 10**9
P = tuple(f"{number:064x}" for number in range(5))
UNKNOWN = "f" * 64
STAGED = f"{5:016x}-{6:032x}.safetensors"


@pytest.fixture
def catalog(tmp_path):
    layout = CacheLayout(tmp_path / "cache")
    layout.create()
    catalog = Catalog(layout, 64, create=True)
    yield catalog
    catalog.close()


@pytest.fixture
def packs(catalog, monkeypatch):
    """Make five packs of 100 bytes; P[0] was used five days ago, P[4] one day ago."""
    now = time.time_ns()
    for number in range(5):
        path = catalog.layout.packs / f"{P[number]}.safetensors"
        path.write_bytes(bytes(100))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda n=number: now - (5 - n) * DAY)
            catalog.record_pack(P[number], FileIdentity.at(path), [], "s")
    return catalog.layout.packs


def left(packs):
    return sorted(path.stem for path in packs.iterdir())


@pytest.mark.parametrize(
    ("max_bytes", "max_age_days", "kept"),
    [
        (None, None, [*P]),
        (500, None, [*P]),
        (499, None, [*P[1:]]),
        (100, None, [P[4]]),
        (99, None, []),
        (0, None, []),
        (None, 2.5, [*P[3:]]),
        (None, 0, []),
        (100, 2.5, [P[4]]),
        (300, 1.5, [P[4]]),
    ],
)
def test_packs_go_by_age_and_size_the_longest_unused_first(catalog, packs, max_bytes, max_age_days, kept):
    limits = PruneLimits(max_bytes=max_bytes, max_age_days=max_age_days)
    told = plan_prune(catalog, limits)
    assert len(left(packs)) == 5, "a plan removes nothing"
    done = prune(catalog, limits)
    assert done == told
    assert left(packs) == kept
    assert [name for name, _ in catalog.pack_names()] == kept
    gone = 5 - len(kept)
    assert (len(done.packs), done.removed_bytes, done.kept_bytes) == (gone, 100 * gone, 100 * len(kept))


def test_packs_that_nobody_needs_go_whatever_their_age(catalog, packs):
    done = prune(catalog, PruneLimits(keep={P[0], P[3]}))
    assert left(packs) == [P[0], P[3]]
    assert {pack.reason for pack in done.packs} == {"unreferenced"}


def test_what_is_needed_still_goes_by_size(catalog, packs):
    done = prune(catalog, PruneLimits(keep={P[0], P[3], P[4]}, max_bytes=200))
    assert left(packs) == [*P[3:]]
    assert [(pack.file, pack.reason) for pack in done.packs] == [
        (f"{P[0]}.safetensors", "size"),
        (f"{P[1]}.safetensors", "unreferenced"),
        (f"{P[2]}.safetensors", "unreferenced"),
    ]


def test_what_killed_builds_left_always_goes(catalog, packs):
    (packs / f"{UNKNOWN}.safetensors").write_bytes(bytes(10))
    (catalog.layout.staging / STAGED).write_bytes(bytes(20))
    catalog.layout.quarantine.mkdir()
    (catalog.layout.quarantine / f"{UNKNOWN}.safetensors").write_bytes(bytes(30))
    (catalog.layout.root / "catalog.db.unusable").write_bytes(bytes(40))
    info = cache_info(catalog)
    assert (info["packs"], info["staged_bytes"], info["quarantined_bytes"]) == (6, 20, 30)
    done = prune(catalog, PruneLimits())
    assert (done.removed_bytes, done.leftover_bytes) == (100, 90)
    assert left(packs) == [*P]
    assert not (catalog.layout.root / "catalog.db.unusable").exists()
    info = cache_info(catalog)
    assert (info["pack_bytes"], info["staged_bytes"], info["quarantined_bytes"]) == (500, 0, 0)


def test_a_pack_that_is_recorded_and_gone_counts_nothing(catalog, packs):
    (packs / f"{P[0]}.safetensors").unlink()
    assert prune(catalog, PruneLimits(max_bytes=400)).kept_bytes == 400
    assert left(packs) == [*P[1:]]


@pytest.mark.parametrize("folder", ["packs", "staging", "quarantine"])
@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_files_of_others_stay_whatever_is_asked_for(catalog, packs, tmp_path, folder, is_link):
    place = getattr(catalog.layout, folder)
    if is_link:
        place.rename(tmp_path / "mine") if place.exists() else (tmp_path / "mine").mkdir()
        place.symlink_to(tmp_path / "mine")
    place.mkdir(exist_ok=True)
    almost = [f"{UNKNOWN}.safetensors.bak", f"{UNKNOWN.upper()}.safetensors", f"{UNKNOWN}.safetensors\n", UNKNOWN]
    mine = ["model.safetensors", "notes.txt", *almost, "a"]
    for name in mine[:-1]:
        (place / name).write_bytes(b"mine")
    (place / "a").mkdir()
    (place / "a" / f"{UNKNOWN}.safetensors").write_bytes(b"mine")
    own = f"{UNKNOWN}.safetensors" if folder != "staging" else STAGED
    (place / own).write_bytes(b"ours")
    info = cache_info(catalog)
    assert info["staged_bytes"] + info["quarantined_bytes"] == (0 if folder == "packs" else 4)
    done = prune(catalog, PruneLimits(max_bytes=0, max_age_days=0, keep=()))
    assert done.removed_bytes == 504
    assert sorted(path.name for path in place.iterdir()) == sorted(mine)
    assert (place / "a" / f"{UNKNOWN}.safetensors").read_bytes() == b"mine"


def test_a_damaged_row_takes_no_file_elsewhere(catalog, packs):
    mine = catalog.layout.root.parent / "mine.safetensors"
    mine.write_bytes(b"mine")
    for name in ("../../mine", str(mine.with_suffix(""))):
        catalog.record_pack(name, FileIdentity.at(mine), [], "s")
    prune(catalog, PruneLimits(max_bytes=0, max_age_days=0, keep=()))
    assert mine.read_bytes() == b"mine"
    assert catalog.pack_names() == ()


def test_published_outputs_keep_their_bytes(tmp_path):
    project = SmallProject(tmp_path)
    project.add_source("e1", random_tensors(0, {"w": (16, 16)}))
    project.set_output("m", {"operator": "passthrough", "experts": ["e1"]})
    project.build()
    before = project.raw("m")
    assert project.open().cache_prune(max_bytes=0).removed == 1
    assert project.raw("m") == before
    assert project.build_one("m").state == "unchanged"
