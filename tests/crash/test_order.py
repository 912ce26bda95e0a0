"""What reaches the disk before what: the flushes and renames without whose order a power cut could show a mixture."""

from __future__ import annotations

import pytest
from support.crash import OUTPUTS, Site
from support.faults import compile_faults
from support.forked import ForkServer


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Return the file system calls of a rebuild in order, as (call, path below the project)."""
    tmp_path = tmp_path_factory.mktemp("order")
    library = compile_faults(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler for the library that logs calls")
    with ForkServer(env={"LD_PRELOAD": str(library)}, flush=True) as server:
        site = Site(tmp_path / "site", server)
        site.report()
        site.turn_to(2)
        result = site.run("build", "-j", "1", env={"FAULT_CALL": "any", "FAULT_LOG": str(tmp_path / "log")})
        assert result.code == 0, result.text
        lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
        pairs = [tuple(line.split(" ", 1)) for line in lines]
        root = str(site.home)
        return [(call, path.removeprefix(root).lstrip("/")) for call, path in pairs if path.startswith(root)]


def first(calls, *wanted, after=0):
    """Return where a call is first made from a place on."""
    return calls.index(wanted, after)


def last(calls, *wanted):
    return len(calls) - 1 - calls[::-1].index(wanted)


def test_a_shard_is_flushed_before_it_gets_its_name_and_its_name_before_it_is_recorded(calls):
    renames = [path for call, path in calls if call == "rename" and "/staging/" in path]
    assert len(renames) >= 3
    for path in renames:
        renamed = first(calls, "rename", path)
        assert last(calls, "write", path) < last(calls, "fsync", path) < renamed
        named = first(calls, "fsync", ".mergecache/packs", after=renamed)
        recorded = first(calls, "fsync", ".mergecache/catalog.db", after=named)
        between = {path for call, path in calls[renamed:named] if call == "write"}
        assert not any("catalog.db" in path for path in between), "the record came before the name was on the disk"
        assert recorded > named


def test_everything_in_the_new_directory_is_flushed_before_it_is_swapped_in_and_the_swap_after(calls):
    for name in OUTPUTS:
        staged = f"build/.{name}.mergepipe-new"
        swapped = first(calls, "rename", staged)
        written = {path for call, path in calls[:swapped] if call == "write" and path.startswith(staged)}
        assert {path.rsplit("/", 1)[1] for path in written} >= {"mergepipe.json", "config.json", "README.md"}
        for path in written:
            assert last(calls[:swapped], "write", path) < last(calls[:swapped], "fsync", path)
        assert last(calls[:swapped], "fsync", staged) > max(first(calls, "fsync", path) for path in written)
        flushed = first(calls, "fsync", "build", after=swapped)
        removed = [path for call, path in calls[swapped:flushed] if call == "unlink" and path.startswith(staged)]
        assert removed == [], "the old directory was removed before the swap was on the disk"


def test_the_lock_is_flushed_before_it_is_renamed_and_comes_after_every_swap(calls):
    temporary = ".Mergefile.lock.tmp"
    renamed = first(calls, "rename", temporary)
    assert last(calls, "write", temporary) < first(calls, "fsync", temporary) < renamed
    assert first(calls, "fsync", "", after=renamed) > renamed
    assert all(first(calls, "rename", f"build/.{name}.mergepipe-new") < renamed for name in OUTPUTS)
