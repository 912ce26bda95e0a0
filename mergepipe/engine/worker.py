"""What a worker process does: it takes orders, begins a few of them ahead, and does them in turn.

A job whose inputs are known reads what its plan says, and that is known when its order comes. So the disk works on the
next jobs' bytes while this one is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import BinaryIO

from mergepipe.engine.hold import HoldPool
from mergepipe.engine.job import BegunMerge, begin_merge, run_job
from mergepipe.engine.kernel import Scratch
from mergepipe.engine.orders import Order, Outcome, ordered_job, outcome_of
from mergepipe.engine.pipes import Inbox, packed
from mergepipe.engine.work import Group, Job
from mergepipe.values import dataclass


def do_orders(
    orders: int, outcomes: BinaryIO, groups: Sequence[Group], hold: HoldPool, scratch: Scratch, ahead: int
) -> None:
    """Do what is ordered, in turn, until there is nobody left who could order anything; tell every outcome.

    Parameters
    ----------
    orders, outcomes
        The pipes from the build and to it.
    groups
        By the number that orders know them by.
    ahead
        How many jobs are begun while another is done; 0 for none.
    """
    begun: deque[_Begun] = deque()
    inbox = Inbox(orders)
    turn = 0
    while True:
        while len(begun) <= ahead and all(one.merge for one in begun) and (not begun or inbox.has_order()):
            order: Order | None = inbox.take()
            if order is None:
                break
            turn = (turn + 1) % (ahead + 1)
            begun.append(_begin(order, groups, hold, scratch, turn if ahead else None))
        if not begun:
            return
        found = _outcome(begun.popleft(), scratch)
        outcomes.write(packed(found))
        outcomes.flush()


@dataclass(slots=True)
class _Begun:
    """An order that was taken; ``merge`` is what was begun of it, ``job`` None where that cannot be done here."""

    order: Order
    job: Job | None
    merge: BegunMerge | None


def _begin(order: Order, groups: Sequence[Group], hold: HoldPool, scratch: Scratch, turn: int | None) -> _Begun:
    try:
        job = ordered_job(order, groups[order.group], hold)
        return _Begun(order, job, None if turn is None else begin_merge(job, scratch, turn))
    except Exception:  # noqa: BLE001 - the build does the job again, and meets whatever it is
        return _Begun(order, None, None)


def _outcome(begun: _Begun, scratch: Scratch) -> Outcome | None:
    """Do a job, and return what is told of it: None where the build must do it again."""
    if begun.job is None:
        return None
    try:
        return outcome_of(run_job(begun.job, scratch, begun.merge), begun.order)
    except Exception:  # noqa: BLE001 - as above
        return None
