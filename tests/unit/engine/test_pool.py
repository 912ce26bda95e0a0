"""The pool of workers: order, failures, and how far it runs ahead."""

import threading
import time

import pytest

from mergepipe.engine.limits import JOBS_AHEAD
from mergepipe.engine.pool import WorkerPool


@pytest.fixture(params=[1, 2, 5])
def pool(request):
    pool = WorkerPool(request.param)
    yield pool
    pool.close()


def test_outcomes_come_in_the_order_of_the_tasks(pool):
    def work(task, scratch):
        time.sleep(0.002 * (task % 3))
        return task * 2

    assert list(pool.run(work, range(40))) == [task * 2 for task in range(40)]


def test_no_task_is_no_outcome(pool):
    assert list(pool.run(lambda task, scratch: task, [])) == []


def test_the_first_failure_is_raised_and_later_tasks_are_not_begun(pool):
    begun = []

    def work(task, scratch):
        begun.append(task)
        if task == 3:
            raise ValueError("task 3")
        return task

    outcomes = pool.run(work, range(1000))
    assert [next(outcomes) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="task 3"):
        next(outcomes)
    assert len(begun) < 50


def test_tasks_are_taken_a_few_ahead_and_no_further():
    pool, taken, gate = WorkerPool(2), [], threading.Event()

    def tasks():
        for number in range(100):
            taken.append(number)
            yield number

    def work(task, scratch):
        gate.wait(10)
        return task

    outcomes = pool.run(work, tasks())
    threading.Timer(0.05, gate.set).start()
    assert next(outcomes) == 0
    assert len(taken) <= 2 * JOBS_AHEAD
    assert list(outcomes) == list(range(1, 100))
    pool.close()


def test_each_worker_has_one_scratch_and_shares_it_with_none():
    pool, seen, barrier = WorkerPool(3), {}, threading.Barrier(3)

    def work(task, scratch):
        if task < 3:
            barrier.wait(10)
        seen.setdefault(threading.get_ident(), set()).add(id(scratch))

    list(pool.run(work, range(30)))
    pool.close()
    assert len(seen) == 3
    assert all(len(found) == 1 for found in seen.values())
    assert len(set.union(*seen.values())) == 3


def test_a_run_that_is_left_early_cancels_what_was_not_begun():
    pool, begun, gate = WorkerPool(1), [], threading.Event()

    def work(task, scratch):
        begun.append(task)
        if task:
            gate.wait(10)
        return task

    outcomes = pool.run(work, range(100))
    assert next(outcomes) == 0
    outcomes.close()
    gate.set()
    pool.close()
    assert len(begun) <= 2


def test_the_pool_can_be_used_again_after_a_failure(pool):
    def fail(task, scratch):
        raise KeyError(task)

    with pytest.raises(KeyError):
        list(pool.run(fail, range(3)))
    assert list(pool.run(lambda task, scratch: task, range(3))) == [0, 1, 2]
