"""Other choices of what a budget reads: the same blocks at the same price, put in another order than by gain per byte.

A choice is an `Order` with its items rearranged, so that everything behind it is the planner's and the engine's own:
what a prefix costs, its bound, its estimate, the access set, the merge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mergepipe.plan.bounds import margin
from mergepipe.plan.budget import Order, bound_steps, to_the_end
from mergepipe.plan.places import full_row, parts
from mergepipe.plan.selection import Selection

Array = Any


def by_hash(order: Order, names: Sequence[str]) -> Array:
    """Return the items of an order as the public code of the paper takes them.

    Parameters
    ----------
    names
        The names of the order's tensors.

    Notes
    -----
    That code (wyy-code/mergepipe, `_block_keep_by_top_p` in ``src/mergepipe/engine/merge_engine.py``) looks at no
    weight: a block is read if the first four bytes of ``sha256("{tensor}:{block}")``, as a little-endian number by
    2^32, are at most a threshold that it lowers with the budget. The experts are no part of the hash: all of them are
    read in a block, or none. A lower threshold reads a subset, so the rule is this order. What it does besides is not
    here: it never merges tensors with ``embed`` or ``norm`` in their names, and charges the base's bytes, too.
    """
    keys = full_row(order.tensors, 0, np.int64)
    for name, part in zip(names, parts(order.tensors, keys), strict=True):
        part[:] = np.asarray([hash_of(name, block) for block in range(len(part))], np.int64)[:, None]
    places = np.sort(order.items)
    return places[np.argsort(keys[places], kind="stable")]


def hash_of(tensor: str, block: int) -> int:
    """Return the number below 2^32 by which the paper's public code decides on a block of all experts."""
    return int.from_bytes(hashlib.sha256(f"{tensor}:{block}".encode()).digest()[:4], "little")


def at_random(order: Order, seed: int) -> Array:
    """Return the items of an order, each order of them equally likely; the same for a seed on every machine."""
    return np.random.Generator(np.random.Philox(seed)).permutation(np.sort(order.items))


def fill(order: Order, items: Array, limit: int) -> Selection:
    """Return what so many bytes buy of items in a given order.

    What does not fit is passed over, and smaller blocks behind it still taken: unlike the planner, which stops there
    so that budgets are nested, such a choice leaves nothing of its bytes that it could use.
    """
    costs = _by_place(order, np.diff(order.bytes), np.int64)[items]
    taken = np.zeros(len(items), np.bool_)
    left = limit
    for number, cost in enumerate(costs.tolist()):
        if cost <= left:
            taken[number] = True
            left -= cost
    return reordered(order, np.concatenate([items[taken], items[~taken]])).cut(int(np.count_nonzero(taken)))


def reordered(order: Order, items: Array) -> Order:
    """Return an order with its items in another one, and with what its prefixes come to."""
    bytes_, blocks, gains, squares = (
        _by_place(order, values, values.dtype)[items]
        for values in (np.diff(order.bytes), np.diff(order.blocks), order.gains, order.squares)
    )
    effects = np.sqrt(_by_place(order, order.gains, np.float64))
    masses = _by_place(order, order.squares, np.float64)
    steps = bound_steps(order.tensors, items, np.zeros(len(items), np.int64), effects[items], masses)
    return replace(
        order,
        items=items,
        bytes=np.concatenate([[0], np.cumsum(bytes_)]),
        blocks=np.concatenate([[0], np.cumsum(blocks)]),
        bounds=np.sqrt(to_the_end(steps)) * (1.0 + margin(len(items))),
        expected=np.sqrt(to_the_end(gains)),
        masses=to_the_end(squares),
        steps=steps,
        gains=gains,
        squares=squares,
        unbounded=_unbounded(order, items, squares),
    )


def _by_place(order: Order, values: Array, dtype: Any) -> Array:
    """Return the values of an order's items at their places in the row of all blocks, 0 elsewhere."""
    row = full_row(order.tensors, 0, dtype)
    row[order.items] = values
    return row


def _unbounded(order: Order, items: Array, squares: Array) -> int:
    blind = full_row(order.tensors, 0, np.bool_)
    for tensor, part in zip(order.tensors, parts(order.tensors, blind), strict=True):
        part[:] = tensor.influence.kind == "none"
    unknown = np.flatnonzero(blind[items] & (squares > 0))
    return int(unknown[-1]) + 1 if unknown.size else 0
