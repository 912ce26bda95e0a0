"""The collector waits for longer while builds run, and no longer than that."""

import gc
import threading

import pytest

from mergepipe.project.collecting import seldom_collecting


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def threshold():
    return gc.get_threshold()


def fail():
    raise ValueError


@pytest.mark.parametrize(("before", "meanwhile"), [(700, 50_000), (100_000, 100_000), (0, 0)])
def test_it_waits_for_longer_while_a_build_runs(before, meanwhile):
    gc.set_threshold(before, 11, 12)
    assert seldom_collecting(threshold)() == (meanwhile, 11, 12)
    assert gc.get_threshold() == (before, 11, 12)
    with pytest.raises(ValueError):
        seldom_collecting(fail)()
    assert gc.get_threshold() == (before, 11, 12)


def test_one_build_within_another_ends_nothing():
    seen = []
    inner = seldom_collecting(threshold)
    seldom_collecting(lambda: seen.extend([inner(), gc.get_threshold()]))()
    assert seen == [(50_000, 10, 10)] * 2
    assert gc.get_threshold() == (700, 10, 10)


def test_after_builds_in_threads_that_overlap_all_is_as_it_was():
    begun, end = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    @seldom_collecting
    def build(number):
        begun[number].set()
        assert end[number].wait(60)

    threads = [threading.Thread(target=build, args=(number,), daemon=True) for number in range(2)]
    for number, thread in enumerate(threads):  # the first to begin is the first to end
        thread.start()
        assert begun[number].wait(60)
    for number, thread in enumerate(threads):
        assert gc.get_threshold() == (50_000, 10, 10)
        end[number].set()
        thread.join()
    assert gc.get_threshold() == (700, 10, 10)
