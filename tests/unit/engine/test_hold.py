"""Memory that is kept between passes: what is lent and what is free together stay within the limit."""

import os
import random
from types import SimpleNamespace

import pytest

from mergepipe.engine.hold import HoldPool

PAGE = os.sysconf("SC_PAGE_SIZE")


def pool_of(limit, *, shared):
    pool = HoldPool(limit)
    if shared:
        pool.share()
    return pool


@pytest.mark.parametrize("shared", [False, True])
def test_whatever_is_lent_and_taken_back_no_more_exists_than_the_limit(shared):
    pool, draw, lent, arrays = pool_of(1000, shared=shared), random.Random(1), [], {}
    for number in range(2000):
        size = draw.choice([10, 100, 333, 500, 900])
        if pool.fits(size) and draw.random() < 0.6:
            view = pool.lend(size)
            assert len(view) == size
            view[:] = bytes([number % 256]) * size
            lent.append((view, number % 256))
            arrays[id(view.obj)] = view.obj
        elif lent:
            view, value = lent.pop(draw.randrange(len(lent)))
            assert bytes(view) == bytes([value]) * len(view)  # nobody else was lent any of it
            pool.take_back([view])
        free = {id(array.data.obj): array for array in pool._free}
        total = sum(len(array) for array in pool._free) + sum(len(view.obj) for view, _ in lent)
        assert total <= 1000
        assert len(free) == len(pool._free)


def test_what_came_back_is_lent_again():
    pool = HoldPool(1000)
    first = pool.lend(400)
    memory = first.obj
    pool.take_back([first])
    assert pool.lend(300).obj is memory


def test_a_forked_process_sees_what_is_lent_later_at_its_place():
    pool = pool_of(10 * PAGE, shared=True)
    asked, answered = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        begin, size = map(int, os.read(asked[0], 100).split())
        view = pool.at(begin, size)
        view[1:3] = bytes(view[:2])
        os.write(answered[1], b"done")
        os._exit(0)
    pool.lend(PAGE + 1)
    view = pool.lend(300)
    view[:3] = b"ab."
    os.write(asked[1], b"%d %d" % pool.place(view))
    assert os.read(answered[0], 100) == b"done"
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(view[:3]) == b"aab"
    for fd in (*asked, *answered):
        os.close(fd)


def test_memory_that_is_not_shared_has_no_place():
    pool = HoldPool(1000)
    before = pool.lend(10)
    assert pool.place(before) is None
    pool.share()
    assert pool.place(before) is None
    assert pool.place(pool.lend(10)) == (0, 10)


def test_where_addresses_run_out_memory_is_lent_that_is_not_shared():
    pool = pool_of(PAGE, shared=True)
    lent = [pool.lend(1) for _ in range(10)]
    places = [pool.place(view) for view in lent]
    assert places[:8] == [(number * PAGE, 1) for number in range(8)]
    assert places[8:] == [None, None]


def test_memory_that_is_let_go_is_given_back_to_the_system_and_lent_anew():
    pool = pool_of(4 * PAGE, shared=True)
    first = pool.lend(PAGE)
    first[:] = b"x" * PAGE
    pool.take_back([first])
    second = pool.lend(4 * PAGE)  # the first has to go
    assert pool.place(second) == (0, 4 * PAGE)
    assert bytes(second[:PAGE]) == bytes(PAGE)


def test_nothing_is_shared_of_a_pool_that_lends_nothing():
    pool = pool_of(0, shared=True)
    assert not pool.fits(1)


def test_where_pages_cannot_be_given_back_the_room_is_lent_again_all_the_same(monkeypatch):
    pool = pool_of(4 * PAGE, shared=True)
    refusing = SimpleNamespace(madvise=every_call_fails)
    monkeypatch.setattr(pool._shared, "_map", refusing)
    for number in range(50):
        view = pool.lend((1 + number % 4) * PAGE)
        assert pool.place(view) is not None
        pool.take_back([view])


def every_call_fails(*arguments):
    raise OSError(22, "Invalid argument")
