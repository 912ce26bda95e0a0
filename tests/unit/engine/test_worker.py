"""A worker process begins jobs while it does another, and never waits for an order while it has something to do."""

import io
import os
import pickle

import pytest

from mergepipe.engine import worker
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.pipes import write_order
from mergepipe.engine.worker import do_orders


class Pipes:
    """A worker in this process: its orders in a pipe, and what it does in the order in which it does it."""

    def __init__(self, monkeypatch):
        self.orders, ours = os.pipe()
        self.send = os.fdopen(ours, "wb")
        self.events = []
        self.refused, self.unfit, self.failing = set(), set(), set()
        self.after = {}
        monkeypatch.setattr(worker, "ordered_job", lambda order, group, hold: order)
        monkeypatch.setattr(worker, "begin_merge", self.begin)
        monkeypatch.setattr(worker, "run_job", self.run)
        monkeypatch.setattr(worker, "outcome_of", lambda done, order: (done, order["number"]))

    def order(self, *numbers):
        for number in numbers:
            write_order(self.send, pickle.dumps(Order(number=number)))

    def begin(self, job, scratch, turn):
        number = job["number"]
        if number in self.refused:
            self.events.append(("refused", number))
            raise OSError("there is no such file")
        if number in self.unfit:
            return None
        self.events.append(("begun", number, turn))
        return f"merge {number}"

    def run(self, job, scratch, begun=None):
        number = job["number"]
        self.events.append(("done", number))
        self.after.get(number, lambda: None)()
        if number in self.failing:
            raise MemoryError
        assert begun in (None, f"merge {number}")
        return begun

    def serve(self, ahead):
        """Have all done that was ordered, and return the outcomes."""
        told = io.BytesIO()
        do_orders(self.orders, told, [None], None, Scratch(), ahead)
        told.seek(0)
        outcomes = []
        while told.tell() < len(told.getvalue()):
            outcomes.append(pickle.load(told))
        return outcomes


class Order(dict):
    """Stands for an order; it is about the one group that there is."""

    group = 0


@pytest.fixture
def pipes(monkeypatch):
    found = Pipes(monkeypatch)
    yield found
    found.send.close()
    os.close(found.orders)


def test_the_next_jobs_are_begun_before_one_is_done_each_with_buffers_of_its_own(pipes):
    pipes.order(*range(4))
    pipes.send.close()
    assert pipes.serve(2) == [(f"merge {number}", number) for number in range(4)]
    assert [event[:2] for event in pipes.events] == [
        ("begun", 0), ("begun", 1), ("begun", 2), ("done", 0), ("begun", 3), ("done", 1), ("done", 2), ("done", 3),
    ]  # fmt: skip
    turns = {event[1]: event[2] for event in pipes.events if event[0] == "begun"}
    assert all(len({turns[number + at] for at in range(3)}) == 3 for number in range(2))


def test_no_order_is_waited_for_while_there_is_something_to_do(pipes):
    pipes.after[0] = lambda: pipes.order(1)
    pipes.after[1] = pipes.send.close
    pipes.order(0)
    assert [number for _, number in pipes.serve(2)] == [0, 1]
    assert [event[:2] for event in pipes.events] == [("begun", 0), ("done", 0), ("begun", 1), ("done", 1)]


def test_where_nothing_is_begun_ahead_each_job_is_taken_when_the_one_before_is_done(pipes):
    pipes.order(0, 1)
    pipes.send.close()
    assert pipes.serve(0) == [(None, 0), (None, 1)]
    assert pipes.events == [("done", 0), ("done", 1)]


def test_behind_a_job_that_cannot_be_begun_nothing_is(pipes):
    pipes.unfit = {1}
    pipes.order(0, 1, 2)
    pipes.send.close()
    assert pipes.serve(2) == [("merge 0", 0), (None, 1), ("merge 2", 2)]
    assert [event[:2] for event in pipes.events] == [
        ("begun", 0), ("done", 0), ("done", 1), ("begun", 2), ("done", 2),
    ]  # fmt: skip


def test_what_fails_at_its_beginning_or_later_is_told_in_its_turn(pipes):
    pipes.refused, pipes.failing = {1}, {2}
    pipes.order(0, 1, 2, 3)
    pipes.send.close()
    assert pipes.serve(2) == [("merge 0", 0), None, None, ("merge 3", 3)]


def test_an_order_that_comes_in_pieces_is_put_together_and_half_of_one_is_none(pipes):
    long = pickle.dumps(Order(number=0, more=bytes(50_000)))
    write_order(pipes.send, long)
    pipes.send.write(len(long).to_bytes(4, "little") + long[:100])
    pipes.send.close()
    assert pipes.serve(2) == [("merge 0", 0)]
