"""Swapping directories: the exchange, the two steps with their journal cut anywhere, and what recovery may never do."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from mergepipe.fsio import swap
from mergepipe.fsio.swap import exchange, has_leftovers, recover_swap, staging_path, swap_in

NAMES = ("target", "staged", "retired", "journal")


class Cut(BaseException):
    """The process ends here, as far as the code under test can tell."""


def fill(directory, **files):
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def content(path):
    if path.is_symlink():
        return str(path.readlink())
    if path.is_file():
        return path.read_text()
    return {child.name: child.read_text() for child in path.iterdir()}


def beside(target):
    """Return the contents of everything beside and at the target, by file name."""
    return {path.name: content(path) for path in target.parent.iterdir()}


@pytest.fixture
def target(tmp_path):
    """Return a target with an old directory in place and a new one staged."""
    path = tmp_path / "out"
    fill(path, weights="old", mine="user's")
    fill(staging_path(path), weights="new")
    return path


@pytest.fixture(params=["exchange", "two-step"])
def way(request, monkeypatch):
    if request.param == "two-step":
        monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    return request.param


# --- the exchange -------------------------------------------------------------------------------------------------


def kinds(folder):
    fill(folder / "directory", file="inside")
    (folder / "file").write_text("text")
    (folder / "link").symlink_to("nowhere")
    return ("directory", "file", "link")


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(("directory", "file", "link"), 2)))
def test_any_two_things_are_exchanged(tmp_path, first, second):
    kinds(tmp_path)
    before = content(tmp_path / first), content(tmp_path / second)
    if not exchange(tmp_path / first, tmp_path / second):
        pytest.skip("this file system cannot exchange two names")
    assert (content(tmp_path / second), content(tmp_path / first)) == before


def test_an_exchange_with_nothing_is_an_error_and_changes_nothing(tmp_path):
    kinds(tmp_path)
    before = {name: content(tmp_path / name) for name in os.listdir(tmp_path)}
    with pytest.raises(OSError, match="missing") as caught:
        exchange(tmp_path / "file", tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT
    assert {name: content(tmp_path / name) for name in os.listdir(tmp_path)} == before


def test_the_exchange_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    kinds(tmp_path)
    assert exchange(tmp_path / "file", tmp_path / "directory") is False
    assert content(tmp_path / "file") == "text"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV])
def test_what_the_kernel_does_not_know_is_reported_as_impossible(tmp_path, monkeypatch, code):
    monkeypatch.setattr(swap, "_renameat2", lambda: lambda _old, _new: -1)
    monkeypatch.setattr(swap.ctypes, "get_errno", lambda: code)
    kinds(tmp_path)
    assert exchange(tmp_path / "file", tmp_path / "directory") is False


def test_what_the_kernel_refuses_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(swap, "_renameat2", lambda: lambda _old, _new: -1)
    monkeypatch.setattr(swap.ctypes, "get_errno", lambda: errno.EACCES)
    with pytest.raises(PermissionError):
        exchange(tmp_path / "a", tmp_path / "b")


def test_a_system_without_the_call_takes_two_steps(target, monkeypatch):
    monkeypatch.setattr(swap, "_renameat2", lambda: None)
    retired = swap_in(target)
    assert content(target) == {"weights": "new"}
    assert content(retired) == {"weights": "old", "mine": "user's"}


# --- swapping in --------------------------------------------------------------------------------------------------


def test_the_new_directory_takes_the_place_and_the_old_one_is_handed_back(target, way):
    retired = swap_in(target)
    assert content(target) == {"weights": "new"}
    assert content(retired) == {"weights": "old", "mine": "user's"}
    assert set(beside(target)) == {"out", retired.name}


def test_the_first_directory_has_nothing_to_hand_back(tmp_path, way):
    target = tmp_path / "out"
    fill(staging_path(target), weights="new")
    assert swap_in(target) is None
    assert beside(target) == {"out": {"weights": "new"}}


def test_a_retired_directory_of_an_earlier_run_is_no_obstacle(target, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    fill(swap._retired_path(target), weights="older")
    assert content(swap_in(target)) == {"weights": "old", "mine": "user's"}


@pytest.mark.parametrize("call", ["write_file", "fsync_path", "first rename", "second rename"])
def test_a_refused_step_leaves_the_target_as_it_was(target, monkeypatch, call):
    monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    before = beside(target)
    refusal = OSError(errno.EIO, "refused")
    if call.endswith("rename"):
        real, wanted, count = Path.rename, 1 if call == "first rename" else 2, itertools.count(1)

        def rename(self, other):
            if next(count) == wanted:
                raise refusal
            return real(self, other)

        monkeypatch.setattr(Path, "rename", rename)
    else:

        def refuse(*_args, **_options):
            raise refusal

        monkeypatch.setattr(swap, call, refuse)
    with pytest.raises(OSError, match="refused"):
        swap_in(target)
    assert beside(target) == before


# --- cut anywhere -------------------------------------------------------------------------------------------------


def cut_before(monkeypatch, number):
    """Make the ``number``-th change of the file system end the process instead; return how many there were."""
    count = itertools.count(1)

    def cutting(real):
        def step(*args, **options):
            if next(count) == number:
                raise Cut
            return real(*args, **options)

        return step

    for name in ("write_file", "fsync_path", "remove_tree"):
        monkeypatch.setattr(swap, name, cutting(getattr(swap, name)))
    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, cutting(getattr(Path, name)))
    return count


def recover(target):
    """Recover as a publication does, and keep what is handed back."""
    handed = []
    while (retired := recover_swap(target)) is not None:
        handed.append(content(retired))
        swap.remove_tree(retired)
    return handed


def steps_of(call, monkeypatch):
    with monkeypatch.context() as patched:
        count = cut_before(patched, -1)
        call()
    return next(count) - 1


def test_cut_at_any_step_the_target_is_whole_after_recovery_and_nothing_is_lost(tmp_path, monkeypatch, way):
    old, new = {"weights": "old", "mine": "user's"}, {"weights": "new"}
    for number in range(1, 12):
        target = tmp_path / str(number) / "out"
        fill(target, **old)
        fill(staging_path(target), **new)
        with monkeypatch.context() as patched:
            cut_before(patched, number)
            try:
                swap_in(target)
            except Cut:
                ended = False
            else:
                ended = True
        if way == "exchange":
            assert os.path.lexists(target), "the exchange has no moment without a target"
        handed = recover(target)
        assert content(target) in (old, new), number
        assert old in [content(target), *handed], "the old directory, with the user's file, is there or handed back"
        assert set(beside(target)) == {"out"}
        assert not has_leftovers(target)
        if ended:
            assert content(target) == new
            return
    pytest.fail("the swap has more steps than this test looks at")


def test_recovery_that_is_cut_itself_is_completed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGEPIPE_NO_EXCHANGE", "1")
    old, new = {"weights": "old"}, {"weights": "new"}
    for first, second in itertools.product(range(1, 9), range(1, 6)):
        target = tmp_path / f"{first}-{second}" / "out"
        fill(target, **old)
        fill(staging_path(target), **new)
        handed = []
        for call, number in ((swap_in, first), (recover_swap, second)):
            with monkeypatch.context() as patched:
                cut_before(patched, number)
                try:
                    found = call(target)
                except Cut:
                    found = None
            if found is not None and call is recover_swap:
                handed.append(content(found))
        handed += recover(target)
        assert content(target) in (old, new)
        assert old in [content(target), *handed]
        assert set(beside(target)) == {"out"}


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=4)))
def test_recovery_removes_nothing_but_its_journal(tmp_path, present):
    target = tmp_path / "out"
    paths = dict(zip(NAMES, (target, staging_path(target), swap._retired_path(target), swap._journal_path(target)),
                     strict=True))  # fmt: skip
    there = [name for name, is_there in zip(NAMES, present, strict=True) if is_there]
    for name in there:
        if name == "journal":
            paths[name].write_text("swap\n")
        else:
            fill(paths[name], of=name)
    retired = recover_swap(target)
    kept = [content(path) for name, path in paths.items() if path.is_dir()]
    assert sorted(map(str, kept)) == sorted(str({"of": name}) for name in there if name != "journal")
    assert not paths["journal"].exists()
    if "target" in there:
        assert content(target) == {"of": "target"}, "a target that is in its place stays there"
    elif "journal" in there and ("staged" in there or "retired" in there):
        assert content(target) == {"of": "staged" if "staged" in there else "retired"}
    else:
        assert not target.exists()
    left = [path for path in (paths["retired"], paths["staged"]) if path.exists()]
    assert retired == (left[0] if left else None)


def test_a_target_that_is_a_file_or_a_link_is_left_alone_by_recovery(tmp_path):
    for make in (lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")):
        target = tmp_path / "out"
        make(target)
        fill(staging_path(target), weights="new")
        swap._journal_path(target).write_text("swap\n")
        before = content(target)
        assert recover_swap(target) == staging_path(target)
        assert content(target) == before
        swap.remove_tree(staging_path(target))
        target.unlink()


def test_without_leftovers_there_is_nothing_to_do(target):
    swap.remove_tree(staging_path(target))
    assert not has_leftovers(target)
    assert recover_swap(target) is None
    assert beside(target) == {"out": {"weights": "old", "mine": "user's"}}


def test_a_target_that_cannot_be_looked_at_is_not_taken_to_be_missing(target, monkeypatch):
    before = beside(target)

    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            swap_in(target)
    assert beside(target) == before
