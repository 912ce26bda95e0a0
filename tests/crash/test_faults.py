"""System calls that fail or do half of what they were asked for: an error in words, nothing broken, no wrong byte."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter

import pytest
from support.crash import Site, check_refused, files_in
from support.quick import every

FAULTS = [
    ("read", errno.EIO),
    ("write", errno.EIO),
    ("write", errno.ENOSPC),
    ("fsync", errno.EIO),
    ("rename", errno.EACCES),
    ("link", errno.EIO),
    ("truncate", errno.ENOSPC),
    ("mkdir", errno.EACCES),
    ("unlink", errno.EACCES),
    ("open", errno.EMFILE),
    ("chmod", errno.EPERM),
    ("list", errno.EIO),
    ("rmdir", errno.EBUSY),
    ("write", errno.EDQUOT),
    ("read", errno.ESTALE),
    ("open", errno.EROFS),
    ("stat", errno.EIO),
    ("stat", errno.ESTALE),
    ("stat", errno.EACCES),
    ("close", errno.EIO),
    ("close", errno.EDQUOT),
    ("room", errno.EIO),
]
SAMPLES = 2
# One thread, so that the n-th call is the same in every run.
BUILD = ("build", "-j", "1")


@pytest.fixture
def site(tmp_path, faulty):
    """Return a project that was built at version 1, at which faults can be set."""
    site = Site(tmp_path / "site", faulty)
    site.report()
    return site


def faults(site, call, error=None, nth=0, path=None):
    """Return the environment for a fault in the project; calls by relative path (unlink) count wherever they are."""
    where = path or ("" if call == "unlink" else str(site.home))
    env = {"FAULT_CALL": call, "FAULT_PATH": where, "FAULT_NTH": str(nth)}
    return env if error is None else {**env, "FAULT_ERROR": str(error)}


@pytest.fixture(scope="session")
def counts(faulty, tmp_path_factory):
    """Return how many calls of each kind a build of version 2 makes after one of version 1."""
    site = Site(tmp_path_factory.mktemp("counts") / "site", faulty)
    site.report()
    site.turn_to(2)
    log = site.root.parent / "log"
    result = site.run(*BUILD, env={"FAULT_CALL": "any", "FAULT_LOG": str(log)})
    assert result.code == 0, result.text
    calls = (line.split(" ", 1) for line in log.read_text(encoding="utf-8", errors="replace").splitlines())
    return Counter(call for call, path in calls if call == "unlink" or str(site.home) in path)


def fail_nth_call(site, clean, call, error, nth):
    site.turn_to(2)
    sources = site.sources()
    result = site.run(*BUILD, env=faults(site, call, error, nth))
    site.check_between(clean[1], clean[2])
    if result.code == 0:  # a call that the build can do without
        site.check_done(clean[2])
    else:
        # A source or a lock that cannot be read counts as one that is wrong.
        check_refused(result, code=2 if "source `" in result.stderr or "the lock `" in result.stderr else 1)
        # SQLite keeps the reason of the operating system to itself.
        reasons = [os.strerror(error), "catalog.db` cannot be used: "]
        # Python closes a folder that could not be closed once more, and tells of that.
        reasons += [os.strerror(errno.EBADF)] if call == "close" else []
        assert any(reason in result.stderr for reason in reasons), result.stderr
    site.report()
    site.check_done(clean[2])
    assert site.litter() == []
    assert site.sources() == sources


def test_every_kind_of_call_is_made(counts):
    assert all(counts[call] > 0 for call, _ in FAULTS)


@pytest.mark.parametrize("sample", every(range(SAMPLES), [0]))
@pytest.mark.parametrize(("call", "error"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_a_call_that_fails_stops_the_build_in_words_and_breaks_nothing(site, clean, counts, call, error, sample):
    generator = random.Random(f"{call} {error}")
    nth = [generator.randrange(counts[call]) + 1 for _ in range(SAMPLES)][sample]
    fail_nth_call(site, clean, call, error, nth)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_whichever_call_fails_nothing_breaks(tmp_path, faulty, clean, counts, call, error):
    step = max(1, counts[call] // 60)
    for nth in range(1, counts[call] + 1, step):
        site = Site(tmp_path / f"{nth}", faulty)
        site.report()
        fail_nth_call(site, clean, call, error, nth)
        shutil.rmtree(tmp_path / f"{nth}")  # sixty of them take gigabytes


@pytest.mark.parametrize("call", ["read", "write"])
def test_transfers_that_do_half_of_what_was_asked_make_the_same_bytes(site, clean, call):
    site.turn_to(2)
    result = site.run(*BUILD, env=faults(site, call, 0))
    assert result.code == 0, result.text
    site.check_done(clean[2])


@pytest.mark.parametrize(("call", "nth"), [("read", 1), ("read", 40), ("write", 20), ("open", 30)])
def test_an_interrupted_call_is_made_again(site, clean, call, nth):
    site.turn_to(2)
    result = site.run(*BUILD, env=faults(site, call, errno.EINTR, nth))
    assert result.code == 0, result.text
    site.check_done(clean[2])


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM])
def test_where_a_shard_cannot_be_linked_it_is_copied(site, clean, error):
    site.turn_to(2)
    result = site.run(*BUILD, env=faults(site, "link", error))
    assert result.code == 0, result.text
    site.check_done(clean[2])
    shard = next(site.out("one").glob("*.safetensors"))
    assert shard.stat().st_nlink == 1


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_where_two_names_cannot_be_exchanged_they_are_renamed_in_two_steps(site, clean, error):
    site.turn_to(2)
    env = faults(site, "rename", error, 0, path=".one.mergepipe-new")
    result = site.run(*BUILD, env={**env, "FAULT_NTH": "1"})
    assert result.code == 0, result.text
    site.check_done(clean[2])
    assert site.litter() == []


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_rename_that_fails_while_the_output_is_swapped_leaves_an_output_in_its_place(site, clean, nth):
    site.turn_to(2)
    env = {**faults(site, "rename", errno.EIO, nth, path="build/"), "MERGEPIPE_NO_EXCHANGE": "1"}
    check_refused(site.run(*BUILD, env=env), "Input/output error", "build/")
    site.check_between(clean[1], clean[2])
    assert site.litter() == []
    site.report()
    site.check_done(clean[2])


def test_a_pack_that_cannot_be_read_is_made_again(site, clean):
    """The packs' ctime differs after a copy of the project, so that they are hashed before they are used."""
    site.turn_to(2)
    for pack in (site.cache / "packs").iterdir():
        os.utime(pack)
    result = site.run(*BUILD, env=faults(site, "read", errno.EIO, path="packs/"))
    assert result.code in (0, 1), result.text
    if result.code:
        check_refused(result, "Input/output error", "packs/")
    site.check_between(clean[1], clean[2])
    site.report()
    site.check_done(clean[2])


def test_a_staged_shard_that_cannot_be_read_is_made_again(site, clean):
    site.turn_to(2)
    site.kill_at("engine.tensor-recorded")
    result = site.run(*BUILD, env=faults(site, "read", errno.EIO, path="staging/"))
    assert result.code in (0, 1), result.text
    if result.code:
        check_refused(result, "Input/output error", "staging/")
    site.check_between(clean[1], clean[2])
    site.report()
    site.check_done(clean[2])


def test_status_says_what_stops_it_from_reading(site):
    before = files_in(site.root)
    result = site.run("status", env=faults(site, "read", errno.EIO, path="Mergefile.lock"))
    check_refused(result, "Input/output error", "Mergefile.lock", code=2)
    assert files_in(site.root) == before
