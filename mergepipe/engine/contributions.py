"""What each expert contributed to a merge: inner products and signs of base, deltas and update, in one pass.

The output is read as one more input beside those that it was made from; its difference to the base is the *update*. All
numbers are statistics of blocks like those of a reduction: float64, taken in bounded memory, added in block order, and
kept in the catalog by the content of the blocks, so that they are measured once.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mergepipe.cache.sources import SourceIndex
from mergepipe.cache.statistics import StatisticStore
from mergepipe.checkpoints.checkpoint import Checkpoint
from mergepipe.digest import digest_at
from mergepipe.dtypes import is_mergeable
from mergepipe.engine.passes import Reducer
from mergepipe.engine.survey import SurveyPasses
from mergepipe.engine.work import TensorWork
from mergepipe.graph.blocks import TensorRecipe, plan_statistic
from mergepipe.graph.inputs import slot_blocks
from mergepipe.graph.reductions import key_recipe, open_table
from mergepipe.operators.contract import Array, BlockInputs, Statistic, StatisticValues
from mergepipe.operators.vectors import CHUNK_ELEMENTS, chunks, fill_deltas, inner_products, symmetric
from mergepipe.plan.access import TensorAccess
from mergepipe.plan.sampling import sampled_slots
from mergepipe.plan.values import Decision, InputRef, OutputPlan, TensorPlan
from mergepipe.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsAndOutput(Statistic):
    """The inner products of the base, the deltas and the update, and how often signs of deltas agree.

    Packed float64: the inner products of the base (where 0 is among the `slots`), the deltas of the experts and the
    update, the last of the slots, as `mergepipe.operators.gram.GramOfDeltas` packs them; then for each pair of deltas
    (the update among them), first with second, first with third, ..., second with third, ..., the number of elements
    in which both have the same sign, and of those in which neither is zero.
    """

    name: ClassVar = "inputs_and_output"
    version: ClassVar = 1
    slots: tuple[int, ...]

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: the numbers follow from the inputs."""
        return ()

    @property
    def has_base(self) -> bool:
        """Whether the base is the first vector."""
        return self.slots[0] == 0

    def measure(self, tiles: Iterator[BlockInputs]) -> bytes:
        """Return the numbers of a block; see `Statistic.measure`."""
        first = int(self.has_base)
        deltas = fill_deltas([slot - 1 for slot in self.slots[first:]])

        def fill(inputs: BlockInputs, rows: Array) -> bool:
            if first:
                rows[0] = inputs.base
            if not deltas(inputs, rows[first:]):
                rows[first:] = 0.0
            return True

        count = len(self.slots)
        products = np.zeros(count * (count + 1) // 2)
        signs = np.zeros((2, (count - first) * (count - first - 1) // 2))
        scratch = None
        with np.errstate(all="ignore"):  # what is not finite shows in the sums
            for _, rows in chunks(tiles, count, fill, CHUNK_ELEMENTS):
                if scratch is None or scratch.shape != rows.shape:
                    scratch = np.empty_like(rows)
                products += inner_products(rows, scratch)
                signs += _sign_counts(rows[first:])
        return np.concatenate([products, *signs]).astype("<f8").tobytes()


def _sign_counts(deltas: Array) -> Array:
    """Return for each pair of deltas ``(count, n)`` how many elements agree, and how many are both not zero."""
    above, below = deltas > 0, deltas < 0
    found = []
    for one, other in itertools.combinations(range(len(deltas)), 2):
        same = np.count_nonzero(above[one] & above[other]) + np.count_nonzero(below[one] & below[other])
        apart = np.count_nonzero(above[one] & below[other]) + np.count_nonzero(below[one] & above[other])
        found.append((same, same + apart))
    return np.asarray(found, np.float64).reshape(-1, 2).T


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContributions:
    """What was measured of one merged tensor, over the elements that are merged.

    Attributes
    ----------
    experts
        The places, among the experts of the tensor, of those that are inputs; others have no part in what follows.
    base
        The sum of the squares of the base, None without one; deltas and update are the values themselves then.
    update
        The sum of the squares of output less base, as stored.
    deltas
        Those of each expert's delta, as far as the merge used it: blocks that a budget leaves out are not in it.
    along
        The inner product of each expert's delta, in the same sense, with the update.
    same, both
        Signs: in how many elements two deltas agree, and in how many neither is zero, summed over the pairs of experts;
        of the whole deltas.
    update_same, update_both
        The same for each expert's delta with the update.
    """

    experts: tuple[int, ...]
    base: float | None
    update: float
    deltas: tuple[float, ...]
    along: tuple[float, ...]
    same: int
    both: int
    update_same: tuple[int, ...]
    update_both: tuple[int, ...]


def measured_plan(plan: OutputPlan, checkpoint: Checkpoint) -> OutputPlan:
    """Return a plan of which every tensor has the finished output as its last input.

    Parameters
    ----------
    plan
        The output's plan, resolved.
    checkpoint
        The finished output; its label is the name that the index knows it by.
    """
    tensors = tuple(_with_output(plan, tensor, checkpoint) for tensor in plan.tensors if is_measured(tensor))
    return replace(plan, tensors=tensors, sources={**plan.sources, checkpoint.label: checkpoint})


def is_measured(tensor: TensorPlan) -> bool:
    """Return whether there is anything to measure: a tensor that is merged from any expert."""
    merged = tensor.decision is Decision.MERGE and is_mergeable(tensor.dtype)
    return merged and any(slot is not None for slot in tensor.experts)


def _with_output(plan: OutputPlan, tensor: TensorPlan, checkpoint: Checkpoint) -> TensorPlan:
    output = InputRef(source=checkpoint.label, info=checkpoint.tensors[tensor.name])
    base = tensor.base if tensor.base is not None else _declared_base(plan, tensor)
    access = None if tensor.access is None else TensorAccess(levels=(*tensor.access.levels, None))
    experts = tuple(None if expert is None else replace(expert, levels=None) for expert in tensor.experts)
    return replace(tensor, base=base, experts=(*experts, output), access=access, sampled=False)


def is_readable(plan: OutputPlan, measured: OutputPlan, index: SourceIndex) -> bool:
    """Return whether a `measured_plan` needs no block that the output was built without reading.

    Experts whose budget goes by samples are known in part alone; what was not read of them is not read for this either.
    Of progressive checkpoints there is no more than codes.
    """
    if any(ref is not None and ref.coded_only for tensor in measured.tensors for ref in tensor.experts):
        return False  # nobody here has the deltas
    sampled = {tensor.name: sampled_slots(tensor) for tensor in plan.tensors}
    refs = [tensor.slots[slot] for tensor in measured.tensors for slot in sampled[tensor.name]]
    return all(ref is None or slot_blocks(ref, index) is not None for ref in refs)


def _declared_base(plan: OutputPlan, tensor: TensorPlan) -> InputRef | None:
    """Return the tensor of a base that the operator does not use: what the update is counted from all the same."""
    part = plan.parts[tensor.part]
    checkpoint = None if part.base is None else part.checkpoints.get(part.base.source)
    if part.base is None or checkpoint is None or checkpoint.adapter is not None:
        return None
    wanted = next(wanted for wanted in part.tensors if wanted.name == tensor.name)
    info = part.find(part.base, wanted)
    if info is None or info.shape != tensor.shape or not is_mergeable(info.dtype):
        return None
    return InputRef(source=part.base.source, info=info)


def _statistic(tensor: TensorPlan) -> InputsAndOutput:
    return InputsAndOutput(slots=tuple(slot for slot, ref in enumerate(tensor.slots) if ref is not None))


Steps = Generator[Sequence[Statistic], StatisticValues, TensorContributions]


def _start(recipe: TensorRecipe) -> tuple[Steps, tuple[Statistic, ...]]:
    steps = _steps(recipe)
    return steps, tuple(next(steps))


def _steps(recipe: TensorRecipe) -> Steps:
    statistic = _statistic(recipe.tensor)
    values = yield (statistic,)
    return folded(statistic, values[statistic], recipe.tensor.access)


def folded(
    statistic: InputsAndOutput, blocks: Iterable[bytes], access: TensorAccess | None = None
) -> TensorContributions:
    """Return what the numbers of a tensor's blocks come to, added in block order.

    Parameters
    ----------
    access
        What a budget leaves out contributed nothing: it counts only for how two experts' signs agree.
    """
    count, first = len(statistic.slots), int(statistic.has_base)
    deltas = count - first
    products, pairs = count * (count + 1) // 2, deltas * (deltas - 1) // 2
    total = np.zeros(products + 2 * pairs)
    with np.errstate(all="ignore"):
        for number, block in enumerate(blocks):
            found = np.frombuffer(block, "<f8")
            omitted = [] if access is None else [s for s in statistic.slots if s and access.omits(s - 1, number)]
            total += np.where(_counted(statistic, omitted), found, 0.0) if omitted else found
    gram = symmetric(total[:products], count)
    same, both = np.zeros((deltas, deltas)), np.zeros((deltas, deltas))
    upper = np.triu_indices(deltas, 1)
    same[upper], both[upper] = total[products : products + pairs], total[products + pairs :]
    own = deltas - 1  # the experts; the update comes behind them
    return TensorContributions(
        experts=tuple(slot - 1 for slot in statistic.slots[first:-1]),
        base=float(gram[0, 0]) if first else None,
        update=float(gram[-1, -1]),
        deltas=tuple(float(gram[first + i, first + i]) for i in range(own)),
        along=tuple(float(gram[first + i, -1]) for i in range(own)),
        same=int(same[:own, :own].sum()),
        both=int(both[:own, :own].sum()),
        update_same=tuple(int(same[i, own]) for i in range(own)),
        update_both=tuple(int(both[i, own]) for i in range(own)),
    )


def _counted(statistic: InputsAndOutput, omitted: Sequence[int]) -> Array:
    """Return which of a block's packed numbers count: whether two experts agree does, whatever is left out of them."""
    there = np.asarray([slot not in omitted for slot in statistic.slots])
    deltas = there[int(statistic.has_base) :]
    update = len(deltas) - 1
    pairs = [other != update or deltas[one] for one, other in itertools.combinations(range(len(deltas)), 2)]
    products = [there[one] and there[other] for one in range(len(there)) for other in range(one, len(there))]
    return np.asarray([*products, *pairs, *pairs], np.bool_)


def known_contributions(
    plan: OutputPlan, index: SourceIndex, store: StatisticStore
) -> dict[str, TensorContributions] | None:
    """Return by tensor name what the catalog knows of a `measured_plan`; None if anything is missing."""
    found = {}
    for tensor in plan.tensors:
        recipe, statistic = TensorRecipe.of(tensor, plan.geometry), _statistic(tensor)
        known = [slot_blocks(slot, index) if slot else None for slot in tensor.slots]
        if any(packed is None and slot is not None for packed, slot in zip(known, tensor.slots, strict=True)):
            return None
        table, key = open_table(store, recipe, statistic), key_recipe(recipe, statistic)
        for block in range(recipe.facts.blocks):
            digests = [digest_at(packed, block) for packed in known]
            planned = plan_statistic(recipe, statistic, key, block, digests)
            if not table.holds(planned.key):
                return None
            table.enter(block, planned.key, None)
        found[tensor.name] = folded(statistic, table, tensor.access)
    return found


class ContributionPasses(SurveyPasses):
    """Drives one group to its contributions: a single pass, and nothing is merged.

    Attributes
    ----------
    measured
        By tensor name what was found; filled when the pass was taken.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.measured: dict[str, TensorContributions] = {}

    def has_passes(self, work: TensorWork) -> bool:
        """Return whether what was read is needed again: never."""
        del work
        return False

    def begin(self) -> None:
        """Ask for the statistic of every work."""
        self.reducers = [Reducer(work, *_start(work.recipe)) for work in self.group.works]

    def done(self, work: TensorWork, value: Any) -> None:
        """Take what was measured of a work's tensor."""
        self.measured[work.name] = value


def contributions_of(passes: Iterable[ContributionPasses]) -> Mapping[str, TensorContributions]:
    """Return by tensor name what all groups found."""
    return {name: found for one in passes for name, found in one.measured.items()}
