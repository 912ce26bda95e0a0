"""Memory that is kept between passes: what is lent and what is free together stay within the limit."""

import random

from mergepipe.engine.hold import HoldPool


def test_whatever_is_lent_and_taken_back_no_more_exists_than_the_limit():
    pool, draw, lent, arrays = HoldPool(1000), random.Random(1), [], {}
    for _ in range(2000):
        size = draw.choice([10, 100, 333, 500, 900])
        if pool.fits(size) and draw.random() < 0.6:
            view = pool.lend(size)
            assert len(view) == size
            lent.append(view)
            arrays[id(view.obj)] = view.obj
        elif lent:
            pool.take_back([lent.pop(draw.randrange(len(lent)))])
        free = {id(array.data.obj): array for array in pool._free}
        total = sum(len(array) for array in pool._free) + sum(len(view.obj) for view in lent)
        assert total <= 1000
        assert len(free) == len(pool._free)


def test_what_came_back_is_lent_again():
    pool = HoldPool(1000)
    first = pool.lend(400)
    memory = first.obj
    pool.take_back([first])
    assert pool.lend(300).obj is memory
