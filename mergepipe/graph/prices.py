"""What reading each block of the experts costs, and which of them are the same: a budget's view of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mergepipe.digest import DIGEST_SIZE
from mergepipe.graph.blocks import TensorRecipe
from mergepipe.graph.given import checked_code
from mergepipe.plan.codes import Coded, coded_slots
from mergepipe.plan.values import InputRef, OutputPlan, TensorPlan
from mergepipe.progressive.levels import LEVELS

if TYPE_CHECKING:
    import numpy as np

    from mergepipe.cache.progressive import CodeStore
    from mergepipe.cache.sources import SourceIndex
    from mergepipe.operators.influence import Influence
    from mergepipe.plan.budget import BudgetTensor
    from mergepipe.plan.hull import LevelPrices

    Array = np.ndarray[Any, Any]


def compared_slots(tensor: TensorPlan) -> tuple[int, ...]:
    """Return the slots of the experts that are inputs, by name: their order in the Mergefile is nothing to measure.

    Those that are there as codes alone are not among them: what is known of them came with the codes.
    """
    inputs = [(slot, ref) for slot, ref in enumerate(tensor.slots) if slot and ref is not None]
    named = [(ref.source, ref.info.name, slot) for slot, ref in inputs if not ref.coded_only]
    return tuple(slot for _, _, slot in sorted(named))


def whole_tensor(
    recipe: TensorRecipe,
    squares: Array,
    gram: Array,
    influence: Influence,
    *,
    costs: Array,
    same: Array | None = None,
    errors: Array | None = None,
    prices: LevelPrices | None = None,
    exact: Array | None = None,
) -> BudgetTensor:
    """Return what a budget is planned from, of numbers that were measured or estimated.

    Parameters
    ----------
    squares
        Of the norms of the deltas, float64 ``(experts, blocks)``; ``errors`` are their standard errors, if they have
        any.
    gram
        Over the whole tensor, float64 ``(experts + 1, experts + 1)``, the base first.
    costs, same, prices, exact
        As in `BudgetTensor`.
    """
    import numpy as np

    from mergepipe.plan.bounds import update_norm
    from mergepipe.plan.budget import BudgetTensor

    with np.errstate(all="ignore"):
        norms = np.sqrt(squares)
        base = float(np.sqrt(gram[0, 0]))
    norms[np.isnan(norms)] = np.inf  # infinities and NaN, which `non_finite` allows, are read first
    if prices is not None and recipe.tensor.work == "float64":
        # A code of 32-bit sources is that of the difference in float32, which is off by a relative 2^-24 at most.
        prices = replace(prices, residuals=prices.residuals + 2.0**-22 * norms)
    update = None
    if influence.combination is not None and exact is None and np.isfinite(gram).all():
        update = update_norm(influence.combination, gram)
    return BudgetTensor(
        norms=norms,
        costs=costs,
        influence=influence,
        same=same,
        update=update,
        base=base if np.isfinite(base) else None,
        errors=errors,
        prices=prices,
        exact=exact,
    )


def level_prices(
    plan: OutputPlan, recipe: TensorRecipe, index: SourceIndex, codes: CodeStore
) -> LevelPrices | None:
    """Return what the levels of a tensor's deltas come to; None where its budget knows none.

    Raises
    ------
    UnknownCodeError
        If a delta was not coded yet.
    PlanError, PackError
        If the code of a progressive checkpoint is of another base, or damaged.
    """
    import numpy as np

    from mergepipe.plan.hull import LevelPrices

    tensor, blocks = recipe.tensor, recipe.facts.blocks
    coded = coded_slots(plan, tensor)
    if not coded:
        return None
    sizes = np.zeros((LEVELS, len(tensor.experts), blocks), np.int64)
    residuals = np.full(sizes.shape, np.inf)
    keys = {one.slot: code_key(one, index, codes) for one in coded}
    told = codes.all_prices([key for key in keys.values() if key is not None])
    for one in coded:
        given = checked_code(plan, one.base, one.expert, index)
        if given is not None:
            stages, left = given.header.prices()
            np.cumsum(stages, axis=0, out=sizes[:, one.slot - 1])
            residuals[:, one.slot - 1] = left
            continue
        key = keys[one.slot]
        known = None if key is None else told.get(key)
        if known is None:
            raise UnknownCodeError
        np.cumsum(known.sizes, axis=0, out=sizes[:, one.slot - 1])
        residuals[:, one.slot - 1] = known.residuals
    return LevelPrices(sizes=sizes, residuals=residuals)


def are_coded(deltas: Iterable[Coded], codes: CodeStore, index: SourceIndex) -> bool:
    """Return whether it is known of all of these deltas what their levels come to."""
    keys = {code_key(coded, index, codes) for coded in deltas if not coded.expert.coded_only}
    known = [key for key in keys if key is not None]
    return len(known) == len(keys) == len(codes.headers(known))


def code_key(coded: Coded, index: SourceIndex, codes: CodeStore) -> bytes | None:
    """Return the key of a code, None while the content of base or expert is not known."""
    base, expert = (index.tensor(ref.source, ref.info) for ref in (coded.base, coded.expert))
    return None if base is None or expert is None else codes.key(base, expert)


class UnknownCodeError(Exception):
    """A delta whose levels a budget may buy was not coded yet."""


def block_costs(recipe: TensorRecipe) -> Array:
    """Return what reading each block of each expert takes in bytes, whatever it holds: int64 ``(experts, blocks)``.

    The factors of an adapter are free; what its deltas are added to is not, where that is an expert.
    """
    import numpy as np

    tensor, blocks = recipe.tensor, recipe.facts.blocks
    costs = np.zeros((len(tensor.experts), blocks), np.int64)
    for expert, ref in enumerate(tensor.experts):
        stored = None if ref is None else _read_ref(tensor, ref)
        if stored is None:
            continue
        grid = stored.grid(recipe.geometry)
        count = min(blocks, grid.count)
        costs[expert, :count] = grid.block_rows * grid.row_bytes
        if count:
            start, stop = grid.byte_range(count - 1)
            costs[expert, count - 1] = stop - start
    return costs


def first_equal(recipe: TensorRecipe, known: Sequence[bytes | None]) -> Array:
    """Return which expert's block is the first with the same content at the same place, ``(experts, blocks)``.

    -1 stands for the base: a zero delta. An expert that is not read, or lacks the block, is its own.
    """
    import numpy as np

    tensor, blocks = recipe.tensor, recipe.facts.blocks
    first = np.repeat(np.arange(len(tensor.experts))[:, None], blocks, axis=1)
    if not have_equal(known, blocks):
        return first
    earlier: list[tuple[int, str, Array]] = []
    if tensor.base is not None and known[0] is not None:
        earlier.append((-1, tensor.base.info.dtype, _digest_rows(known[0], blocks)))
    for expert, ref in enumerate(tensor.experts):
        if ref is None or ref.lora is not None or _read_ref(tensor, ref) is None:
            continue
        rows = _digest_rows(known[expert + 1], blocks)
        for number, dtype, other in reversed(earlier):  # the first one is written last
            if dtype == ref.info.dtype:
                count = min(len(rows), len(other))
                first[expert, :count][(rows[:count] == other[:count]).all(axis=1)] = number
        earlier.append((expert, ref.info.dtype, rows))
    return first


def have_equal(known: Sequence[bytes | None], blocks: int) -> bool:
    """Return whether two slots seem to have the same content at the same place: then the first words agree."""
    import numpy as np

    words = np.repeat(np.arange(len(known), dtype=np.uint64)[:, None], blocks, axis=1)
    for slot, packed in enumerate(known):
        if packed:
            own = np.frombuffer(packed, np.uint64)[:: DIGEST_SIZE // 8][:blocks]
            words[slot, : len(own)] = own
    words.sort(axis=0)
    return bool((words[1:] == words[:-1]).any())


def _digest_rows(packed: bytes | None, blocks: int) -> Array:
    """Return packed digests as rows of numbers, ``(blocks, 4)``, as far as there are any."""
    import numpy as np

    rows = np.frombuffer(packed or b"", np.uint64).reshape(-1, DIGEST_SIZE // 8)
    return rows[:blocks]


def _read_ref(tensor: TensorPlan, ref: InputRef) -> InputRef | None:
    """Return the stored tensor whose blocks are read for an expert and paid for; None where that is nothing."""
    stored = ref if ref.lora is None else ref.lora.on
    return stored if stored is not None and tensor.is_expert(stored) else None
